"""The rule about the number of microbatches a pipeline has."""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.pipeline.pipeline_waits import PipelineWaits
from meshscope.core.unavailable import Unavailable, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Estimate, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.pipeline_view import (
    MIN_GAIN_RATIO,
    PipelineView,
    bubble_evidence,
    describe_confidence,
    pipeline_view,
)
from meshscope.diagnose.wording import duration, plural, ratio
from meshscope.simulate.pipeline.schedule_edits import price_schedule, rank_schedules
from meshscope.simulate.what_if import Gain

_MIN_INHERENT_RATIO = Threshold(
    name="pipeline_min_inherent_ratio",
    default=0.10,
    meaning="share of a pipeline's time that its order of actions leaves idle with equal stages",
)
_MIN_MICROBATCHES_PER_STAGE = Threshold(
    name="pipeline_min_microbatches_per_stage",
    default=1.5,
    meaning="microbatches over stages below which they are called too few",
)


class TooFewMicrobatches(Rule):
    """The pipeline has too few microbatches for its number of stages.

    What it finds: a schedule that leaves ranks idle for `pipeline_min_inherent_ratio` of the
    pipeline's time even with equal stages and instant transfers. It is above low only if there are
    fewer than `pipeline_min_microbatches_per_stage` microbatches for each stage.

    Why it matters: filling and draining the pipeline takes as long as p-1 microbatches, whatever
    their number, so with few microbatches it takes much of the step.

    How it is measured: the recorded order of actions is replayed with every stage at the mean of
    all; the idle time in that replay is inherent. The gain is that of more microbatches with the
    same samples per step, replayed with the recorded times: actions shrink in proportion to the
    samples in them, and the time between actions stays as it is. Without recorded actions or phases
    it is estimated from waits for messages and their counts.

    What to change: cut the batch into more, smaller microbatches, accumulate over more of them, or
    use a schedule with a smaller bubble; the evidence says what others would save.

    When it is wrong: if smaller microbatches run less efficiently (an action has a fixed part), the
    gain is too high. Stages that differ are not part of it.
    """

    code = "PP001"
    name = "too-few-microbatches"
    thresholds = (_MIN_INHERENT_RATIO, _MIN_MICROBATCHES_PER_STAGE)

    def find(self, context: Context) -> Iterable[Finding]:
        view = context.study.get(pipeline_view)
        if isinstance(view, Unavailable):
            yield from self._find_by_waits(context, need(context.study.pipeline_waits))
            return
        yield from self._find_by_actions(context, view)

    def _find_by_actions(self, context: Context, view: PipelineView) -> Iterable[Finding]:
        bubble = view.analysis.bubble
        inherent = bubble.part_ratio(bubble.parts.inherent_ns)
        if inherent < context.thresholds[_MIN_INHERENT_RATIO]:
            return
        schedule = bubble.executed.schedule
        m, p = schedule.num_microbatches, schedule.num_ranks
        wanted = _choose_microbatches(context, m, p)
        gain = _price_microbatches(view, wanted)
        if not isinstance(gain, Unavailable) and gain.saved_ratio < MIN_GAIN_RATIO:
            return
        yield Finding(
            code=self.code,
            title=f"{plural(m, 'microbatch', 'microbatches')} for {plural(p, 'stage')}",
            severity=_cap(context, m, p, gain),
            summary=(
                f"{bubble.executed.name} with {m} microbatches on {p} pipeline ranks leaves them "
                f"idle for {ratio(inherent)} of the pipeline's time ({duration(bubble.cost_ns)}) "
                f"even with equal stages; {ratio(bubble.bubble_ratio)} was measured."
            ),
            evidence=(*bubble_evidence(view), *_list_alternatives(view, wanted)),
            confidence=describe_confidence(
                view,
                "assumes that a microbatch takes time in proportion to its samples",
                ConfidenceLevel.MEDIUM,
            ),
            change=(
                f"Split each step into {wanted} microbatches instead of {m}, with as many samples "
                f"in total, or use a schedule with a smaller bubble."
            ),
            gain=gain,
        )

    def _find_by_waits(self, context: Context, waits: PipelineWaits) -> Iterable[Finding]:
        inherent = waits.inherent_ns / waits.step_ns
        if inherent < context.thresholds[_MIN_INHERENT_RATIO]:
            return
        m, p = waits.num_microbatches, waits.num_stages
        wanted = _choose_microbatches(context, m, p)
        gain = Estimate(
            saved_ns=waits.saved_ns(wanted),
            step_ns=waits.step_ns,
            basis="the pipeline waits that equal stages explain, in proportion to the size of a "
            "microbatch",
        )
        yield Finding(
            code=self.code,
            title=f"{plural(m, 'microbatch', 'microbatches')} for {plural(p, 'stage')}",
            severity=_cap(context, m, p, gain),
            summary=(
                f"pipeline ranks wait {duration(waits.bubble_ns)} of a step of "
                f"{duration(waits.step_ns)} for each other's messages, with "
                f"{plural(m, 'message')} per step."
            ),
            evidence=(
                Evidence(name="wait for messages", value=waits.bubble_ns, unit="ns"),
                Evidence(name="of which by equal stages", value=waits.inherent_ns, unit="ns"),
                Evidence(name="messages of a step", value=m),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.LOW,
                text="no actions and no phases of stages were recorded: uneven stages or slow "
                "transfers would look the same",
            ),
            change=f"Split each step into {wanted} microbatches instead of {m}.",
            gain=gain,
        )


def _choose_microbatches(context: Context, m: int, p: int) -> int:
    """A multiple of `m` that is enough, at least twice as many."""
    enough = context.thresholds[_MIN_MICROBATCHES_PER_STAGE] * p
    return m * max(2, int(np.ceil(enough / m)))


def _price_microbatches(view: PipelineView, wanted: int) -> Gain | Estimate | Unavailable:
    priced = price_schedule(view.replay, num_microbatches=wanted)
    if not isinstance(priced, Unavailable):
        return priced.gain
    bubble = view.analysis.bubble
    m = bubble.executed.schedule.num_microbatches
    return Estimate(
        saved_ns=bubble.parts.inherent_ns * (1 - m / wanted),
        step_ns=view.replay.step_ns,
        basis=f"the inherent bubble in proportion to microbatches; no replay: {priced.reason}",
    )


def _cap(context: Context, m: int, p: int, gain: Gain | Estimate | Unavailable) -> Severity:
    """Enough microbatches are a choice, not a fault, whatever more of them would save."""
    is_few = m < context.thresholds[_MIN_MICROBATCHES_PER_STAGE] * p
    return severity_of(gain) if is_few else Severity.LOW


def _list_alternatives(view: PipelineView, wanted: int) -> tuple[Evidence, ...]:
    """The savings of other numbers of microbatches and of the best schedules."""
    m = view.analysis.times.schedule.num_microbatches
    found = []
    for count in sorted({2 * m, 2 * wanted}):
        priced = price_schedule(view.replay, num_microbatches=count)
        if not isinstance(priced, Unavailable) and not isinstance(priced.gain, Unavailable):
            name = f"saved with {count} microbatches"
            found.append(Evidence(name=name, value=priced.gain.saved_ns, unit="ns"))
    for other in rank_schedules(view.replay)[:2]:
        if not isinstance(other.gain, Unavailable) and other.gain.saved_ratio >= MIN_GAIN_RATIO:
            name = f"saved with {other.name}"
            found.append(Evidence(name=name, value=other.gain.saved_ns, unit="ns"))
    return tuple(found)
