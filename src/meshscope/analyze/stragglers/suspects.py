"""Ranks known to be late by themselves, so that others' waits are not counted twice.

Every rank that communicates with a slow rank waits, and every wait looks like slow communication, a
bubble or a slow link. Rules that read waits ask here first: `explain` says how much of the waiting
the suspects' excess accounts for.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.stragglers.pauses import Pauses
from meshscope.analyze.stragglers.stragglers import Stragglers
from meshscope.analyze.timeline.peer_work import PeerWork
from meshscope.store.read.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suspects:
    """Ranks late by themselves, and by how much in each step."""

    ranks: frozenset[int]
    """Slow, fail-slow and paused ranks."""
    excess_ns: Floats
    """[step index, rank index]: excess over peers, or over the rank's other steps; 0 for all other
    ranks."""
    step_ns: float

    @property
    def lost_ratio(self) -> float:
        """Mean over steps of the largest excess, as a share of a step: their cost at most."""
        if not self.excess_ns.size or self.step_ns <= 0:
            return 0.0
        return float(self.excess_ns.max(axis=1).mean()) / self.step_ns

    def explain(self, wait_ns: Floats) -> float:
        """Share of the waiting [step] that they can have caused, 0 to 1."""
        total = float(wait_ns.sum())
        if total <= 0 or not self.excess_ns.size:
            return 0.0
        return float(np.minimum(wait_ns, self.excess_ns.max(axis=1)).sum()) / total


def list_suspects(work: PeerWork, stragglers: Stragglers, pauses: Pauses) -> Suspects:
    excess = pauses.excess_ns.copy()
    index_of = {rank: index for index, rank in enumerate(work.ranks)}
    for slow_set in stragglers.slow_sets:
        for slow in slow_set.slow:
            peers = [index_of[rank] for rank in slow.reference]
            own = index_of[slow.rank]
            base = np.median(work.total_ns[:, peers], axis=1) if peers else work.total_ns[:, own]
            excess[:, own] = np.maximum(work.total_ns[:, own] - base, 0.0)
    for fail_set in stragglers.fail_slow_sets:
        for failed in fail_set.slow:
            own = index_of[failed.rank]
            inside = np.zeros(len(work.steps), dtype=np.bool_)
            inside[failed.change.onset : failed.change.recovery] = True
            usual = np.median(work.total_ns[~inside, own])
            gap = np.maximum(work.total_ns[:, own] - usual, 0.0)
            excess[:, own] = np.where(inside, gap, 0.0)
    paused = frozenset(paused.rank for paused in pauses.ranks)
    return Suspects(ranks=stragglers.ranks | paused, excess_ns=excess, step_ns=work.step_ns)
