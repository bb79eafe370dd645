"""Rules about training itself: the loss, the gradient norm, updates that were not made.

They cost no step time, so severity depends on what they mean for the run: all steps after a
loss that is not a number are lost.
"""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.study import Study
from meshscope.analyze.training.convergence import (
    Convergence,
    JobSeries,
    LossCourse,
    NonFinite,
    find_level_change,
)
from meshscope.analyze.training.loss_rises import find_rises
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity, grade
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import count, name_ranks, p_value, plural, ratio
from meshscope.numerics.joint_events import JointEvents, find_joint_events
from meshscope.numerics.spikes import Spike, find_spikes

MIN_SPIKES = Threshold(
    name="loss_spikes_min_count",
    default=3,
    meaning="number of loss spikes from which they are reported",
)
_MANY_SPIKES_RATIO = Threshold(
    name="loss_spikes_many_ratio",
    default=0.01,
    meaning="share of steps that are spikes, from which the finding is medium",
)
_EXPLODING_FACTOR = Threshold(
    name="grad_norm_exploding_factor",
    default=10,
    minimum=1.0,
    meaning="gradient norm at the end over that of the middle of the run, from which it explodes",
)
_VANISHING_FACTOR = Threshold(
    name="grad_norm_vanishing_factor",
    default=0.01,
    meaning="the same ratio, below which it vanishes",
)
_SLOW_STEP_RATIO = Threshold(
    name="joint_slow_step_min_ratio",
    default=0.5,
    meaning="by which a step must be longer than its neighbours to count as slow",
)
_MAX_JOINT_CHANCE = Threshold(
    name="joint_max_chance_ratio",
    default=0.01,
    meaning="chance of as many joint events among independent signals",
)
_MIN_SKIPPED_RATIO = Threshold(
    name="skipped_min_ratio",
    default=0.03,
    meaning="share of the updates after the first tenth of the run that were skipped",
)

NOT_TIME = Unavailable("it costs no step time")
_MIN_SKIPPED = 3
_MAX_LISTED = 8


class LossNotFinite(Rule):
    """The loss is NaN or infinite.

    What it finds: values of the loss, on any rank, that are not finite numbers.

    Why it matters: one such update makes every weight NaN, and all steps after it are lost; if the
    update is skipped, that step is lost.

    How it is measured: all values of every rank are counted. The finding names the first step that
    has one, and the ranks that had one there: after one update all have it. Where losses are
    sampled, those of the steps since the last sample are read once one is not finite; on devices
    they are not kept, and the finding says between which steps it began. Ranks that log the job's
    loss all have it at once, wherever it began; then the ranks are named whose own loss (the
    recorder's `backward_loss`, the engine's `own_loss`) is not finite in that step, unless it is so
    on all: then the weights were no numbers any more.

    What to change: go back to a checkpoint before the first one; look at the batch of that step;
    lower the learning rate, clip gradients, scale the loss, compute softmax and norms in float32.

    When it is wrong: if NaN is logged on purpose for a step without a loss.
    """

    code = "CV001"
    resources = frozenset({"finite numbers"})
    name = "loss-not-finite"
    severities = (Severity.HIGH, Severity.CRITICAL)

    def find(self, context: Context) -> Iterable[Finding]:
        found = need(context.study.convergence)
        if found.loss_nonfinite is None:
            return
        bad = found.loss_nonfinite
        is_everywhere = len(bad.first_ranks) == len(context.study.attempt.ranks) > 1
        where = "on all ranks" if is_everywhere else f"on {name_ranks(bad.first_ranks)}"
        since = "and stays so" if bad.is_lasting else f"last in step {bad.last_step}"
        before = bad.last_finite_step
        if before is not None and before + 1 < bad.first_step:
            where += f" (the last one known before it is that of step {before})"
        origin = found.loss_origin if is_everywhere else ()
        when = f"from step {bad.first_step} on" if bad.is_lasting else f"in step {bad.first_step}"
        by = f", by {name_ranks(origin)}" if origin else ""
        yield Finding(
            code=self.code,
            title=f"the loss is {bad.first_kind} {when}{by}",
            severity=Severity.CRITICAL if bad.is_lasting else Severity.HIGH,
            summary=f"The loss is {bad.first_kind} first in step {bad.first_step} {where}, {since}"
            f": {plural(bad.num_values, 'value')} in {plural(bad.num_steps, 'step')}."
            f"{_say_origin(context.study, origin)}{_say_gradients(found, bad)}",
            # Where all have it at once, the job's loss was logged.
            ranks=origin if is_everywhere else bad.first_ranks,
            first_step=bad.first_step,
            last_step=bad.last_step,
            evidence=(
                Evidence(name="values that are not finite", value=bad.num_values),
                Evidence(name="steps that have one", value=bad.num_steps, unit="steps"),
                *_rate_evidence(found, bad.first_step),
            ),
            change="Go back to a checkpoint before it, look at that step's batch, and lower the "
            "learning rate, clip gradients or compute the loss in float32.",
            gain=NOT_TIME,
        )


def _say_origin(study: Study, origin: tuple[int, ...]) -> str:
    """Where the job's loss got it from."""
    if not origin:
        return ""
    layout = known(study.layout)
    is_cut = layout is not None and (layout.degree("pp") > 1 or layout.degree("tp") > 1)
    among = " or those that compute the same samples with it" if is_cut else ""
    return f" In that step only the own loss of {name_ranks(origin)} is so: there{among} it began."


def _say_gradients(found: Convergence, bad: NonFinite) -> str:
    """Whether gradients were bad before the loss was."""
    norm = found.norm_nonfinite
    if norm is None or norm.first_step >= bad.first_step:
        return ""
    return f" The gradient norm is {norm.first_kind} before it, from step {norm.first_step} on."


def _rate_evidence(found: Convergence, step: int) -> tuple[Evidence, ...]:
    """The learning rate in a step, where one was logged."""
    rate = _value_at(found.learning_rate, step)
    return () if rate is None else (Evidence(name=f"learning rate in step {step}", value=rate),)


def _value_at(series: JobSeries | Unavailable, step: int) -> float | None:
    """The last value at or before a step."""
    if isinstance(series, Unavailable):
        return None
    row = int(np.searchsorted(series.step, step, side="right")) - 1
    return float(series.value[row]) if row >= 0 else None


class LossDiverged(Rule):
    """The loss has left its best level and stays above it.

    What it finds: a loss whose last tenth lies above the best level reached before by 10 % and by
    six times the noise, with no value back near that level.

    Why it matters: training no longer makes progress, and rarely recovers by itself.

    How it is measured: the best level is the lowest running median of nine steps; the noise is the
    spread about that median.

    What to change: go back to the checkpoint before it rose, with a lower learning rate, gradient
    clipping, or a longer warm-up; look at the data of the steps in which it began.

    When it is wrong: if the data or the task changes during the run, and for numbers that are meant
    to rise.
    """

    code = "CV002"
    name = "loss-diverged"
    severities = (Severity.HIGH, Severity.HIGH)

    def find(self, context: Context) -> Iterable[Finding]:
        found = need(context.study.convergence)
        if found.divergence is None:
            return
        gone = found.divergence
        yield Finding(
            code=self.code,
            title=f"the loss diverges from step {gone.since_step} on",
            severity=Severity.HIGH,
            summary=f"The loss was {gone.best:.4g} at step {gone.best_step}, has risen since step "
            f"{gone.since_step} and ends at {gone.last:.4g}.",
            first_step=gone.since_step,
            evidence=(
                Evidence(name="best level", value=gone.best),
                Evidence(name="level at the end", value=gone.last),
                Evidence(name="noise", value=gone.noise),
                *_rate_evidence(found, gone.since_step),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.MEDIUM, text="beyond six times the noise, and not back since"
            ),
            change="Go back to the checkpoint before it rose, with a lower learning rate, a longer "
            "warm-up or gradient clipping.",
            gain=NOT_TIME,
        )


class LossPlateau(Rule):
    """The loss fell and no longer falls.

    What it finds: a loss whose trend over the last half of at least 50 steps is within 1 % of its
    level, up or down, after it had fallen by more than 5 %.

    Why it matters: steps that change nothing can be saved, or made useful.

    How it is measured: the 95 % interval of the Theil-Sen slope of the last half, autocorrelation
    included, must lie wholly within the limit, so noise alone makes no plateau.

    What to change: nothing, if this is as good as the model gets; otherwise decay the learning
    rate, use a larger model, or more data.

    When it is wrong: in a short recording a slow decrease looks like a plateau.
    """

    code = "CV003"
    name = "loss-plateau"
    severities = (Severity.LOW, Severity.LOW)

    def find(self, context: Context) -> Iterable[Finding]:
        found = need(context.study.convergence)
        if found.course is not LossCourse.PLATEAU:
            return
        change, loss = need(found.change_ratio), need(found.loss)
        half = len(loss) // 2
        yield Finding(
            code=self.code,
            title="the loss no longer falls",
            severity=Severity.LOW,
            summary=f"Over the last {plural(len(loss) - half, 'step')} the loss changed by between "
            f"{ratio(change[0])} and {ratio(change[2])} of its level, "
            f"{float(np.median(loss.value[half:])):.4g}.",
            first_step=int(loss.step[half]),
            last_step=int(loss.step[-1]),
            evidence=(
                Evidence(name="change over the last half, low end", value=change[0], unit="ratio"),
                Evidence(name="high end", value=change[2], unit="ratio"),
                *_rate_evidence(found, int(loss.step[-1])),
            ),
            confidence=Confidence(level=ConfidenceLevel.MEDIUM, text="95 % interval"),
            change="If this is not as good as the model gets, decay the learning rate, or look at "
            "capacity and data.",
            gain=NOT_TIME,
        )


class LossSpikes(Rule):
    """The loss jumps up in single steps.

    What it finds: at least `loss_spikes_min_count` steps whose loss is 20 % and seven robust
    standard deviations above its neighbours.

    Why it matters: spikes are the first sign of a learning rate at its limit, or of bad samples;
    large ones undo the work of many steps.

    How it is measured: 0.6745 times the distance from the median of twenty neighbours over the
    median absolute deviation of all such distances, in logarithms if all values are positive.

    What to change: look at the batches of these steps; clip gradients; lower the learning rate;
    skip samples that cause it again.

    When it is wrong: if batches differ by design, as in a mixture of tasks.
    """

    code = "CV004"
    name = "loss-spikes"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (MIN_SPIKES, _MANY_SPIKES_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        found = need(context.study.convergence)
        loss_spikes = need(found.loss_spikes)
        rises = find_rises(found)  # CV008 has these
        spikes = tuple(
            one
            for one in loss_spikes.up
            if not any(rise.first_step <= one.step <= rise.last_step for rise in rises)
        )
        num_values = loss_spikes.num_values
        if len(spikes) < context.thresholds[MIN_SPIKES]:
            return
        worst = max(spikes, key=lambda spike: spike.change_ratio)
        is_many = len(spikes) >= context.thresholds[_MANY_SPIKES_RATIO] * num_values
        yield Finding(
            code=self.code,
            title=f"the loss spikes in {plural(len(spikes), 'step')}",
            severity=Severity.MEDIUM if is_many else Severity.LOW,
            summary=f"In {count(len(spikes))} of {plural(num_values, 'step')} the loss stands out "
            f"from its neighbours, most in step {worst.step}: {worst.value:.4g} instead of "
            f"{worst.usual:.4g}.",
            first_step=spikes[0].step,
            last_step=spikes[-1].step,
            evidence=(
                Evidence(name="spikes", value=len(spikes)),
                Evidence(name="steps", value=_list_steps(spikes)),
                Evidence(name="robust score of the worst", value=worst.score),
                *_rate_evidence(found, worst.step),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH, text="robust score of 7 or more, and 20 % or more"
            ),
            change="Look at the batches of these steps; clip gradients or lower the learning rate.",
            gain=NOT_TIME,
        )


def _list_steps(spikes: tuple[Spike, ...]) -> str:
    more = "" if len(spikes) <= _MAX_LISTED else ", …"
    return ", ".join(str(spike.step) for spike in spikes[:_MAX_LISTED]) + more


class GradientNorm(Rule):
    """Gradients explode, vanish, or are not finite.

    What it finds: a gradient norm that ends `grad_norm_exploding_factor` times above its middle, or
    `grad_norm_vanishing_factor` below it while the loss has not fallen in proportion, or one that
    is NaN or infinite while the loss is finite.

    Why it matters: exploding gradients come before a divergence; vanished ones train nothing.

    How it is measured: every value of the last tenth must be beyond the factor times the median of
    the second to fifth tenth. Vanishing is not reported if the loss has halved: a model that fits
    its data has small gradients.

    What to change: clip gradients, lower the learning rate, check initialisation and normalisation;
    with float16, check the loss scale.

    When it is wrong: a norm that is logged after clipping cannot explode, and a learning rate
    schedule that ends at 0 lowers norms.
    """

    code = "CV005"
    name = "gradient-norm"
    severities = (Severity.MEDIUM, Severity.HIGH)
    thresholds = (_EXPLODING_FACTOR, _VANISHING_FACTOR)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one: not finite, exploding, vanishing, in this order."""
        found = need(context.study.convergence)
        if found.loss_nonfinite is not None:
            return  # a loss that is not finite has such gradients: reported once
        skipped = known(context.study.skipped_updates)
        is_scaled = skipped is not None and skipped.num_skipped > 0
        if found.norm_nonfinite is not None and not is_scaled:
            yield self._report_nonfinite(found.norm_nonfinite, context)
            return
        norm = need(found.grad_norm)
        limits = context.thresholds
        up = find_level_change(norm, factor=limits[_EXPLODING_FACTOR])
        down = find_level_change(norm, factor=limits[_VANISHING_FACTOR])
        change = up or (None if _has_halved(found.loss) else down)
        if change is None:
            return
        word = "explodes" if up else "vanishes"
        yield Finding(
            code=self.code,
            title=f"the gradient norm {word} from step {change.since_step} on",
            severity=Severity.HIGH if up else Severity.MEDIUM,
            summary=f"The gradient norm ends at {change.last:.3g}; in the middle of the run it was "
            f"{change.usual:.3g}.",
            first_step=change.since_step,
            evidence=(
                Evidence(name="usual norm", value=change.usual),
                Evidence(name="norm at the end", value=change.last),
                *_rate_evidence(found, change.since_step),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.MEDIUM, text="every value of the last tenth"
            ),
            change="Clip gradients or lower the learning rate."
            if up
            else "Look at saturated activations, dead units and the loss scale.",
            gain=NOT_TIME,
        )

    def _report_nonfinite(self, bad: NonFinite, context: Context) -> Finding:
        is_everywhere = len(bad.first_ranks) == len(context.study.attempt.ranks)
        return Finding(
            code=self.code,
            title=f"the gradient norm is {bad.first_kind} in step {bad.first_step}",
            severity=Severity.HIGH,
            summary=f"The gradient norm is not finite in {plural(bad.num_steps, 'step')}, first in "
            f"step {bad.first_step}, while the loss is.",
            ranks=() if is_everywhere else bad.first_ranks,
            first_step=bad.first_step,
            last_step=bad.last_step,
            evidence=(Evidence(name="steps", value=bad.num_steps, unit="steps"),),
            change="Clip gradients, lower the learning rate, and look at the batch of that step.",
            gain=NOT_TIME,
        )


def _has_halved(loss: JobSeries | Unavailable) -> bool:
    if isinstance(loss, Unavailable) or len(loss) < 6:
        return False
    tenth = max(3, len(loss) // 10)
    first, last = float(np.median(loss.value[:tenth])), float(np.median(loss.value[-tenth:]))
    return last < first / 2


class JointDisturbances(Rule):
    """Loss, gradient norm and step time are disturbed in the same steps.

    What it finds: spikes of two of loss, gradient norm and step time that coincide, within one
    step, more often than by chance.

    Why it matters: two signals that are disturbed together have one cause: a bad batch (loss and
    norm), a long or odd sample (loss and time).

    How it is measured: spikes of each signal by robust score and effect. The expected number of
    coincidences is the product of their rates; the chance of at least as many is Poisson's, times
    the number of pairs tested.

    What to change: look at the batches of the named steps.

    When it is wrong: two signals of one formula (a norm after a loss) always coincide: the steps
    are the news, not the coincidence.
    """

    code = "CV006"
    name = "joint-disturbances"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (_SLOW_STEP_RATIO, _MAX_JOINT_CHANCE)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one: the pair least likely by chance."""
        found = need(context.study.convergence)
        events = find_joint_events(*_mark_steps(context, found))
        limit = context.thresholds[_MAX_JOINT_CHANCE]
        beyond_chance = [e for e in events if e.p_value < limit and len(e.steps) > 1]
        if beyond_chance:
            yield self._report(beyond_chance[0])

    def _report(self, event: JointEvents) -> Finding:
        shown = ", ".join(map(str, event.steps[:_MAX_LISTED]))
        return Finding(
            code=self.code,
            title=f"{event.first} and {event.second} are disturbed in the same "
            f"{plural(len(event.steps), 'step')}",
            severity=Severity.LOW
            if "step time" in (event.first, event.second)
            else Severity.MEDIUM,
            summary=f"Disturbances of {event.first} and {event.second} coincide in "
            f"{plural(len(event.steps), 'step')} ({shown}); by chance {event.expected:.2g} of "
            f"{count(event.num_first)} and {count(event.num_second)} would.",
            first_step=event.steps[0],
            last_step=event.steps[-1],
            evidence=(
                Evidence(name="coincidences", value=len(event.steps)),
                Evidence(name="expected by chance", value=event.expected),
                Evidence(name="steps", value=shown),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH,
                text=f"{p_value(event.p_value)} against independent signals",
                p_value=event.p_value,
            ),
            change="Look at the batches of these steps.",
            gain=NOT_TIME,
        )


def _mark_steps(
    context: Context, found: Convergence
) -> tuple[dict[str, "np.ndarray[tuple[int], np.dtype[np.int64]]"], int]:
    """Disturbed steps by signal, and the number of steps."""
    steps = context.study.steps
    times = steps.duration_ns[steps.is_steady].astype(np.float64)
    slow = find_spikes(
        steps.step[steps.is_steady],
        np.maximum(times, 1.0),
        min_change_ratio=context.thresholds[_SLOW_STEP_RATIO],
    )
    named = {
        "loss": found.loss_spikes,
        "gradient norm": found.norm_spikes,
        "step time": slow,
    }
    marks = {
        name: np.array([spike.step for spike in spikes.up], dtype=np.int64)
        for name, maybe in named.items()
        if (spikes := known(maybe)) is not None
    }
    return marks, steps.num_steps


class SkippedSteps(Rule):
    """Updates were skipped.

    What it finds: steps after the first tenth of the run whose update the gradient scaler skipped,
    `skipped_min_ratio` of them or more.

    Why it matters: a skipped step costs its whole time and trains nothing.

    How it is measured: counted from the step's flags on the rank with most of them. The first
    steps, in which a scaler searches for its scale, are left out.

    What to change: use bfloat16, or lower the scaler's growth; find what overflows.

    When it is wrong: if a program skips updates itself and on purpose.
    """

    code = "CV007"
    resources = frozenset({"finite numbers"})
    name = "skipped-updates"
    thresholds = (_MIN_SKIPPED_RATIO,)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        found = need(context.study.skipped_updates)
        if found.num_late < _MIN_SKIPPED:
            return
        if found.late_ratio < context.thresholds[_MIN_SKIPPED_RATIO]:
            return
        step_ns = context.study.step_ns
        gain = (
            step_ns
            if isinstance(step_ns, Unavailable)
            else Estimate(
                saved_ns=found.late_ratio * step_ns,
                step_ns=step_ns,
                basis="the share of steps that trained nothing",
            )
        )
        yield Finding(
            code=self.code,
            title=f"{plural(found.num_late, 'update')} were skipped",
            severity=grade(found.late_ratio),
            summary=f"{count(found.num_late)} of {plural(found.num_late_steps, 'step')} after the "
            f"first tenth of the run made no update, {ratio(found.late_ratio)}.",
            ranks=found.ranks,
            first_step=found.first_late_step,
            last_step=found.last_step,
            evidence=(
                Evidence(name="skipped updates", value=found.num_late, unit="steps"),
                Evidence(name="share of the steps", value=found.late_ratio, unit="ratio"),
            ),
            change="Use bfloat16, let the loss scale grow more slowly, and look for what "
            "overflows.",
            gain=gain,
        )
