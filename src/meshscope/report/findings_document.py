"""Findings as values of the JSON document."""

from typing import SupportsFloat

import msgspec

from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.finding import Estimate, Evidence, Finding
from meshscope.diagnose.pricing import recoverable_hours
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import Diagnosis
from meshscope.report.values import Absent, RankRange, as_number, as_ranges, as_text
from meshscope.simulate.what_if import Gain

REPLAYED = "replayed"
"""The basis of a gain that was had by timing the run again without the cause."""


class EvidenceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One number or fact a finding rests on."""

    name: str
    value: float | int | str
    unit: str
    """`ns`, `bytes`, `ratio`, …; empty for counts and words."""


class ConfidenceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How sure a finding is."""

    level: str
    """`high`, `medium` or `low`."""
    text: str
    p_value: float | None
    """Corrected for all that was looked at; null where no test was made."""


class FindingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, what to change about it, and what that would win."""

    code: str
    name: str
    """The rule's name."""
    title: str
    severity: str
    """`low`, `medium`, `high` or `critical`."""
    summary: str
    ranks: list[RankRange]
    """The culprits; empty: all ranks, or none in particular."""
    first_step: int | None
    last_step: int | None
    """Between which steps it was seen; null: all that were looked at."""
    evidence: list[EvidenceFacts]
    confidence: ConfidenceFacts
    change: str
    saved_ns: float | Absent
    """Per step, if the cause were gone."""
    saved_ratio: float | Absent
    """Of the step."""
    step_ns: float | Absent
    """The step that `saved_ratio` is of."""
    price_basis: str | Absent
    """`replayed`, or how it was added up."""
    recoverable_rank_hours: float | Absent
    """`saved_ns` x steps x ranks."""
    explained_by: str | None
    """The finding that this one is a symptom of."""


class DiagnosisFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules found."""

    findings: list[FindingFacts]
    """The most urgent first; symptoms of others last."""
    worst_severity: str | None
    rules: list[str]
    """Codes of the rules that ran."""
    num_steps: int
    """Steps that `recoverable_rank_hours` counts."""
    num_ranks: int
    has_accelerators: bool
    step_ns: float | Absent
    """Median over steps from one start to the next, gaps included."""
    replay_error_ratio: float | Absent
    """By how much a replay with the durations as measured misses the clock."""
    changed_thresholds: dict[str, float]


def build_diagnosis(diagnosis: Diagnosis) -> DiagnosisFacts:
    """All that was found, as values that JSON can hold."""
    fidelity, worst = diagnosis.fidelity, diagnosis.worst
    return DiagnosisFacts(
        findings=[_finding(finding, diagnosis) for finding in diagnosis.findings],
        worst_severity=None if worst is None else worst.word,
        rules=list(diagnosis.rules),
        num_steps=diagnosis.scale.num_steps,
        num_ranks=diagnosis.scale.num_ranks,
        has_accelerators=diagnosis.scale.has_accelerators,
        step_ns=as_number(diagnosis.step_ns),
        replay_error_ratio=as_number(
            fidelity if isinstance(fidelity, Unavailable) else fidelity.error_ratio
        ),
        changed_thresholds=dict(diagnosis.changed_thresholds),
    )


def _finding(finding: Finding, diagnosis: Diagnosis) -> FindingFacts:
    gain, sure = finding.gain, finding.confidence
    return FindingFacts(
        code=finding.code,
        name=RULES[finding.code].name if finding.code in RULES else "",
        title=as_text(finding.title),
        severity=finding.severity.word,
        summary=as_text(finding.summary),
        ranks=as_ranges(int(rank) for rank in finding.ranks),
        first_step=None if finding.first_step is None else int(finding.first_step),
        last_step=None if finding.last_step is None else int(finding.last_step),
        evidence=[_evidence(one) for one in finding.evidence],
        confidence=ConfidenceFacts(
            level=sure.level.value,
            text=as_text(sure.text),
            p_value=None if sure.p_value is None else float(sure.p_value),
        ),
        change=as_text(finding.change),
        saved_ns=as_number(gain if isinstance(gain, Unavailable) else float(gain.saved_ns)),
        saved_ratio=as_number(gain if isinstance(gain, Unavailable) else float(gain.saved_ratio)),
        step_ns=as_number(gain if isinstance(gain, Unavailable) else float(gain.step_ns)),
        price_basis=_basis(gain),
        recoverable_rank_hours=as_number(recoverable_hours(gain, diagnosis.scale)),
        explained_by=None if finding.explained_by is None else as_text(finding.explained_by),
    )


def _basis(gain: Gain | Estimate | Unavailable) -> str | Absent:
    if isinstance(gain, Unavailable):
        return Absent(as_text(gain.reason))
    return as_text(gain.basis) if isinstance(gain, Estimate) else REPLAYED


def _evidence(evidence: Evidence) -> EvidenceFacts:
    value: float | int | str = evidence.value
    if isinstance(value, str):
        value = as_text(value)
    else:
        number = as_number(_plain(value))
        value = number.unavailable if isinstance(number, Absent) else number
    return EvidenceFacts(name=as_text(evidence.name), value=value, unit=evidence.unit)


def _plain(value: SupportsFloat) -> float | int:
    """Numbers of numpy become Python's; whole ones stay whole."""
    if isinstance(value, int):
        return int(value)
    number = float(value)
    is_whole = not isinstance(value, float) and number.is_integer()
    return int(number) if is_whole else number
