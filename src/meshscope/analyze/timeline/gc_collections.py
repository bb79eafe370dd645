"""Python's garbage collections inside the timeline, and how much work time they took.

The recorder writes collections of 0.2 ms and more as detail spans `gc gen0` to `gc gen2`. No other
Python code runs meanwhile, so the part of a collection inside a piece of WORK is time the rank lost
to it. On a device's stream queued work goes on: there a collection counts only where the stream
idles in no phase.

Wrong where many collections below 0.2 ms add up: they are not recorded.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.operations import MAX_SPAN_NS, MAX_TIME_NS
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.numerics.intervals import Intervals
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

PREFIX = "gc gen"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collections:
    """What the collector took of each piece of a timeline."""

    lost_ns: Int64s
    """Indexed like `Timeline.pieces`; 0 where none ran."""
    num_collections: dict[int, int]
    """Rank to collections recorded in kept steps; ranks without any are left out."""

    @property
    def has_any(self) -> bool:
        """Whether any collection fell into work."""
        return bool(self.lost_ns.any())

    def sum_by_step(self, timeline: Timeline) -> Floats:
        """[step, rank index], what ran between steps included."""
        pieces, shape = timeline.pieces, (len(timeline.steps), len(timeline.ranks))
        index = np.searchsorted(np.array(timeline.ranks), pieces.rank)
        cell = pieces.step.astype(np.int64) * shape[1] + index
        sums = np.bincount(cell, self.lost_ns, minlength=shape[0] * shape[1])
        return np.asarray(sums.reshape(shape), dtype=np.float64)


def measure_collections(attempt: Attempt, timeline: Timeline) -> Collections:
    lost = np.zeros(len(timeline.pieces), dtype=np.int64)
    counts: dict[int, int] = {}
    for index, rank in enumerate(timeline.ranks):
        spans = _read_spans(attempt.ranks[rank])
        if not len(spans[0]):
            continue
        start, end = (timeline.alignment.to_reference(rank, times) for times in spans)
        rows = _find_interruptible(timeline, index)
        pieces = timeline.pieces
        lost[rows] = Intervals(start, end).within(pieces.start_ns[rows], pieces.end_ns[rows])
        first, last = timeline.period_start_ns[index, 0], timeline.period_end_ns[index, -1]
        counts[rank] = int(np.count_nonzero((end > first) & (start < last)))
    return Collections(lost_ns=lost, num_collections={r: n for r, n in counts.items() if n})


def _read_spans(recording: Recording) -> tuple[Int64s, Int64s]:
    """Start and end of a rank's collections, in order and without overlap."""
    names = [name_id for name_id, name in recording.names.items() if name.startswith(PREFIX)]
    if not names or not recording.has_table("spans"):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    columns = recording.read("spans")
    start = int64_column(columns, "start_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    is_good = np.isin(columns["name_id"], names) & (start >= 0) & (start < MAX_TIME_NS)
    is_good &= (duration >= 0) & (duration < MAX_SPAN_NS)
    start, end = start[is_good], (start + duration)[is_good]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    # A collection cannot run inside another; where a record says so, time counts once.
    start[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    return start, np.maximum(end, start)


def _find_interruptible(timeline: Timeline, index: int) -> Int64s:
    pieces = timeline.pieces
    is_own = (pieces.rank == timeline.ranks[index]) & (pieces.kind == PieceKind.WORK)
    if bool(timeline.on_device[index]):
        is_own &= pieces.phase == 0
    return np.flatnonzero(is_own).astype(np.int64)
