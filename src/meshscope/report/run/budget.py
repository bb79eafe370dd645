"""The budget as readers see it: means per rank and step, and sums per rank."""

from dataclasses import dataclass

from meshscope.analyze.budget.budget import Budget, Utilisation
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLineFacts:
    """What one line of the budget takes."""

    name: str
    """`exposed wait dp`."""
    share: str
    """`exposed wait`."""
    axis: str
    """Empty where time belongs to no axis."""
    mean_ns: float
    """Per rank and step."""
    ratio: float
    """Of the wall clock."""
    spread_ns: float
    """The mean may be off by so much; 0 where it was counted."""
    note: str
    """Why compute is not split; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudgetFacts:
    """The budget of one rank."""

    rank: int
    wall_ns: int
    """All steps of the run together; exact."""
    time_ns: tuple[int, ...]
    """In the order of `lines`, all steps of the run together."""
    residual_ns: int
    """`wall_ns` minus the sum of `time_ns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetFacts:
    """Where the wall clock went. Lines and residual sum to `mean_wall_ns`."""

    num_steps: int
    """Steps that were looked at: without warm-up, finished by every rank."""
    num_left_out: int
    """Steady steps not looked at, to stay within memory. Their wall clock counts, exactly; their
    lines are those of the steps around them."""
    num_stood_for: int
    """Steps that were read and lack marks on the device, records of communication, or were
    profiled. They count too, by the steps of their kind."""
    num_summed_steps: int
    """Steps whose communication is brought to the exact sums of what was thinned."""
    mean_wall_ns: float
    """Per rank and step, the gap before the step included."""
    lines: tuple[BudgetLineFacts, ...]
    evidence: str | Unavailable
    """What estimated lines rest on, such as kernel samples."""
    residual_mean_ns: float
    """What no line explains, per rank and step; negative where lines explain too much."""
    residual_ratio: float
    mfu: Utilisation | Unavailable
    hfu: Utilisation | Unavailable
    ranks: tuple[RankBudgetFacts, ...]


def describe_budget(budget: Budget, num_left_out: int) -> BudgetFacts:
    count, wall = max(budget.num_rank_steps, 1), budget.total_wall_ns
    by_rank = zip(
        budget.ranks, budget.run.wall_ns.tolist(), budget.of_ranks_ns().tolist(), strict=True
    )
    return BudgetFacts(
        num_steps=len(budget.steps),
        num_left_out=num_left_out,
        num_stood_for=0 if num_left_out else budget.run.num_steps - len(budget.steps),
        num_summed_steps=budget.run.num_summed_steps,
        mean_wall_ns=budget.mean_wall_ns,
        lines=tuple(
            BudgetLineFacts(
                name=line.name,
                share=str(line.share),
                axis=line.axis,
                mean_ns=total / count,
                ratio=total / wall if wall else 0.0,
                spread_ns=spread,
                note=line.reason,
            )
            for line, total, spread in zip(
                budget.lines,
                budget.total_ns().tolist(),
                budget.spread_ns.mean(axis=0).tolist(),
                strict=True,
            )
        ),
        evidence=budget.evidence,
        residual_mean_ns=budget.total_residual_ns / count,
        residual_ratio=budget.residual_ratio,
        mfu=budget.mfu,
        hfu=budget.hfu,
        ranks=tuple(
            RankBudgetFacts(
                rank=rank, wall_ns=own_ns, time_ns=tuple(times), residual_ns=own_ns - sum(times)
            )
            for rank, own_ns, times in by_rank
        ),
    )
