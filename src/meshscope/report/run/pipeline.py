"""The pipelines of a run as readers see them: the bubble, what it must be, and the stages."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from meshscope.analyze.pipeline.bubble import PipelineBubble
from meshscope.analyze.pipeline.pipeline import PipelineAnalysis
from meshscope.analyze.pipeline.stage_work import StageTime
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """One stage."""

    time: StageTime
    num_layers: int | Unavailable
    extras: tuple[str, ...]
    """What it holds besides layers."""
    bubble_ratio: float
    """Of its pipeline rank: 1 - busy / cost, median over steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """The bubble of all pipelines, and its parts."""

    bubble: PipelineBubble
    schedule: str
    """Recognised from the order of actions; `unknown order` if none matches."""
    is_exact: bool
    """Whether microbatches come in that schedule's order, too."""
    action_source: str
    num_stages: int
    num_microbatches: int
    num_runs: int
    """Steps of all pipelines together that the numbers are over."""
    num_other_runs: int
    """Left out: incomplete or in another order."""
    parts_ns: Mapping[str, float]
    """Parts of the bubble per step; they sum to `cost_ns - busy_ns`."""
    sends: str
    """`free`, `batched` or `blocking`: whether a sender waits for its receiver."""
    replay_error_ratio: float
    """|measured - replayed| / measured."""
    stages: tuple[StageFacts, ...]


def describe_pipeline(found: PipelineAnalysis) -> PipelineFacts:
    times, bubble, layers = found.times, found.bubble, found.work.layers
    return PipelineFacts(
        bubble=bubble,
        schedule=bubble.executed.name,
        is_exact=bubble.executed.is_exact,
        action_source=times.source.value,
        num_stages=times.schedule.num_stages,
        num_microbatches=times.schedule.num_microbatches,
        num_runs=times.num_runs,
        num_other_runs=times.num_other_runs,
        parts_ns={
            part.name.removesuffix("_ns"): getattr(bubble.parts, part.name)
            for part in fields(bubble.parts)
        },
        sends=bubble.action_gaps.plan.mode.value,
        replay_error_ratio=bubble.action_gaps.fidelity_ratio,
        stages=tuple(
            StageFacts(
                time=stage,
                num_layers=layers
                if isinstance(layers, Unavailable)
                else layers.num_layers[stage.stage],
                extras=() if isinstance(layers, Unavailable) else layers.extras[stage.stage],
                bubble_ratio=bubble.rank_bubble_ratio[stage.position],
            )
            for stage in found.work.stages
        ),
    )
