"""Which line of the budget a difference in step time comes from.

A line's change is the difference of its mean time per step and rank in the two runs; the changes,
residual included, sum to the difference of the mean periods. Intervals come from a moving-block
bootstrap over steps, separately for each line, so they do not sum. Only means add up, not medians:
one very long step moves a line but not the Hodges–Lehmann shift of the step time, so the two may
differ.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget import Budget
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.location_shift import (
    MIN_BLOCK_VALUES,
    MIN_VALUES,
    NUM_DRAWS,
    SEED,
    block_length,
    draw_blocks,
    reach_few,
    student_quantile,
)
from meshscope.numerics.trend import autocorrelation
from meshscope.store.read.arrays import Floats

_RESIDUAL = "residual"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """One line of the budget in both runs: mean time per step and rank."""

    name: str
    a_ns: float
    b_ns: float
    low_ns: float
    """Lower end of the 95 % interval of the difference."""
    high_ns: float

    @property
    def change_ns(self) -> float:
        """What the line adds to the step from A to B."""
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """All lines; their changes sum to that of `period`."""

    lines: tuple[LineChange, ...]
    """In the order of the budgets; the residual last."""
    period: LineChange
    """The mean period of a step."""


def compare_budgets(a: Budget | Unavailable, b: Budget | Unavailable) -> BudgetChange | Unavailable:
    if isinstance(a, Unavailable):
        return Unavailable(f"A: {a.reason}")
    if isinstance(b, Unavailable):
        return Unavailable(f"B: {b.reason}")
    if min(len(a.steps), len(b.steps)) < MIN_VALUES:
        return Unavailable(f"it takes {MIN_VALUES} steps on each side")
    means_a, means_b = _per_step(a), _per_step(b)
    names = list(dict.fromkeys((*means_a, *means_b)))
    none_a, none_b = np.zeros(len(a.steps)), np.zeros(len(b.steps))
    lines = [
        _measure(name, means_a.get(name, none_a), means_b.get(name, none_b))
        for name in names
        if name != _RESIDUAL
    ]
    lines.append(_measure(_RESIDUAL, means_a[_RESIDUAL], means_b[_RESIDUAL]))
    period = _measure("step period", a.wall_ns.mean(axis=0), b.wall_ns.mean(axis=0))
    return BudgetChange(lines=tuple(lines), period=period)


def _per_step(budget: Budget) -> dict[str, Floats]:
    """Line to its mean over ranks in every step."""
    means = budget.time_ns.mean(axis=0)
    found: dict[str, Floats] = {}
    for index, line in enumerate(budget.lines):
        found[line.name] = found.get(line.name, np.zeros(len(means))) + means[:, index]
    found[_RESIDUAL] = budget.residual_ns.mean(axis=0)
    return found


def _measure(name: str, a: Floats, b: Floats) -> LineChange:
    mean_a, mean_b = float(a.mean()), float(b.mean())
    reach, change = _find_reach(a, b), mean_b - mean_a
    return LineChange(
        name=name, a_ns=mean_a, b_ns=mean_b, low_ns=change - reach, high_ns=change + reach
    )


def _find_reach(a: Floats, b: Floats) -> float:
    if min(len(a), len(b)) < MIN_BLOCK_VALUES:
        return reach_few(a, b)
    error_a, blocks_a = _standard_error(a)
    error_b, blocks_b = _standard_error(b)
    return float(np.hypot(error_a, error_b)) * student_quantile(blocks_a + blocks_b - 2)


def _standard_error(values: Floats) -> tuple[float, int]:
    """Of the mean, and the number of blocks behind it."""
    count = len(values)
    if float(np.ptp(values)) == 0:
        return 0.0, count
    block = block_length(autocorrelation(values), count)
    random = np.random.default_rng(SEED)
    draws = values[draw_blocks(random, count, block, NUM_DRAWS)].mean(axis=1)
    return float(np.std(draws, ddof=1)) * (count / (count - block)) ** 0.5, count // block
