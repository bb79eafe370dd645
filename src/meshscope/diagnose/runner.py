"""Runs all rules on one attempt and puts their findings in order.

Rules do not know of each other. What ties findings together is decided here, after all have run and
independently of their order: a rule that raised becomes a finding, and a finding that speaks of the
same waits as a stronger one is a symptom of it, is demoted to LOW and says so.

Two findings are about the same waits where the rule of the weaker names the stronger's code in
`symptom_of`, or where the replay says so: fixing both saves hardly more than fixing the stronger.
Wrong where a cause is only in reach of a rule that prices it too low: then its symptom stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshscope.analyze.study import Failure, attempt_to
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.pricing import Scale, join_edits
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rule import Rule

if TYPE_CHECKING:
    from meshscope.simulate.what_if import Fidelity

_FAILED_RULE_CODE = "HE001"
"""Runs last: it tells what broke while the others ran."""
_MIN_CAUSE_RATIO = 0.5
"""A cause must win at least this much of what its symptom would."""
_MAX_OWN_RATIO = 0.25
"""A finding that adds less than this of its gain to a stronger one's has no waits of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings about one attempt."""

    findings: tuple[Finding, ...]
    """The most urgent first."""
    rules: tuple[str, ...]
    """Codes of the rules that ran."""
    scale: Scale
    step_ns: float | Unavailable
    """The period of a step that gains are compared with by readers; see `Context.step_ns`."""
    fidelity: "Fidelity | Unavailable"
    """How well the replay that prices findings agrees with the clock."""
    changed_thresholds: Mapping[str, float]

    @property
    def replay_error_ratio(self) -> float | Unavailable:
        """By how much a replay with the durations as measured misses the clock."""
        fidelity = self.fidelity
        return fidelity if isinstance(fidelity, Unavailable) else fidelity.error_ratio

    @property
    def worst(self) -> Severity | None:
        """The highest severity; None without findings."""
        return max((finding.severity for finding in self.findings), default=None)


def diagnose(context: Context, *, rules: Mapping[str, type[Rule]] = RULES) -> Diagnosis:
    """Runs the rules. Never raises for what a rule or an analysis does."""
    _ = context.study.health  # what a report says of damage must not depend on what rules read
    found: list[Finding] = []
    for code in sorted(rules, key=lambda code: (code == _FAILED_RULE_CODE, code)):
        result = _run_rule(rules[code], context)
        if isinstance(result, Failure):
            context.study.failures.append(result)
        else:
            found += result
    explained = _explain_symptoms(sorted(found, key=_order), context, rules)
    return Diagnosis(
        findings=tuple(sorted(explained, key=_order)),
        rules=tuple(sorted(rules)),
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
    )


def _run_rule(rule: type[Rule], context: Context) -> list[Finding] | Failure:
    return attempt_to(f"rule {rule.code}", lambda: rule().run(context))


def _order(finding: Finding) -> tuple[bool, int, float, str, tuple[int, ...], str]:
    """Severity first: it is graded by gain, except where time is not what is lost."""
    return (
        finding.explained_by is not None,
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
    """What rules say of each other. A symptom explains nothing, so causes are settled first."""
    result: list[Finding] = []
    for finding in findings:
        names = rules[finding.code].symptom_of if finding.code in rules else frozenset()
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
    """The strongest cause that leaves the finding hardly anything to win."""
    timeline = known(context.study.timeline)
    if timeline is None:
        return None
    for cause in causes:
        if cause.edit is None or finding.edit is None or finding.saved_ns <= 0:
            continue
        both = known(context.price([join_edits(timeline, (cause.edit, finding.edit))])[0])
        if both is None:
            return None
        if both.saved_ns - cause.saved_ns < _MAX_OWN_RATIO * finding.saved_ns:
            return cause
    return None


def _demote(finding: Finding, cause: Finding) -> Finding:
    return replace(finding, severity=Severity.LOW, explained_by=cause.label)
