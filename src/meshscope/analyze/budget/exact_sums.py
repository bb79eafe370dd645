"""How long operations took in all steps of a thinned run, by rank and axis: table `aggregates`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.group_axes import merge_groups
from meshscope.store.read.columns import int64_column
from meshscope.store.read.run import Attempt
from meshscope.store.retention_tables import AGGREGATE_STEPS, THINNED_TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSums:
    """Of steps that every rank has summed up."""

    first_step: int
    end_step: int
    """The first step after them."""
    time_ns: Mapping[tuple[int, str], int]
    """From begin to end of the operations of a rank along an axis."""


def read_exact_sums(attempt: Attempt, first_step: int) -> ExactSums | None:
    """From `first_step` on, by whole blocks; None where nothing was thinned."""
    if not all(recording.has_table("aggregates") for recording in attempt):
        return None
    by_rank, end, width = {}, None, AGGREGATE_STEPS
    for recording in attempt:
        columns = recording.read("aggregates")
        is_operation = columns["source"] == THINNED_TABLES.index("collectives")
        block = int64_column(columns, "first_step")[is_operation]
        by_rank[recording.rank] = (
            block,
            columns["group_id"][is_operation].astype(np.int64),
            int64_column(columns, "total_ns")[is_operation],
        )
        # The last block may be half done; those before it are not.
        own_end = int(block.max()) if len(block) else 0
        end = own_end if end is None else min(end, own_end)
        longest = int(columns["span_level"][is_operation].max(initial=0))
        width = max(width, AGGREGATE_STEPS << min(longest, 40))
    # Whole blocks of every rank, the longest there are.
    first, end = -(-first_step // width) * width, (end or 0) // width * width
    if end <= first:
        return None
    groups, indices = merge_groups(attempt)
    time_ns: dict[tuple[int, str], int] = {}
    for rank, (block, group_id, total_ns) in by_rank.items():
        inside = (block >= first) & (block < end)
        for own_id, index in indices.get(rank, {}).items():
            key = rank, groups[index].axis
            found = total_ns[inside & (group_id == own_id)]
            time_ns[key] = time_ns.get(key, 0) + int(found.sum())
    return ExactSums(first_step=first, end_step=end, time_ns=time_ns)
