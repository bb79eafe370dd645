"""The budget: one row per line, the largest first, then what is left and MFU."""

from meshscope.analyze.budget.budget import Utilisation
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.run.budget import BudgetFacts
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import (
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
    make_facts,
)

MIN_RATIO = 0.0005
"""Lines below this share are combined."""


def show_budget(report: Report, detail: Detail) -> Section | None:
    """Where the wall clock went; None without a diagnosis."""
    return describe_budget(report.budget)


def describe_budget(budget: BudgetFacts | Unavailable | None) -> Section | None:
    if budget is None:
        return None
    if isinstance(budget, Unavailable):
        line = Line(f"n/a: {form.clean_text(budget.reason)}")
        return Section(key="budget", title="Budget", parts=(line,))
    left_out = f", {form.count(budget.num_left_out)} not looked at" if budget.num_left_out else ""
    basis = _describe_basis(budget)
    looked_at = form.plural(budget.num_steps, "step")
    if budget.num_stood_for:
        num_steps = budget.num_steps + budget.num_stood_for
        looked_at = f"{form.count(budget.num_steps)} of {form.plural(num_steps, 'step')}"
    note = f"mean of a rank's step, gap before it included; {looked_at}"
    parts: list[Part] = [_make_table(budget)]
    parts += [
        Line(f"{line.name} is not split: {form.clean_text(line.note)}", Tone.QUIET)
        for line in budget.lines
        if line.note
    ]
    if not isinstance(budget.evidence, Unavailable):
        parts.append(
            Line(f"Lines with ± are estimated from {form.clean_text(budget.evidence)}.", Tone.QUIET)
        )
    if basis:
        parts.append(Line(basis, Tone.QUIET))
    mfu, hfu = (form.or_reason(use, _describe_use) for use in (budget.mfu, budget.hfu))
    parts.append(make_facts([("MFU, HFU", mfu)] if mfu == hfu else [("MFU", mfu), ("HFU", hfu)]))
    return Section(key="budget", title="Budget", note=note + left_out, parts=tuple(parts))


def _describe_basis(budget: BudgetFacts) -> str:
    """What the lines rest on where not all steps were looked at."""
    if budget.num_stood_for:
        return (
            "The wall clock is that of all steps; lines are those of the steps recorded in full, "
            "counted by kind: with a checkpoint, an evaluation, or neither."
        )
    if not budget.num_left_out:
        return ""
    text = "The wall clock is that of all steps; lines are those of the steps looked at"
    if budget.num_summed_steps:
        steps = form.plural(budget.num_summed_steps, "step")
        text += f", communication of {steps} by exact sums of what was thinned"
    return f"{text}."


def _make_table(budget: BudgetFacts) -> Table:
    shown = [line for line in budget.lines if abs(line.ratio) >= MIN_RATIO]
    shown.sort(key=lambda line: -line.ratio)
    rows = [
        (form.clean_text(line.name), line.mean_ns, line.ratio, line.spread_ns) for line in shown
    ]
    small = [line for line in budget.lines if abs(line.ratio) < MIN_RATIO]
    if any(line.mean_ns for line in small):
        total, share = sum(line.mean_ns for line in small), sum(line.ratio for line in small)
        rows.append(("smaller lines", total, share, 0.0))
    sign = -1 if budget.residual_mean_ns < 0 else 1
    rows.append(("residual", budget.residual_mean_ns, sign * budget.residual_ratio, 0.0))
    rows.append(("wall clock", budget.mean_wall_ns, 1.0, 0.0))
    columns = [
        make_column("", rows, lambda row: row[0], 3, is_right=False),
        make_column("time", rows, lambda row: form.duration(row[1]), 2),
        make_column("share", rows, lambda row: form.ratio(row[2]), 2),
    ]
    if any(row[3] for row in rows):
        columns.append(
            make_column("", rows, lambda row: f"± {form.duration(row[3])}" if row[3] else "", 2)
        )
    return Table(tuple(columns))


def _describe_use(found: Utilisation) -> str:
    warning = "; impossible: FLOPs or peak are wrong" if found.is_impossible else ""
    flops, peak = (form.clean_text(text) for text in (found.flops_source, found.peak_source))
    return (
        f"{form.ratio(found.ratio)}{warning}  ({found.formula}; {found.flops_per_step:.3g} FLOPs: "
        f"{flops}; {found.peak_flops_per_s:.3g} FLOP/s: {peak})"
    )
