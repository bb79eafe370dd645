"""Uneven work without a persistent culprit: the rank with most work changes.

In each step all peers wait for the one with most work; even shares would save the largest work
minus the mean (rebalancing conserves work). Whether peers take turns or one leads more often than
by chance is reported, not judged: a rank that leads persistently is a straggler.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.peer_work import PeerWork
from meshscope.numerics.chance import SIGNIFICANCE_RATIO, binomial_tail


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadImbalance:
    """How uneven the work of peers is, over all groups of a run."""

    variation_ratio: float
    """Median over groups and steps of the standard deviation over the mean."""
    lost_ns: float
    """Per step: largest minus mean work, of the group where that is most; mean over steps."""
    lost_ratio: float
    """Of the step."""
    leader: int
    """The rank that most often has the most work of its group."""
    leader_ratio: float
    """Share of steps in which it does."""
    leader_p: float
    """Chance of that or more if all were alike, for any rank of the run."""
    num_steps: int

    @property
    def takes_turns(self) -> bool:
        """Whether no rank leads more often than by chance."""
        return self.leader_p >= SIGNIFICANCE_RATIO


def measure_load_imbalance(work: PeerWork) -> LoadImbalance | None:
    """None if no rank has a peer."""
    if not work.groups or not len(work.steps):
        return None
    lost, variations, leaders = [], [], []
    num_steps = len(work.steps)
    for group in work.groups:
        own = work.total_ns[:, list(group.indices)]
        mean = own.mean(axis=1)
        lost.append(own.max(axis=1) - mean)
        variations.append(np.divide(own.std(axis=1), mean, where=mean > 0, out=np.zeros_like(mean)))
        counts = np.bincount(own.argmax(axis=1), minlength=len(group.indices))
        best = int(counts.argmax())
        p_value = binomial_tail(int(counts[best]), num_steps, 1 / len(group.indices))
        leaders.append((p_value, -int(counts[best]), work.ranks[group.indices[best]]))
    p_value, minus_count, leader = min(leaders)
    lost_ns = float(np.max(lost, axis=0).mean())
    return LoadImbalance(
        variation_ratio=float(np.median(np.concatenate(variations))),
        lost_ns=lost_ns,
        lost_ratio=lost_ns / work.step_ns if work.step_ns > 0 else 0.0,
        leader=leader,
        leader_ratio=-minus_count / num_steps,
        leader_p=min(1.0, p_value * sum(len(group.indices) for group in work.groups)),
        num_steps=num_steps,
    )
