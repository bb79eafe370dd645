"""A run in windows of steps, so that an export holds one window in memory at a time.

A row belongs to one window by its rank's own clock: after the end of the rank's step before the
window, up to the end of the rank's last step in it. What lies before the first step and after the
last belongs to the first and last window of a whole run. A window's recordings reach a step further
on both sides, because ranks are not at the same step at the same moment.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.operations import MAX_TIME_NS
from meshscope.errors import UsageError
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.read.table_window import TimeWindows

_ROWS_PER_WINDOW = 300_000
COUNTED_TABLES = ("steps", "phases", "spans", "device_spans", "collectives", "waits", "actions")
_STEPS = re.compile(r"([0-9]{1,15})(-([0-9]{1,15})?)?")

Moments = Mapping[int, int]
"""By rank, on its own host's clock."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWindow:
    """Some steps of all ranks."""

    steps: tuple[int, int] | None
    """First and last; None where no step finished."""
    attempt: Attempt
    """Reads what is in the window, and a step more on both sides."""
    after_ns: Moments
    until_ns: Moments
    first_ns: Moments
    """`after_ns` of the first window."""
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Steps to export."""

    first: int
    last: int
    is_whole: bool
    """All of the run, with what comes before the first and after the last step."""
    num_rows: int
    """About how many rows of tables."""


def parse_steps(text: str) -> tuple[int, int | None]:
    """`10-20`, `15`, or `10-` for all from 10 on; UsageError for anything else."""
    found = _STEPS.fullmatch(text.strip())
    first = int(found[1]) if found else 0
    last = (int(found[3]) if found[3] else None) if found and found[2] else first
    if found is None or (last is not None and last < first):
        raise UsageError(f"{text!r} is no range of steps; expected 15, 10-20 or 10-")
    return first, last


def choose_range(
    attempt: Attempt, asked: tuple[int, int | None] | None, max_rows: int
) -> StepRange | None:
    """The steps that were asked for; else all, or the last that fit. None without steps."""
    extents = [extent for one in attempt if (extent := one.find_step_extent()) is not None]
    if not extents:
        if asked is not None:
            raise UsageError("no step was finished, so --steps chooses none; leave it out")
        return None
    first, last = min(low for low, _ in extents), max(high for _, high in extents)
    num_rows = sum(one.count_rows(name) for one in attempt for name in COUNTED_TABLES)
    per_step = max(num_rows / (last - first + 1), 1.0)
    if asked is not None:
        low, high = max(asked[0], first), last if asked[1] is None else min(asked[1], last)
        if low > high:
            raise UsageError(f"the run has steps {first} to {last}; --steps chooses none of them")
        return StepRange(
            first=low, last=high, is_whole=False, num_rows=int(per_step * (high - low + 1))
        )
    if num_rows <= max_rows:
        return StepRange(first=first, last=last, is_whole=True, num_rows=num_rows)
    num_kept = max(int(max_rows / per_step), 1)
    return StepRange(
        first=last - num_kept + 1, last=last, is_whole=False, num_rows=int(num_kept * per_step)
    )


def cut_windows(
    attempt: Attempt, steps: StepRange | None, *, rows_per_window: int = _ROWS_PER_WINDOW
) -> Iterator[StepWindow]:
    """In order of time."""
    if steps is None:
        yield _take_whole(attempt, None)
        return
    num_steps = steps.last - steps.first + 1
    length = max(int(num_steps * rows_per_window / max(steps.num_rows, 1)), 1)
    if steps.is_whole and length >= num_steps:
        yield _take_whole(attempt, (steps.first, steps.last))
        return
    after = first_ns = {one.rank: _find_begin(one, steps) for one in attempt}
    for first in range(steps.first, steps.last + 1, length):
        last = min(first + length - 1, steps.last)
        is_open = steps.is_whole and last == steps.last
        until, ranks = {}, {}
        for one in attempt:
            rows = one.read_steps([(first - 1, last)])
            begin = after[one.rank]
            until[one.rank] = MAX_TIME_NS if is_open else _find_end(rows, first, begin)
            ranks[one.rank] = _narrow(one, rows, begin, until[one.rank])
        yield StepWindow(
            steps=(first, last),
            attempt=replace(attempt, ranks=ranks),
            after_ns=after,
            until_ns=until,
            first_ns=first_ns,
            is_last=last == steps.last,
        )
        after = until


def _take_whole(attempt: Attempt, steps: tuple[int, int] | None) -> StepWindow:
    before = dict.fromkeys(attempt.ranks, -1)
    return StepWindow(
        steps=steps,
        attempt=attempt,
        after_ns=before,
        until_ns=dict.fromkeys(attempt.ranks, MAX_TIME_NS),
        first_ns=before,
        is_last=True,
    )


def _find_begin(recording: Recording, steps: StepRange) -> int:
    """Where the first step's period begins: at the end of the step before, else at its start."""
    if steps.is_whole:
        return -1
    rows = recording.read_steps([(steps.first - 1, steps.last)])
    number = int64_column(rows, "step")
    is_before = number < steps.first
    if is_before.any():
        return int(int64_column(rows, "end_host_mono_ns")[is_before].max())
    starts = int64_column(rows, "start_host_mono_ns")
    return int(starts.min()) - 1 if len(starts) else MAX_TIME_NS


def _find_end(rows: Columns, first: int, begin: int) -> int:
    ends = int64_column(rows, "end_host_mono_ns")[int64_column(rows, "step") >= first]
    return max(int(ends.max()), begin) if len(ends) else begin


def _narrow(recording: Recording, rows: Columns, begin: int, end: int) -> Recording:
    starts = int64_column(rows, "start_host_mono_ns")
    low = min(int(starts.min()) if len(starts) else begin, max(begin, 0))
    high = min(end + max(end - low, 0), MAX_TIME_NS)
    return recording.narrow(
        TimeWindows(start_ns=np.array([low]), end_ns=np.array([max(high, low)]))
    )
