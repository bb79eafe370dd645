"""What the rules about pipelines, and the report, share of a run's pipelines."""

from dataclasses import dataclass

from meshscope.analyze.pipeline.pipeline import PipelineAnalysis
from meshscope.analyze.pipeline.pipeline_times import ActionSource
from meshscope.analyze.pipeline.stage_verdict import StageVerdict, judge_stages
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence
from meshscope.diagnose.wording import plural
from meshscope.simulate.pipeline.pipeline_replay import (
    PipelineReplay,
    StageFactors,
    build_pipeline_replay,
    edit_stages,
)
from meshscope.simulate.what_if import Edit, Gain

MIN_GAIN_RATIO = 0.01
"""A change that saves less is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineView:
    timeline: Timeline
    analysis: PipelineAnalysis
    replay: PipelineReplay
    verdict: StageVerdict

    def price(self, context: Context, factors: StageFactors, name: str) -> "Priced":
        """A change of stages' work: the larger gain of the pipeline's own replay and that of the
        run.

        Each keeps as measured what it does not model, so both err on the low side: the first misses
        sends that wait for their receiver, the second the time between actions.
        """
        edit = edit_stages(self.timeline, self.analysis.times, factors, name)
        own = self.replay.price(duration_ns=self.replay.scale_work(factors))
        whole = context.price_edit(edit)
        if isinstance(own, Unavailable) or isinstance(whole, Unavailable):
            return Priced(gain=whole if isinstance(own, Unavailable) else own, edit=edit)
        return Priced(gain=max(own, whole, key=lambda gain: gain.saved_ns), edit=edit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    gain: Gain | Unavailable
    edit: Edit

    @property
    def saved_ratio(self) -> float:
        """0 where it is not known."""
        gain = known(self.gain)
        return 0.0 if gain is None else gain.saved_ratio


def pipeline_view(study: Study) -> PipelineView:
    timeline, analysis = need(study.timeline), need(study.pipeline)
    replay = build_pipeline_replay(
        timeline, analysis.times, analysis.work, analysis.bubble.action_gaps
    )
    return PipelineView(
        timeline=timeline,
        analysis=analysis,
        replay=need(replay),
        verdict=judge_stages(analysis.work),
    )


def describe_confidence(view: PipelineView, text: str, level: ConfidenceLevel) -> Confidence:
    times = view.analysis.times
    what = (
        f"{plural(times.num_runs, 'step')} of {plural(len(set(times.chain.tolist())), 'pipeline')}"
    )
    if times.source is ActionSource.PHASES:
        what += ", actions taken from forward and backward phases"
    return Confidence(level=level, text=f"{what}; {text}")


def bubble_evidence(view: PipelineView) -> tuple[Evidence, ...]:
    bubble = view.analysis.bubble
    return (
        Evidence(name="bubble", value=bubble.bubble_ratio, unit="ratio"),
        Evidence(name="bubble with equal stages", value=bubble.balanced_ratio, unit="ratio"),
        Evidence(name="bubble with these stages", value=bubble.executed_ratio, unit="ratio"),
        Evidence(name="schedule", value=bubble.executed.name),
        Evidence(name="microbatches", value=bubble.executed.schedule.num_microbatches),
    )
