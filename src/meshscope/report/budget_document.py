"""The budget as values of the JSON document."""

import msgspec

from meshscope.analyze.budget.budget import HFU_FORMULA, MFU_FORMULA, Budget, Utilisation
from meshscope.core.unavailable import Unavailable
from meshscope.report.values import Absent, as_number, as_text


class BudgetLineFacts(msgspec.Struct, frozen=True, kw_only=True):
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
    note: str
    """Of compute that is not split: why. Empty otherwise."""


class UtilisationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs utilisation, with what it was made of."""

    ratio: float | Absent
    """Over 1 where FLOPs or peak are wrong."""
    is_impossible: bool
    formula: str
    flops_per_step: float | Absent
    """Of all ranks."""
    peak_flops_per_s: float | Absent
    """Of all ranks: the denominator."""
    peak_source: str
    """Empty where there is none."""


class RankBudgetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of one rank."""

    rank: int
    wall_ns: int
    """All steps together."""
    time_ns: list[int]
    """In the order of `lines`, all steps together."""
    residual_ns: int
    """`wall_ns` less the sum of `time_ns`."""


class BudgetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall clock went. Lines and residual sum to `mean_wall_ns`."""

    num_steps: int
    """Steps it is over: without warm-up, finished by every rank."""
    num_left_out: int
    """Steady steps left out to stay within memory."""
    mean_wall_ns: float
    """Per rank and step, the gap before the step included."""
    lines: list[BudgetLineFacts]
    residual_mean_ns: float
    """What no line explains, per rank and step; negative where lines explain too much."""
    residual_ratio: float
    mfu: UtilisationFacts
    hfu: UtilisationFacts
    ranks: list[RankBudgetFacts]


def build_budget(budget: Budget | Unavailable, num_left_out: int) -> BudgetFacts | Absent:
    """A budget as the document has it."""
    if isinstance(budget, Unavailable):
        return Absent(as_text(budget.reason))
    count, wall = max(budget.wall_ns.size, 1), budget.total_wall_ns
    residual = int(budget.residual_ns.sum())
    lines = [
        BudgetLineFacts(
            name=as_text(line.name),
            share=str(line.share),
            axis=as_text(line.axis),
            mean_ns=total / count,
            ratio=total / wall if wall else 0.0,
            note=as_text(line.reason),
        )
        for line, total in zip(budget.lines, budget.total_ns().tolist(), strict=True)
    ]
    return BudgetFacts(
        num_steps=len(budget.steps),
        num_left_out=num_left_out,
        mean_wall_ns=wall / count,
        lines=lines,
        residual_mean_ns=residual / count,
        residual_ratio=budget.residual_ratio,
        mfu=_utilisation(budget.mfu, MFU_FORMULA),
        hfu=_utilisation(budget.hfu, HFU_FORMULA),
        ranks=[
            RankBudgetFacts(rank=rank, wall_ns=own, time_ns=times, residual_ns=own - sum(times))
            for rank, own, times in zip(
                budget.ranks,
                budget.wall_ns.sum(axis=1).tolist(),
                budget.of_ranks_ns().tolist(),
                strict=True,
            )
        ],
    )


def _utilisation(found: Utilisation | Unavailable, formula: str) -> UtilisationFacts:
    if isinstance(found, Unavailable):
        missing = Absent(as_text(found.reason))
        return UtilisationFacts(
            ratio=missing,
            is_impossible=False,
            formula=formula,
            flops_per_step=missing,
            peak_flops_per_s=missing,
            peak_source="",
        )
    return UtilisationFacts(
        ratio=as_number(found.ratio),
        is_impossible=found.is_impossible,
        formula=formula,
        flops_per_step=as_number(found.flops_per_step),
        peak_flops_per_s=as_number(found.peak_flops_per_s),
        peak_source=as_text(found.peak_source),
    )
