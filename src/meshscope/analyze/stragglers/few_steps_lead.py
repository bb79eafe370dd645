"""Which of a group of peers was the slowest in a few steps, and whether chance explains it.

Two chances are told. If steps were independent, one of N equal ranks is the slowest in all of S
steps with N·N^-S, and so far ahead of the others in each with `lead_chance`. But a few steps cannot
show whether they are independent: a disturbance that lasts makes the same rank slow in all of them.
`lasting_chance` takes it that noise of a step is that of the step before with correlation
_LASTING_CORRELATION: what is seen to move from one step to the next (pooled over the peers, without
the rank itself) is then a known part of the whole noise, and the rank's excess over the others'
mean is judged against that (Student's t, Bonferroni over ranks).

Wrong for disturbances that last even longer and for heavy tails.
"""

import math
from dataclasses import dataclass

import numpy as np

from meshscope.numerics.chance import lead_chance, student_tail
from meshscope.store.read.arrays import Floats

_LASTING_CORRELATION = 0.95
"""Of one step with the next, up to which noise is told from a slow rank; as in `persistence`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The peer with most work."""

    index: int
    """Column of the group's matrix."""
    excess_ns: float
    """Median over steps of its work less the others' median."""
    excess_ratio: float
    """Over the others' median."""
    least_ratio: float
    """Least lead over the slowest other peer, of all steps, over the others' median."""
    chance: float
    """That some rank leads like this by accident, if steps are independent."""
    lasting_chance: float
    """The same if noise lasts for many steps."""


def measure_lead(total_ns: Floats) -> Lead:
    """Of work [step, peer] of at least two peers and two steps."""
    size = total_ns.shape[1]
    slowest = int(total_ns.sum(axis=0).argmax())
    others = np.delete(total_ns, slowest, axis=1)
    usual = np.median(others, axis=1)
    lead = total_ns[:, slowest] - others.max(axis=1)
    excess = total_ns[:, slowest] - usual
    chance = float(size)
    for ahead, spread in zip(lead.tolist(), np.ptp(others, axis=1).tolist(), strict=True):
        chance *= lead_chance(ahead, spread, size) / size
    return Lead(
        index=slowest,
        excess_ns=float(np.median(excess)),
        excess_ratio=float(np.median(excess)) / max(float(np.median(usual)), 1.0),
        least_ratio=float((lead / np.maximum(usual, 1)).min()),
        chance=min(1.0, chance),
        lasting_chance=_find_lasting_chance(total_ns, slowest),
    )


def _find_lasting_chance(total_ns: Floats, index: int) -> float:
    """With two peers their difference is all there is to see moves in."""
    num_steps, size = total_ns.shape
    # In logarithms, as noise of work is a factor; what all ranks share in a step is taken out.
    level = np.log(np.maximum(total_ns, 1.0))
    others = np.delete(level, index, axis=1)
    excess = float((level[:, index] - others.mean(axis=1)).mean())
    if size == 2:
        moves, freedom = np.diff(level[:, index] - others[:, 0]), num_steps - 1
        variance = float((moves**2).sum()) / freedom / 2
    else:
        moves = np.diff(others - others.mean(axis=1, keepdims=True), axis=0)
        freedom = (size - 2) * (num_steps - 1)
        variance = float((moves**2).sum()) / freedom
    # A move has 2 (1 - correlation) of the variance of the noise itself.
    deviation = math.sqrt(variance / (2 * (1 - _LASTING_CORRELATION)) * size / (size - 1))
    if deviation <= 0:
        return 0.0 if excess > 0 else 1.0
    chance: float = size * student_tail(excess / deviation, freedom)
    return min(1.0, chance)
