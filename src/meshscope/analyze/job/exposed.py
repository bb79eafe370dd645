"""How long communication held a rank up, and in which part of each operation.

Exposed is the time in which the program, or the device's stream, could do nothing else:

- in a blocking operation, from the call (on a device: from when the stream reached it) to its end;
- for one with a handle, the waits for it: their duration on the host, on a device as long as the
  stream was held up; and the time that traces show it ran with nothing beside it
  (`find_unqueued`);
- for those that backward's engine issues (a reducer's waits are not visible), per step the interval
  from the start of the last one issued to the last end; each moment belongs to the operation that
  ends next. An end on a device that is a bound ends nothing, unless it is the last. Outside of
  steps it is not known which belong together, and none counts as exposed.

A moment counts once: to the hold-up that began first, and to one that the program timed itself
only where torch shows none. Exposed time is split by when it was: before the operation was ready
(waiting), until its end (transfer), or after it (noticed late).

Wrong on a device for engine-issued operations that queue behind each other: the interval is taken
to start with the last one.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.arrivals import AlignedTimes, RowTimes
from meshscope.analyze.job.clocks import ClockAlignment
from meshscope.analyze.job.operations import OperationRows, Waits, slice_runs
from meshscope.core.operations import EndSource
from meshscope.numerics.intervals import Intervals
from meshscope.store.read.arrays import Bools, Int32s, Int64s
from meshscope.store.schema import OperationFlag


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HoldUps:
    """Intervals in which operations held their ranks up, on the reference clock."""

    row: Int64s
    rank: Int32s
    step: Int32s
    """In which it happened; a wait may be in a later step than its operation."""
    start_ns: Int64s
    end_ns: Int64s

    def __len__(self) -> int:
        return len(self.row)

    def select(self, rows: Bools | Int64s) -> "HoldUps":
        return HoldUps(
            row=self.row[rows],
            rank=self.rank[rows],
            step=self.step[rows],
            start_ns=self.start_ns[rows],
            end_ns=self.end_ns[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exposed:
    """Exposed time by hold-up, in four parts that sum to it."""

    row: Int64s
    rank: Int32s
    step: Int32s
    wait_ns: Int64s
    transfer_ns: Int64s
    unsplit_ns: Int64s
    """Of operations whose wait and transfer cannot be separated."""
    late_ns: Int64s
    """Before the arrival or after the end."""


def measure_exposed(
    rows: OperationRows,
    waits: Waits,
    times: AlignedTimes,
    row_times: RowTimes,
    alignment: ClockAlignment,
) -> Exposed:
    """The exposed time of every operation of every rank."""
    found = _join(
        [
            find_blocking(rows, times),
            find_waits(rows, waits, times, alignment),
            find_unqueued(waits, alignment),
            find_engine_intervals(rows, times),
        ]
    )
    is_manual = rows.has_flag(OperationFlag.MANUAL)[found.row]
    seen, seen_ns = count_once(found.select(~is_manual))
    manual, _ = count_once(found.select(is_manual))
    manual_ns = (manual.end_ns - manual.start_ns) - _measure_covered(seen, manual)
    parts = _split_exposed(seen, times, row_times)
    zeros = np.zeros(len(manual), dtype=np.int64)
    return Exposed(
        row=np.concatenate([seen.row, manual.row]),
        rank=np.concatenate([seen.rank, manual.rank]),
        step=np.concatenate([seen.step, manual.step]),
        wait_ns=np.concatenate([parts[0], zeros]),
        transfer_ns=np.concatenate([parts[1], zeros]),
        unsplit_ns=np.concatenate([parts[2], manual_ns]),
        late_ns=np.concatenate([seen_ns - parts[0] - parts[1] - parts[2], zeros]),
    )


def find_blocking(rows: OperationRows, times: AlignedTimes) -> HoldUps:
    """Operations that held up their caller or its stream.

    Not those of which only a later moment is known: the stream may have gone on long before.
    """
    is_free = rows.has_flag(OperationFlag.ASYNC | OperationFlag.ENGINE)
    is_free |= rows.end_source == EndSource.DEVICE_LATE
    row = np.flatnonzero(~is_free & rows.has_end)
    on_device = rows.has_flag(OperationFlag.DEVICE)[row]
    start = np.where(on_device, times.arrival_ns[row], times.enqueue_ns[row])
    return _make(rows, row, start, times.end_ns[row])


def find_waits(
    rows: OperationRows, waits: Waits, times: AlignedTimes, alignment: ClockAlignment
) -> HoldUps:
    """Waits for operations that had been started earlier."""
    kept = np.flatnonzero((waits.row >= 0) & ~waits.is_unqueued)
    found = _align_waits(waits, kept, alignment)
    # The stream continues when the operation is over, whenever the host asked.
    device_ns, device_end_ns = waits.device_ns[kept], waits.device_end_ns[kept].copy()
    for own, part in slice_runs(found.rank):
        device_end_ns[part] = alignment.to_reference(own, device_end_ns[part])
    has_own_end = waits.device_end_ns[kept] >= 0
    on_device = (device_ns >= 0) & (rows.has_end[found.row] | has_own_end)
    stream_end = np.where(has_own_end, device_end_ns, times.end_ns[found.row])
    end = np.where(on_device, stream_end, found.end_ns)
    start = np.where(on_device, end - device_ns, found.start_ns)
    return replace(found, start_ns=start, end_ns=end)


def find_unqueued(waits: Waits, alignment: ClockAlignment) -> HoldUps:
    """When operations ran with nothing beside them and held nothing up, according to traces."""
    return _align_waits(waits, np.flatnonzero((waits.row >= 0) & waits.is_unqueued), alignment)


def _align_waits(waits: Waits, kept: Int64s, alignment: ClockAlignment) -> HoldUps:
    rank, start = waits.rank[kept], waits.start_ns[kept].copy()
    for own, part in slice_runs(rank):
        start[part] = alignment.to_reference(own, start[part])
    end = start + waits.duration_ns[kept]
    return HoldUps(
        row=waits.row[kept], rank=rank, step=waits.step[kept], start_ns=start, end_ns=end
    )


def find_engine_intervals(rows: OperationRows, times: AlignedTimes) -> HoldUps:
    """What backward's engine waited for, by rank, step and microbatch, cut where operations end."""
    row, last_issued = find_engine_rows(rows, times)
    end = times.end_ns[row]
    before = np.maximum(np.roll(end, 1), last_issued)
    before[_find_turns(rows, row)] = last_issued[_find_turns(rows, row)]
    return _make(rows, row, np.minimum(before, end), end)


def find_engine_rows(rows: OperationRows, times: AlignedTimes) -> tuple[Int64s, Int64s]:
    """What backward's engine waited for, by rank, step, microbatch and end; and when it had issued
    the last operation of those."""
    row = np.flatnonzero(rows.has_flag(OperationFlag.ENGINE) & rows.has_end & (rows.step >= 0))
    keys = (times.end_ns[row], rows.microbatch[row], rows.step[row], rows.rank[row])
    row = row[np.lexsort(keys)]
    first = _find_turns(rows, row)
    if not len(first):
        return row, row
    on_device = rows.has_flag(OperationFlag.DEVICE)[row]
    issued = np.where(on_device, times.arrival_ns[row], times.enqueue_ns[row])
    size = np.diff(np.append(first, len(row)))
    last_issued = np.repeat(np.maximum.reduceat(issued, first), size)
    is_kept = rows.end_source[row] != EndSource.DEVICE_LATE
    is_kept[np.append(first[1:], len(row)) - 1] = True
    return row[is_kept], last_issued[is_kept]


def _find_turns(rows: OperationRows, row: Int64s) -> Int64s:
    """Where another rank, step or microbatch starts."""
    starts = np.zeros(len(row), dtype=np.bool_)
    starts[:1] = True
    for column in (rows.rank, rows.step, rows.microbatch):
        starts[1:] |= column[row][1:] != column[row][:-1]
    return np.flatnonzero(starts)


def _make(rows: OperationRows, row: Int64s, start_ns: Int64s, end_ns: Int64s) -> HoldUps:
    return HoldUps(
        row=row,
        rank=rows.rank[row],
        step=rows.step[row],
        start_ns=start_ns,
        end_ns=np.maximum(start_ns, end_ns),
    )


def _join(parts: list[HoldUps]) -> HoldUps:
    return HoldUps(
        row=np.concatenate([part.row for part in parts]),
        rank=np.concatenate([part.rank for part in parts]),
        step=np.concatenate([part.step for part in parts]),
        start_ns=np.concatenate([part.start_ns for part in parts]),
        end_ns=np.concatenate([part.end_ns for part in parts]),
    )


def count_once(found: HoldUps) -> tuple[HoldUps, Int64s]:
    """Cuts from every hold-up what earlier ones of its rank cover; also the length of each."""
    ordered = found.select(np.lexsort((found.start_ns, found.rank)))
    start, end = ordered.start_ns.copy(), ordered.end_ns.copy()
    for _, part in slice_runs(ordered.rank):
        covered = np.maximum.accumulate(end[part])
        start[part][1:] = np.maximum(start[part][1:], covered[:-1])
    end = np.maximum(start, end)
    cut = HoldUps(row=ordered.row, rank=ordered.rank, step=ordered.step, start_ns=start, end_ns=end)
    return cut, end - start


def _measure_covered(seen: HoldUps, other: HoldUps) -> Int64s:
    """How much of each hold-up in `other` those in `seen` cover; both come from `count_once`."""
    covered = np.zeros(len(other), dtype=np.int64)
    theirs = dict(slice_runs(seen.rank))
    for rank, part in slice_runs(other.rank):
        own = theirs.get(rank, slice(0, 0))
        held = Intervals(seen.start_ns[own], seen.end_ns[own])
        covered[part] = held.within(other.start_ns[part], other.end_ns[part])
    return covered


def _split_exposed(
    found: HoldUps, times: AlignedTimes, row_times: RowTimes
) -> tuple[Int64s, Int64s, Int64s]:
    """Each hold-up's time in waiting, in transfer, and in unsplit operations."""
    arrival, end = times.arrival_ns[found.row], times.end_ns[found.row]
    ready, is_split = row_times.ready_ns[found.row], row_times.is_split[found.row]
    wait = _overlap(found, arrival, ready)
    transfer = _overlap(found, ready, end)
    whole = _overlap(found, arrival, end)
    return (
        np.where(is_split, wait, 0),
        np.where(is_split, transfer, 0),
        np.where(is_split, 0, whole),
    )


def _overlap(found: HoldUps, start: Int64s, end: Int64s) -> Int64s:
    inside = np.minimum(found.end_ns, end) - np.maximum(found.start_ns, start)
    return np.asarray(np.maximum(inside, 0), dtype=np.int64)
