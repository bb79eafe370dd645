"""Steps in which a rank works far longer than it usually does: sporadic pauses of its host.

A step of a rank is a pause if its work exceeds the rank's usual (median) by _PAUSE_RATIO of a step
and by far more than its scatter, in few of its steps: what happens in many is normal for the rank.
The cost of pauses in a step is that of the longest one on any rank: others that pause at the same
time cost nothing more.

Pauses of the garbage collector are known by their spans (`gc_collections`); a longer forward with a
normal backward points to the host rather than the device. Wrong for pauses inside an operation,
which are transfer, and in fetching data, which are the input's. Uneven work that goes around the
ranks is not called pauses.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.peer_work import PeerWork
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.store.read.arrays import Bools, Floats

_PAUSE_RATIO = 0.25
"""Least excess over the usual work, as a share of a step's period."""
_PAUSE_DEVIATIONS = 8.0
"""Least excess, in robust deviations of the rank's work."""
_MAX_STEPS_RATIO = 0.34
"""The most paused steps of a rank; with more it is slow or uneven."""
_MIN_PAUSES = 3
"""Fewest pauses of a rank after its start-up that are a pattern."""
_AROUND_STEPS_RATIO = 0.9
"""Least share of steps with a long rank if uneven work goes around."""
_AROUND_RANKS = 1.2
"""The most long ranks in such a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedRank:
    """One rank with sporadic pauses."""

    rank: int
    step_indices: tuple[int, ...]
    """Indices in `PeerWork.steps`."""
    typical_ns: float
    """Median length."""
    longest_ns: float
    share_of: dict[str, float]
    """Phase to the share of their time that is in it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pauses:
    """All pauses of a run."""

    ranks: tuple[PausedRank, ...]
    """Most time first."""
    excess_ns: Floats
    """[step, rank index]: excess over the usual work, 0 without a pause."""
    usual_ns: Floats
    """[rank index]: median work."""
    cost_ns: float
    """Per step: mean over steps of the longest pause on any rank."""
    step_ns: float

    @property
    def cost_ratio(self) -> float:
        """Of the step."""
        return self.cost_ns / self.step_ns if self.step_ns > 0 else 0.0


def find_pauses(work: PeerWork, *, without: frozenset[int] = frozenset()) -> Pauses:
    """Pauses of all ranks except those known to be slow."""
    usual = np.median(work.total_ns, axis=0)
    excess = work.total_ns - usual
    deviation = MAD_TO_DEVIATION * np.median(np.abs(excess), axis=0)
    limit = np.maximum(_PAUSE_RATIO * work.step_ns, _PAUSE_DEVIATIONS * deviation)
    is_pause = excess > limit
    counts = is_pause.sum(axis=0)
    num_later = counts - np.logical_and.accumulate(is_pause, axis=0).sum(axis=0)
    named = np.array([rank in without for rank in work.ranks])
    is_sporadic = (num_later >= _MIN_PAUSES) & (counts <= _MAX_STEPS_RATIO * len(excess)) & ~named
    if _goes_around(is_pause & is_sporadic):
        is_sporadic = np.zeros_like(is_sporadic)
    kept = np.where(is_pause & is_sporadic, excess, 0.0)
    order = np.argsort(-kept.sum(axis=0), kind="stable")
    ranks = tuple(
        _describe(work, index, kept[:, index] > 0, kept[:, index])
        for index in order.tolist()
        if is_sporadic[index]
    )
    return Pauses(
        ranks=ranks,
        excess_ns=kept,
        usual_ns=usual,
        cost_ns=float(kept.max(axis=1).mean()) if kept.size else 0.0,
        step_ns=work.step_ns,
    )


def _goes_around(is_pause: Bools) -> bool:
    """Whether nearly every step has one long rank, and hardly ever two: uneven work, not pauses.

    Independent pauses that leave no step out would often coincide.
    """
    in_step = is_pause.sum(axis=1)
    num_hit = int(np.count_nonzero(in_step))
    if num_hit < _AROUND_STEPS_RATIO * len(in_step) or not num_hit:
        return False
    return float(in_step.sum()) / num_hit < _AROUND_RANKS


def _describe(work: PeerWork, index: int, paused: Bools, excess: Floats) -> PausedRank:
    total = float(excess.sum())
    return PausedRank(
        rank=work.ranks[index],
        step_indices=tuple(np.flatnonzero(paused).tolist()),
        typical_ns=float(np.median(excess[paused])),
        longest_ns=float(excess.max()),
        share_of={phase: _sum_in(work, phase, index, paused) / total for phase in work.phases},
    )


def _sum_in(work: PeerWork, phase: str, index: int, paused: Bools) -> float:
    """Excess time in one phase of the paused steps."""
    own = work.work_ns[work.phases.index(phase)][:, index]
    return float((own[paused] - np.median(own)).sum())
