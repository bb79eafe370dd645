"""The pipelines of a run as values of the JSON document."""

from dataclasses import fields

import msgspec

from meshscope.analyze.pipeline.bubble import BubbleParts
from meshscope.analyze.pipeline.pipeline import PipelineAnalysis
from meshscope.core.unavailable import Unavailable
from meshscope.report.values import Absent, RankRange, as_number, as_ranges, as_text


class PipelineStageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One stage."""

    stage: int
    position: int
    """Its pipeline rank."""
    ranks: list[RankRange]
    forward_ns: float
    """Work of one microbatch: median over steps and microbatches, lower median over ranks."""
    backward_ns: float
    num_layers: int | Absent
    extras: list[str]
    """What it holds besides layers."""
    bubble_ratio: float
    """Of its pipeline rank: 1 - busy / cost, median over steps."""


class PipelineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The bubble of all pipelines, and where it is from."""

    schedule: str
    """Recognised from the order of actions; `unknown order` where it is none that is known."""
    is_exact: bool
    """Whether microbatches come in that schedule's order, too."""
    action_source: str
    num_pipelines: int
    num_stages: int
    num_microbatches: int
    num_runs: int
    """Steps of all pipelines together that the numbers are over."""
    num_other_runs: int
    """Left out: incomplete or in another order."""
    cost_ns: float
    """The longest time of a pipeline rank from its first begin to its last end; mean over steps."""
    busy_ns: float
    """Of it, in actions; mean over ranks."""
    bubble_ratio: float
    utilisation_ratio: float
    """1 - bubble."""
    executed_ratio: float
    """The bubble this order must have with these stage times and transfers."""
    balanced_ratio: float
    """With equal stages and instant transfers."""
    closed_form_ratio: float | Absent
    closed_form: str
    parts_ns: dict[str, float]
    """Where the bubble is from, per step; they sum to `cost_ns - busy_ns`."""
    sends: str
    """`free`, `batched` or `blocking`: whether a rank that sends waits for its receiver."""
    replay_error_ratio: float
    """|measured - replayed| / measured."""
    stages: list[PipelineStageFacts]


def build_pipeline(
    found: PipelineAnalysis | Unavailable, *, is_expected: bool
) -> PipelineFacts | Absent | None:
    """None for a run without a pipeline; why there is nothing to see where one was declared."""
    if isinstance(found, Unavailable):
        return Absent(as_text(found.reason)) if is_expected else None
    times, bubble = found.times, found.bubble
    return PipelineFacts(
        schedule=bubble.executed.name,
        is_exact=bubble.executed.is_exact,
        action_source=times.source.value,
        num_pipelines=bubble.num_pipelines,
        num_stages=times.schedule.num_stages,
        num_microbatches=times.schedule.num_microbatches,
        num_runs=times.num_runs,
        num_other_runs=times.num_other_runs,
        cost_ns=bubble.cost_ns,
        busy_ns=bubble.busy_ns,
        bubble_ratio=bubble.bubble_ratio,
        utilisation_ratio=bubble.utilisation_ratio,
        executed_ratio=bubble.executed_ratio,
        balanced_ratio=bubble.balanced_ratio,
        closed_form_ratio=as_number(bubble.closed_form_ratio),
        closed_form=bubble.closed_form,
        parts_ns={
            field.name.removesuffix("_ns"): getattr(bubble.parts, field.name)
            for field in fields(BubbleParts)
        },
        sends=bubble.handovers.plan.mode.value,
        replay_error_ratio=bubble.handovers.fidelity_ratio,
        stages=_stages(found),
    )


def _stages(found: PipelineAnalysis) -> list[PipelineStageFacts]:
    layers = found.work.layers
    return [
        PipelineStageFacts(
            stage=stage.stage,
            position=stage.position,
            ranks=as_ranges(stage.ranks),
            forward_ns=stage.forward_ns,
            backward_ns=stage.backward_ns,
            num_layers=Absent(as_text(layers.reason))
            if isinstance(layers, Unavailable)
            else layers.num_layers[stage.stage],
            extras=[]
            if isinstance(layers, Unavailable)
            else [as_text(extra) for extra in layers.extras[stage.stage]],
            bubble_ratio=found.bubble.rank_bubble_ratio[stage.position],
        )
        for stage in found.work.stages
    ]
