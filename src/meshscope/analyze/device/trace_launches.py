"""How far ahead of a device its host was: launches, and how many waited at any time.

A launch waits from the begin of its call to the begin of the first work it launched. Depth is how
many wait at a moment, from the first call to the last begin; a CUDA graph is one launch, however
many kernels it has. Depth 0 while the device idles is a device that waits for its host.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Trace, ValueKind
from meshscope.ingest.traces.trace_kernels import name_has
from meshscope.store.read.arrays import Int32s, Int64s, find_true

_GRAPH_CALL = "graphlaunch"
SHORT_NS = 10_000
"""A host needs about so long to launch a kernel from eager code: shorter ones cannot keep a device
busy unless they are launched from a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchQueue:
    """How far ahead of the device its host was, over the device work whose launch is known.

    The delay is from the begin of the launching call to the begin of the work: short delays mean
    that the device waited for its host."""

    num_launches: int
    """Device work whose launching call is known."""
    median_delay_ns: float
    p5_delay_ns: float
    p95_delay_ns: float
    num_graph_kernels: int
    """Launched by a graph: one call for many."""
    num_graph_launches: int
    """Calls that launched graphs."""
    graph_time_ratio: float
    """Their share of the time of all device events."""
    num_short: int
    """Device events of at most SHORT_NS: a launch takes about as long."""
    short_ratio: float
    """Their share of all."""
    short_time_ratio: float
    """Their share of the time of all."""
    median_duration_ns: float
    """Of all device events."""
    num_calls: int
    """That launched it."""
    median_depth: int
    """Half of the time at most so many waited."""
    p5_depth: int
    max_depth: int
    empty_ratio: float
    """Share of the time at which none waited."""


def measure_launches(
    trace: Trace, rows: Int64s, launch: Int32s, graph_work: Int64s
) -> LaunchQueue | Unavailable:
    """The launches of one device's events, of which `graph_work` are those that graphs replayed."""
    events = trace.events
    known = rows.take(find_true(launch.take(rows) >= 0))
    if not len(known):
        return Unavailable("no launching call of this device's work is in the trace")
    call = launch.take(known).astype(np.int64)
    delay = events.begin_ns.take(known) - events.begin_ns.take(call)
    low, middle, high = np.percentile(delay, [5, 50, 95]).tolist()
    duration = events.duration_ns.take(rows)
    is_short = duration <= SHORT_NS
    whole_ns = int(duration.sum())
    num_calls, depths, empty = _measure_depth(trace, known, call)
    return LaunchQueue(
        num_launches=len(known),
        median_delay_ns=middle,
        p5_delay_ns=low,
        p95_delay_ns=high,
        num_graph_kernels=len(graph_work),
        num_graph_launches=len(np.unique(call[name_has(trace, call, _GRAPH_CALL)])),
        num_short=int(np.count_nonzero(is_short)),
        short_ratio=float(is_short.mean()),
        short_time_ratio=int(duration[is_short].sum()) / max(whole_ns, 1),
        median_duration_ns=float(np.median(duration)),
        graph_time_ratio=int(events.duration_ns[graph_work].sum()) / max(whole_ns, 1),
        num_calls=num_calls,
        p5_depth=depths[0],
        median_depth=depths[1],
        max_depth=depths[2],
        empty_ratio=empty,
    )


def find_graph_work(trace: Trace, rows: Int64s, launch: Int32s) -> Int64s:
    """Which of a device's events a graph replayed: by the call that launched it, or as they say."""
    is_graph = np.zeros(len(trace.events), dtype=np.bool_)
    known = rows.take(find_true(launch.take(rows) >= 0))
    is_graph[known[name_has(trace, launch.take(known).astype(np.int64), _GRAPH_CALL)]] = True
    is_graph[_in_graphs(trace)] = True
    return rows[is_graph.take(rows)]


def _in_graphs(trace: Trace) -> Int64s:
    """Events that name a graph of theirs."""
    rows = trace.argument_rows("graph id")
    values = trace.arguments.value[rows]
    rows = rows[(trace.arguments.kind[rows] == int(ValueKind.INT)) & (values > 0)]
    found: Int64s = trace.arguments.event[rows].astype(np.int64)
    return found


def _measure_depth(
    trace: Trace, work: Int64s, call: Int64s
) -> tuple[int, tuple[int, int, int], float]:
    """Calls; depth at 5 and 50 % of the time and at most; share of the time without any."""
    events = trace.events
    is_call = np.zeros(len(events), dtype=np.bool_)
    is_call[call] = True
    num_calls = int(np.count_nonzero(is_call))
    if num_calls < len(call):  # graphs: the first work counts
        call, first = np.unique(call, return_index=True)
        work = work[first]
    begun = events.begin_ns.take(work)
    called = np.minimum(events.begin_ns.take(call), begun)
    called.sort()
    begun.sort()
    moments = np.concatenate([called, begun])
    del called, begun  # each is as long as the trace has launches
    order = np.argsort(moments, kind="stable")
    depth = np.where(order < num_calls, 1, -1).astype(np.int32)
    length = np.diff(moments[order])
    del order, moments
    depth = np.cumsum(depth, out=depth)[:-1]
    lasting = np.zeros(int(depth.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(lasting, depth, length)
    whole = int(lasting.sum())
    if not whole:
        return num_calls, (0, 0, 0), 0.0
    reached = np.cumsum(lasting)
    low, middle = (int(np.searchsorted(reached, share * whole)) for share in (0.05, 0.5))
    highest = int(find_true(lasting > 0)[-1])
    return num_calls, (low, middle, highest), float(lasting[0] / whole)
