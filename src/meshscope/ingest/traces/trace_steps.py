"""The profiler's steps in a trace: `ProfilerStep#n` annotations of the host.

A device runs behind its host: a step of the device is what was launched for it, from the first to
the last. Device work belongs to the step in which the call that launched it began; where that call
is not in the trace, to the step in which the work itself began. Work that was launched before the
trace began belongs to the first step: it took its time from it.
"""

import re
from dataclasses import dataclass

import numpy as np

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.store.read.arrays import Int32s, Int64s

STEP_NAME = re.compile(r"ProfilerStep#(\d{1,12})$")
BEFORE_TRACE = -2
"""In place of a launching call: it was made before the trace began."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceSteps:
    """Steps in order of time."""

    number: Int64s
    begin_ns: Int64s
    end_ns: Int64s

    def __len__(self) -> int:
        return len(self.number)

    def locate(self, moment_ns: Int64s) -> Int32s:
        """The place of the step each moment is in; -1 outside of all."""
        if not len(self):
            return np.full(len(moment_ns), -1, dtype=np.int32)
        place = np.searchsorted(self.begin_ns, moment_ns, side="right") - 1
        is_inside = (place >= 0) & (moment_ns < self.end_ns[place])
        return np.where(is_inside, place, -1).astype(np.int32)

    def numbers_at(self, places: Int32s) -> list[int | None]:
        """The number of the step at each place; None for -1."""
        if not len(self):
            return [None] * len(places)
        numbers = self.number[places].tolist()
        return [
            number if place >= 0 else None
            for number, place in zip(numbers, places.tolist(), strict=True)
        ]


def find_steps(trace: Trace) -> TraceSteps:
    """The annotations named ProfilerStep#n, one for each n."""
    events = trace.events
    rows = np.flatnonzero(
        (events.category == Category.ANNOTATION) | (events.category == Category.CPU_OP)
    )
    names = {
        place: int(found[1])
        for place in np.unique(events.name[rows]).tolist()
        if place >= 0 and (found := STEP_NAME.match(trace.strings[place]))
    }
    seen: dict[int, int] = {}
    for row in rows[np.isin(events.name[rows], list(names))].tolist():
        seen.setdefault(names[int(events.name[row])], row)
    picked = np.array(sorted(seen.values(), key=lambda row: int(events.begin_ns[row])), np.int64)
    number = np.array([names[int(events.name[row])] for row in picked.tolist()], np.int64)
    begin, end = events.begin_ns[picked], events.end_ns[picked]
    # One that begins before the last one ended would hide it.
    end = np.minimum(end, np.append(begin[1:], np.iinfo(np.int64).max)) if len(end) else end
    return TraceSteps(number=number, begin_ns=begin, end_ns=end)


def find_launches(trace: Trace) -> Int64s:
    """For each event the row of the runtime call that launched it, by correlation; -1 without.

    BEFORE_TRACE for work on a stream ahead of the first whose call is known: streams run in order.
    """
    events = trace.events
    launch = np.full(len(events), -1, dtype=np.int64)
    calls = np.flatnonzero((events.category == Category.RUNTIME) & (events.correlation > 0))
    work = np.flatnonzero(
        (events.category >= Category.KERNEL)
        & (events.category <= Category.MEMSET)
        & (events.correlation > 0)
    )
    if not len(calls) or not len(work):
        return launch
    keys = events.correlation[calls].astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys, calls = keys[order], calls[order]
    wanted = events.correlation[work].astype(np.int64)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    is_found = keys[place] == wanted
    launch[work[is_found]] = calls[place[is_found]]
    launch[_find_queued_before(trace, launch)] = BEFORE_TRACE
    return launch


def _find_queued_before(trace: Trace, launch: Int64s) -> Int64s:
    """Work that begins before any launched work of its stream does."""
    events = trace.events
    is_work = (events.category >= Category.KERNEL) & (events.category <= Category.MEMSET)
    rows = np.flatnonzero(is_work)
    called = rows[launch[rows] >= 0]
    first = np.full(len(trace.tracks) + 1, np.iinfo(np.int64).min)
    first[events.track[called]] = np.iinfo(np.int64).max
    np.minimum.at(first, events.track[called], events.begin_ns[called])
    found: Int64s = rows[events.begin_ns[rows] < first[events.track[rows]]]
    return found


def assign_steps(trace: Trace, steps: TraceSteps, launch: Int64s) -> Int32s:
    """For each event the place of its step; -1 outside of all."""
    moment = np.where(launch >= 0, trace.events.begin_ns[launch], trace.events.begin_ns)
    found = steps.locate(moment)
    return np.where((launch == BEFORE_TRACE) & (len(steps) > 0), 0, found).astype(np.int32)


def split_by_step(rows: Int64s, step_of: Int32s) -> list[tuple[int, Int64s]]:
    """Place of each step that has any of the events, and these in their own order."""
    own = step_of[rows]
    order = np.argsort(own, kind="stable")
    places, first = np.unique(own[order], return_index=True)
    parts = np.split(rows[order], first[1:])
    return [(place, part) for place, part in zip(places.tolist(), parts, strict=True) if place >= 0]
