"""Trace windows as the journals of an attempt have them: which steps of which ranks, and where.

A window has two lines: one when it began, one when it ended; the later one holds. What a line says
is checked: a path that leads out of the run, or numbers that make no sense, make no window.

Profiled steps are slower, and a trace is written before the step that follows it, so that a window
disturbs its warm-up, its own steps and the one after. Ranks wait for each other: a step that is
disturbed on one rank is on all. A window without an end disturbs everything after its start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from meshscope.store.read.recording import JsonFields, Recording
from meshscope.store.read.run import Attempt

_LINE = "trace_window"
_MEMORY_LINE = "memory_window"
"""A step whose memory was profiled; it disturbs as a trace window does, and has no trace."""
KERNEL_LINE = "kernel_window"
"""A kernel sample; it disturbs likewise, and fills the table `kernels`."""
_FLOPS_LINE = "flop_window"
"""A step whose FLOPs were counted; it disturbs likewise."""
NO_TRACE = "the window never ended"
"""Why a window without a trace and without a problem has none."""
MAX_WINDOWS = 100_000
"""Most windows of one rank; more are ignored."""
_MAX_NUMBER = 1 << 62
_MAX_TEXT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """One window of one rank."""

    rank: int
    number: int
    """Counted from 0 on its rank, and again from 0 when the program gives other settings."""
    reason: str
    """Who asked for the window."""
    first_step: int | None
    """The first step in the trace; None while it warms up."""
    last_step: int | None
    disturbed_from_step: int
    """The first step that was profiled, warm-up included."""
    disturbed_to_step: int | None
    """The last step that is not to be compared with others; None of a window without an end."""
    path: str | None
    """Path of the trace, relative to the run's folder; None when there is none."""
    num_bytes: int | None
    begin_host_mono_ns: int
    """Just before the profiler was started."""
    end_host_mono_ns: int | None
    write_ns: int | None
    """How long writing the trace held this rank up."""
    problem: str | None
    """Why there is no trace."""
    num_rows: int | None = None
    """What a kernel sample wrote, once all of it is written; None of other windows."""


def windows_of(attempt: Attempt, line: str = _LINE) -> tuple[TraceWindow, ...]:
    """All windows, by rank and in their order."""
    return tuple(window for recording in attempt for window in read_windows(recording, line))


def read_windows(recording: Recording, line: str = _LINE) -> tuple[TraceWindow, ...]:
    """Those of one rank, in their order."""
    by_start: dict[tuple[int, int], TraceWindow] = {}
    for update in recording.updates:
        window = _read_window(recording.rank, update.get(line))
        if window is not None and len(by_start) < MAX_WINDOWS:
            by_start[window.number, window.begin_host_mono_ns] = window
    return tuple(by_start.values())


def disturbing_windows(attempt: Attempt) -> tuple[TraceWindow, ...]:
    """One window for each range of disturbed steps, by traces, a memory profile, a kernel
    sample or a count of FLOPs: most ranks are profiled in the same ones."""
    lines = (_LINE, _MEMORY_LINE, KERNEL_LINE, _FLOPS_LINE)
    windows = [window for line in lines for window in windows_of(attempt, line)]
    by_steps = {(w.disturbed_from_step, w.disturbed_to_step): w for w in windows}
    return tuple(by_steps.values())


def mark_profiled(
    steps: npt.NDArray[np.int64], windows: Sequence[TraceWindow]
) -> npt.NDArray[np.bool_]:
    """Which of the steps a window of any rank disturbed."""
    is_profiled = np.zeros(len(steps), dtype=np.bool_)
    for first, last in {(w.disturbed_from_step, w.disturbed_to_step) for w in windows}:
        is_profiled |= (steps >= first) & (steps <= (_MAX_NUMBER if last is None else last))
    return is_profiled


def _read_window(rank: int, fields: object) -> TraceWindow | None:
    if not isinstance(fields, dict):
        return None
    number, start_ns = _read_number(fields, "number"), _read_number(fields, "begin_host_mono_ns")
    disturbed_from = _read_number(fields, "disturbed_from_step")
    if number is None or start_ns is None or disturbed_from is None:
        return None
    path = _read_path(fields.get("path"))
    return TraceWindow(
        rank=rank,
        number=number,
        reason=_read_text(fields, "reason") or "not recorded",
        first_step=_read_number(fields, "first_step"),
        last_step=_read_number(fields, "last_step"),
        disturbed_from_step=disturbed_from,
        disturbed_to_step=_read_number(fields, "disturbed_to_step"),
        path=path,
        num_bytes=None if path is None else _read_number(fields, "bytes"),
        begin_host_mono_ns=start_ns,
        end_host_mono_ns=_read_number(fields, "end_host_mono_ns"),
        write_ns=_read_number(fields, "write_ns"),
        problem=_read_text(fields, "problem"),
        num_rows=_read_number(fields, "num_rows") if fields.get("is_read") is True else None,
    )


def _read_number(fields: JsonFields, name: str) -> int | None:
    """A count or a moment; None for -1 and for anything else."""
    value = fields.get(name)
    is_good = isinstance(value, int) and not isinstance(value, bool)
    return value if is_good and isinstance(value, int) and 0 <= value < _MAX_NUMBER else None


def _read_text(fields: JsonFields, name: str) -> str | None:
    value = fields.get(name)
    return value[:_MAX_TEXT] if isinstance(value, str) and value else None


def _read_path(value: object) -> str | None:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or "\0" in value:
        return None
    path = PurePosixPath(value)
    return None if path.is_absolute() or ".." in path.parts else str(path)
