"""A comparison of two runs for people: sentences and rows that text and Markdown share."""

from dataclasses import dataclass

from meshscope.analyze.compare.compare import Metric, Verdict
from meshscope.analyze.compare.compare_budget import BudgetChange
from meshscope.analyze.compare.compare_loss import LossComparison
from meshscope.analyze.compare.compare_provenance import Difference
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.compare_document import Compared
from meshscope.report.screen import Screen, ScreenWriter, make_column

MAX_DIFFERENCES = 40
"""Shown at most; the JSON document has all."""
MAX_VALUE = 60
"""Characters of a fact in a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table, as text."""

    name: str
    a: str
    b: str
    change: str
    interval: str


def render_comparison(compared: Compared, screen: Screen) -> str:
    """The whole text."""
    writer = ScreenWriter(screen)
    writer.headline(f"A  {form.clean_text(compared.a)}", "bold")
    writer.headline(f"B  {form.clean_text(compared.b)}", "bold")
    writer.line(tell_verdict(compared), _style(compared))
    writer.section("What it took", "change from A to B, 95 % interval")
    _write_rows(writer, list_metric_rows(compared))
    writer.line(tell_test(compared.comparison.period), "dim")
    _write_budget(writer, compared.comparison.budget)
    writer.section("Loss")
    writer.line(tell_loss(compared.comparison.loss))
    _write_provenance(writer, compared.comparison.provenance)
    return writer.finish()


def _style(compared: Compared) -> str:
    return "red" if compared.has_failed else ""


def _write_rows(writer: ScreenWriter, rows: list[Row]) -> None:
    writer.table(
        [
            make_column("", rows, lambda row: row.name, 9, is_right=False),
            make_column("A", rows, lambda row: row.a, 5),
            make_column("B", rows, lambda row: row.b, 6),
            make_column("change", rows, lambda row: row.change, 8),
            make_column("interval", rows, lambda row: row.interval, 7, is_right=False),
        ]
    )


def _write_budget(writer: ScreenWriter, budget: BudgetChange | Unavailable) -> None:
    writer.section("Where the difference is", "mean per step and rank; changes sum to the period's")
    if isinstance(budget, Unavailable):
        writer.line(f"n/a: {form.clean_text(budget.reason)}")
        return
    _write_rows(writer, list_budget_rows(budget))


def _write_provenance(
    writer: ScreenWriter, differences: tuple[Difference, ...] | Unavailable
) -> None:
    writer.section("What is different about the runs")
    if isinstance(differences, Unavailable):
        writer.line(f"n/a: {form.clean_text(differences.reason)}")
        return
    if not differences:
        writer.line("Nothing that was recorded: code, arguments, settings, layout, machines.")
        return
    shown = differences[:MAX_DIFFERENCES]
    writer.table(
        [
            make_column("", shown, lambda d: d.subject.value, 4, is_right=False),
            make_column("", shown, lambda d: form.clean_text(d.name), 9, is_right=False),
            make_column("A", shown, lambda d: show_fact(d.a), 5, is_right=False),
            make_column("B", shown, lambda d: show_fact(d.b), 6, is_right=False),
        ]
    )
    if len(differences) > len(shown):
        writer.line(f"and {form.count(len(differences) - len(shown))} more, see --json", "dim")


def show_fact(value: str | None) -> str:
    """A fact of one side, as much as fits into a table."""
    return "(none)" if value is None else form.clean_text(value, MAX_VALUE) or "(empty)"


def tell_verdict(compared: Compared) -> str:
    """One sentence: whether B is slower, and what that means for the exit code."""
    period = compared.comparison.period
    interval, change = period.interval_ratio, period.change_ratio
    if isinstance(interval, Unavailable) or isinstance(change, Unavailable):
        reason = interval.reason if isinstance(interval, Unavailable) else "one side has no steps"
        return f"Step times cannot be compared: {form.clean_text(reason)}."
    word = "slower" if change > 0 else "faster"
    text = f"B is {form.ratio(abs(change))} {word} than A, {_interval_text(interval)}"
    if interval[0] <= 0 <= interval[1]:
        text = f"No difference in the step period is certain: {_signed(change)}, " + _interval_text(
            interval
        )
    if compared.verdict is None or compared.limit_ratio is None:
        return text + "."
    limit = form.ratio(compared.limit_ratio)
    return {
        Verdict.SLOWER: f"{text}: beyond the limit of {limit}.",
        Verdict.WITHIN: f"{text}: within the limit of {limit}.",
        Verdict.INCONCLUSIVE: f"{text}: inconclusive, the limit of {limit} lies within the "
        "interval; record more steps.",
    }[compared.verdict]


def tell_test(period: Metric) -> str:
    """How the interval was had."""
    shift = period.shift
    if isinstance(shift, Unavailable):
        return f"n/a: {form.clean_text(shift.reason)}"
    return (
        f"Hodges-Lehmann shift over {form.count(shift.num_a)} and {form.count(shift.num_b)} steps, "
        f"Mann-Whitney p = {shift.p_value:.2g}, steps drawn in blocks of {shift.block}"
    )


def tell_loss(loss: LossComparison | Unavailable) -> str:
    """One sentence on where the losses part."""
    if isinstance(loss, Unavailable):
        return f"n/a: {form.clean_text(loss.reason)}"
    steps = f"steps {loss.first_step} to {loss.last_step}, {form.plural(loss.num_ranks, 'rank')}"
    limit = (
        "bit by bit"
        if loss.tolerance.is_exact
        else f"within {loss.tolerance.absolute:g} + {loss.tolerance.relative:g} of the value"
    )
    found = loss.divergence
    if found is None:
        return (
            f"The same {limit} in {form.plural(loss.num_values, 'value')} of {loss.name} "
            f"({steps}); largest difference {loss.largest_difference:.3g}."
        )
    return (
        f"First different ({limit}) in step {found.step} on rank {found.rank}: {found.a:.9g} and "
        f"{found.b:.9g}; {form.count(loss.num_beyond)} of {form.plural(loss.num_values, 'value')} "
        f"differ ({steps}), at most by {loss.largest_difference:.3g}."
    )


def list_metric_rows(compared: Compared) -> list[Row]:
    """One row per metric that at least one side has."""
    rows = []
    for metric in compared.comparison.metrics:
        if isinstance(metric.a, Unavailable) and isinstance(metric.b, Unavailable):
            continue
        interval, change = metric.interval_ratio, metric.change_ratio
        rows.append(
            Row(
                name=metric.name,
                a=_show(metric.a, metric.unit),
                b=_show(metric.b, metric.unit),
                change="n/a" if isinstance(change, Unavailable) else _signed(change),
                interval="" if isinstance(interval, Unavailable) else _interval_text(interval),
            )
        )
    return rows


def list_budget_rows(budget: BudgetChange) -> list[Row]:
    """One row per line, the period last."""
    return [
        Row(
            name=form.clean_text(line.name),
            a=form.duration(line.a_ns),
            b=form.duration(line.b_ns),
            change=_signed_duration(line.change_ns),
            interval=f"{_signed_duration(line.low_ns)} to {_signed_duration(line.high_ns)}",
        )
        for line in (*budget.lines, budget.period)
    ]


def _show(value: float | Unavailable, unit: str) -> str:
    if isinstance(value, Unavailable):
        return "n/a"
    if unit == "ns":
        return form.duration(value)
    return form.memory(value) if unit == "bytes" else form.rate(value, unit.partition("/")[0])


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + form.ratio(value)


def _signed_duration(ns: float) -> str:
    return ("+" if ns > 0 else "") + form.duration(ns)


def _interval_text(interval: tuple[float, float]) -> str:
    return f"{_signed(interval[0])} to {_signed(interval[1])}"
