"""Steps whose update was skipped, after the search for a loss scale.

They are counted from the steps' flags on the rank that skipped most: a scaler decides alike for all
ranks that share gradients. The first tenth of the run is left out of the rate: a scaler that starts
high skips there by design.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.schema import StepFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdates:
    """Of the rank that skipped most."""

    ranks: tuple[int, ...]
    """Ranks that skipped after the first tenth; empty if all did."""
    num_skipped: int
    """In the whole run."""
    num_late: int
    """After the first tenth."""
    num_late_steps: int
    first_late_step: int | None
    last_step: int | None

    @property
    def late_ratio(self) -> float:
        """Skipped steps over all, after the first tenth."""
        return self.num_late / self.num_late_steps if self.num_late_steps else 0.0


def count_rank_skipped(recording: Recording) -> SkippedUpdates | None:
    """Of one rank; None where it finished no step."""
    columns = recording.read("steps")
    step = int64_column(columns, "step")
    return (
        _count_flags(step, (int64_column(columns, "flags") & StepFlag.SKIPPED) != 0)
        if len(step)
        else None
    )


def merge_skipped(ranks: Mapping[int, SkippedUpdates | None]) -> SkippedUpdates | Unavailable:
    found = {rank: own for rank, own in ranks.items() if own is not None}
    if not found:
        return Unavailable("no step finished")
    late = tuple(rank for rank, own in found.items() if own.num_late)
    most = max(found.values(), key=lambda own: (own.num_late, own.num_skipped))
    return SkippedUpdates(
        ranks=() if len(late) == len(found) else late,
        num_skipped=most.num_skipped,
        num_late=most.num_late,
        num_late_steps=most.num_late_steps,
        first_late_step=most.first_late_step,
        last_step=most.last_step,
    )


def _count_flags(
    step: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    is_skipped: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]",
) -> SkippedUpdates:
    start = len(step) // 10
    late = step[start:][is_skipped[start:]]
    return SkippedUpdates(
        ranks=(),
        num_skipped=int(np.count_nonzero(is_skipped)),
        num_late=len(late),
        num_late_steps=len(step) - start,
        first_late_step=int(late[0]) if len(late) else None,
        last_step=int(late[-1]) if len(late) else None,
    )
