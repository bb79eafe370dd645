"""What held ranks up, rank by rank, in the form from which pieces are cut.

Operations of groups with one rank hold no rank up: they have nothing to wait for or to send. Where
pieces are a device's, operations on its stream hold the stream up; those of the host do so only
where the stream has run out of work.
"""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.job.exposed import (
    HoldUps,
    count_once,
    find_blocking,
    find_engine_intervals,
    find_unqueued,
    find_waits,
)
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import slice_runs
from meshscope.analyze.timeline.rank_pieces import Hold
from meshscope.numerics.interval_layers import Layer
from meshscope.store.read.arrays import Int64s
from meshscope.store.schema import OperationFlag


def find_holds(job: Job, device_ranks: Iterable[int]) -> dict[int, list[Hold]]:
    """Holds by rank; a moment belongs to the first that claims it."""
    operations, waits = job.operations, job.waits
    rows = operations.rows
    parts = [
        find_blocking(rows, job.times),
        find_waits(rows, waits, job.times, job.alignment),
        find_engine_intervals(rows, job.times),
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
    unqueued = find_unqueued(waits, job.alignment)
    is_free = is_shared[rows.group[unqueued.row]]
    holds: dict[int, list[Hold]] = {}
    for own, only_idle, is_queued in (
        (found.select(is_kept & ~is_manual & ~is_host), False, True),
        (found.select(is_kept & ~is_manual & is_host), True, True),
        (found.select(is_kept & is_manual & ~on_device), False, True),
        (found.select(is_kept & is_manual & on_device), True, True),
        (unqueued.select(is_free), False, False),
    ):
        cut, length_ns = count_once(own)
        cut = cut.select(length_ns > 0)
        for rank, part in slice_runs(cut.rank):
            start, end, row = cut.start_ns[part], cut.end_ns[part], cut.row[part]
            hold = Hold(
                layer=Layer(start_ns=start, end_ns=end, value=row),
                ready_ns=np.clip(job.row_times.ready_ns[row], start, end),
                is_split=job.row_times.is_split[row],
                only_idle=only_idle,
                is_queued=is_queued,
            )
            holds.setdefault(rank, []).append(hold)
    return holds


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
