"""Why a device had nothing to do, gap by gap, from when its next work was launched.

A gap ends with the begin of the next work of the device. Up to the begin of the call that
launched that work the host had not come so far: `host`, but `synchronising` while the host itself
waited for the device and `communicating` while it was inside a collective's call. From there to the
gap's end it is `launch`, as long as a launch may take (LAUNCH_NS); what is longer, and all of a gap
whose next work had been launched before it, is `dependency`: the work was there and waited for an
event, a copy, a stream. Gaps whose next work has no launching call in the trace are `unknown`.

Wrong for kernels of a CUDA graph: one call launches all of them, so gaps inside are `dependency`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.intervals import Stretches, complement, unite
from meshscope.store.trace_columns import Category, Trace

Int64s = npt.NDArray[np.int64]

LAUNCH_NS = 20_000
"""Longer than a launch takes on any device in use; torch's own take 5 to 10 µs."""
SYNCHRONISING = ("synchronize", "eventquery", "memcpyasync_dtoh")
COMMUNICATING = ("nccl:", "gloo:", "c10d::", "record_param_comms", "rccl:", "work::wait", "xccl:")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Idle time of a device by cause; the parts sum to `total_ns`."""

    total_ns: int
    host_ns: int
    """The host was at something else."""
    synchronising_ns: int
    """The host waited for the device before it launched more."""
    communicating_ns: int
    """The host was inside a collective's call."""
    launch_ns: int
    dependency_ns: int
    unknown_ns: int
    num_gaps: int


def explain_idle(
    trace: Trace, rows: Int64s, launch: Int64s, begin_ns: int, end_ns: int
) -> IdleTime:
    """The gaps between `begin_ns` and `end_ns` of a device whose events are `rows`."""
    events = trace.events
    busy = unite(events.begin_ns[rows], events.end_ns[rows])
    gaps = complement(busy, begin_ns, end_ns)
    if not len(gaps) or not len(rows):
        return _make(gaps, *(np.zeros(len(gaps), dtype=np.int64) for _ in range(6)))
    order = rows[np.argsort(events.begin_ns[rows], kind="stable")]
    place = np.searchsorted(events.begin_ns[order], gaps.end_ns)
    following = order[np.minimum(place, len(order) - 1)]
    call = np.where(place < len(order), launch[following], -1)
    launched = np.where(call >= 0, events.begin_ns[call], gaps.begin_ns)
    length = gaps.end_ns - gaps.begin_ns
    host_end = np.clip(launched, gaps.begin_ns, gaps.end_ns)
    host = host_end - gaps.begin_ns
    rest = length - host
    was_queued = host == 0
    launching = np.where(was_queued, 0, np.minimum(rest, LAUNCH_NS))
    synchronising = _host_stretches(trace, SYNCHRONISING, Category.RUNTIME)
    communicating = _host_stretches(trace, COMMUNICATING, Category.ANNOTATION, Category.CPU_OP)
    in_sync = synchronising.within(gaps.begin_ns, host_end)
    in_call = np.minimum(communicating.within(gaps.begin_ns, host_end), host - in_sync)
    is_known = call >= 0
    return _make(
        gaps,
        np.where(is_known, host - in_sync - in_call, 0),
        np.where(is_known, in_sync, 0),
        np.where(is_known, in_call, 0),
        np.where(is_known, launching, 0),
        np.where(is_known, rest - launching, 0),
        np.where(is_known, 0, length),
    )


def _make(
    gaps: Stretches,
    host: Int64s,
    synchronising: Int64s,
    communicating: Int64s,
    launching: Int64s,
    dependency: Int64s,
    unknown: Int64s,
) -> IdleTime:
    return IdleTime(
        total_ns=gaps.total_ns,
        host_ns=int(host.sum()),
        synchronising_ns=int(synchronising.sum()),
        communicating_ns=int(communicating.sum()),
        launch_ns=int(launching.sum()),
        dependency_ns=int(dependency.sum()),
        unknown_ns=int(unknown.sum()),
        num_gaps=len(gaps),
    )


def _host_stretches(trace: Trace, parts: tuple[str, ...], *categories: Category) -> Stretches:
    """When the host was in a call whose name has one of the parts."""
    events = trace.events
    rows = np.flatnonzero(np.isin(events.category, np.array(categories, dtype=np.uint8)))
    wanted = [
        place
        for place in np.unique(events.name[rows]).tolist()
        if place >= 0 and any(part in trace.strings[place][:200].lower() for part in parts)
    ]
    rows = rows[np.isin(events.name[rows], np.array(wanted, dtype=np.int64))]
    return unite(events.begin_ns[rows], events.end_ns[rows])
