"""Findings: the most urgent in the first line, then each with evidence, change and price.

Findings above LOW are shown in full, up to a limit; LOW findings in a line each.
"""

import math

from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Course, Estimate, Evidence, Finding
from meshscope.diagnose.pricing import recoverable_hours
from meshscope.diagnose.runner import Diagnosis
from meshscope.diagnose.wording import capitalize
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Part, Section, Tone, make_facts

_MAX_SHOWN = 6
"""Findings shown in full."""
_MAX_LOW_SHOWN = 4
_MAX_EVIDENCE = 6
_EXACT_RATIO = 0.0005
"""A replay this close is shown as 0 %."""
_MIN_HOURS = 0.1
"""Fewer hours, summed over all ranks, are not shown."""
TONES = {
    Severity.CRITICAL: Tone.CRITICAL,
    Severity.HIGH: Tone.ALARM,
    Severity.MEDIUM: Tone.NOTICE,
    Severity.LOW: Tone.QUIET,
}


def show_findings(report: Report, detail: Detail) -> Section | None:
    """Findings above LOW in full; None without a diagnosis."""
    diagnosis = report.diagnosis
    if diagnosis is None:
        return None
    urgent = [finding for finding in diagnosis.findings if finding.severity > Severity.LOW]
    low = [finding for finding in diagnosis.findings if finding.severity <= Severity.LOW]
    parts: list[Part] = []
    if not urgent:
        parts.append(Line(form.begin_sentence(describe_nothing(diagnosis))))
    for finding in urgent[:_MAX_SHOWN]:
        parts += _show_finding(finding, diagnosis)
    if len(urgent) > _MAX_SHOWN:
        more = form.plural(len(urgent) - _MAX_SHOWN, "more finding")
        parts.append(Line(f"and {more} (see --json)", Tone.QUIET))
    parts += [
        Line(f"low  {finding.code}  {_describe_low(finding)}", Tone.QUIET)
        for finding in low[:_MAX_LOW_SHOWN]
    ]
    if len(low) > _MAX_LOW_SHOWN:
        more = form.plural(len(low) - _MAX_LOW_SHOWN, "more finding")
        parts.append(Line(f"and {more} of low severity (see --json)", Tone.QUIET))
    note = _describe_basis(diagnosis)
    return Section(key="findings", title="Findings", note=note, parts=tuple(parts))


def describe_nothing(diagnosis: Diagnosis) -> str:
    """Rules that could not look, or not at everything, are counted: silence is no proof."""
    num_low, blind = len(diagnosis.findings), len(diagnosis.not_run)
    low = f" ({num_low} of low severity: --explain)" if num_low else ""
    unseen = f", {form.count(blind)} could not see all they need" if blind else ""
    rules = form.plural(len(diagnosis.rules), "rule")
    return f"no finding above low severity{low}; {rules} ran{unseen}"


def describe_worst(diagnosis: Diagnosis) -> str:
    """The most urgent finding in a sentence; empty if none is above LOW."""
    if not diagnosis.findings or diagnosis.findings[0].severity <= Severity.LOW:
        return ""
    first = diagnosis.findings[0]
    title = capitalize(form.clean_text(first.title))
    price = describe_price(first)
    return f"{title}: fixing it saves {price}." if price else f"{title}."


def describe_price(finding: Finding) -> str:
    """`31.0 ms of 190 ms a step (16 %)`; empty without a price.

    Of one of several losses that hide each other also what it saves if the others stay.
    """
    gain = finding.gain
    if isinstance(gain, Unavailable) or not math.isfinite(gain.saved_ns + gain.step_ns):
        return ""
    step = f"{form.duration(gain.step_ns)} a step"
    alone_ns = gain.alone_ns if isinstance(gain, Estimate) else None
    hidden = ""
    if alone_ns is not None:
        hidden = f" once the others are fixed, too; alone {form.duration(alone_ns)}"
    return f"{form.duration(gain.saved_ns)} of {step} ({form.ratio(gain.saved_ratio)}){hidden}"


def _describe_basis(diagnosis: Diagnosis) -> str:
    fidelity = known(diagnosis.fidelity)
    if fidelity is None:
        return "savings are estimates: the run cannot be replayed"
    error = fidelity.error_ratio
    if not fidelity.is_enough:
        return f"savings are estimates: a replay is {form.ratio(error)} off the measured time"
    if error < _EXACT_RATIO:
        return "savings come from a replay that reproduces the measured time"
    return f"savings come from a replay within {form.ratio(error)} of the measured time"


def _describe_low(finding: Finding) -> str:
    title = form.clean_text(finding.title)
    if finding.explained_by is not None:
        return f"{title}; explained by {form.clean_text(finding.explained_by)}"
    price = describe_price(finding)
    return f"{title}, {price}" if price else title


def _show_finding(finding: Finding, diagnosis: Diagnosis) -> tuple[Part, ...]:
    title = form.clean_text(finding.title)
    head = f"{finding.severity.word}  {finding.code}  {title}"
    rows = [("  What", capitalize(form.clean_text(finding.summary, 600)))]
    price = _describe_worth(finding, diagnosis)
    if price:
        rows.append(("  Saves", price))
    rows.append(("  Where", _describe_where(finding)))
    if finding.evidence:
        shown = [_describe_evidence(one) for one in finding.evidence[:_MAX_EVIDENCE]]
        rows.append(("  Evidence", "; ".join(shown)))
    rows.append(("  Change", form.clean_text(finding.change, 600)))
    sure = finding.confidence
    rows.append(("  Sure", f"{sure.level}: {form.clean_text(sure.text)}"))
    return Line(head, TONES[finding.severity]), make_facts(rows)


def _describe_worth(finding: Finding, diagnosis: Diagnosis) -> str:
    price, gain = describe_price(finding), finding.gain
    hours = known(recoverable_hours(gain, diagnosis.scale))
    if not price or isinstance(gain, Unavailable) or hours is None:
        return ""
    amount = _describe_hours(hours, diagnosis)
    basis = form.clean_text(gain.basis)
    return f"{price}{amount}; {basis}"


def _describe_where(finding: Finding) -> str:
    """`rank 5, since step 15 (2026-01-05 09:30:01 UTC)`."""
    where = form.name_ranks(finding.ranks) if finding.ranks else "all ranks"
    return f"{where}, {describe_onset(finding)}"


def describe_onset(finding: Finding) -> str:
    """`since step 15 (2026-01-05 09:30:01 UTC)`, `since the first analysed step, 3`."""
    onset, last = finding.onset, finding.last_step
    if isinstance(onset, Unavailable):
        return f"since when is not known: {form.clean_text(onset.reason)}"
    moment = known(onset.start_unix_ns)
    when = "" if moment is None else f" ({form.moment(moment)})"
    if last is not None and last == finding.first_step:
        return f"in step {onset.step}{when}"
    if onset.is_over and onset.course is not Course.AT_TIMES:
        return f"from step {onset.step}{when} to {last}"
    return {
        Course.ALWAYS: f"since the first analysed step, {onset.step}{when}",
        Course.SINCE: f"since step {onset.step}{when}",
        Course.AT_TIMES: f"at times, first in step {onset.step}{when}",
    }[onset.course]


def _describe_evidence(evidence: Evidence) -> str:
    """`work of rank 5 in forward 62.0 ms`."""
    return f"{form.clean_text(evidence.name)} {_describe_value(evidence)}"


def _describe_value(evidence: Evidence) -> str:
    value = evidence.value
    if isinstance(value, str):
        return form.clean_text(value)
    show = {
        "ns": form.duration,
        "bytes": form.memory,
        "ratio": form.ratio,
        "bytes_per_s": form.bandwidth,
    }.get(evidence.unit)
    if not math.isfinite(value):
        return f"not a finite number ({value})"
    if show is not None:
        return show(value)
    text = form.count(value) if isinstance(value, int) else form.numbers(value)[0]
    unit = evidence.unit.replace("_per_s", "/s").replace("_", " ")
    if unit == "step":  # its number
        return text
    if unit == "steps" and value == 1:
        unit = "step"
    return f"{text} {unit}" if unit else text


def _describe_hours(hours: float, diagnosis: Diagnosis) -> str:
    """`, 12.4 GPU-hours over 180,000 steps`; empty if negligible."""
    if hours < _MIN_HOURS:
        return ""
    steps = form.plural(diagnosis.scale.num_steps, "step")
    return f", {hours:.3g} {diagnosis.scale.hours_unit} over {steps}"
