"""Which steps of the run each step of a timeline is like, where it has not all that were read.

A timeline leaves out steps without marks on the device, without records of communication, and
those that a profiler disturbed. What is recorded of a step is chosen by chance, so that those left
out are like the others; but few of the others may have what is rare and long: a checkpoint, an
evaluation, code that is compiled anew. The host's phases are recorded in every step, and sort all
of them into kinds. A step of the timeline counts for as many as there are of its kind for each
that it has. A kind that it has none of is known by the host alone: by what such a step and the two
after it take beyond the usual (a host that was ahead of its device waits before it saves, and
catches up after it).

Wrong where steps of one kind differ much and few of them are in the timeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.operations import PhaseBook
from meshscope.analyze.timeline.rank_reading import RankReading
from meshscope.analyze.timeline.timeline_steps import StepTable
from meshscope.store.read.arrays import Bools, Floats, Int64s

RARE_PHASES = ("compile", "checkpoint", "eval", "logging")
"""Of the host, with lines of their own in a budget; what takes part in most steps sorts none."""
USUAL = -1
_NO_STEP = -(1 << 62)
_MIN_RATIO = 0.01
"""Of the usual period: a shorter phase makes no kind of step."""
_CATCH_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepKinds:
    """The steps that all ranks finished, from the first one of the timeline to its last."""

    kind: Int64s
    """Per step the rare phase that it has most of, as a place in `RARE_PHASES`, or `USUAL`."""
    place: Int64s
    """Per step of the timeline its place among these."""
    is_disturbed: Bools
    """Per step: its length says nothing."""
    excess_ns: Floats
    """[rank, step]: what it takes beyond the usual, where no step of the timeline is like it; it
    counts as a usual one besides."""

    @property
    def num_missing(self) -> int:
        return len(self.kind) - len(self.place)

    @property
    def seen_kind(self) -> Int64s:
        """Per step the kind of the steps of the timeline that are like it."""
        seen = np.unique(self.kind[self.place])
        found = np.where(np.isin(self.kind, seen), self.kind, USUAL)
        # Where all steps of the timeline have something rare, all others are like them.
        return found if USUAL in seen else np.full(len(found), USUAL)

    def weigh(self) -> Floats:
        """Per step of the timeline: how many it counts for."""
        found, place = np.unique(self.seen_kind, return_inverse=True)
        num_alike = np.bincount(place, minlength=len(found))
        num_kept = np.bincount(place[self.place], minlength=len(found))
        return np.asarray((num_alike / np.maximum(num_kept, 1))[place[self.place]])

    def predict(self, period_ns: Int64s) -> Floats:
        """[rank, step]: how long each step is if it is like those of its kind, whose periods are
        given, [rank, step of the timeline]."""
        found, place = np.unique(self.seen_kind, return_inverse=True)
        predicted = np.zeros((len(period_ns), len(place)))
        for index in range(len(found)):
            own = period_ns[:, place[self.place] == index]
            predicted[:, place == index] = own.mean(axis=1, keepdims=True)
        return predicted + self.excess_ns


def sort_steps(
    finished: StepTable,
    kept: Int64s,
    is_disturbed: Bools,
    readings: Sequence[RankReading],
    book: PhaseBook,
) -> StepKinds:
    """`finished` is on the hosts' clocks, `kept` are the numbers of the timeline's steps."""
    first, last = np.searchsorted(finished.steps, kept[[0, -1]])
    between = slice(int(first), int(last) + 1)
    place = np.searchsorted(finished.steps[between], kept)
    if len(place) == last + 1 - first:
        kind = np.full(len(place), USUAL, dtype=np.int64)
    else:
        kind = _find_kinds(finished, readings, book)[between]
    period_ns = (finished.end_ns - finished.before_ns)[:, between].astype(np.float64)
    excess_ns = np.zeros(period_ns.shape)
    rows = np.flatnonzero(~np.isin(kind, [*kind[place].tolist(), USUAL]))
    if len(rows):
        excess_ns[:, rows] = _measure_excess(period_ns, rows, kind == USUAL)
    return StepKinds(
        kind=kind, place=place, is_disturbed=is_disturbed[between], excess_ns=excess_ns
    )


def _find_kinds(finished: StepTable, readings: Sequence[RankReading], book: PhaseBook) -> Int64s:
    time_ns = np.zeros((len(finished.steps), len(RARE_PHASES)))
    own = np.array([book.find(name) for name in RARE_PHASES])
    for reading in readings:
        spans = reading.phases.spans
        row = np.flatnonzero((spans.interval >= 0) & np.isin(reading.phases.phase, own))
        # A step has the gap before it; what comes after the last step is in none.
        step = np.append(reading.steps.step, _NO_STEP)[spans.interval[row] // 2]
        at = np.minimum(np.searchsorted(finished.steps, step), len(finished.steps) - 1)
        is_placed = finished.steps[at] == step
        row, at = row[is_placed], at[is_placed]
        column = (reading.phases.phase[row][:, None] == own).argmax(axis=1)
        np.add.at(time_ns, (at, column), spans.duration_ns[row])
    usual_ns = float(np.median(finished.end_ns - finished.before_ns)) * len(readings)
    has_phase = time_ns > _MIN_RATIO * usual_ns
    is_rare = has_phase.sum(axis=0) < len(finished.steps) / 2
    time_ns = np.where(has_phase & is_rare, time_ns, 0.0)
    return np.where(time_ns.any(axis=1), time_ns.argmax(axis=1), USUAL)


def _measure_excess(period_ns: Floats, rows: Int64s, is_usual: Bools) -> Floats:
    """[rank, row]: what these steps take longer than the usual, less what the next ones make up."""
    if not is_usual.any():
        return np.zeros((len(period_ns), len(rows)))
    excess_ns = period_ns - np.median(period_ns[:, is_usual], axis=1, keepdims=True)
    found = excess_ns[:, rows].copy()
    for place, row in enumerate(rows.tolist()):
        for later in range(row + 1, min(row + 1 + _CATCH_UP_STEPS, len(is_usual))):
            if not is_usual[later]:
                break
            found[:, place] += np.minimum(excess_ns[:, later], 0.0)
    return np.maximum(found, 0.0)
