"""One trace in the tables of a recording: steps, phases, device spans, collectives, waits, gaps.

What a recorder would have written had it seen what the profiler saw. The device's line is what it
computed or copied; communication with no compute beside it is exposed, as `trace_time` counts
it. Part of that held the device up: nothing ran up to an operation's end, and what came next, be it
a copy, was queued behind it: launched before that end, or after a call in which the host waited for
it. The rest nothing waited for: the host was late, or kernels beside the operation had gaps between
them; faster communication would not have helped.

Copies that nothing hides are a phase of their own. Gaps of the device up to `merged_gap_ns` count
as the work around them.

Without a device the line is the host's: calls of gloo hold it up where its main thread runs no
operator up to their end, which is an upper limit (`analyze.trace_host`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Trace, TraceGroup
from meshscope.ingest.traces.trace_axes import find_host
from meshscope.ingest.traces.trace_collectives import TraceCollective, list_collectives
from meshscope.ingest.traces.trace_host import summarize_host
from meshscope.ingest.traces.trace_idle import HostCalls, find_gaps
from meshscope.ingest.traces.trace_kernels import Work
from meshscope.ingest.traces.trace_phases import (
    HostPhases,
    begin_earlier,
    find_phases,
    take_as_one_step,
)
from meshscope.ingest.traces.trace_spans import find_ends, unite_events
from meshscope.ingest.traces.trace_step_memory import StepMemory, has_host_memory, sample_steps
from meshscope.ingest.traces.trace_steps import (
    BEFORE_TRACE,
    Places,
    StepSource,
    TraceSteps,
    assign_steps,
    note_steps,
)
from meshscope.ingest.traces.trace_view import TraceView
from meshscope.numerics.idle_gaps import IdleGaps
from meshscope.numerics.intervals import Intervals, complement, join, unite
from meshscope.store.read.arrays import Int32s, Int64s, find_true

COPY = "copy"
"""Name of the phase of exposed copies."""
NONE = np.empty(0, dtype=np.int64)
FIRST_WALL_NS = 1_000_000_000 * 1_000_000_000
"""September 2001: earlier times are not of a wall clock, but count from a host's boot."""
MAX_TURN_NS = 200_000
"""An operation that begins so soon after another of its stream had waited for its turn."""
MERGED_GAPS_NS = (0, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
"""Gaps that are not kept apart from the work around them, if there are too many of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceSpans:
    """Stretches in which a device worked for one phase, in order of time, none overlapping."""

    begin_ns: Int64s
    end_ns: Int64s
    phase: Int64s
    """Place in `TraceRecording.phases`."""

    def __len__(self) -> int:
        return len(self.begin_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceWork:
    """One device of a trace."""

    device: int
    spans: DeviceSpans
    """It computed or copied."""
    copies: DeviceSpans
    """Of these it copied, with nothing beside it."""
    edges: DeviceSpans
    """Of every step the first and the last moment of anything on the device, without length."""
    gaps: IdleGaps
    gap_step: Int64s
    """Per gap the number of the step of the work that ends it; -1."""
    merged_gap_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCollective:
    """One communication kernel, or call of gloo, with what a recorder would have known."""

    found: TraceCollective
    enqueue_ns: int
    arrive_ns: int
    """When the rank was ready for it: all work that was launched before it was over. Earlier than
    its begin where it queued behind another operation of its stream."""
    step: int
    """The step's number."""
    phase: int
    """Place in `TraceRecording.phases`."""
    held_ns: int
    """How long the device, or the host, waited for its end, with nothing computed beside it."""
    unqueued: tuple[tuple[int, int], ...]
    """When else it ran with nothing computed beside it, begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRecording:
    """What one trace of one rank has; times are the trace's own."""

    source: str
    rank: int | Unavailable
    world_size: int | Unavailable
    groups: tuple[TraceGroup, ...]
    device_name: str
    host: str
    """As the trace's name tells it; ""."""
    base_ns: int
    """What is to be added to times so that they are of the wall clock, or of none."""
    is_on_wall_clock: bool
    """Times with the base count from 1970; else from a moment that nobody knows."""
    extent_ns: tuple[int, int]
    """From its first event to its last end, with the base."""
    warnings: tuple[str, ...]
    steps: TraceSteps
    has_steps: bool
    """The profiler numbered them, so that they are alike on all ranks. Steps that were found, and a
    whole trace taken for one, count from 0 on every rank (`steps.source`)."""
    phases: HostPhases
    work: DeviceWork | None
    """None where the trace has no device: phases are then of the host."""
    collectives: tuple[RecordedCollective, ...]
    num_outside: int
    """Device events outside of steps, which are left out."""
    earlier_ns: int
    """How long the device was at work that was launched before the trace began; the first step's,
    as a phase of its own."""
    other_devices: tuple[int, ...]
    """Devices of the trace that are not looked at: a rank has one."""
    memory: StepMemory | None
    """Of the device; None where the trace has none."""
    has_host_memory: bool
    """Whether the trace has memory of the host's allocator."""


def record_trace(trace: Trace, *, max_spans: int, view: TraceView | None = None) -> TraceRecording:
    """The tables of one trace; `view` is what was found out about it already."""
    look = _Look(view or TraceView(trace))
    steps, has_steps = look.steps, look.has_steps
    return TraceRecording(
        source=trace.source,
        rank=trace.rank,
        world_size=trace.world_size,
        groups=trace.groups,
        device_name=trace.device_names.get(look.device, ""),
        host=find_host(trace),
        base_ns=trace.base_ns,
        is_on_wall_clock=_find_extent(trace)[0] > FIRST_WALL_NS,
        extent_ns=_find_extent(trace),
        warnings=(*trace.warnings, *note_steps(trace, steps)),
        steps=steps,
        has_steps=has_steps,
        phases=look.phases,
        work=look.merge_spans(max_spans) if look.device >= 0 else None,
        collectives=look.list_operations() if look.device >= 0 else look.list_host_operations(),
        num_outside=look.num_outside,
        earlier_ns=look.earlier_ns,
        other_devices=look.other_devices,
        memory=sample_steps(trace.memory, steps, look.device) if look.device >= 0 else None,
        has_host_memory=has_host_memory(trace.memory),
    )


class _Look:
    """One trace while it is looked at."""

    def __init__(self, view: TraceView) -> None:
        trace = self._trace = view.trace
        self._view = view
        found = bool(len(view.steps))
        self.steps = view.steps if found else take_as_one_step(trace)
        self.has_steps = self.steps.source is StepSource.PROFILER
        self._classes, self._launch = view.classes, view.launch
        self._step_of = view.step_of if found else assign_steps(trace, self.steps, view.launch)
        self.phases = find_phases(trace, self.steps)
        device_of = view.device_of
        self.device, self.other_devices = _choose_device(device_of)
        self._every = find_true(device_of == self.device) if self.device >= 0 else NONE
        every = self._every
        self._rows = every[self._step_of[every] >= 0]
        self.num_outside = len(every) - len(self._rows)
        is_earlier = self._launch[self._rows] == BEFORE_TRACE
        if is_earlier.any():
            since = int(trace.events.begin_ns[self._rows[is_earlier]].min())
            self.steps, self.phases = begin_earlier(self.steps, self.phases, since)
        phase = self.phases.locate(_moments(trace, self._launch, self._rows))
        self._phase = np.where(is_earlier, 0, phase)
        self.earlier_ns = unite_events(trace, self._rows[is_earlier]).total_ns

    def merge_spans(self, max_spans: int) -> DeviceWork:
        """What the device did and why it did not."""
        trace, rows, phase = self._trace, self._rows, self._phase
        spans, copies, merged_gap_ns = _merge_spans(
            trace, self._classes.work, rows, phase, max_spans
        )
        gaps = _find_gaps(trace, rows, self._launch, self._view.calls)
        return DeviceWork(
            device=self.device,
            spans=spans,
            copies=copies,
            edges=_find_edges(trace, rows, self._step_of, phase),
            gaps=gaps,
            gap_step=_find_gap_steps(self.steps, self._step_of, gaps),
            merged_gap_ns=merged_gap_ns,
        )

    def list_operations(self) -> tuple[RecordedCollective, ...]:
        """Communication kernels of the device."""
        trace, rows, launch = self._trace, self._rows, self._launch
        others = rows[self._classes.work[rows] != int(Work.COMMUNICATION)]
        busy = self._view.spans_of[self.device].compute
        found = self._list_collectives(busy)
        waits = self._view.calls.synchronising
        held = _measure_holds(trace, others, busy, launch, waits, found)
        unqueued = _find_unqueued(found, held, busy)
        place = {row: place for place, row in enumerate(rows.tolist())}
        return tuple(
            RecordedCollective(
                found=one,
                enqueue_ns=self._find_enqueue(one),
                arrive_ns=arrive_ns,
                step=int(self.steps.number[self._step_of[one.row]]),
                phase=int(self._phase[place[one.row]]),
                held_ns=held_ns,
                unqueued=pieces,
            )
            for one, arrive_ns, held_ns, pieces in zip(
                found, self._find_arrivals(found, others), held.tolist(), unqueued, strict=True
            )
        )

    def _list_collectives(self, busy: Intervals) -> tuple[TraceCollective, ...]:
        """Of the steps. A layout names axes, and pairs of ranks by them: a run has its own."""
        if self._view.has_layout:
            classes, operator_of = self._classes, self._view.operator_of
            return list_collectives(self._trace, classes, self._rows, busy, operator_of)
        found = self._view.list_collectives(self.device)
        return tuple(one for one in found if self._step_of[one.row] >= 0)

    def _find_arrivals(self, found: Sequence[TraceCollective], others: Int64s) -> list[int]:
        """An operation's stream waits for what was launched before it, then for its own turn."""
        events, launch = self._trace.events, self._launch
        called = others[launch[others] >= 0]
        called = called[np.argsort(events.begin_ns[launch[called]], kind="stable")]
        moments = events.begin_ns[launch[called]]
        over = np.maximum.accumulate(find_ends(self._trace, called))
        arrivals = []
        last_end: dict[int, int] = {}
        for one in found:
            track, call = int(events.track[one.row]), int(launch[one.row])
            arrive = one.begin_ns
            if call >= 0 and one.begin_ns - last_end.get(track, -MAX_TURN_NS) < MAX_TURN_NS:
                before = int(np.searchsorted(moments, events.begin_ns[call]))
                ready = int(over[before - 1]) if before else 0
                arrive = min(max(ready, int(events.begin_ns[call])), arrive)
            last_end[track] = one.end_ns
            arrivals.append(arrive)
        return arrivals

    def _find_enqueue(self, one: TraceCollective) -> int:
        call = int(self._launch[one.row])
        if call == BEFORE_TRACE:
            return int(self.steps.begin_ns[0]) - 1
        return int(self._trace.events.begin_ns[call]) if call >= 0 else one.begin_ns

    def list_host_operations(self) -> tuple[RecordedCollective, ...]:
        """Calls of gloo and its like; they hold the main thread up where it runs no operator."""
        trace = self._trace
        host = self._view.host
        if not len(self._view.steps):
            host = summarize_host(trace, self.steps, self._view.namer, has_device=False)
        exposed = np.array(host.exposed_spans, dtype=np.int64).reshape(-1, 2)
        begin = np.array([one.begin_ns for one in host.collectives], dtype=np.int64)
        end = np.array([one.end_ns for one in host.collectives], dtype=np.int64)
        place = np.searchsorted(exposed[:, 0], end, side="left") - 1
        since = np.append(exposed[:, 0], 0)[place]
        reaches = (place >= 0) & (np.append(exposed[:, 1], 0)[place] >= end)
        held = np.where(reaches, end - np.maximum(since, begin), 0)
        phase = self.phases.locate(begin)
        hidden = complement(Intervals(exposed[:, 0], exposed[:, 1]), *_extent(begin, end))
        unqueued = _find_unqueued(host.collectives, held, hidden)
        return tuple(
            RecordedCollective(
                found=one,
                enqueue_ns=one.begin_ns,
                arrive_ns=one.begin_ns,
                step=one.step,
                phase=in_phase,
                held_ns=held_ns,
                unqueued=pieces,
            )
            for one, in_phase, held_ns, pieces in zip(
                host.collectives, phase.tolist(), held.tolist(), unqueued, strict=True
            )
            if one.step is not None
        )


def _choose_device(device_of: Places) -> tuple[int, tuple[int, ...]]:
    """The device with the most events, and the others."""
    numbers, count = np.unique(device_of[device_of >= 0], return_counts=True)
    if not len(numbers):
        return -1, ()
    chosen = int(numbers[count.argmax()])
    return chosen, tuple(number for number in numbers.tolist() if number != chosen)


def _find_extent(trace: Trace) -> tuple[int, int]:
    events, base = trace.events, trace.base_ns
    if not len(events):
        return base, base
    return int(events.begin_ns[0]) + base, int(events.end_ns.max()) + base


def _moments(trace: Trace, launch: Int32s, rows: Int64s) -> Int64s:
    """When each was launched, else when it began."""
    call = launch[rows]
    events = trace.events
    return np.where(call >= 0, events.begin_ns[call], events.begin_ns[rows])


def _find_gaps(trace: Trace, rows: Int64s, launch: Int32s, calls: HostCalls) -> IdleGaps:
    events = trace.events
    begin = int(events.begin_ns[rows].min(initial=np.iinfo(np.int64).max))
    end = int(find_ends(trace, rows).max(initial=begin))
    return find_gaps(trace, rows, launch, begin, end, calls)


def _find_gap_steps(steps: TraceSteps, step_of: Places, gaps: IdleGaps) -> Int64s:
    place = np.where(gaps.following >= 0, step_of[gaps.following], -1)
    return np.where(place >= 0, steps.number[place], -1)


def _find_edges(trace: Trace, rows: Int64s, step_of: Places, phase: Int64s) -> DeviceSpans:
    """Steps end with their last communication, too, which is not among the spans."""
    events = trace.events
    rows, phase = rows[phase >= 0], phase[phase >= 0]
    step, place = np.unique(step_of[rows], return_inverse=True)
    picked = []
    for moment in (events.begin_ns[rows], -find_ends(trace, rows)):
        order = np.lexsort((moment, place))
        picked.append(order[np.searchsorted(place[order], np.arange(len(step)))])
    first, last = picked
    at = np.append(events.begin_ns[rows[first]], events.ends(rows[last]))
    owner = np.append(phase[first], phase[last])
    return DeviceSpans(begin_ns=at, end_ns=at, phase=owner)


def _merge_spans(
    trace: Trace, work: npt.NDArray[np.uint8], rows: Int64s, phase: Int64s, max_spans: int
) -> tuple[DeviceSpans, DeviceSpans, int]:
    """Work of one phase without gaps, as one span; gaps are kept as far as spans are allowed."""
    events = trace.events
    sent = rows[work[rows] == int(Work.COMMUNICATION)]
    kept = (work[rows] != int(Work.COMMUNICATION)) & (phase >= 0)
    rows, phase = rows[kept], phase[kept]
    is_copy = work[rows] == int(Work.COPY)
    computed, copied = rows[~is_copy], rows[is_copy]
    compute = _lay(events.begin_ns[computed], events.ends(computed), phase[~is_copy])
    copies = _leave_out(
        _lay(events.begin_ns[copied], events.ends(copied), phase[is_copy]),
        join(unite(compute[0], compute[1]), unite(events.begin_ns[sent], events.ends(sent))),
    )
    begin, end, owner = (np.append(one, other) for one, other in zip(compute, copies, strict=True))
    order = np.argsort(begin, kind="stable")
    for merged_gap_ns in MERGED_GAPS_NS:
        spans = _join_neighbours(begin[order], end[order], owner[order], merged_gap_ns)
        if len(spans) <= max_spans:
            break
    return spans, _join_neighbours(*copies, 0), merged_gap_ns


_Laid = tuple[Int64s, Int64s, Int64s]


def _lay(begin: Int64s, end: Int64s, phase: Int64s) -> _Laid:
    """Stretches cut so that they follow each other: a moment belongs to whoever began first."""
    order = np.argsort(begin, kind="stable")
    begin, end, phase = begin[order], end[order], phase[order]
    covered = np.maximum.accumulate(end) if len(end) else end
    begin = begin.copy()
    begin[1:] = np.maximum(begin[1:], covered[:-1])
    is_any = end > begin
    return begin[is_any], end[is_any], phase[is_any]


def _leave_out(laid: _Laid, busy: Intervals) -> _Laid:
    """What of the stretches lies outside of the set."""
    begin, end, phase = laid
    first = np.searchsorted(busy.end_ns, begin, side="right")
    after = np.searchsorted(busy.start_ns, end, side="left")
    count = np.clip(after - first, 0, None) + 1
    owner = np.repeat(np.arange(len(begin)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    place = first[owner] + offset
    since = np.append(0, busy.end_ns)[place]
    until = np.append(busy.start_ns, np.iinfo(np.int64).max)[place]
    begin = np.where(offset > 0, np.maximum(begin[owner], since), begin[owner])
    end = np.minimum(end[owner], until)
    is_any = end > begin
    return begin[is_any], end[is_any], phase[owner[is_any]]


def _join_neighbours(begin: Int64s, end: Int64s, phase: Int64s, gap_ns: int) -> DeviceSpans:
    """Those of one phase with at most this much between them are one."""
    is_first = np.ones(len(begin), dtype=np.bool_)
    is_first[1:] = (begin[1:] - end[:-1] > gap_ns) | (phase[1:] != phase[:-1])
    first = find_true(is_first)
    last = np.append(first[1:], len(begin)) - 1 if len(first) else first
    return DeviceSpans(begin_ns=begin[first], end_ns=end[last], phase=phase[first])


def _extent(begin: Int64s, end: Int64s) -> tuple[int, int]:
    return (int(begin.min()), int(end.max())) if len(begin) else (0, 0)


def _find_unqueued(
    found: Sequence[TraceCollective], held: Int64s, busy: Intervals
) -> list[tuple[tuple[int, int], ...]]:
    """Per operation when it ran with nothing beside it and held nothing up. Where several ran, a
    moment belongs to the one that began first."""
    begin = np.array([one.begin_ns for one in found], dtype=np.int64)
    end = begin + np.array([one.duration_ns for one in found], dtype=np.int64)
    laid = _lay(begin, end, np.arange(len(found)))
    pieces: list[list[tuple[int, int]]] = [[] for _ in found]
    rest = _leave_out(laid, join(busy, unite(end - held, end)))
    for since, until, owner in zip(*(column.tolist() for column in rest), strict=True):
        pieces[owner].append((since, until))
    return [tuple(own) for own in pieces]


def _measure_holds(
    trace: Trace,
    others: Int64s,
    busy: Intervals,
    launch: Int32s,
    waits: Intervals,
    found: tuple[TraceCollective, ...],
) -> Int64s:
    """Per operation how long, up to its end, the device ran nothing else because of it; `waits` is
    when the host waited for the device."""
    events = trace.events
    begin = np.array([one.begin_ns for one in found], dtype=np.int64)
    end = begin + np.array([one.duration_ns for one in found], dtype=np.int64)
    if not len(busy) or not len(found):
        return end - begin
    computes = busy.within(end - 1, end) > 0
    place = np.searchsorted(busy.end_ns, end, side="right") - 1
    idle_since = np.where(place >= 0, busy.end_ns[np.maximum(place, 0)], begin)
    since = np.maximum(idle_since, begin)
    order = others[np.argsort(events.begin_ns[others], kind="stable")]
    next_place = np.searchsorted(events.begin_ns[order], end, side="left")
    has_next = next_place < len(order)
    following = order[np.minimum(next_place, len(order) - 1)]
    call = np.where(has_next, launch[following], -1)
    launched = np.where(call >= 0, events.begin_ns[call], since)
    waited = waits.within(end - 1, end + 1) == 2
    since = np.where(waited, since, np.maximum(since, launched))
    return np.where(computes, 0, np.clip(end - since, 0, end - begin))
