"""Findings as text: the most urgent in the first line, then each with evidence, change and price.

Findings above LOW are shown in full, up to a number; those that are LOW in a line each, because on
a healthy run there is nothing else to say.
"""

from meshscope.report import format as form
from meshscope.report.findings_document import DiagnosisFacts, EvidenceFacts, FindingFacts
from meshscope.report.screen import ScreenWriter
from meshscope.report.values import Absent, list_ranges

MAX_SHOWN = 6
"""Findings shown in full."""
MAX_LOW_SHOWN = 4
MAX_EVIDENCE = 6
LOW = "low"
_STYLES = {"critical": "bold red", "high": "red", "medium": "yellow", "low": "dim"}


def describe_worst(diagnosis: DiagnosisFacts) -> str:
    """The most urgent finding in a sentence; empty when none is above LOW."""
    if not diagnosis.findings or diagnosis.findings[0].severity == LOW:
        return ""
    first = diagnosis.findings[0]
    title = _capitalize(form.clean_text(first.title))
    price = describe_price(first)
    return f"{title}: fixing it saves {price}." if price else f"{title}."


def describe_price(finding: FindingFacts) -> str:
    """`31.0 ms of 190 ms a step (16 %)`; empty without a price."""
    saved, step, share = finding.saved_ns, finding.step_ns, finding.saved_ratio
    if isinstance(saved, Absent) or isinstance(step, Absent) or isinstance(share, Absent):
        return ""
    return f"{form.duration(saved)} of {form.duration(step)} a step ({form.ratio(share)})"


def write_findings(out: ScreenWriter, diagnosis: DiagnosisFacts) -> None:
    """The section."""
    urgent = [finding for finding in diagnosis.findings if finding.severity != LOW]
    low = [finding for finding in diagnosis.findings if finding.severity == LOW]
    out.section("Findings", _describe_basis(diagnosis))
    if not urgent:
        out.line(f"none above low, by {form.plural(len(diagnosis.rules), 'rule')}")
    for finding in urgent[:MAX_SHOWN]:
        _write_finding(out, finding, diagnosis)
    if len(urgent) > MAX_SHOWN:
        out.line(f"and {form.plural(len(urgent) - MAX_SHOWN, 'more finding')} (see --json)", "dim")
    for finding in low[:MAX_LOW_SHOWN]:
        out.line(f"low  {finding.code}  {_describe_low(finding)}", "dim")
    if len(low) > MAX_LOW_SHOWN:
        more = form.plural(len(low) - MAX_LOW_SHOWN, "more finding")
        out.line(f"and {more} of low severity (see --json)", "dim")


def _describe_basis(diagnosis: DiagnosisFacts) -> str:
    error = diagnosis.replay_error_ratio
    if isinstance(error, Absent):
        return "not priced by replay"
    return f"priced by a replay {form.ratio(error)} off the clock"


def _describe_low(finding: FindingFacts) -> str:
    title = form.clean_text(finding.title)
    if finding.explained_by is not None:
        return f"{title}; explained by {form.clean_text(finding.explained_by)}"
    price = describe_price(finding)
    return f"{title}, {price}" if price else title


def _write_finding(out: ScreenWriter, finding: FindingFacts, diagnosis: DiagnosisFacts) -> None:
    title = form.clean_text(finding.title)
    out.line(f"{finding.severity}  {finding.code}  {title}", _STYLES[finding.severity])
    facts = [("  What", _capitalize(form.clean_text(finding.summary, 600)))]
    price = _describe_worth(finding, diagnosis)
    if price:
        facts.append(("  Saves", price))
    facts.append(("  Where", _describe_place(finding)))
    if finding.evidence:
        shown = [describe_evidence(one) for one in finding.evidence[:MAX_EVIDENCE]]
        facts.append(("  Evidence", "; ".join(shown)))
    facts.append(("  Change", form.clean_text(finding.change, 600)))
    sure = finding.confidence
    facts.append(("  Sure", f"{sure.level}: {form.clean_text(sure.text)}"))
    out.facts(facts)


def _describe_worth(finding: FindingFacts, diagnosis: DiagnosisFacts) -> str:
    price, hours = describe_price(finding), finding.recoverable_rank_hours
    if not price or isinstance(hours, Absent):
        return ""
    unit = "GPU-hours" if diagnosis.has_accelerators else "rank-hours"
    basis = form.or_dash(finding.price_basis, form.clean_text)
    steps = form.plural(diagnosis.num_steps, "step")
    return f"{price}, {_three_digits(hours)} {unit} over {steps}; {basis}"


def _describe_place(finding: FindingFacts) -> str:
    ranks = list_ranges(finding.ranks)
    where = form.name_ranks(ranks) if len(ranks) else "all ranks"
    first, last = finding.first_step, finding.last_step
    if first is None and last is None:
        return where
    if first == last:
        return f"{where}, step {first}"
    begin = "" if first is None else f" from {first}"
    end = "" if last is None else f" to {last}"
    return f"{where}, steps{begin}{end}"


def describe_evidence(evidence: EvidenceFacts) -> str:
    """`work of rank 5 in forward 62.0 ms`."""
    return f"{form.clean_text(evidence.name)} {_describe_value(evidence)}"


def _describe_value(evidence: EvidenceFacts) -> str:
    value = evidence.value
    if isinstance(value, str):
        return form.clean_text(value)
    show = {
        "ns": form.duration,
        "bytes": form.memory,
        "ratio": form.ratio,
        "bytes_per_s": form.bandwidth,
    }.get(evidence.unit)
    if show is not None:
        return show(value)
    text = form.count(value) if isinstance(value, int) else form.numbers(value)[0]
    unit = evidence.unit.replace("_per_s", "/s").replace("_", " ")
    return f"{text} {unit}" if unit else text


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value >= 0.001 or not value else f"{value:.1g}"


def _capitalize(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
