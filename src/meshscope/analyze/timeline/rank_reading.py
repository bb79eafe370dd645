"""One rank's phases and device marks as recorded, and the track that pieces are cut from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.operations import PhaseBook
from meshscope.analyze.rank.phases import StepTimes
from meshscope.analyze.timeline.actions import Actions
from meshscope.analyze.timeline.rank_phases import (
    DeviceMarks,
    RankPhases,
    fit_mark_offsets,
    layer_by_depth,
    place_device_spans,
    read_phases,
)
from meshscope.analyze.timeline.rank_pieces import Hold, Track
from meshscope.analyze.timeline.timeline_steps import StepTable
from meshscope.numerics.interval_layers import EMPTY_LAYER, Layer, make_layer
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.recording import Recording

_IDLE_PHASES = ("data", "compile", "checkpoint", "eval", "logging")
"""Phases of the host that explain why a device's stream has nothing to do."""
WAIT_PHASE = "pipeline wait"
COMM_PHASE = "comm"

_ToReference = Callable[[Int64s], Int64s]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankReading:
    """What one rank recorded about its phases, on its own clock."""

    rank: int
    steps: StepTimes
    phases: RankPhases
    marks: DeviceMarks | None
    """None where no phase was marked on a device."""


def read_rank(recording: Recording, steps: StepTimes, book: PhaseBook) -> RankReading:
    phases = read_phases(recording, steps, book)
    marks = None
    if recording.has_table("device_spans"):
        marks = place_device_spans(
            recording.read("device_spans"), phases, fit_mark_offsets(recording)
        )
    has_marks = marks is not None and len(marks) > 0
    return RankReading(
        rank=recording.rank, steps=steps, phases=phases, marks=marks if has_marks else None
    )


def apply_device_times(
    table: StepTable, readings: Sequence[RankReading]
) -> tuple[StepTable, Bools]:
    """Replaces host times by device times on ranks with marks; also which steps have marks: others
    are left out.

    On a device a step ends with the last of its phases on the stream, and its period begins where
    that of the step before ended. If the step before has no marks, the period is taken to be as
    long as the host's (`_measure_host_periods`).
    """
    before, start, end = table.before_ns.copy(), table.start_ns.copy(), table.end_ns.copy()
    is_marked = np.ones(len(table.steps), dtype=np.bool_)
    for index, reading in enumerate(readings):
        if reading.marks is None:
            continue
        found = _find_device_steps(reading.marks, reading.steps)
        order = np.argsort(reading.steps.step, kind="stable")
        row = order[np.searchsorted(reading.steps.step[order], table.steps)]
        is_marked &= found[3][row]
        before[index], start[index], end[index] = (moments[row] for moments in found[:3])
    placed = StepTable(steps=table.steps, before_ns=before, start_ns=start, end_ns=end)
    return (placed if is_marked.all() else placed.select(is_marked)), is_marked


def _find_device_steps(
    marks: DeviceMarks, steps: StepTimes
) -> tuple[Int64s, Int64s, Int64s, Bools]:
    """Per step of the rank, on the device: period start, start, end; and whether it has marks."""
    inside = marks.interval % 2 == 1
    index = marks.interval[inside] // 2
    end = np.full(len(steps), -1, dtype=np.int64)
    np.maximum.at(end, index, marks.end_ns[inside])
    start = np.full(len(steps), np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(start, index, marks.start_ns[inside])
    has_marks = end >= 0
    end = np.maximum.accumulate(end)
    # Only some short steps are marked: after an unmarked one the device is taken to keep the
    # host's pace.
    before = start.copy()
    if not has_marks[:-1].all():
        before = np.minimum(end - _measure_host_periods(steps), start)
        before[:1] = start[:1]
    before[1:] = np.where(has_marks[:-1], end[:-1], np.maximum(before[1:], end[:-1]))
    is_next = np.append(True, steps.step[1:] == steps.step[:-1] + 1)
    before = np.where(is_next, before, start)
    before = np.minimum(before, end)
    return before, np.clip(start, before, end), end, has_marks


def _measure_host_periods(steps: StepTimes) -> Int64s:
    """How long each step took the host: from end to end, from the start before to its own, and
    from its own to the next, the one in the middle of these.

    A host that is ahead of its device spends the same work now in this step and now in the next: a
    step that it leaves late is not longer. What is really longer is so in two of the three.
    """
    to_end = steps.end_ns - np.append(steps.start_ns[:1], steps.end_ns[:-1])
    to_start = np.diff(steps.start_ns)
    three = (to_end, np.append(to_end[:1], to_start), np.append(to_start, to_end[-1:]))
    middle: Int64s = np.median(np.stack(three), axis=0).astype(np.int64)
    return middle


def make_track(
    reading: RankReading,
    table: StepTable,
    index: int,
    book: PhaseBook,
    holds: tuple[Hold, ...],
    to_reference: _ToReference,
) -> Track:
    """What is known of a rank except its actions, on the reference clock."""
    phases, busy = _layer_phases(reading, book, to_reference)
    period_start = to_reference(table.before_ns[index])
    period_end = np.maximum(to_reference(table.end_ns[index]), period_start)
    return Track(
        rank=reading.rank,
        period_start_ns=period_start,
        step_start_ns=np.clip(to_reference(table.start_ns[index]), period_start, period_end),
        period_end_ns=period_end,
        phases=phases,
        busy=busy,
        holds=holds,
        wait_phase=book.find(WAIT_PHASE),
    )


def _layer_phases(
    reading: RankReading, book: PhaseBook, to_reference: _ToReference
) -> tuple[tuple[Layer, ...], Layer]:
    """Phases, outermost first, and where a device's stream is in one."""
    phases, marks = reading.phases, reading.marks
    is_placed = phases.spans.interval >= 0
    if marks is not None:
        is_placed &= np.isin(phases.phase, [book.find(name) for name in _IDLE_PHASES])
    row = np.flatnonzero(is_placed)
    host = layer_by_depth(
        to_reference(phases.start_ns[row]),
        to_reference(phases.end_ns[row]),
        phases.spans.depth[row].astype(np.int64),
        phases.phase[row].astype(np.int64),
    )
    if marks is None:
        return host, EMPTY_LAYER
    start, end = to_reference(marks.start_ns), to_reference(marks.end_ns)
    device = layer_by_depth(start, end, marks.depth, marks.phase.astype(np.int64))
    return (*host, *device), device[0] if device else EMPTY_LAYER


def layer_actions(actions: Actions, first_row: int) -> tuple[Layer, Layer]:
    """A rank's actions, and the waits for their inputs; values are rows from `first_row` on."""
    row = np.arange(first_row, first_row + len(actions))
    has_wait = actions.wait_start_ns >= 0
    wait_start = actions.wait_start_ns[has_wait]
    return (
        make_layer(actions.start_ns, actions.end_ns, row),
        make_layer(wait_start, wait_start + actions.wait_ns[has_wait], row[has_wait]),
    )
