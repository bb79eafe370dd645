"""The budget as text: one row per line, the largest first, then what is left and MFU."""

from rich.text import Text

from meshscope.report import format as form
from meshscope.report.budget_document import BudgetFacts, BudgetLineFacts, UtilisationFacts
from meshscope.report.screen import Column, ScreenWriter
from meshscope.report.values import Absent

MIN_RATIO = 0.0005
"""Lines below this share are put together."""


def write_budget(out: ScreenWriter, budget: BudgetFacts | None, reason: str | None) -> None:
    """The section; nothing where a budget was not asked for."""
    if budget is None:
        if reason is not None:
            out.section("Budget")
            out.line(f"n/a: {form.clean_text(reason)}")
        return
    left_out = f", {form.count(budget.num_left_out)} not looked at" if budget.num_left_out else ""
    note = f"mean of a rank's step, gap before it included; {form.plural(budget.num_steps, 'step')}"
    out.section("Budget", note + left_out)
    shown = [line for line in budget.lines if abs(line.ratio) >= MIN_RATIO]
    shown.sort(key=lambda line: -line.ratio)
    rows = [(form.clean_text(line.name), line.mean_ns, line.ratio) for line in shown]
    small = [line for line in budget.lines if abs(line.ratio) < MIN_RATIO]
    if any(line.mean_ns for line in small):
        total, share = sum(line.mean_ns for line in small), sum(line.ratio for line in small)
        rows.append(("smaller lines", total, share))
    rows.append(("residual", budget.residual_mean_ns, _signed_residual(budget)))
    rows.append(("wall clock", budget.mean_wall_ns, 1.0))
    out.table(
        [
            Column(title="", cells=[Text(row[0]) for row in rows], importance=3, is_right=False),
            Column(title="time", cells=[Text(form.duration(row[1])) for row in rows], importance=2),
            Column(title="share", cells=[Text(form.ratio(row[2])) for row in rows], importance=2),
        ]
    )
    for line in budget.lines:
        _write_note(out, line)
    mfu, hfu = _describe(budget.mfu), _describe(budget.hfu)
    out.facts([("MFU, HFU", mfu)] if mfu == hfu else [("MFU", mfu), ("HFU", hfu)])


def _signed_residual(budget: BudgetFacts) -> float:
    return -budget.residual_ratio if budget.residual_mean_ns < 0 else budget.residual_ratio


def _write_note(out: ScreenWriter, line: BudgetLineFacts) -> None:
    if line.note:
        out.line(f"{line.name} is not split: {form.clean_text(line.note)}", "dim")


def _describe(found: UtilisationFacts) -> str:
    ratio = form.or_reason(found.ratio, form.ratio)
    flops, peak = found.flops_per_step, found.peak_flops_per_s
    if isinstance(flops, Absent) or isinstance(peak, Absent):
        return ratio
    warning = "; impossible: FLOPs or peak are wrong" if found.is_impossible else ""
    return (
        f"{ratio}{warning}  ({found.formula}; {flops:.3g} FLOPs, {peak:.3g} FLOP/s: "
        f"{form.clean_text(found.peak_source)})"
    )
