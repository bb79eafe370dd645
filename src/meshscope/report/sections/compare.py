"""A comparison of two runs. In JSON times are nanoseconds, ratios are over A, and `verdict` is
null unless a limit was given.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from meshscope.analyze.compare.compare import Comparison, Metric, Verdict
from meshscope.analyze.compare.compare_budget import BudgetChange, LineChange
from meshscope.analyze.compare.compare_loss import LossComparison
from meshscope.analyze.compare.compare_provenance import Difference
from meshscope.core.unavailable import Unavailable, known
from meshscope.diagnose.finding_changes import FindingChange
from meshscope.numerics.location_shift import Shift
from meshscope.report import format as form
from meshscope.report.encode import Shape
from meshscope.report.section import (
    Headline,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
)
from meshscope.simulate.ledger.ledger_change import LedgerChange, LedgerLine

_MIN_LEDGER_RATIO = 0.005
"""Of A's step: smaller changes of a loss are not shown."""
_MAX_DIFFERENCES = 40
"""Shown at most; the JSON document has all."""
_MAX_VALUE = 60
"""Characters of a fact in a table."""
_NUM_LEADING = 20
"""Characters shown before the first that differs, of a fact that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison and its options."""

    a: str
    """Names of the runs as the user gave them."""
    b: str
    comparison: Comparison
    limit_ratio: float | None
    """`--fail-on` as a ratio; None when no limit was given."""
    verdict: Verdict | None
    ledger: LedgerChange | Unavailable
    """Which losses of time changed."""
    findings: tuple[FindingChange, ...]
    """Which findings above LOW came, went or cost another amount."""
    fails_on_loss: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the command ends with exit code 7."""
        return self.verdict is Verdict.SLOWER or self.is_loss_failure

    @property
    def is_loss_failure(self) -> bool:
        """Whether losses had to agree and do not, or could not be compared."""
        loss = known(self.comparison.loss)
        return self.fails_on_loss and (loss is None or loss.divergence is not None)


DOCUMENT = ("meshscope-compare", 2)
"""Name and version of the JSON document: a `Compared`."""
SHAPES = {
    Compared: Shape(inlined=("comparison",), dropped=("fails_on_loss",), derived=("has_failed",)),
    Metric: Shape(derived=("change_ratio", "interval_ratio")),
    LineChange: Shape(derived=("change_ns",)),
    LedgerLine: Shape(derived=("change_ns",)),
    LossComparison: Shape(dropped=("last_a", "last_b"), renamed={"divergence": "first_divergence"}),
}


def make_compare_sections(compared: Compared) -> list[Section]:
    """For a screen: the runs, the verdict, and its evidence."""
    tone = Tone.ALARM if compared.has_failed else Tone.PLAIN
    head = (
        Headline(f"A  {form.clean_text(compared.a)}"),
        Headline(f"B  {form.clean_text(compared.b)}"),
        Line(tell_verdict(compared), tone),
    )
    return [Section(key="verdict", title="", parts=head), *_list_evidence(compared)]


def make_compare_page(compared: Compared) -> list[Section]:
    """For a page: the verdict is the heading."""
    mark = "❌" if compared.has_failed else "✅"
    runs = (
        Line(f"A: {form.clean_text(compared.a)}"),
        Line(f"B: {form.clean_text(compared.b)}"),
    )
    title = f"{mark} {tell_verdict(compared)}"
    return [Section(key="verdict", title=title, parts=runs), *_list_evidence(compared)]


def _list_evidence(compared: Compared) -> Iterator[Section]:
    comparison = compared.comparison
    shown = [metric for metric in comparison.metrics if not _is_empty(metric)]
    yield Section(
        key="metrics",
        title="What it took",
        note="change from A to B, 95 % interval",
        parts=(
            _tabulate([_show_metric(metric) for metric in shown]),
            Line(tell_test(comparison.period), Tone.QUIET),
        ),
    )
    yield Section(
        key="budget",
        title="Where the difference is",
        note="mean per step and rank; changes sum to the period's",
        parts=(_show_budget(comparison.budget),),
    )
    yield Section(
        key="ledger",
        title="What is lost differently",
        note="of a step; by replay, with all losses of a run that are 0.5 % of it or more",
        parts=tuple(_show_ledger(compared.ledger)),
    )
    yield Section(
        key="findings",
        title="What the diagnoses say differently",
        note="saved per step without the cause",
        parts=tuple(_show_findings(compared.findings)),
    )
    yield Section(key="loss", title="Loss", parts=(Line(tell_loss(comparison.loss)),))
    yield Section(
        key="provenance",
        title="What is different about the runs",
        parts=tuple(_list_differences(comparison.provenance)),
    )


_Row = tuple[str, str, str, str, str]


def _tabulate(rows: Sequence[_Row]) -> Table:
    return Table(
        (
            make_column("", rows, lambda row: row[0], 9, is_right=False),
            make_column("A", rows, lambda row: row[1], 5),
            make_column("B", rows, lambda row: row[2], 6),
            make_column("change", rows, lambda row: row[3], 8),
            make_column("interval", rows, lambda row: row[4], 7, is_right=False),
        )
    )


def _is_empty(metric: Metric) -> bool:
    return known(metric.a) is None and known(metric.b) is None


def _show_metric(metric: Metric) -> _Row:
    def show(value: float) -> str:
        if metric.unit == "ns":
            return form.duration(value)
        if metric.unit == "bytes":
            return form.memory(value)
        return form.rate(value, metric.unit.partition("/")[0])

    interval = known(metric.interval_ratio)
    return (
        metric.name,
        form.or_dash(metric.a, show),
        form.or_dash(metric.b, show),
        form.or_dash(metric.change_ratio, _signed),
        "" if interval is None else _interval_text(interval),
    )


def _show_budget(budget: BudgetChange | Unavailable) -> Part:
    found = known(budget)
    if found is None:
        return Line(form.or_reason(budget, str))
    return _tabulate([_show_line(line) for line in (*found.lines, found.period)])


def _show_line(line: LineChange) -> _Row:
    return (
        form.clean_text(line.name),
        form.duration(line.a_ns),
        form.duration(line.b_ns),
        _signed_duration(line.change_ns),
        f"{_signed_duration(line.low_ns)} to {_signed_duration(line.high_ns)}",
    )


def _show_ledger(change: LedgerChange | Unavailable) -> Iterator[Part]:
    found = known(change)
    if found is None:
        yield Line(form.or_reason(change, str))
        return
    least_ns = _MIN_LEDGER_RATIO * max(found.step.a_ns, 1.0)
    losses = [line for line in found.losses if abs(line.change_ns) >= least_ns]
    phases = [
        LedgerLine(name=f"needed in {line.name}", a_ns=line.a_ns, b_ns=line.b_ns)
        for line in found.phases
        if abs(line.change_ns) >= least_ns
    ]
    rows = (*losses, *phases, found.best, found.step)
    yield Table(
        (
            make_column("", rows, lambda row: form.clean_text(row.name), 9, is_right=False),
            make_column("A", rows, lambda row: form.duration(row.a_ns), 5),
            make_column("B", rows, lambda row: form.duration(row.b_ns), 6),
            make_column("change", rows, lambda row: _signed_duration(row.change_ns), 8),
        )
    )


def _show_findings(changes: tuple[FindingChange, ...]) -> Iterator[Part]:
    if not changes:
        yield Line("Nothing above low severity.")
        return

    def show(severity: str | None, saved_ns: float) -> str:
        price = f", {form.duration(saved_ns)}" if saved_ns > 0 else ""
        return "-" if severity is None else f"{severity}{price}"

    def name(change: FindingChange) -> str:
        return form.clean_text(f"{change.code} {change.title}")

    shown = changes[:_MAX_DIFFERENCES]
    yield Table(
        (
            make_column("", shown, name, 9, is_right=False),
            make_column("A", shown, lambda c: show(c.severity_a, c.saved_a_ns), 5, is_right=False),
            make_column("B", shown, lambda c: show(c.severity_b, c.saved_b_ns), 6, is_right=False),
        )
    )
    if len(changes) > len(shown):
        yield Line(f"and {form.count(len(changes) - len(shown))} more, see --json", Tone.QUIET)


def _list_differences(differences: tuple[Difference, ...] | Unavailable) -> Iterator[Part]:
    found = known(differences)
    if found is None:
        yield Line(form.or_reason(differences, str))
        return
    if not found:
        yield Line(
            "Nothing that was recorded: code, arguments, hyper-parameters, layout, machines."
        )
        return
    shown = found[:_MAX_DIFFERENCES]
    yield Table(
        (
            make_column("", shown, lambda d: d.subject.value, 4, is_right=False),
            make_column("", shown, lambda d: form.clean_text(d.name), 9, is_right=False),
            make_column("A", shown, lambda d: _show_fact(d.a, d.b), 5, is_right=False),
            make_column("B", shown, lambda d: _show_fact(d.b, d.a), 6, is_right=False),
        )
    )
    if len(found) > len(shown):
        yield Line(f"and {form.count(len(found) - len(shown))} more, see --json", Tone.QUIET)


def _show_fact(value: str | None, other: str | None) -> str:
    """Of a long value the part where it begins to differ from the other side's."""
    if value is None:
        return "(none)"
    pairs = zip(value, other or "", strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if len(value) > _MAX_VALUE and num_same > _NUM_LEADING:
        value = f"…{value[num_same - _NUM_LEADING :]}"
    return form.clean_text(value, _MAX_VALUE) or "(empty)"


def tell_verdict(compared: Compared) -> str:
    """One sentence: whether B is slower, and what follows for the exit code."""
    period = compared.comparison.period
    interval, change = known(period.interval_ratio), known(period.change_ratio)
    if interval is None or change is None:
        missing = period.interval_ratio
        reason = missing.reason if isinstance(missing, Unavailable) else "one side has no steps"
        return f"Step times cannot be compared: {form.clean_text(reason)}."
    word = "slower" if change > 0 else "faster"
    text = f"B is {form.ratio(abs(change))} {word} than A, "
    if interval[0] <= 0 <= interval[1]:
        text = f"No difference in the step period is certain: {_signed(change)}, "
    text += _interval_text(interval)
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
    """How the interval was computed."""
    return form.or_reason(period.shift, _describe_shift)


def _describe_shift(shift: Shift) -> str:
    counts = f"{form.count(shift.num_a)} and {form.count(shift.num_b)}"
    over = f"Hodges-Lehmann shift over {counts} steps"
    if not shift.block:
        return f"{over}, Student's t, p = {shift.p_value:.2g}: so few steps say little"
    return f"{over}, Mann-Whitney p = {shift.p_value:.2g}, steps drawn in blocks of {shift.block}"


def tell_loss(loss: LossComparison | Unavailable) -> str:
    """One sentence on where the losses diverge."""
    return form.or_reason(loss, _describe_loss)


def _describe_loss(loss: LossComparison) -> str:
    steps = f"steps {loss.first_step} to {loss.last_step}, {form.plural(loss.num_ranks, 'rank')}"
    limit = (
        "bit by bit"
        if loss.tolerance.is_exact
        else f"within {loss.tolerance.absolute:g} + {loss.tolerance.relative:g} of the value"
    )
    found = loss.divergence
    if found is None:
        return (
            f"The same {limit} in {form.plural(loss.num_values, 'value')} of "
            f"{form.clean_text(loss.name)} ({steps}){_tell_largest(loss, '; largest difference')}."
        )
    return (
        f"First different ({limit}) in step {found.step} on rank {found.rank}: {found.a:.9g} and "
        f"{found.b:.9g}; {form.count(loss.num_beyond)} of {form.plural(loss.num_values, 'value')} "
        f"differ ({steps}){_tell_largest(loss, ', at most by')}{_tell_infinite(loss)}."
    )


def _tell_largest(loss: LossComparison, words: str) -> str:
    """Empty if all that differ are apart by no number."""
    is_told = math.isfinite(loss.largest_difference) and (
        loss.num_beyond == 0 or loss.num_beyond > loss.num_infinitely_apart
    )
    return f"{words} {loss.largest_difference:.3g}" if is_told else ""


def _tell_infinite(loss: LossComparison) -> str:
    if not loss.num_infinitely_apart:
        return ""
    count = (
        "all of them"
        if loss.num_infinitely_apart == loss.num_beyond
        else (f"{form.count(loss.num_infinitely_apart)} of them")
    )
    return f"; in {count} one side is not finite, or both in another way"


def _signed(value: float) -> str:
    text = form.ratio(value)
    if text.startswith("<"):  # of rounding: it has no sign to speak of
        return f"±{text}"
    return ("+" if value > 0 else "") + text


def _signed_duration(ns: float) -> str:
    return ("+" if ns > 0 else "") + form.duration(ns)


def _interval_text(interval: tuple[float, float]) -> str:
    return f"{_signed(interval[0])} to {_signed(interval[1])}"
