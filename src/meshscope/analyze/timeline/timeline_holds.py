"""What held ranks up, rank by rank, in the form from which pieces are cut.

Operations of groups with one rank hold no rank up: they have nothing to wait for or to send. Where
pieces are a device's, operations on its stream hold the stream up; those of the host do so only
where the stream has run out of work.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.arrivals import AlignedTimes, RowTimes
from meshscope.analyze.job.clocks import ClockAlignment
from meshscope.analyze.job.exposed import (
    HoldUps,
    count_once,
    find_blocking,
    find_engine_intervals,
    find_unqueued,
    find_waits,
)
from meshscope.analyze.job.operations import Operations, Waits, slice_runs
from meshscope.analyze.timeline.rank_pieces import Hold
from meshscope.numerics.interval_layers import Layer
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.schema import OperationFlag


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Class:
    """Hold-ups of one sort, none overlapping another of the same rank."""

    found: HoldUps
    of_rank: dict[int, slice]
    only_idle: bool
    is_queued: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankHolds:
    row_times: RowTimes
    classes: tuple[_Class, ...]

    def for_rank(self, rank: int) -> tuple[Hold, ...]:
        """A moment belongs to the first hold that claims it."""
        return tuple(
            self._make(one, one.of_rank[rank]) for one in self.classes if rank in one.of_rank
        )

    def _make(self, one: _Class, part: slice) -> Hold:
        found = one.found
        start, end, row = found.start_ns[part], found.end_ns[part], found.row[part]
        return Hold(
            layer=Layer(start_ns=start, end_ns=end, value=row),
            ready_ns=np.clip(self.row_times.ready_ns[row], start, end),
            is_split=self.row_times.is_split[row],
            only_idle=one.only_idle,
            is_queued=one.is_queued,
        )


def find_holds(
    operations: Operations,
    waits: Waits,
    times: AlignedTimes,
    row_times: RowTimes,
    alignment: ClockAlignment,
    device_ranks: Iterable[int],
) -> RankHolds:
    rows = operations.rows
    parts = [
        find_blocking(rows, times),
        find_waits(rows, waits, times, alignment),
        find_engine_intervals(rows, times),
    ]
    has_marks = rows.has_flag(OperationFlag.DEVICE)
    marked_waits = waits.device_ns[np.flatnonzero((waits.row >= 0) & ~waits.is_unqueued)] >= 0
    of_stream = np.concatenate([has_marks[parts[0].row], marked_waits, has_marks[parts[2].row]])
    found = _join(parts)
    is_shared = np.array([len(group.ranks) != 1 for group in operations.groups] + [True])
    is_kept = is_shared[rows.group[found.row]]
    is_manual = rows.has_flag(OperationFlag.MANUAL)[found.row]
    on_device = np.isin(found.rank, list(device_ranks))
    is_host = on_device & ~of_stream
    classes = [
        _make_class(found, is_kept & ~is_manual & ~is_host, only_idle=False),
        _make_class(found, is_kept & ~is_manual & is_host, only_idle=True),
        _make_class(found, is_kept & is_manual & ~on_device, only_idle=False),
        _make_class(found, is_kept & is_manual & on_device, only_idle=True),
    ]
    unqueued = find_unqueued(waits, alignment)
    is_kept = is_shared[rows.group[unqueued.row]]
    classes.append(_make_class(unqueued, is_kept, only_idle=False, is_queued=False))
    return RankHolds(row_times=row_times, classes=tuple(one for one in classes if one.of_rank))


def _make_class(
    found: HoldUps, is_chosen: Bools, *, only_idle: bool, is_queued: bool = True
) -> _Class:
    cut, length_ns = count_once(found.select(is_chosen))
    cut = cut.select(length_ns > 0)
    of_rank = dict(slice_runs(cut.rank))
    return _Class(found=cut, of_rank=of_rank, only_idle=only_idle, is_queued=is_queued)


def _join(parts: list[HoldUps]) -> HoldUps:
    def column(name: str) -> Int64s:
        return np.concatenate([getattr(part, name) for part in parts])

    return HoldUps(
        row=column("row"),
        rank=column("rank").astype(np.int32),
        step=column("step").astype(np.int32),
        start_ns=column("start_ns"),
        end_ns=column("end_ns"),
    )
