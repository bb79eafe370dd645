"""Runs all rules on one attempt and puts their findings in order.

Rules do not know each other. The runner connects their findings after all rules have run,
independently of their order: a rule that raised becomes a finding, and a finding about the same
waits as a stronger one is a symptom of it: it names that finding and is demoted to LOW.

Two findings are about the same waits if the weaker one's rule names the stronger one's code in
`symptom_of`, or if a replay shows that fixing both saves hardly more than fixing the stronger.
Wrong if the only rule that sees a cause prices it too low: then its symptom stays.

Where a trace is cut off nothing but that is above LOW. Where records of steps are lost, or devices
were marked in few, findings that rest on these are less sure, and say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from meshscope.analyze.study import Failure, catch_failure
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import (
    Confidence,
    ConfidenceLevel,
    Estimate,
    Finding,
    check_finding,
)
from meshscope.diagnose.ledger_prices import UNNAMED_CODE, settle_findings
from meshscope.diagnose.pricing import Scale, join_edits
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
_HEALTH = "HE"
"""Codes of rules about the recording itself."""
_WITHOUT_TIMELINE = (_HEALTH, "CV", "ME", "HW")
"""Codes of rules that read neither phases nor operations."""
_NO_SOURCES: Mapping[str, str] = MappingProxyType({})
_SAVES_NOTHING = Unavailable("without it a step would not be shorter")
_MIN_CAUSE_RATIO = 0.5
"""A cause must save at least this share of what its symptom would."""
_MAX_OWN_RATIO = 0.25
"""A finding that adds less than this share of its gain to a stronger one is a symptom of it."""


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
    for code in sorted(rules, key=lambda code: (code == _FAILED_RULE_CODE, code)):
        source = f" of {sources[code]}" if code in sources else ""
        result = _run_rule(rules[code], context, source)
        if isinstance(result, Failure):
            context.study.failures.append(result)
        else:
            found += result
    if _has_cut_traces(context):
        found = [one if one.code.startswith(_HEALTH) else _doubt(one) for one in found]
    elif gaps := describe_gaps(context.study):
        found = [_lower_confidence(one, gaps) for one in found]
    found = doubt_noise(settle_findings(found, context), context)
    explained = _explain_symptoms(sorted(found, key=_order), context, rules)
    # What another finding explains needs no second one without a cause.
    explained = [one for one in explained if one.code != UNNAMED_CODE or not one.explained_by]
    return Diagnosis(
        findings=tuple(sorted(explained, key=_order)),
        names={code: rules[code].name for code in sorted(rules)},
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


def _run_rule(rule: type[Rule], context: Context, source: str) -> list[Finding] | Failure:
    def run() -> list[Finding]:
        found = rule().run(context)
        for one in found:
            check_finding(one, rule.code)
            _check_edit(one, context)
        return [_support_price(one, context) for one in found]

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
    is_dead = finding.code == _DEAD_RANK_CODE and finding.severity >= Severity.HIGH
    return (
        finding.explained_by is not None,
        not is_dead,
        -finding.severity,
        -finding.saved_ns,
        finding.code,
        finding.ranks,
        finding.title,
    )


def _explain_symptoms(
    findings: list[Finding], context: Context, rules: Mapping[str, type[Rule]]
) -> list[Finding]:
    """Demotes what a stronger finding explains; `findings` are in order."""
    left = _explain_by_code(findings, rules)
    causes: list[Finding] = []
    result: list[Finding] = []
    for finding in left:
        if finding.severity is Severity.LOW or finding.edit is None:
            result.append(finding)
            continue
        cause = _find_same_waits(finding, causes, context)
        if cause is None:
            causes.append(finding)
            result.append(finding)
        else:
            result.append(_demote(finding, cause))
    return result


def _explain_by_code(findings: list[Finding], rules: Mapping[str, type[Rule]]) -> list[Finding]:
    """Applies `Rule.symptom_of`. A symptom explains nothing, so causes are settled first."""
    result: list[Finding] = []
    for finding in findings:
        names = rules[finding.code].symptom_of if finding.code in rules else frozenset()
        names = names if finding.symptom_of is None else finding.symptom_of
        causes = [
            other
            for other in findings
            if other.code in names
            and other.severity > Severity.LOW
            and other.saved_ns >= _MIN_CAUSE_RATIO * finding.saved_ns
        ]
        is_symptom = bool(causes) and finding.severity > Severity.LOW
        result.append(_demote(finding, causes[0]) if is_symptom else finding)
    return result


def _find_same_waits(finding: Finding, causes: list[Finding], context: Context) -> Finding | None:
    """The strongest cause after which the finding would save hardly anything."""
    timeline = known(context.study.timeline)
    if timeline is None:
        return None
    for cause in causes:
        if cause.edit is None or finding.edit is None or finding.saved_ns <= 0:
            continue
        both = known(context.price_edit(join_edits(timeline, (cause.edit, finding.edit))))
        if both is None:
            return None
        if both.saved_ns - cause.saved_ns < _MAX_OWN_RATIO * finding.saved_ns:
            return cause
    return None


def _demote(finding: Finding, cause: Finding) -> Finding:
    return replace(finding, severity=Severity.LOW, explained_by=cause.label)
