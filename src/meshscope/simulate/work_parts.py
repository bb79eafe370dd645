"""Work of a timeline cut finely enough to be compared between ranks: by step, phase and segment.

A segment is the work of a rank between two arrivals at operations in a step. Ranks that do the same
communicate in the same order, so segment 7 of one is segment 7 of the other, and their `signature`
of a step is the same. If it differs, only phases can be compared. Without segments a delay after an
all-reduce could not be distinguished from one before it, and their costs differ. Ends of waits do
not cut: how often a rank polled an operation differs from step to step.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.numerics.intervals import sort_distinct
from meshscope.simulate.rank_events import find_equal
from meshscope.store.read.arrays import Bools, Int32s, Int64s

_MAX_SEGMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkParts:
    """Parts of WORK pieces; sorted by rank and time."""

    piece: Int64s
    rank_index: Int32s
    """Index into `Timeline.ranks`."""
    step: Int32s
    phase: Int32s
    segment: Int64s
    """Arrivals of the rank since the start of the step."""
    work_ns: Int64s
    signature: Int64s
    """[rank index, step index]: equal if the same operations came in the same order."""

    def __len__(self) -> int:
        return len(self.piece)

    def slice_rank(self, rank_index: int) -> slice:
        return find_equal(self.rank_index, rank_index)

    def join(self, timeline: Timeline, part_ns: np.ndarray) -> Int64s:
        """[piece]: durations, from durations of parts."""
        total = np.bincount(self.piece, weights=part_ns, minlength=len(timeline.pieces))
        return np.rint(total).astype(np.int64)

    def key(self, is_segmented: Bools, num_phases: int) -> Int64s:
        """[part]: a number for its step, phase and, where `is_segmented` [rank, step], segment."""
        segment = np.where(is_segmented[self.rank_index, self.step], self.segment, 0)
        cell = self.step.astype(np.int64) * num_phases + self.phase
        return cell * _MAX_SEGMENTS + np.minimum(segment, _MAX_SEGMENTS - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arrivals:
    """Arrivals at operations that were found on all ranks; sorted by rank and time."""

    rank_index: Int64s
    time_ns: Int64s
    row: Int64s


def cut_work(timeline: Timeline, ranks: Collection[int] | None = None) -> WorkParts:
    """Cuts the work of all ranks, or of these, where they arrive at operations."""
    arrivals = _find_arrivals(timeline)
    signature = np.zeros((len(timeline.ranks), len(timeline.steps)), dtype=np.int64)
    found = [
        _cut_rank(timeline, rank_index, arrivals, signature)
        for rank_index, rank in enumerate(timeline.ranks)
        if ranks is None or rank in ranks
    ]
    piece, segment, work = (np.concatenate(column) for column in zip(*found, strict=True))
    pieces = timeline.pieces
    return WorkParts(
        piece=piece,
        rank_index=np.searchsorted(np.array(timeline.ranks), pieces.rank[piece]).astype(np.int32),
        step=pieces.step[piece],
        phase=pieces.phase[piece],
        segment=segment,
        work_ns=work,
        signature=signature,
    )


def _find_arrivals(timeline: Timeline) -> _Arrivals:
    communication = timeline.communication
    if communication is None:
        none = np.empty(0, dtype=np.int64)
        return _Arrivals(rank_index=none, time_ns=none, row=none)
    matches, rows = communication.matches, communication.operations.rows
    row = matches.member[matches.is_usable[matches.of_member]]
    row = row[np.isin(rows.rank[row], timeline.ranks)]
    rank_index = np.searchsorted(np.array(timeline.ranks), rows.rank[row])
    time = communication.times.arrival_ns[row]
    order = np.lexsort((row, time, rank_index))
    return _Arrivals(rank_index=rank_index[order], time_ns=time[order], row=row[order])


def _cut_rank(
    timeline: Timeline, rank_index: int, arrivals: _Arrivals, signature: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Piece, segment and work of one rank's parts; fills in its row of `signature`."""
    pieces, rank = timeline.pieces, timeline.ranks[rank_index]
    inside, own = find_equal(pieces.rank, rank), find_equal(arrivals.rank_index, rank_index)
    low, high = inside.start, inside.stop
    time, start = arrivals.time_ns[own], timeline.period_start_ns[rank_index]
    # The first arrival of each step, those between windows counting to the step before.
    first = np.searchsorted(time, start)
    step = np.searchsorted(start, time, side="right") - 1
    _add_signatures(timeline, arrivals.row[own], step, first, signature[rank_index])
    starts = pieces.start_ns[low:high]
    cut = sort_distinct(np.concatenate([starts, time]))
    at = np.maximum(np.searchsorted(starts, cut, side="right") - 1, 0)
    until = np.minimum(np.append(cut[1:], np.iinfo(np.int64).max), pieces.end_ns[low:high][at])
    is_work = (pieces.kind[low:high][at] == PieceKind.WORK) & (until > cut)
    is_work &= cut >= starts[0] if len(starts) else False
    at, cut, until = at[is_work], cut[is_work], until[is_work]
    segment = np.searchsorted(time, cut, side="right") - first[pieces.step[low:high][at]]
    return at + low, np.maximum(segment, 0), until - cut


def _add_signatures(
    timeline: Timeline, row: Int64s, step: Int64s, first: Int64s, signature: Int64s
) -> None:
    """Adds a hash of the order of calls to `signature`, per step."""
    if timeline.communication is None:
        return
    inside = np.flatnonzero(step >= 0)
    row, step = row[inside], step[inside]
    rows = timeline.communication.operations.rows
    # What is routed differs from rank to rank and step to step, and is the same operation.
    size = np.where(rows.kind[row] == Kind.ALL_TO_ALL, 0, rows.size_bytes[row])
    code = size % (1 << 20) * len(Kind) + rows.kind[row] + 1
    turn = inside - first[step] + 1
    mixed = (code.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ (
        turn.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    )
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    np.add.at(signature, step, mixed.view(np.int64))
