"""Why a device had nothing to do, gap by gap, from when its next work was launched.

A gap ends with the begin of the next work of the device. Up to the begin of the call that
launched that work the host had not come so far: `host`, but `synchronising` where the host waited
for the device just when that ran dry, or later in the gap, and `communicating` while it was inside
a collective's call. A host that waits has nothing queued when the wait is over: all it does before
it launches again is then behind the wait, and `synchronising` as well. From there to the
gap's end it is `launch`, as long as a launch may take (LAUNCH_NS); what is longer, and all of a gap
whose next work had been launched before it, is `dependency`: the work was there and waited for an
event, a copy, a stream. Gaps whose next work has no launching call in the trace are `unknown`.

Wrong for kernels of a CUDA graph: one call launches all of them, so gaps inside are `dependency`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_spans import unite_events
from meshscope.numerics.intervals import Intervals, complement
from meshscope.store.read.arrays import Int64s

LAUNCH_NS = 20_000
"""Longer than a launch takes on any device in use; torch's own take 5 to 10 µs."""
SYNCHRONISING = ("synchronize", "memcpyasync_dtoh")
LAUNCHING = ("launch",)
COMMUNICATING = (
    "nccl:", "gloo:", "c10d::", "record_param_comms", "rccl:", "work::wait", "xccl:", "hccl:",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Idle time of a device by cause; the parts sum to `total_ns`."""

    total_ns: int
    host_ns: int
    """The host was at something else."""
    synchronising_ns: int
    """The host had waited for the device before it launched more."""
    communicating_ns: int
    """The host was inside a collective's call."""
    launch_ns: int
    dependency_ns: int
    unknown_ns: int
    num_gaps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdleGaps:
    """Gaps in order of time, with how long each was for which cause."""

    begin_ns: Int64s
    end_ns: Int64s
    following: Int64s
    """The event that ends it; -1: none does."""
    host_ns: Int64s
    synchronising_ns: Int64s
    communicating_ns: Int64s
    launch_ns: Int64s
    dependency_ns: Int64s
    unknown_ns: Int64s

    def __len__(self) -> int:
        return len(self.begin_ns)

    def sum_up(self, picked: npt.NDArray[np.bool_] | slice = slice(None)) -> IdleTime:
        """Some of them together."""
        return IdleTime(
            total_ns=int((self.end_ns - self.begin_ns)[picked].sum()),
            host_ns=int(self.host_ns[picked].sum()),
            synchronising_ns=int(self.synchronising_ns[picked].sum()),
            communicating_ns=int(self.communicating_ns[picked].sum()),
            launch_ns=int(self.launch_ns[picked].sum()),
            dependency_ns=int(self.dependency_ns[picked].sum()),
            unknown_ns=int(self.unknown_ns[picked].sum()),
            num_gaps=len(self.begin_ns[picked]),
        )


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
    launch: Int64s,
    begin_ns: int,
    end_ns: int,
    calls: HostCalls | None = None,
) -> IdleTime:
    """The gaps between `begin_ns` and `end_ns` of a device whose events are `rows`."""
    return find_gaps(trace, rows, launch, begin_ns, end_ns, calls).sum_up()


def find_gaps(
    trace: Trace,
    rows: Int64s,
    launch: Int64s,
    begin_ns: int,
    end_ns: int,
    calls: HostCalls | None = None,
) -> IdleGaps:
    """The same, gap by gap; `calls` are the trace's, where they were found before."""
    events = trace.events
    busy = unite_events(trace, rows)
    gaps = complement(busy, begin_ns, end_ns)
    order = rows[np.argsort(events.begin_ns[rows], kind="stable")]
    place = np.searchsorted(events.begin_ns[order], gaps.end_ns)
    following = np.append(order, -1)[np.minimum(place, len(order))]
    call = np.where(following >= 0, launch[following], -1) if len(launch) else following
    launched = np.where(call >= 0, events.begin_ns[call], gaps.start_ns) if len(events) else call
    length = gaps.end_ns - gaps.start_ns
    host_end = np.clip(launched, gaps.start_ns, gaps.end_ns)
    host = host_end - gaps.start_ns
    rest = length - host
    was_queued = host == 0
    launching = np.where(was_queued, 0, np.minimum(rest, LAUNCH_NS))
    calls = calls or find_calls(trace)
    in_sync = calls.synchronising.within(gaps.start_ns, host_end)
    ran_dry = calls.synchronising.within(gaps.start_ns - 1, gaps.start_ns) > 0
    in_sync = np.where(ran_dry, host, in_sync)
    in_call = np.minimum(calls.communicating.within(gaps.start_ns, host_end), host - in_sync)
    is_known = call >= 0
    return IdleGaps(
        begin_ns=gaps.start_ns,
        end_ns=gaps.end_ns,
        following=following,
        host_ns=np.where(is_known, host - in_sync - in_call, 0),
        synchronising_ns=np.where(is_known, in_sync, 0),
        communicating_ns=np.where(is_known, in_call, 0),
        launch_ns=np.where(is_known, launching, 0),
        dependency_ns=np.where(is_known, rest - launching, 0),
        unknown_ns=np.where(is_known, 0, length),
    )


def find_synchronising(trace: Trace) -> Intervals:
    """When a thread that launches work waited for the device; others, such as a watchdog, may."""
    events = trace.events
    tracks = np.unique(events.track[_named_rows(trace, LAUNCHING, Category.RUNTIME)])
    rows = _named_rows(trace, SYNCHRONISING, Category.RUNTIME)
    return unite_events(trace, rows[np.isin(events.track[rows], tracks)])


def _host_stretches(trace: Trace, parts: tuple[str, ...], *categories: Category) -> Intervals:
    """When the host was in a call whose name has one of the parts."""
    return unite_events(trace, _named_rows(trace, parts, *categories))


def _named_rows(trace: Trace, parts: tuple[str, ...], *categories: Category) -> Int64s:
    events = trace.events
    rows = np.flatnonzero(np.isin(events.category, np.array(categories, dtype=np.uint8)))
    wanted = [
        place
        for place in np.unique(events.name[rows]).tolist()
        if place >= 0 and any(part in trace.strings[place][:200].lower() for part in parts)
    ]
    found: Int64s = rows[np.isin(events.name[rows], np.array(wanted, dtype=np.int64))]
    return found
