"""What the ledger of lost time shows and no other rule names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.stacks import NO_LINES, SampledLines, StackSamples
from meshscope.core.unavailable import need
from meshscope.core.verdict.severity import Severity, grade
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.pricing import join_edits
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules.step_time import ADVICE
from meshscope.diagnose.views.own_parts import MAX_OWN_PART_RATIO, OWN_PART, is_own_part
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.wording import duration, name_ranks, plural, ratio
from meshscope.numerics.chance import MIN_STEPS
from meshscope.simulate.ledger.ledger import Entry, Ledger
from meshscope.simulate.ledger.losses import Loss, LossKind
from meshscope.simulate.ledger.peer_cells import BETWEEN_STEPS, Place
from meshscope.store.read.arrays import Bools, Int64s

_ASIDES = frozenset(("logging", "checkpoint"))
"""Phases that a step could do without. Forwards without gradients in every step (`eval`) are part
of training where an agent acts or a teacher answers."""
_ACTING = frozenset(("eval", "forward"))
"""Between steps: what goes with these in phases of the program's own is part of training, too."""
_MIN_LOST_RATIO = Threshold(
    name="lost_time_min_ratio",
    default=0.03,
    meaning="share of the step that a loss no other rule names must cost",
)
_MIN_LOST_ERRORS = Threshold(
    name="lost_time_min_errors",
    default=6.0,
    meaning="excess of a rank over its peers, in standard errors over blocks of steps",
)


_MIN_LOST_PAUSES = Threshold(
    name="lost_time_min_pauses",
    default=5,
    meaning="steps in which a rank that is not always slow must take far longer than its peers",
)


_MIN_OWN_RATIO = Threshold(
    name="lost_time_min_own_ratio",
    default=0.1,
    meaning="share of the step that all ranks must spend between steps in a phase of the program's",
)


class UnnamedLoss(Rule):
    """Some ranks take longer than their peers somewhere, and no other rule says why.

    What it finds: ranks that spend more time than their peers in a phase, in no phase or between
    steps, stages of a pipeline that take longer than their size says, and what all ranks do in most
    steps beside training (logging, saving), at a cost of `lost_time_min_ratio` of the step or
    more. Of a phase of the program's own name, on all ranks between steps, nobody knows whether
    training needs it: from `lost_time_min_own_ratio` on it is reported, as medium at most, unless
    the model is called there, as where an agent acts.

    Why it matters: all others wait for them. Two such losses that hide each other save little when
    one is removed, and much together.

    How it is measured: the ledger of lost time (docs/simulate.md): each loss gets its share of what
    a replay without all of them saves. What comes exactly once in n steps is priced as that, not by
    how many of the steps that were looked at happen to have it. A rank stands out if its mean
    excess over the median of its peers is `lost_time_min_errors` standard errors or more, or if
    nearly all long steps in a place are its own (now and then, or in bursts),
    `lost_time_min_pauses` of them or more. The runner drops the finding where another one removes
    the same work.

    What to change: look at what these ranks do there; a stack sampled in that place names the line.

    When it is wrong: if ranks are given different work on purpose. Stages are compared by their
    layers, FLOPs and parameters; where these are not known, or the stage computes the loss as well,
    the finding is one level lower and says so. So it is where only some long steps are certain, and
    not the mean. What ranks do alone in most steps, in a phase that training may need, may be their
    part of it (one updates weights for all): below a tenth of a step it is LOW.
    """

    code = "LT001"
    name = "lost-time"
    thresholds = (_MIN_LOST_RATIO, _MIN_LOST_ERRORS, _MIN_LOST_PAUSES, _MIN_OWN_RATIO)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        """One for all that the same ranks take longer for, one for each other loss."""
        ledger = need(context.ledger)
        if len(need(context.study.timeline).steps) < MIN_STEPS:
            return
        least_ns = context.thresholds[_MIN_LOST_RATIO] * ledger.replayed_ns
        certain = [
            (entry, loss, loss.place)
            for entry in ledger.entries
            if (loss := entry.loss) is not None
            and loss.place is not None
            and self._is_certain(context, loss)
        ]
        together: dict[object, list[_Lost]] = {}
        for entry, loss, place in certain:
            is_theirs = loss.kind in _BLAMED or place.is_between
            key = (loss.ranks, loss.kind) if is_theirs else id(entry)
            together.setdefault(key, []).append(_Lost(entry=entry, loss=loss, place=place))
        for lost in together.values():
            if sum(one.entry.share_ns for one in lost) >= least_ns:
                yield _describe(self.code, context, ledger, lost)

    def _is_certain(self, context: Context, loss: Loss) -> bool:
        if loss.kind is LossKind.ASIDE:
            return _is_named_aside(loss) or self._is_own_aside(context, loss)
        has_pauses = loss.num_pauses >= context.thresholds[_MIN_LOST_PAUSES]
        return has_pauses or (loss.kind in _BLAMED and _is_steady(context, loss))

    def _is_own_aside(self, context: Context, loss: Loss) -> bool:
        """What all ranks do in most steps in a phase of the program's own, without the model."""
        ledger = need(context.ledger)
        acting = [
            one.loss
            for one in ledger.entries
            if one.loss is not None
            and one.loss.place is not None
            and one.loss.place.is_between
            and one.loss.place.phase in _ACTING
        ]
        least_ns = context.thresholds[_MIN_OWN_RATIO] * ledger.replayed_ns
        is_own = loss.place is not None and loss.place.is_own
        return (
            is_own
            and _is_usual(loss)
            and loss.excess_ns >= least_ns
            and not any(_is_usual(one) for one in acting)
        )


def _is_named_aside(loss: Loss) -> bool:
    """What all ranks do in most steps, beside training."""
    return loss.place is not None and loss.place.phase in _ASIDES and _is_usual(loss)


def _is_usual(loss: Loss) -> bool:
    """Whether it is in most steps."""
    return 2 * int((loss.step_ns > 0).sum()) > len(loss.step_ns)


_MIN_REGULAR_PAUSES = 4
"""From which on equal distances are no chance."""
_MIN_REGULAR_RATIO = 0.9
"""Of all that is lost, in these steps."""
_BLAMED = frozenset((LossKind.SLOWER, LossKind.LONGER_STAGE))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lost:
    entry: Entry
    loss: Loss
    place: Place


def _name_places(lost: Sequence[_Lost]) -> str:
    """`in forward and in backward`, `between steps`, `in eval and in no phase, between steps`."""
    places = list(dict.fromkeys(one.place for one in lost))
    if len(places) > 1 and all(place.is_between for place in places):
        names = [f"in {place.phase or 'no phase'}" for place in places]
        return f"{' and '.join(names)}, {BETWEEN_STEPS}"
    return " and ".join(_name_place(place) for place in places)


def _name_place(place: Place) -> str:
    name = place.name
    return name if name.startswith(("outside ", "between ")) else f"in {name}"


def _describe(code: str, context: Context, ledger: Ledger, lost: Sequence[_Lost]) -> Finding:
    loss, timeline = lost[0].loss, need(context.study.timeline)
    if loss.kind is LossKind.ASIDE:
        return _describe_aside(code, ledger, lost)
    ranks, where = loss.ranks, _name_places(lost)
    every = _find_interval(loss, timeline.steps)
    usual = 1.0 if every is None else len(loss.step_ns) / (every * loss.num_pauses)
    share_ns = usual * sum(one.entry.share_ns for one in lost)
    alone_ns = usual * sum(one.entry.alone_ns for one in lost)
    excess_ns = usual * sum(one.loss.excess_ns for one in lost)
    share = share_ns / ledger.replayed_ns
    lines = next((found for one in lost if (found := _find_lines(context, one)).lines), NO_LINES)
    take = "takes" if len(ranks) == 1 else "take"
    phases = [one.place.phase for one in lost if one.place.phase]
    has_name = phases or lines.lines
    do = "it does" if len(ranks) == 1 else "they do"
    unknown = "" if has_name else f" Nothing recorded names what {do} there."
    others = "other stages" if loss.kind is LossKind.LONGER_STAGE else "peers"
    is_steady = _is_steady(context, loss)
    is_theirs = (
        share < MAX_OWN_PART_RATIO
        and all(_is_usual(one.loss) for one in lost)
        and is_own_part(timeline, ranks, [one.place for one in lost])
    )
    confidence = _state_confidence(loss, is_steady=is_steady)
    if is_theirs:
        confidence = Confidence(level=ConfidenceLevel.LOW, text=f"{confidence.text}; {OWN_PART}")
    if not is_steady:
        where += f" in {loss.num_pauses} of {plural(len(loss.step_ns), 'step')}"
    basis = "its share of a replay without any loss"
    if every is not None:
        basis += f", as it is once in {every} steps"
    return Finding(
        code=code,
        title=f"{name_ranks(ranks)} {take} longer {where}",
        severity=Severity(max(Severity.LOW, grade(share) - _is_doubtful(loss, is_steady=is_steady)))
        if not is_theirs
        else Severity.LOW,
        summary=f"{name_ranks(ranks)} {take} {duration(excess_ns)} longer than {others} "
        f"{where}, {duration(share_ns)} of a step ({ratio(share)}).{unknown}"
        f"{write_lines(lines)}",
        ranks=ranks,
        evidence=(
            Evidence(name=f"excess over {others} per step", value=excess_ns, unit="ns"),
            Evidence(name="saved if removed alone", value=alone_ns, unit="ns"),
            Evidence(name="share of what is lost", value=share_ns, unit="ns"),
            *list_evidence(lines),
        ),
        confidence=confidence,
        change=next((ADVICE[name] for name in phases if name in ADVICE), _CHANGE),
        gain=Estimate(
            saved_ns=share_ns,
            step_ns=ledger.replayed_ns,
            basis=basis,
            alone_ns=max(0.0, alone_ns) if alone_ns < share_ns / 2 else None,
        ),
        edit=join_edits(timeline, [one.entry.edit for one in lost])
        if len(lost) > 1
        else lost[0].entry.edit,
    )


def _find_interval(loss: Loss, steps: Int64s) -> int | None:
    """Every how many steps it comes, where all its pauses are as far apart; None where not.

    A window of 40 steps has five or six of what comes every eight: which, is chance.
    """
    if loss.num_pauses < _MIN_REGULAR_PAUSES:
        return None
    longest = np.sort(np.argsort(-loss.step_ns, kind="stable")[: loss.num_pauses])
    is_all = float(loss.step_ns[longest].sum()) >= _MIN_REGULAR_RATIO * float(loss.step_ns.sum())
    apart = np.unique(np.diff(steps[longest]))
    return int(apart[0]) if is_all and len(apart) == 1 and apart[0] > 1 else None


def _describe_aside(code: str, ledger: Ledger, lost: Sequence[_Lost]) -> Finding:
    """What all ranks do, and a step could do without."""
    share_ns = sum(one.entry.share_ns for one in lost)
    where, first = _name_places(lost), lost[0]
    gain = Estimate(
        saved_ns=share_ns,
        step_ns=ledger.replayed_ns,
        basis="its share of a replay without any loss",
    )
    severity = grade(gain.saved_ratio)
    confidence = Confidence(level=ConfidenceLevel.HIGH, text="counted, not estimated")
    change = ADVICE.get(first.place.phase, "Do it less often, or in another thread.")
    if any(one.place.is_own for one in lost):
        severity = min(Severity.MEDIUM, severity)
        confidence = Confidence(level=ConfidenceLevel.LOW, text="training may need what has a name")
        change = f"If training does not need it in every step: {change[0].lower()}{change[1:]}"
    return Finding(
        code=code,
        title=f"all ranks spend time {where}",
        severity=severity,
        summary=f"all ranks spend {duration(first.loss.excess_ns)} {where} in most steps, "
        f"{ratio(gain.saved_ratio)} of a step.",
        evidence=(Evidence(name="share of what is lost", value=share_ns, unit="ns"),),
        confidence=confidence,
        change=change,
        gain=gain,
        edit=first.entry.edit,
    )


_CHANGE = (
    "Look at what these ranks do there, and take it out of the step; recorder.phase(…) gives it a "
    "name."
)


def _is_steady(context: Context, loss: Loss) -> bool:
    """Whether the mean over steps is certain, and not only that some steps are far too long."""
    is_sure = loss.num_errors >= context.thresholds[_MIN_LOST_ERRORS]
    return loss.kind is not LossKind.PAUSES and is_sure


def _is_doubtful(loss: Loss, *, is_steady: bool) -> bool:
    """Of ranks that are blamed for some long steps, the mean over all steps is not certain."""
    return bool(loss.doubt) or (loss.kind in _BLAMED and not is_steady)


def _state_confidence(loss: Loss, *, is_steady: bool) -> Confidence:
    if not is_steady:
        text = (
            f"{plural(loss.num_pauses, 'step')} far beyond its peers'; other programs do that, too"
        )
        if _is_doubtful(loss, is_steady=is_steady):
            text += ", and the mean over all steps is not certain"
        return Confidence(level=ConfidenceLevel.MEDIUM, text=text)
    text = f"{loss.num_errors:.0f} standard errors over {plural(len(loss.step_ns), 'step')}"
    if loss.doubt:
        return Confidence(level=ConfidenceLevel.LOW, text=f"{text}; {loss.doubt}")
    if loss.kind is LossKind.LONGER_STAGE:
        text += "; stages are compared by layers, FLOPs and parameters, as far as recorded"
    return Confidence(level=ConfidenceLevel.MEDIUM, text=text)


def _find_lines(context: Context, lost: _Lost) -> SampledLines:
    place = lost.place

    def choose(samples: StackSamples) -> Bools:
        return samples.find_in_phase(place.phase, is_between=place.is_between)

    return find_lines(context.study, lost.loss.ranks, choose)
