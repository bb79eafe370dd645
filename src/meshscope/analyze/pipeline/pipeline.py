"""The pipelines of one attempt: when actions ran, how long stages take, and the bubble.

    collect_pipeline_times → measure_stage_work → measure_bubble

If a program recorded neither actions nor phases, `pipeline_waits` uses the waits for messages.
"""

from dataclasses import dataclass

from meshscope.analyze.pipeline.bubble import PipelineBubble, measure_bubble
from meshscope.analyze.pipeline.pipeline_times import PipelineTimes, collect_pipeline_times
from meshscope.analyze.pipeline.stage_work import StageWork, measure_stage_work
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import need, or_unavailable
from meshscope.store.read.run import Attempt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineAnalysis:
    times: PipelineTimes
    work: StageWork
    bubble: PipelineBubble

    @property
    def utilisation_ratio(self) -> float:
        """1 - bubble: the share of their time in which ranks of the pipelines ran actions."""
        return self.bubble.utilisation_ratio


@or_unavailable
def analyze_pipeline(timeline: Timeline, attempt: Attempt) -> PipelineAnalysis:
    times = need(collect_pipeline_times(timeline, attempt))
    work = measure_stage_work(times, attempt)
    bubble = need(measure_bubble(times))
    return PipelineAnalysis(times=times, work=work, bubble=bubble)
