"""The steps of a trace: `ProfilerStep#n` annotations of the host, else what repeats in it
(`trace_step_search`).

A device runs behind its host: a step of the device is what was launched for it, from the first to
the last. Device work belongs to the step in which the call that launched it began; where that call
is not in the trace, to the step in which the work itself began. Work that was launched before the
trace began belongs to the first step: it took its time from it.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.core import unit_text
from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_spans import find_named
from meshscope.store.read.arrays import Int16s, Int32s, Int64s, find_true

STEP_NAME = re.compile(r"ProfilerStep#(\d{1,12})$")
_XLA_STEP, _XLA_LINE = re.compile(r"(\d{1,12})$"), "Steps"
Places = Int32s | Int16s
"""One for each event: in two bytes where they fit."""
BEFORE_TRACE = -2
"""In place of a launching call: it was made before the trace began."""


class StepSource(StrEnum):
    """How the steps of a trace were found."""

    PROFILER = "profiler"
    """The profiler marked them; their numbers are the program's."""
    OPTIMIZER = "optimizer"
    RANGE = "range"
    KERNELS = "kernels"
    NONE = "none"
    """There are none: the whole trace is looked at as one."""

    @property
    def words(self) -> str:
        """For people."""
        return _SOURCE_WORDS[self]


_SOURCE_WORDS = {
    StepSource.PROFILER: "marked by the profiler (ProfilerStep#n)",
    StepSource.OPTIMIZER: "found from the ends of optimizer steps: the trace has no ProfilerStep#n",
    StepSource.RANGE: "found from the program's ranges that repeat: the trace has no "
    "ProfilerStep#n",
    StepSource.KERNELS: "found from a sequence of kernels that repeats: the trace has no "
    "ProfilerStep#n",
    StepSource.NONE: "not found: the trace has no ProfilerStep#n, and no optimizer step, range or "
    "sequence of kernels repeats",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceSteps:
    """Steps in order of time."""

    number: Int64s
    begin_ns: Int64s
    end_ns: Int64s
    source: StepSource = StepSource.PROFILER

    def __len__(self) -> int:
        return len(self.number)

    def locate(self, moment_ns: Int64s) -> Int32s:
        """The place of the step each moment is in; -1 outside of all."""
        if not len(self):
            return np.full(len(moment_ns), -1, dtype=np.int32)
        place = np.searchsorted(self.begin_ns, moment_ns, side="right") - 1
        is_inside = (place >= 0) & (moment_ns < self.end_ns.take(place))
        return np.where(is_inside, place, -1).astype(np.int32)

    def numbers_at(self, places: Places) -> list[int | None]:
        """The number of the step at each place; None for -1."""
        if not len(self):
            return [None] * len(places)
        numbers = self.number[places].tolist()
        return [
            number if place >= 0 else None
            for number, place in zip(numbers, places.tolist(), strict=True)
        ]


def find_steps(trace: Trace) -> TraceSteps:
    """The annotations named ProfilerStep#n, one for each n; else what XLA marked."""
    events = trace.events
    rows = find_named(trace, STEP_NAME.match, Category.ANNOTATION, Category.CPU_OP)
    pattern = STEP_NAME
    if not len(rows):
        rows, pattern = _find_xla_marks(trace), _XLA_STEP
    seen: dict[int, int] = {}
    for row in rows.tolist():
        found = pattern.match(trace.strings[events.name[row]])
        if found is not None:
            seen.setdefault(int(found[1]), row)
    marks = sorted(seen.items(), key=lambda mark: int(events.begin_ns[mark[1]]))
    number, picked = np.array(marks, dtype=np.int64).reshape(-1, 2).T
    begin, end = events.begin_ns[picked], events.ends(picked)
    # One that begins before the last one ended would hide it.
    end = np.minimum(end, np.append(begin[1:], np.iinfo(np.int64).max)) if len(end) else end
    source = StepSource.PROFILER if len(number) else StepSource.NONE
    return TraceSteps(number=number, begin_ns=begin, end_ns=end, source=source)


def _find_xla_marks(trace: Trace) -> Int64s:
    """Events of the line `Steps` of XLA's first device."""
    lines = [
        (track.process_name, place)
        for place, track in enumerate(trace.tracks)
        if track.thread_name == _XLA_LINE and track.process_name.startswith("/device:")
    ]
    if not lines:
        return np.empty(0, dtype=np.int64)
    return find_true(trace.events.track == min(lines)[1])


def measure_unrecorded(trace: Trace, steps: TraceSteps) -> int:
    """ns between marked steps whose numbers do not follow each other in which there is no event of
    any kind: the profiler was off, as between cycles of a schedule, and nobody is known to have
    idled."""
    events, found = trace.events, 0
    if steps.source is not StepSource.PROFILER:
        return 0
    for place in find_true(np.diff(steps.number) > 1).tolist():
        since, until = int(steps.end_ns[place]), int(steps.begin_ns[place + 1])
        before = slice(int(np.searchsorted(events.begin_ns, until)))
        last = events.begin_ns[before] + events.duration_ns[before]
        found += max(until - max(since, int(last.max(initial=since))), 0)
    return found


def go_back(steps: TraceSteps) -> bool:
    """Whether a later step has a lower number."""
    return bool((np.diff(steps.number) < 0).any())


def note_steps(trace: Trace, steps: TraceSteps) -> list[str]:
    """What is odd about the steps, for people."""
    found = []
    unrecorded_ns = measure_unrecorded(trace, steps)
    if unrecorded_ns:
        found.append(
            f"nothing was recorded in {unit_text.duration(unrecorded_ns)} between steps: the "
            "profiler was off; the device's total and idle time hold them, what limits it was "
            "judged without"
        )
    if go_back(steps):
        found.append(
            "the numbers of its steps go back: its clock was set back, or it is of several runs; "
            "times across steps and against other ranks are not to be trusted"
        )
    return found


def find_launches(trace: Trace) -> Int32s:
    """For each event the row of the runtime call that launched it, by correlation; -1 without.

    BEFORE_TRACE for work on a stream ahead of the first whose call is known: streams run in order.
    """
    events = trace.events
    launch = np.full(len(events), -1, dtype=np.int32)
    calls = find_true((events.category == int(Category.RUNTIME)) & (events.correlation > 0))
    work = find_true(
        (events.category >= int(Category.KERNEL))
        & (events.category <= int(Category.MEMSET))
        & (events.correlation > 0)
    )
    if not len(calls) or not len(work):
        return launch
    keys = events.correlation.take(calls)
    if (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
        keys, calls = keys.take(order), calls.take(order)
    wanted = events.correlation.take(work)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    launch[work] = np.where(keys.take(place) == wanted, calls.take(place), -1)
    launch[_find_queued_before(trace, launch)] = BEFORE_TRACE
    return launch


def _find_queued_before(trace: Trace, launch: Int32s) -> Int64s:
    """Work that begins before any launched work of its stream does."""
    events = trace.events
    is_work = (events.category >= int(Category.KERNEL)) & (events.category <= int(Category.MEMSET))
    rows = find_true(is_work)
    called = rows.take(find_true(launch.take(rows) >= 0))[::-1]
    first = np.full(len(trace.tracks) + 1, np.iinfo(np.int64).min)
    # Of several what stands last.
    first[events.track.take(called)] = events.begin_ns.take(called)
    is_before = events.begin_ns.take(rows) < first.take(events.track.take(rows))
    found: Int64s = rows[is_before]
    return found


def make_places(num: int, highest: int) -> Places:
    """So many times -1, in a type for places up to `highest`."""
    if highest < 1 << 15:
        return np.full(num, -1, dtype=np.int16)
    return np.full(num, -1, dtype=np.int32)


def assign_steps(trace: Trace, steps: TraceSteps, launch: Int32s) -> Places:
    """For each event the place of its step; -1 outside of all."""
    begin_ns = trace.events.begin_ns
    found = make_places(len(begin_ns), len(steps))
    # Events are in order of begin, so that those of a step follow each other.
    first = np.searchsorted(begin_ns, steps.begin_ns).tolist()
    after = np.searchsorted(begin_ns, steps.end_ns).tolist()
    for place, (begin, end) in enumerate(zip(first, after, strict=True)):
        found[begin : min([end, *first[place + 1 : place + 2]])] = place
    launched = find_true(launch >= 0)
    found[launched] = steps.locate(begin_ns.take(launch.take(launched)))
    if len(steps):
        found[launch == BEFORE_TRACE] = 0
    return found


def split_by_step(rows: Int64s, step_of: Places) -> list[tuple[int, Int64s]]:
    """Place of each step that has any of the events, and these in their own order."""
    own = step_of[rows]
    order = np.argsort(own, kind="stable")
    places, first = np.unique(own[order], return_index=True)
    parts = np.split(rows[order], first[1:])
    return [(place, part) for place, part in zip(places.tolist(), parts, strict=True) if place >= 0]
