"""The events of each rank between which it works: arrivals at operations, resumptions after holds.

Per rank, sorted by time: the start of a window; the arrival at an operation (the call, or when the
device's stream reached it); the end of a hold-up (a blocking operation's end, the end of a wait for
a handle, the end of what backward's engine waited for, the end of a wait for a pipeline action's
input); the end of a step. Holds of length 0 are included: another duration may make them long.

`fixed_ns` is time between two events in which the rank did not work and which no modelled operation
explains; a replay keeps it as it was.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from meshscope.analyze.job.exposed import (
    HoldUps,
    count_once,
    find_blocking,
    find_engine_rows,
    find_waits,
)
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import OperationRows
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.store.read.arrays import Bools, Int32s, Int64s, Uint8s
from meshscope.store.schema import OperationFlag

MAX_PIECES = 120_000
"""Pieces that are replayed at most: some 600,000 edges, 30 ms for each edit."""


class EventKind(IntEnum):
    START = 0
    """A window starts on this rank."""
    ARRIVE = 1
    """The rank arrives at an operation."""
    RESUME = 2
    """The rank continues after an operation has held it up."""
    INPUT = 3
    """A pipeline action has its input."""
    MADE = 4
    """A pipeline action's output is made."""
    HELD = 5
    """The rank continues after something that is not modelled."""
    STEP_END = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankEvents:
    """Columns; sorted by rank and time."""

    rank_index: Int32s
    """Index into `Timeline.ranks`."""
    time_ns: Int64s
    kind: Uint8s
    row: Int64s
    """ARRIVE, RESUME: row of the operations; INPUT, MADE: of the actions; STEP_END: the step."""
    held_since_ns: Int64s
    """RESUME, INPUT: when the hold-up began, and `time_ns` otherwise."""
    window: Int64s
    """Range of consecutive steps; nothing is chained from one to the next."""

    def __len__(self) -> int:
        return len(self.rank_index)

    def select(self, rows: Bools | Int64s) -> "RankEvents":
        return RankEvents(
            rank_index=self.rank_index[rows],
            time_ns=self.time_ns[rows],
            kind=self.kind[rows],
            row=self.row[rows],
            held_since_ns=self.held_since_ns[rows],
            window=self.window[rows],
        )


def find_hold_ups(communication: Job) -> HoldUps:
    """All waits for operations, also those of length 0; each moment belongs to one of them."""
    rows, times = communication.operations.rows, communication.times
    parts = [
        find_blocking(rows, times),
        find_waits(rows, communication.waits, times, communication.alignment),
        _find_engine_waits(communication),
    ]
    found = HoldUps(
        row=np.concatenate([part.row for part in parts]),
        rank=np.concatenate([part.rank for part in parts]).astype(np.int32),
        step=np.concatenate([part.step for part in parts]).astype(np.int32),
        start_ns=np.concatenate([part.start_ns for part in parts]),
        end_ns=np.concatenate([part.end_ns for part in parts]),
    )
    is_manual = rows.has_flag(OperationFlag.MANUAL)[found.row]
    cut, _ = count_once(found.select(~is_manual))
    return cut


def _find_engine_waits(communication: Job) -> HoldUps:
    """Waits of backward's engine: for all operations it issued, from the last issue on."""
    rows, times = communication.operations.rows, communication.times
    row, start = find_engine_rows(rows, times)
    return HoldUps(
        row=row,
        rank=rows.rank[row],
        step=rows.step[row],
        start_ns=start,
        end_ns=np.maximum(times.end_ns[row], start),
    )


def find_asked(rows: OperationRows, holds: HoldUps, end_ns: Int64s) -> Int64s:
    """Start of the wait that saw the end of each row; very large if none did.

    A rank may wait for an operation several times: while it is launched, and again for its end.
    """
    asked = np.full(len(rows), np.iinfo(np.int64).max // 2)
    saw_end = holds.end_ns >= end_ns[holds.row]
    np.minimum.at(asked, holds.row[saw_end], holds.start_ns[saw_end])
    return asked


def collect_events(
    timeline: Timeline, holds: HoldUps | None, row_window: Int64s, inputs: RankEvents | None
) -> RankEvents:
    """The events of all ranks, sorted.

    `row_window` is, per row of operations, the window in which it is modelled, or -1; `inputs` are
    the events of pipeline actions whose inputs are modelled.
    """
    parts = [_find_borders(timeline), _find_held(timeline, row_window, inputs)]
    if timeline.communication is not None and holds is not None:
        parts += _find_operations(timeline, timeline.communication, holds, row_window)
    if inputs is not None:
        parts.append(inputs)
    joined = join_events(parts)
    joined = joined.select(joined.window >= 0)
    # At one moment a rank first resumes from what it started first; a step ends last.
    last = np.where(joined.kind == EventKind.STEP_END, np.iinfo(np.int64).max, joined.row)
    order = np.lexsort((joined.kind, last, joined.time_ns, joined.window, joined.rank_index))
    return joined.select(order)


def join_events(parts: list[RankEvents]) -> RankEvents:
    return RankEvents(
        rank_index=np.concatenate([part.rank_index for part in parts]).astype(np.int32),
        time_ns=np.concatenate([part.time_ns for part in parts]),
        kind=np.concatenate([part.kind for part in parts]).astype(np.uint8),
        row=np.concatenate([part.row for part in parts]),
        held_since_ns=np.concatenate([part.held_since_ns for part in parts]),
        window=np.concatenate([part.window for part in parts]),
    )


def make_events(
    timeline: Timeline,
    kind: EventKind,
    rank_index: Int64s,
    time_ns: Int64s,
    row: Int64s,
    *,
    held_since_ns: Int64s | None = None,
    window: Int64s | None = None,
) -> RankEvents:
    """Events of one kind; their window follows from their time unless it is given."""
    return RankEvents(
        rank_index=rank_index.astype(np.int32),
        time_ns=time_ns,
        kind=np.full(len(time_ns), kind, dtype=np.uint8),
        row=row.astype(np.int64),
        held_since_ns=time_ns if held_since_ns is None else held_since_ns,
        window=_find_windows(timeline, rank_index, time_ns) if window is None else window,
    )


def number_windows(timeline: Timeline) -> Int64s:
    """The window of each step; -1 for steps of a very long timeline that are not replayed.

    The first steps of every window are dropped, as many as needed to stay below `MAX_PIECES`.
    """
    number = np.cumsum(timeline.starts_window).astype(np.int64) - 1
    part = MAX_PIECES / max(1, len(timeline.pieces))
    if part >= 1:
        return number
    size = np.bincount(number)
    kept = np.maximum(np.floor(size * part), 1)
    after = np.repeat(np.cumsum(size), size) - np.arange(len(number))
    return np.where(after <= kept[number], number, -1)


def find_equal(values: Int32s | Int64s, value: int) -> slice:
    """The slice of a sorted column with this value."""
    # Bounds of the column's own type: others would have the whole column converted first.
    bounds = np.array([value, value + 1], dtype=values.dtype)
    low, high = np.searchsorted(values, bounds).tolist()
    return slice(low, high)


def _split_by_rank(rank_index: Int64s | Int32s, num_ranks: int) -> list[Int64s]:
    """The rows of each rank, in one pass over all."""
    order = np.argsort(rank_index, kind="stable")
    cuts = np.searchsorted(rank_index[order], np.arange(1, num_ranks))
    return np.split(order, cuts)


def _find_windows(timeline: Timeline, rank_index: Int64s, time_ns: Int64s) -> Int64s:
    """The window of each moment, an end counting to the earlier one; -1 outside all windows."""
    numbers = number_windows(timeline)
    window = np.full(len(rank_index), -1, dtype=np.int64)
    for rank, own in enumerate(_split_by_rank(rank_index, len(timeline.ranks))):
        step = np.searchsorted(timeline.period_end_ns[rank], time_ns[own])
        step = np.minimum(step, len(timeline.steps) - 1)
        is_inside = time_ns[own] >= timeline.period_start_ns[rank][step]
        is_inside &= time_ns[own] <= timeline.period_end_ns[rank][step]
        window[own] = np.where(is_inside, numbers[step], -1)
    return window


def _find_borders(timeline: Timeline) -> RankEvents:
    num_ranks, num_steps = timeline.period_end_ns.shape
    window = number_windows(timeline)
    first, _ = find_window_ends(window)
    rank_index = np.arange(num_ranks)
    start = make_events(
        timeline,
        EventKind.START,
        np.repeat(rank_index, len(first)),
        timeline.period_start_ns[:, first].reshape(-1),
        np.full(num_ranks * len(first), -2),
        window=np.tile(window[first], num_ranks),
    )
    end = make_events(
        timeline,
        EventKind.STEP_END,
        np.repeat(rank_index, num_steps),
        timeline.period_end_ns.reshape(-1),
        np.tile(np.arange(num_steps), num_ranks),
        window=np.tile(window, num_ranks),
    )
    return join_events([start, end])


def find_window_ends(window: Int64s) -> tuple[Int64s, Int64s]:
    """The first and the last step of every window."""
    is_new = np.append(True, window[1:] != window[:-1])
    is_last = np.append(is_new[1:], True)
    return np.flatnonzero(is_new & (window >= 0)), np.flatnonzero(is_last & (window >= 0))


def _find_held(timeline: Timeline, row_window: Int64s, inputs: RankEvents | None) -> RankEvents:
    """Ends of pieces in which something that is not modelled holds a rank up."""
    pieces = timeline.pieces
    is_known = np.zeros(len(pieces), dtype=np.bool_)
    has_row = pieces.row >= 0
    window = number_windows(timeline)[pieces.step]
    is_known[has_row] = row_window[pieces.row[has_row]] == window[has_row]
    if inputs is not None and timeline.actions is not None:
        is_input = np.zeros(len(timeline.actions) + 1, dtype=np.bool_)
        is_input[inputs.row[inputs.kind == EventKind.INPUT]] = True
        is_known |= ~has_row & is_input[pieces.action]
    picked = np.flatnonzero((pieces.kind != PieceKind.WORK) & ~is_known)
    rank_index = np.searchsorted(np.array(timeline.ranks), pieces.rank[picked])
    row = np.full(len(picked), -1)
    end = pieces.end_ns[picked]
    return make_events(timeline, EventKind.HELD, rank_index, end, row, window=window[picked])


def _find_operations(
    timeline: Timeline,
    communication: Job,
    holds: HoldUps,
    row_window: Int64s,
) -> list[RankEvents]:
    rows, times = communication.operations.rows, communication.times
    ranks = np.array(timeline.ranks)
    row = np.flatnonzero(row_window >= 0)
    arrive = make_events(
        timeline,
        EventKind.ARRIVE,
        np.searchsorted(ranks, rows.rank[row]),
        times.arrival_ns[row],
        row,
        window=row_window[row],
    )
    kept = holds.select(row_window[holds.row] >= 0)  # not those of ranks without steps
    kept = kept.select(_held_the_stream(timeline, rows, kept))
    rank_index = np.searchsorted(ranks, kept.rank)
    resume = make_events(
        timeline, EventKind.RESUME, rank_index, kept.end_ns, kept.row, held_since_ns=kept.start_ns
    )
    return [arrive, resume.select(resume.window == row_window[resume.row])]


def _held_the_stream(timeline: Timeline, rows: OperationRows, holds: HoldUps) -> Bools:
    """Hold-ups that count for the rank's pieces: on a device, not those of the host alone."""
    on_device = timeline.on_device[np.searchsorted(np.array(timeline.ranks), holds.rank)]
    is_seen = np.zeros(len(rows), dtype=np.bool_)
    is_seen[timeline.pieces.row[timeline.pieces.row >= 0]] = True
    is_seen |= rows.has_flag(OperationFlag.DEVICE)
    found: Bools = ~on_device | is_seen[holds.row]
    return found
