"""Trace windows in the JSON document: which steps of which ranks have a trace, and where it is."""

import msgspec

from meshscope.report.values import Absent, as_text
from meshscope.store.read.run import Attempt
from meshscope.store.read.trace_windows import TraceWindow, windows_of

MAX_TRACES = 10_000
NO_TRACE = "the window never ended"


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One window of torch.profiler on one rank."""

    rank: int
    reason: str
    """Who asked for it."""
    first_step: int | Absent
    """First step in the trace."""
    last_step: int | Absent
    path: str | Absent
    """Relative to the run's folder."""
    num_bytes: int | Absent
    begin_host_mono_ns: int
    end_host_mono_ns: int | Absent


def build_traces(attempt: Attempt) -> list[TraceFacts]:
    """All windows of an attempt, by rank."""
    return [_facts(window) for window in windows_of(attempt)[:MAX_TRACES]]


def _facts(window: TraceWindow) -> TraceFacts:
    none = Absent(as_text(window.problem or NO_TRACE))
    early = none if window.path is None else Absent("not recorded")
    return TraceFacts(
        rank=window.rank,
        reason=as_text(window.reason),
        first_step=early if window.first_step is None else window.first_step,
        last_step=early if window.last_step is None else window.last_step,
        path=none if window.path is None else as_text(window.path),
        num_bytes=early if window.num_bytes is None else window.num_bytes,
        begin_host_mono_ns=window.begin_host_mono_ns,
        end_host_mono_ns=none if window.end_host_mono_ns is None else window.end_host_mono_ns,
    )
