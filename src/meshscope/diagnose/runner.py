"""Runs all rules on one attempt and puts their findings in order.

Rules do not know each other. The runner connects their findings after all rules have run,
independently of their order: a rule that raised becomes a finding, and a finding about the same
time as another one is a symptom of it (`explaining`): it names that finding and is demoted to LOW.

Where a trace is cut off nothing but that is above LOW. Where records of steps are lost, or devices
were marked in few, findings that rest on these are less sure, and say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from meshscope.analyze.study import Failure, catch_failure
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.explaining import explain_findings
from meshscope.diagnose.finding import (
    Confidence,
    ConfidenceLevel,
    Estimate,
    Finding,
    check_finding,
)
from meshscope.diagnose.ledger_prices import UNNAMED_CODE, settle_findings
from meshscope.diagnose.onsets import date_findings
from meshscope.diagnose.pricing import Scale
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.lost_steps import describe_gaps
from meshscope.diagnose.views.shared_cores import doubt_noise
from meshscope.store.read.columns import ProblemKind

if TYPE_CHECKING:
    from meshscope.simulate.ledger.ledger import Ledger
    from meshscope.simulate.what_if import Fidelity

_FAILED_RULE_CODE = "HE001"
"""Runs last: it reports errors of the other rules."""
_DEAD_RANK_CODE = "HE002"
_FULL_MEMORY_CODE = "ME006"
_HEALTH = "HE"
"""Codes of rules about the recording itself."""
_WITHOUT_TIMELINE = (_HEALTH, "CV", "ME", "HW")
"""Codes of rules that read neither phases nor operations."""
_NO_SOURCES: Mapping[str, str] = MappingProxyType({})
_SAVES_NOTHING = Unavailable("without it a step would not be shorter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings about one attempt."""

    findings: tuple[Finding, ...]
    """The most urgent first."""
    names: Mapping[str, str]
    """Code to name of the rules that ran, by code."""
    scale: Scale
    step_ns: float | Unavailable
    """The step period that readers compare gains with; see `Study.step_ns`."""
    fidelity: "Fidelity | Unavailable"
    """How well the replay that prices findings agrees with the clock."""
    changed_thresholds: Mapping[str, float]
    ledger: "Ledger | Unavailable"
    """Where the time between the measured step and the best one goes."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Code to reason of rules that could not look, or not at everything."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Codes of the rules that ran."""
        return tuple(self.names)

    @property
    def replay_error_ratio(self) -> float | Unavailable:
        """Error of a replay with measured durations against the clock."""
        fidelity = self.fidelity
        return fidelity if isinstance(fidelity, Unavailable) else fidelity.error_ratio

    @property
    def worst(self) -> Severity | None:
        """The highest severity; None without findings."""
        return max((finding.severity for finding in self.findings), default=None)


def diagnose(
    context: Context,
    *,
    rules: Mapping[str, type[Rule]] = RULES,
    sources: Mapping[str, str] = _NO_SOURCES,
) -> Diagnosis:
    """Never raises, whatever a rule or an analysis raises.

    `sources` has, by code, the file or package of rules that are not ours.
    """
    _ = context.study.health  # damage must be reported whatever the rules read
    found: list[Finding] = []
    not_run: dict[str, str] = {}
    for code in sorted(rules, key=lambda code: (code == _FAILED_RULE_CODE, code)):
        source = f" of {sources[code]}" if code in sources else ""
        result = _run_rule(rules[code], context, source)
        if isinstance(result, Failure):
            context.study.failures.append(result)
            not_run[code] = f"it failed: {result.error}"
        else:
            found += result[0]
            not_run |= {} if result[1] is None else {code: result[1].reason}
    if _has_cut_traces(context):
        found = [one if one.code.startswith(_HEALTH) else _doubt(one) for one in found]
    elif gaps := describe_gaps(context.study):
        found = [_lower_confidence(one, gaps) for one in found]
    found = doubt_noise(settle_findings(found, context), context)
    explained = explain_findings(sorted(found, key=_order), context, rules)
    # What another finding explains needs no second one without a cause.
    explained = [one for one in explained if one.code != UNNAMED_CODE or not one.explained_by]
    explained = date_findings(_explain_deaths(explained), context)
    return Diagnosis(
        findings=tuple(sorted(explained, key=_order)),
        names={code: rules[code].name for code in sorted(rules)},
        not_run=not_run,
        scale=Scale(
            num_steps=context.study.steps.num_steps,
            num_ranks=context.study.num_ranks,
            has_accelerators=context.study.has_accelerators,
        ),
        step_ns=context.study.step_ns,
        fidelity=context.replay
        if isinstance(context.replay, Unavailable)
        else context.replay.fidelity,
        changed_thresholds=context.thresholds.changed,
        ledger=context.ledger,
    )


def _explain_deaths(findings: list[Finding]) -> list[Finding]:
    """A rank that ended because memory was full needs no second finding that it ended."""
    full = next((one for one in findings if _is_death(one) and one.code == _FULL_MEMORY_CODE), None)
    if full is None:
        return findings
    return [
        replace(one, severity=Severity.LOW, explained_by=full.label)
        if one.code == _DEAD_RANK_CODE and one.ranks and set(one.ranks) <= set(full.ranks)
        else one
        for one in findings
    ]


def _is_death(finding: Finding) -> bool:
    """Whether the job makes no more steps because of it."""
    is_full = finding.code == _FULL_MEMORY_CODE and finding.severity is Severity.CRITICAL
    return is_full or (finding.code == _DEAD_RANK_CODE and finding.severity >= Severity.HIGH)


def _has_cut_traces(context: Context) -> bool:
    """A profiler writes hosts before devices: the rest may be most of a device's work."""
    study = context.study
    problems = study.health.problems if study.attempt.is_from_traces else ()
    return any(problem.kind is ProblemKind.CUT for problem in problems)


def _doubt(finding: Finding) -> Finding:
    text = "a trace is cut off: what its missing part would show is not known"
    confidence = Confidence(level=ConfidenceLevel.LOW, text=text)
    return replace(finding, severity=Severity.LOW, confidence=confidence)


def _lower_confidence(finding: Finding, gaps: str) -> Finding:
    """Of a finding that rests on the timeline, where steps are missing in it."""
    if finding.code.startswith(_WITHOUT_TIMELINE):
        return finding
    sure = finding.confidence
    level = ConfidenceLevel.MEDIUM if sure.level is ConfidenceLevel.HIGH else ConfidenceLevel.LOW
    return replace(finding, confidence=replace(sure, level=level, text=f"{sure.text}; {gaps}"))


def _run_rule(
    rule: type[Rule], context: Context, source: str
) -> tuple[list[Finding], Unavailable | None] | Failure:
    def run() -> tuple[list[Finding], Unavailable | None]:
        found, missing = rule().examine(context)
        for one in found:
            check_finding(one, rule.code)
            _check_edit(one, context)
        return [_support_price(one, context) for one in found], missing

    return catch_failure(f"rule {rule.code}{source}", run)


def _check_edit(finding: Finding, context: Context) -> None:
    """Raises if an edit is not one of this run: edits are joined and compared piece by piece."""
    timeline = None if finding.edit is None else known(context.study.timeline)
    if finding.edit is None or timeline is None or finding.edit.work_ns is None:
        return
    shape = np.shape(finding.edit.work_ns)
    if shape != (len(timeline.pieces),):
        raise TypeError(f"an edit has work of shape {shape} for {len(timeline.pieces)} pieces")


def _support_price(finding: Finding, context: Context) -> Finding:
    """Without a price that no replay supports, or that is none."""
    gain = finding.gain
    if isinstance(gain, Unavailable):
        return finding
    replay = known(context.replay)
    problem = None if replay is None else replay.fidelity.problem
    if isinstance(gain, Estimate):
        problem = None
    if problem is not None:  # a pipeline has a replay of its own, which may agree with the clock
        return replace(finding, gain=problem, severity=min(finding.severity, Severity.HIGH))
    return finding if gain.saved_ns > 0 else replace(finding, gain=_SAVES_NOTHING)


def _order(finding: Finding) -> tuple[bool, bool, int, float, str, tuple[int, ...], str]:
    """A dead rank, then by severity: it is graded by gain, except where the loss is not time.

    A job with a dead rank makes no more steps; what its steps cost before comes second.
    """
    return (
        finding.explained_by is not None,
        not _is_death(finding),
        -finding.severity,
        -finding.saved_ns,
        finding.code,
        finding.ranks,
        finding.title,
    )
