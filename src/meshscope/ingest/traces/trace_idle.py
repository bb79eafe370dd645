"""Idle time of a device in a trace by cause; `numerics.idle_gaps` says what the causes are."""

from dataclasses import dataclass, replace

import numpy as np

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_kernels import find_launching, has_any
from meshscope.ingest.traces.trace_spans import find_ends, find_named, unite_events
from meshscope.ingest.traces.trace_steps import BEFORE_TRACE
from meshscope.numerics.idle_gaps import IdleGaps, IdleTime, explain_gaps
from meshscope.numerics.intervals import Intervals
from meshscope.store.read.arrays import Int32s, Int64s, find_true

SYNCHRONISING = ("synchronize", "memcpyasync_dtoh")
COMMUNICATING = (
    "nccl:", "gloo:", "c10d::", "record_param_comms", "rccl:", "work::wait", "xccl:", "hccl:",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostCalls:
    """When the host was in calls that explain why it launched nothing."""

    synchronising: Intervals
    communicating: Intervals


def find_calls(trace: Trace) -> HostCalls:
    """Of all threads."""
    return HostCalls(
        synchronising=find_synchronising(trace),
        communicating=_host_stretches(trace, COMMUNICATING, Category.ANNOTATION, Category.CPU_OP),
    )


def explain_idle(
    trace: Trace,
    rows: Int64s,
    launch: Int32s,
    begin_ns: int,
    end_ns: int,
    calls: HostCalls | None = None,
) -> IdleTime:
    """The gaps between `begin_ns` and `end_ns` of a device whose events are `rows`."""
    return find_gaps(trace, rows, launch, begin_ns, end_ns, calls).sum_up()


def find_gaps(
    trace: Trace,
    rows: Int64s,
    launch: Int32s,
    begin_ns: int,
    end_ns: int,
    calls: HostCalls | None = None,
) -> IdleGaps:
    """The same, gap by gap; `calls` are the trace's, where they were found before."""
    events = trace.events
    call = np.full(len(rows), -1, dtype=np.int64)
    if len(launch):
        call[:] = launch.take(rows)
    launched = np.full(len(rows), -1, dtype=np.int64)
    known = find_true(call >= 0)
    launched[known] = find_ends(trace, call.take(known))
    launched[call == BEFORE_TRACE] = 0
    calls = calls or find_calls(trace)
    gaps = explain_gaps(
        unite_events(trace, rows),
        events.begin_ns.take(rows),
        launched,
        first_ns=begin_ns,
        last_ns=end_ns,
        synchronising=calls.synchronising,
        communicating=calls.communicating,
    )
    return replace(gaps, following=np.append(rows, -1)[gaps.following])


def find_synchronising(trace: Trace) -> Intervals:
    """When a thread that launches work waited for the device; others, such as a watchdog, may."""
    events = trace.events
    tracks = np.unique(events.track[find_launching(trace)])
    rows = find_named(trace, has_any(*SYNCHRONISING), Category.RUNTIME)
    return unite_events(trace, rows[np.isin(events.track[rows], tracks)])


def _host_stretches(trace: Trace, parts: tuple[str, ...], *categories: Category) -> Intervals:
    """When the host was in a call whose name has one of the parts."""
    return unite_events(trace, find_named(trace, has_any(*parts), *categories))
