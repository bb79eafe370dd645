"""Which findings are about the same lost time: one of them explains the other.

No rule knows another one. What a finding is about is checked on the run: the work or transfers that
its edit removes, replayed with and without those of the other; the steps in which it says that time
is lost, against what the other's edit saves in these steps; or, where time is not what is lost,
what runs out on which ranks.

A rule that says where or when time is lost, not why (`Rule.is_pattern`), is explained by a cause
that covers half of it. Of two causes the larger explains what adds nothing to it; where both save
the same, the one that removes less work is the cause.

Wrong if the only rule that sees a cause prices it too low: then its symptom stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding, StepLoss
from meshscope.diagnose.pricing import join_edits
from meshscope.diagnose.rule import Rule
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit

_MIN_COVERED_RATIO = 0.5
"""Of a pattern's loss that a cause must account for."""
_MAX_OWN_RATIO = 0.25
"""A finding that adds less than this share of its gain to a stronger one is a symptom of it."""
_SAME_RATIO = 0.8
"""Two causes of which the smaller saves this share of the larger save the same."""


def explain_findings(
    findings: Sequence[Finding], context: Context, rules: Mapping[str, type[Rule]]
) -> list[Finding]:
    """Demotes what another finding explains; `findings` are in order, the strongest first."""
    losses = _Losses(context, rules)
    patterns = {one.code for one in findings if one.code in rules and rules[one.code].is_pattern}
    loud = [one for one in findings if one.severity > Severity.LOW]
    causes = [one for one in loud if one.code not in patterns]
    kept: list[Finding] = []
    explained: dict[int, Finding] = {}
    for cause in causes:
        other = next((one for one in kept if losses.is_part(cause, one)), None)
        if other is None:
            kept.append(cause)
        elif losses.is_closer(cause, other):
            explained[id(other)] = cause
            kept[kept.index(other)] = cause
        else:
            explained[id(cause)] = other
    # Of two patterns the one that says where comes before the one that only says when.
    by_place = sorted(
        (one for one in loud if one.code in patterns), key=lambda one: one.edit is None
    )
    for pattern in by_place:
        found = losses.find_cover(pattern, [one for one in kept if one.code not in patterns])
        if found is None:
            found = next((one for one in kept if losses.is_part(pattern, one)), None)
        if found is None:
            kept.append(pattern)
        else:
            explained[id(pattern)] = found
    return [_demote(one, explained.get(id(one))) for one in findings]


def _demote(finding: Finding, cause: Finding | None) -> Finding:
    if cause is None:
        return finding
    return replace(finding, severity=Severity.LOW, explained_by=cause.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """What a replay says of two edits."""

    first_ns: float
    second_ns: float
    both_ns: float


class _Losses:
    """What findings lose, compared two by two."""

    def __init__(self, context: Context, rules: Mapping[str, type[Rule]]) -> None:
        self._context, self._rules = context, rules
        self._steps: dict[int, tuple[StepLoss, ...]] = {}

    def is_part(self, finding: Finding, other: Finding) -> bool:
        """Whether a finding adds hardly anything to a stronger one."""
        if self._have_one_resource(finding, other):
            return True
        if finding.saved_ns <= 0:
            return False
        if finding.lost_steps is not None or other.lost_steps is not None:
            return self._cover(finding, other) > 1.0 - _MAX_OWN_RATIO
        priced = self._price(finding, other)
        if priced is None:
            return False
        own_ns = priced.both_ns - priced.second_ns
        return own_ns < _MAX_OWN_RATIO * min(finding.saved_ns, max(priced.first_ns, 1.0))

    def is_closer(self, finding: Finding, other: Finding) -> bool:
        """Whether a finding saves as much as the stronger one by removing less."""
        if finding.saved_ns < _SAME_RATIO * other.saved_ns:
            return False
        own, others = self._sum_removed(finding.edit), self._sum_removed(other.edit)
        return 0 < own < _SAME_RATIO * others

    def find_cover(self, pattern: Finding, causes: Sequence[Finding]) -> Finding | None:
        """The cause that accounts for most of a pattern, if for half of it."""
        covered = [self._cover(pattern, cause) for cause in causes]
        if not covered or max(covered) < _MIN_COVERED_RATIO:
            return None
        return causes[covered.index(max(covered))]

    def _cover(self, pattern: Finding, cause: Finding) -> float:
        """The share of a pattern's loss that a cause accounts for."""
        if self._have_one_resource(pattern, cause):
            return 1.0
        if pattern.lost_steps is None and cause.lost_steps is None:
            priced = self._price(pattern, cause)
            if priced is None or priced.first_ns <= 0:
                return 0.0
            return 1.0 - (priced.both_ns - priced.second_ns) / priced.first_ns
        # Ranks that do not meet in every step lose it by their own periods, not by the last one's.
        return max(
            _cover_steps(lost, saved)
            for lost in self._find_steps(pattern)
            for saved in self._find_steps(cause)
        )

    def _have_one_resource(self, finding: Finding, other: Finding) -> bool:
        own, shared = (self._rules[one.code].resources for one in (finding, other))
        is_same = bool(own & shared)
        ranks, others = set(finding.ranks), set(other.ranks)
        return is_same and (not ranks or not others or bool(ranks & others))

    def _price(self, first: Finding, second: Finding) -> _Priced | None:
        timeline = known(self._context.study.timeline)
        if timeline is None or first.edit is None or second.edit is None:
            return None
        edits = (first.edit, second.edit)
        gains = self._context.price([*edits, join_edits(timeline, edits)])
        saved = [gain.saved_ns for gain in gains if not isinstance(gain, Unavailable)]
        if len(saved) < len(gains):
            return None
        return _Priced(first_ns=saved[0], second_ns=saved[1], both_ns=saved[2])

    def _find_steps(self, finding: Finding) -> tuple[StepLoss, ...]:
        """In which steps it loses time: as the finding says, or by the replay's two periods."""
        if id(finding) not in self._steps:
            told = finding.lost_steps
            self._steps[id(finding)] = self._replay_steps(finding.edit) if told is None else (told,)
        return self._steps[id(finding)]

    def _replay_steps(self, edit: Edit | None) -> tuple[StepLoss, ...]:
        replay = known(self._context.replay)
        if replay is None or edit is None or replay.fidelity.problem is not None:
            return (StepLoss(step=np.empty(0, np.int64), lost_ns=np.empty(0)),)
        found = (replay.save_by_step_ns(edit, of_ranks=of_ranks) for of_ranks in (False, True))
        return tuple(
            StepLoss(step=replay.timeline.steps[is_replayed], lost_ns=saved_ns[is_replayed])
            for saved_ns, is_replayed in found
        )

    def _sum_removed(self, edit: Edit | None) -> float:
        timeline = known(self._context.study.timeline)
        if edit is None or timeline is None:
            return 0.0
        total = 0.0
        if edit.work_ns is not None:
            total += float(np.abs(measured_work(timeline) - edit.work_ns).sum())
        if edit.transfer_ns is not None and timeline.communication is not None:
            measured = timeline.communication.row_times.transfer_ns
            total += float(np.abs(measured - edit.transfer_ns).sum())
        return total


def _cover_steps(lost: StepLoss, saved: StepLoss) -> float:
    """The share of what is lost in some steps that is saved in these, beyond the other steps.

    Or in a step beside: what a rank loses at its end is lost on the others in the next.
    """
    _, own, others = np.intersect1d(lost.step, saved.step, return_indices=True)
    lost_ns, saved_ns = lost.lost_ns[own], saved.lost_ns[others]
    is_lost = lost_ns > 0
    if not is_lost.any():
        return 0.0
    usual_ns = float(np.median(saved_ns[~is_lost])) if (~is_lost).any() else 0.0
    beyond = np.maximum(saved_ns - usual_ns, 0.0)
    beyond = np.max([beyond, np.append(beyond[1:], 0.0), np.append(0.0, beyond[:-1])], axis=0)
    return float(np.minimum(lost_ns, beyond)[is_lost].sum() / lost_ns[is_lost].sum())
