"""What the host did, step by step, in parts that sum: for traces without a device.

Looked at is the main thread: the one that marks profiler steps, else the one with the most time in
operators. A moment of it counts for the first of these that holds:

    data loading    it was in a DataLoader's `__next__`
    operators       an operator ran on it that does not communicate; `optimizer` inside of an
                    optimizer's call. Operators that ask for a collective, such as autograd
                    functions in Python, are seen through while one runs: they mostly wait for it
    exposed         a collective was running, on any thread: nothing else of the main thread is
                    known, which is mostly waiting. Python between two operators while a collective
                    runs behind them counts too, so it is an upper limit
    optimizer       it was in an optimizer's call, in Python
    other           anything else: Python

The parts sum to the step's length. Communication is the union of all collectives, on any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_axes import AxisNamer
from meshscope.ingest.traces.trace_collectives import TraceCollective, list_host_collectives
from meshscope.ingest.traces.trace_communication import (
    AxisRow,
    CollectiveColumns,
    as_columns,
    tabulate_axes,
)
from meshscope.ingest.traces.trace_kernels import has_any, name_has
from meshscope.ingest.traces.trace_spans import (
    AT_ONCE,
    find_ends,
    find_named,
    find_parents,
    find_rows,
    mark_names,
    number_rows,
    read_arguments,
    unite_events,
)
from meshscope.ingest.traces.trace_steps import TraceSteps
from meshscope.numerics.intervals import Intervals, join, subtract
from meshscope.store.read.arrays import Int64s, find_true

CALLS = (
    "c10d::", "gloo:", "nccl:", "record_param_comms", "xccl:", "rccl:", "mpi:", "ucc:", "hccl:",
)  # fmt: skip
LOADING = ("enumerate(dataloader)",)
OPTIMIZING = ("optimizer.step#", "optimizer.zero_grad#")
GLOO = ("gloo:", "mpi:", "ucc:")
"""Calls that are the collective itself, not the asking for one."""
_HOST = (Category.CPU_OP, Category.ANNOTATION)
ASKING = ("host", "call")
"""Axis and kind under which calls are listed that ask for a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """The main thread over some time; the first five parts sum to `total_ns`."""

    total_ns: int
    operator_ns: int
    exposed_ns: int
    """A collective was running and no operator."""
    loading_ns: int
    optimizer_ns: int
    other_ns: int
    communication_ns: int
    """Of any thread; `exposed_ns` is the part that nothing hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """One profiler step of the host."""

    step: int
    time: HostTime
    communication: tuple[AxisRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOperatorRow:
    """All calls of one operator with the same shapes, on any thread."""

    name: str
    shapes: str
    types: str
    values: str
    """Of a convolution its numbers; else empty."""
    count: int
    total_ns: int
    self_ns: int
    """Without the operators it called."""
    share_ratio: float
    """Of the self time of all operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """What the host's threads did, for traces without a device."""

    total_ns: int
    operator_ns: int
    """The union of all operators of all threads."""
    communication_ns: int
    """The union of the collectives' calls."""
    time: HostTime
    """The main thread, all of it."""
    steps: tuple[HostStep, ...]
    operators: tuple[HostOperatorRow, ...]
    """Empty for traces with a device, whose operators are listed with it."""
    collectives: tuple[TraceCollective, ...]
    communication: tuple[AxisRow, ...]
    exposed_spans: tuple[tuple[int, int], ...]
    """When communication was exposed, begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """Sets of moments of the main thread that do not overlap, and what ran behind them."""

    loading: Intervals
    computing: Intervals
    optimizing: Intervals
    exposed: Intervals
    communication: Intervals

    def measure(self, begin_ns: int, end_ns: int) -> HostTime:
        def length(one: Intervals) -> int:
            return int(one.within(np.array([begin_ns]), np.array([end_ns]))[0])

        total = end_ns - begin_ns
        loading, computing = length(self.loading), length(self.computing)
        optimizing, exposed = length(self.optimizing), length(self.exposed)
        return HostTime(
            total_ns=total,
            operator_ns=computing,
            exposed_ns=exposed,
            loading_ns=loading,
            optimizer_ns=optimizing,
            other_ns=total - loading - computing - optimizing - exposed,
            communication_ns=length(self.communication),
        )


def summarize_host(
    trace: Trace, steps: TraceSteps, namer: AxisNamer, *, has_device: bool
) -> HostSummary:
    """The host of one trace; where there is a device, only the times."""
    calls = find_named(trace, has_any(*CALLS), *_HOST)
    main = _find_main(trace, steps)
    asking = calls[(trace.events.track[calls] == main) & ~name_has(trace, calls, *GLOO)]
    operators = _pass_through(trace, main, asking)
    parts = _divide(trace, main, calls, asking, operators)
    begin, end = _find_edges(trace, operators.ran)
    collectives: tuple[TraceCollective, ...] = ()
    if not has_device:
        collectives = _list_calls(trace, steps, parts, namer)
    columns = _with_calls(trace, as_columns(collectives), () if has_device else calls)
    hidden = subtract(parts.communication, parts.exposed)
    return HostSummary(
        total_ns=end - begin,
        operator_ns=operators.ran.total_ns,
        communication_ns=parts.communication.total_ns,
        time=parts.measure(begin, end),
        steps=tuple(
            HostStep(
                step=number,
                time=parts.measure(first, last),
                communication=tabulate_axes(columns, hidden, window=(first, last)),
            )
            for number, first, last in zip(
                steps.number.tolist(), steps.begin_ns.tolist(), steps.end_ns.tolist(), strict=True
            )
        ),
        operators=() if has_device else _tabulate(trace, find_rows(trace, Category.CPU_OP)),
        collectives=collectives,
        communication=tabulate_axes(columns, hidden),
        exposed_spans=()
        if has_device
        else tuple(
            zip(parts.exposed.start_ns.tolist(), parts.exposed.end_ns.tolist(), strict=True)
        ),
    )


def _with_calls(
    trace: Trace, columns: CollectiveColumns, calls: Int64s | tuple[()]
) -> CollectiveColumns:
    """The calls that ask for collectives beside them, so that all of communication is there."""
    rows = np.setdiff1d(np.asarray(calls, dtype=np.int64), columns.row)
    events = trace.events
    begin = np.append(columns.begin_ns, events.begin_ns[rows])
    order = np.argsort(begin, kind="stable")
    place = len(columns.keys)
    return CollectiveColumns(
        begin_ns=begin[order],
        end_ns=np.append(columns.end_ns, find_ends(trace, rows))[order],
        row=np.append(columns.row, rows)[order],
        key=np.append(columns.key, np.full(len(rows), place))[order],
        keys=(*columns.keys, ASKING),
        size_bytes=np.append(columns.size_bytes, np.full(len(rows), -1))[order],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Operators:
    """When operators ran."""

    ran: Intervals
    """Any, on any thread."""
    closed: Intervals
    """On the main thread, such as ask for no collective, and in which no call for one begins."""
    opened: Intervals
    """Such in which one does."""


def _pass_through(trace: Trace, main: int, asking: Int64s) -> _Operators:
    """Operators are most of a trace: some are looked at a time."""
    events = trace.events
    is_call_name = mark_names(trace, has_any(*CALLS))
    begins = np.append(np.sort(events.begin_ns[asking]), np.iinfo(np.int64).max)
    ran, closed, opened = [], [], []
    for first in range(0, len(events), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        rows = first + find_true(events.category[part] == int(Category.CPU_OP))
        if not len(rows):
            continue
        ran.append(unite_events(trace, rows))
        is_own = (events.track.take(rows) == main) & ~is_call_name.take(events.name.take(rows))
        own = rows.take(find_true(is_own))
        if not len(asking):
            closed.append(unite_events(trace, own))
            continue
        is_open = _find_next(begins, events.begin_ns.take(own)) < find_ends(trace, own)
        opened.append(unite_events(trace, own.take(find_true(is_open))))
        closed.append(unite_events(trace, own.take(find_true(~is_open))))
    return _Operators(ran=join(*ran), closed=join(*closed), opened=join(*opened))


def _find_next(few: Int64s, moments: Int64s) -> Int64s:
    """For each of the moments, in order, the first of a few at it or later; the last is the end."""
    if not len(moments):
        return moments
    # The few are looked up among the many, which then know the next of them.
    own = few[few.searchsorted(moments[0]) : few.searchsorted(moments[-1]) + 1]
    place = moments.searchsorted(own, side="right")
    return np.repeat(own, np.diff(place, prepend=0))


def _find_edges(trace: Trace, operators: Intervals) -> tuple[int, int]:
    """From when to when the host did anything."""
    events = trace.events
    rows = find_rows(trace, *_HOST)
    if not len(rows):
        return 0, 0
    ranges = rows[events.category[rows] == int(Category.ANNOTATION)]
    last = int(find_ends(trace, ranges).max(initial=int(events.begin_ns[rows[-1]])))
    return int(events.begin_ns[rows[0]]), max([last, *operators.end_ns[-1:].tolist()])


def _divide(
    trace: Trace, main: int, calls: Int64s, asking: Int64s, operators: _Operators
) -> _Parts:
    communication = unite_events(trace, calls)
    waiting = subtract(operators.opened, communication)
    busy = join(operators.closed, waiting)
    # What runs inside of a call that asks for a collective is part of it. The collective itself may
    # be drawn on the main thread too (gloo's sends are) while that goes on with its work.
    busy = subtract(busy, unite_events(trace, asking))
    loading = _named(trace, main, LOADING)
    in_optimizer = subtract(_named(trace, main, OPTIMIZING), loading)
    busy = subtract(busy, loading)
    exposed = subtract(subtract(communication, loading), busy)
    optimizing = subtract(in_optimizer, exposed)
    return _Parts(
        loading=loading,
        computing=subtract(busy, in_optimizer),
        optimizing=optimizing,
        exposed=exposed,
        communication=communication,
    )


def _named(trace: Trace, main: int, parts: tuple[str, ...]) -> Intervals:
    rows = find_named(trace, has_any(*parts), *_HOST)
    return unite_events(trace, rows[trace.events.track[rows] == main])


def _find_main(trace: Trace, steps: TraceSteps) -> int:
    """The track that marks steps, else the one with the most time in operators."""
    events = trace.events
    if len(steps):
        marks = find_named(trace, has_any("profilerstep#"), *_HOST)
        if len(marks):
            return int(np.bincount(events.track[marks]).argmax())
    rows = find_rows(trace, Category.CPU_OP)
    if not len(rows):
        rows = find_rows(trace, Category.ANNOTATION)
    if not len(rows):
        return -1
    return int(np.bincount(events.track[rows], weights=events.duration_ns[rows]).argmax())


def _list_calls(
    trace: Trace, steps: TraceSteps, parts: _Parts, namer: AxisNamer
) -> tuple[TraceCollective, ...]:
    """The collectives themselves, not the calls that ask for them."""
    events = trace.events
    rows = find_named(trace, has_any(*GLOO), Category.ANNOTATION)
    begin, end = events.begin_ns[rows], find_ends(trace, rows)
    numbers = steps.numbers_at(steps.locate(begin))
    return list_host_collectives(
        trace, rows, parts.exposed.within(begin, end), namer=namer, step_of=numbers
    )


def _tabulate(trace: Trace, operators: Int64s) -> tuple[HostOperatorRow, ...]:
    """Operators with the most time of their own first."""
    if not len(operators):
        return ()
    events = trace.events
    own_ns = _measure_self(trace, operators)
    keys = ("Input Dims", "Input type", "Concrete Inputs")
    said = read_arguments(trace, operators, keys, ()).text
    shapes, types = said["Input Dims"], said["Input type"]
    names = events.name[operators]
    values = np.where(name_has(trace, operators, "conv"), said["Concrete Inputs"], -1)
    number, example = number_rows(names, shapes, types, values)
    sums = np.zeros((2, len(example)), dtype=np.int64)
    np.add.at(sums[0], number, events.duration_ns[operators])
    np.add.at(sums[1], number, own_ns)
    count = np.bincount(number, minlength=len(example))
    whole = max(int(own_ns.sum()), 1)
    return tuple(
        HostOperatorRow(
            name=_string(trace, int(names[example[place]])),
            shapes=_string(trace, int(shapes[example[place]])),
            types=_string(trace, int(types[example[place]])),
            values=_string(trace, int(values[example[place]])),
            count=int(count[place]),
            total_ns=int(sums[0, place]),
            self_ns=int(sums[1, place]),
            share_ratio=float(sums[1, place] / whole),
        )
        for place in np.argsort(-sums[1], kind="stable").tolist()
    )


def _string(trace: Trace, place: int) -> str:
    return trace.strings[place] if place >= 0 else ""


def _measure_self(trace: Trace, operators: Int64s) -> Int64s:
    """Length of each less that of those directly inside of it, on its own track."""
    events = trace.events
    own_ns = events.duration_ns[operators].astype(np.int64)
    order = np.lexsort(
        (-events.duration_ns[operators], events.begin_ns[operators], events.track[operators])
    )
    track = events.track[operators[order]]
    begin, end = events.begin_ns[operators[order]], find_ends(trace, operators[order])
    for first, after in _stretches_of_equal(track):
        part = order[first:after]
        parent = find_parents(begin[first:after], end[first:after])
        has_parent = parent >= 0
        np.subtract.at(
            own_ns, part[parent[has_parent]], events.duration_ns[operators[part[has_parent]]]
        )
    return np.maximum(own_ns, 0)


def _stretches_of_equal(values: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    edges = find_true(np.diff(values)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True))
