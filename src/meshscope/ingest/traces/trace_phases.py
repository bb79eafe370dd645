"""The phases of a step in a trace: what the host was at, from first to last, without gaps.

    data        a DataLoader's `enumerate(DataLoader)…` or an annotation that names loading
    backward    the program's own ranges of that name (`trace_range_names`); where it has none, from
                the first function of autograd's engine to the last of a pass
    weight gradient   ranges of that name, `mlp(W)`; only where the program has them
    optimizer   `Optimizer.step#…`, and ranges of that name
    forward     ranges of that name; where there are none, what comes before a backward
    rest        all other time of a step
    compute     the whole step, where a trace has neither autograd nor an optimizer (inference)
    earlier     what the device did of steps before the trace, whose launches are not in it

A pass of backward ends where the thread that trains begins an operator of its own. Device work is
in the phase in which it was launched. Of ranges inside each other the outermost counts: a forward
in a backward is computed again there. A trace in which no steps are found is one.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_range_names import RangePhase, name_phase
from meshscope.ingest.traces.trace_spans import find_parents, find_rows, match_names
from meshscope.ingest.traces.trace_steps import StepSource, TraceSteps
from meshscope.numerics.intervals import Intervals, complement, intersect, join, subtract, unite
from meshscope.store.read.arrays import Int32s, Int64s, find_true

DATA, FORWARD, BACKWARD, OPTIMIZER, REST, COMPUTE, EARLIER, WEIGHTS = (
    "data", "forward", "backward", "optimizer", "rest", "compute", "earlier", "weight gradient",
)  # fmt: skip
NAMES = (DATA, FORWARD, BACKWARD, OPTIMIZER, REST, COMPUTE, EARLIER, WEIGHTS)

_DATA_NAME = re.compile(
    r"enumerate\(DataLoader\)|^[#\s]*(?:data|data[_ ]?load(?:ing|er)?|load[_ ]data|get[_ ]batch)"
    r"[#\s]*$",
    re.IGNORECASE,
)
_OPTIMIZER_NAME = re.compile(r"^Optimizer\.step#")
_BACKWARD_NAME = re.compile(r"^autograd::engine::evaluate_function")
_ENGINE_THREAD = re.compile(r"autograd", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPhases:
    """Stretches in order of time that cover every step and do not overlap."""

    begin_ns: Int64s
    end_ns: Int64s
    name: Int32s
    """Place in `NAMES`."""
    step: Int32s
    """Place in the steps."""

    def __len__(self) -> int:
        return len(self.begin_ns)

    def locate(self, moment_ns: Int64s) -> Int64s:
        """The stretch each moment is in; -1 outside of all."""
        if not len(self):
            return np.full(len(moment_ns), -1, dtype=np.int64)
        place = np.searchsorted(self.begin_ns, moment_ns, side="right") - 1
        is_inside = (place >= 0) & (moment_ns < self.end_ns[place])
        return np.where(is_inside, place, -1)


def begin_earlier(
    steps: TraceSteps, phases: HostPhases, begin_ns: int
) -> tuple[TraceSteps, HostPhases]:
    """The first step from where the device worked on what was launched before the trace, which is
    a phase of its own, ahead of what the host did."""
    until = steps.begin_ns[:1]
    since = np.minimum(until - 1, begin_ns)
    zero = np.zeros(1, dtype=np.int32)
    return (
        replace(steps, begin_ns=np.append(since, steps.begin_ns[1:])),
        HostPhases(
            begin_ns=np.append(since, phases.begin_ns),
            end_ns=np.append(until, phases.end_ns),
            name=np.append(zero + NAMES.index(EARLIER), phases.name).astype(np.int32),
            step=np.append(zero, phases.step),
        ),
    )


def take_as_one_step(trace: Trace) -> TraceSteps:
    """The whole trace, for one that has no steps; none where nothing in it is the profiler's."""
    events = trace.events
    if not np.any(events.category != int(Category.OTHER)):
        none = np.empty(0, dtype=np.int64)
        return TraceSteps(number=none, begin_ns=none, end_ns=none, source=StepSource.NONE)
    return TraceSteps(
        number=np.zeros(1, dtype=np.int64),
        begin_ns=events.begin_ns[:1],
        end_ns=np.array([events.end_ns.max() + 1]),
        source=StepSource.NONE,
    )


def find_phases(trace: Trace, steps: TraceSteps) -> HostPhases:
    """What the host was at in every step."""
    rows = _PhaseRows(trace)
    said = rows.find_named()
    data = rows.annotated(_DATA_NAME)
    weights = subtract(said[RangePhase.WEIGHTS], data)
    before = join(data, weights)
    is_said = len(said[RangePhase.BACKWARD]) > 0
    backward = subtract(said[RangePhase.BACKWARD] if is_said else rows.find_passes(), before)
    before = join(before, backward)
    updates = join(rows.annotated(_OPTIMIZER_NAME), said[RangePhase.OPTIMIZER])
    optimizer = subtract(updates, before)
    forward = subtract(said[RangePhase.FORWARD], join(before, optimizer))
    whole = Intervals(steps.begin_ns, steps.end_ns)
    named = [
        (DATA, _cut(data, whole)),
        (WEIGHTS, _cut(weights, whole)),
        (BACKWARD, _cut(backward, whole)),
        (OPTIMIZER, _cut(optimizer, whole)),
        (FORWARD, _cut(forward, whole)),
    ]
    rest = _cut(complement(unite(*_columns(named)), *_extent(steps)), whole)
    if len(forward):
        named.append((REST, rest))
    elif not len(backward) and not len(optimizer):
        named.append((COMPUTE, rest))
    else:
        is_forward = _comes_before(rest, backward, optimizer, steps)
        named.append((FORWARD, Intervals(rest.start_ns[is_forward], rest.end_ns[is_forward])))
        named.append((REST, Intervals(rest.start_ns[~is_forward], rest.end_ns[~is_forward])))
    begin, end = _columns(named)
    name = np.concatenate([np.full(len(found), NAMES.index(one)) for one, found in named])
    order = np.argsort(begin, kind="stable")
    return HostPhases(
        begin_ns=begin[order],
        end_ns=end[order],
        name=name[order].astype(np.int32),
        step=steps.locate(begin[order]),
    )


def _columns(named: list[tuple[str, Intervals]]) -> tuple[Int64s, Int64s]:
    return (
        np.concatenate([found.start_ns for _, found in named]),
        np.concatenate([found.end_ns for _, found in named]),
    )


def _extent(steps: TraceSteps) -> tuple[int, int]:
    return (int(steps.begin_ns[0]), int(steps.end_ns[-1])) if len(steps) else (0, 0)


def _cut(found: Intervals, steps: Intervals) -> Intervals:
    """What of it lies in steps, cut where one step follows another."""
    if not len(found):
        return found
    inside = intersect(found, unite(steps.start_ns, steps.end_ns))
    cuts = steps.start_ns
    first = np.searchsorted(cuts, inside.start_ns, side="right")
    after = np.searchsorted(cuts, inside.end_ns, side="left")
    count = after - first + 1
    owner = np.repeat(np.arange(len(inside)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    begin = np.where(offset == 0, inside.start_ns[owner], 0)
    is_later = offset > 0
    begin[is_later] = cuts[first[owner[is_later]] + offset[is_later] - 1]
    is_last = offset == count[owner] - 1
    end = np.where(is_last, inside.end_ns[owner], 0)
    end[~is_last] = cuts[first[owner[~is_last]] + offset[~is_last]]
    return Intervals(begin, end)


def _comes_before(
    rest: Intervals, backward: Intervals, optimizer: Intervals, steps: TraceSteps
) -> npt.NDArray[np.bool_]:
    """Whether the next thing that is not `rest` in the same step is a backward."""
    far = np.iinfo(np.int64).max
    following = [
        np.append(one.start_ns, far)[np.searchsorted(one.start_ns, rest.start_ns)]
        for one in (backward, optimizer)
    ]
    step = steps.locate(rest.start_ns)
    until = np.where(step >= 0, steps.end_ns[step], far) if len(steps) else following[0]
    found: npt.NDArray[np.bool_] = (following[0] < following[1]) & (following[0] < until)
    return found


class _PhaseRows:
    """Events of the host by their names."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._events = trace.events

    def annotated(self, pattern: re.Pattern[str]) -> Intervals:
        """When an annotation with such a name was open."""
        rows = self._named(pattern, Category.ANNOTATION, Category.CPU_OP)
        return unite(self._events.begin_ns[rows], self._events.ends(rows))

    def find_named(self) -> dict[RangePhase, Intervals]:
        """When ranges of the program's that are named for a phase were open, the outermost."""
        events, strings = self._events, self._trace.strings
        rows = find_true(events.category == int(Category.ANNOTATION))
        names = np.unique(events.name[rows]).tolist()
        phases = {n: phase for n in names if n >= 0 and (phase := name_phase(strings[n][:400]))}
        rows = rows[np.isin(events.name[rows], np.array(list(phases), dtype=np.int64))]
        found: dict[RangePhase, list[Int64s]] = {phase: [] for phase in RangePhase}
        for track in np.unique(events.track[rows]).tolist():
            own = rows[events.track[rows] == track]
            own = own[np.lexsort((-events.duration_ns[own], events.begin_ns[own]))]
            outer = own[find_parents(events.begin_ns[own], events.ends(own)) < 0]
            of_phase = np.array([phases[name] for name in events.name[outer].tolist()])
            for phase in RangePhase:
                found[phase].append(outer[of_phase == phase])
        picked = {
            phase: np.concatenate(own) if own else np.empty(0, dtype=np.int64)
            for phase, own in found.items()
        }
        return {p: unite(events.begin_ns[own], events.ends(own)) for p, own in picked.items()}

    def find_passes(self) -> Intervals:
        """Passes of backward: functions of the engine with no operator of another's between."""
        events = self._events
        rows = self._named(_BACKWARD_NAME, Category.CPU_OP)
        found = unite(events.begin_ns[rows], events.ends(rows))
        if len(found) < 2:
            return found
        own = self._foreground(rows, found)
        before = np.searchsorted(own, found.start_ns)
        is_first = np.append(True, before[1:] != before[:-1])
        first = find_true(is_first)
        last = np.append(first[1:] - 1, len(found) - 1)
        return Intervals(found.start_ns[first], found.end_ns[last])

    def _foreground(self, engine: Int64s, backward: Intervals) -> Int64s:
        """When the training thread began operators outside of backward's functions."""
        events = self._events
        operators = find_true(events.category == int(Category.CPU_OP))
        track = self._training_track(operators, engine)
        begin = events.begin_ns[operators[events.track[operators] == track]]
        moments: Int64s = np.sort(begin[backward.within(begin, begin + 1) == 0])
        return moments

    def _training_track(self, operators: Int64s, engine: Int64s) -> int:
        """The thread with the most operators that are not backward's."""
        tracks = self._events.track
        is_other = np.ones(len(tracks), dtype=np.bool_)
        is_other[engine] = False
        own = tracks[operators[is_other[operators]]]
        is_engine = np.array(
            [bool(_ENGINE_THREAD.search(track.thread_name)) for track in self._trace.tracks]
        )
        if len(own) and not is_engine[own].all():
            own = own[~is_engine[own]]
        engines = set(tracks[engine].tolist())
        outside = own[~np.isin(own, list(engines))]
        # On a CPU one thread does both.
        picked = outside if len(outside) else own
        return int(np.bincount(picked).argmax()) if len(picked) else -1

    def _named(self, pattern: re.Pattern[str], *categories: Category) -> Int64s:
        rows = find_rows(self._trace, *categories)
        found: Int64s = rows[match_names(self._trace, self._events.name[rows], pattern.search)]
        return found
