"""The automatic schedule beside the built-in ones, for the same costs and limits.

Costs are given, or taken from the actions of a recorded run: medians of a stage's actions. Where
the run has whole backwards, I and W are half of one each, the same assumption as that of
`simulate --edit schedule=…`. Built-in schedules with chunks split a rank's time evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshscope.core.schedule import ActionKind, Schedule
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, ScheduleReplay, replay_schedule
from meshscope.core.schedule_search import (
    Objective,
    StageCosts,
    list_costs,
    measure_held,
    search_schedule,
)
from meshscope.errors import UsageError

if TYPE_CHECKING:
    from meshscope.analyze.pipeline.stage_work import StageWork

_B, _I, _W = ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedSchedule:
    name: str
    bubble_ratio: float
    """Of the longest span of a rank, which is the Zero Bubble paper's rate."""
    span_ns: float
    """The longest time of any rank from its own start to its own end."""
    makespan_ns: float
    """From the first start to the last end."""
    max_held: float
    """The most activations that any rank holds, in microbatches of all its stages."""
    fits: bool
    """Whether no rank holds more than it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    source: str
    """Where the costs come from."""
    num_microbatches: int
    communication_ns: float
    kept_ratio: float
    """Of a microbatch's activations, held from I to W."""
    objective: Objective
    stages: tuple[StageCosts, ...]
    found: RatedSchedule
    built_in: tuple[RatedSchedule, ...]
    """The best first, without those that these ranks and microbatches cannot have."""
    text: str
    """The schedule found, as `parallel.schedule` of a configuration takes it."""


def choose_schedule(
    stages: Sequence[StageCosts],
    num_microbatches: int,
    *,
    source: str,
    communication_ns: float = 0.0,
    kept_ratio: float = 1.0,
    objective: Objective = "span",
) -> ScheduleChoice:
    found = search_schedule(
        stages,
        num_microbatches,
        communication_ns=communication_ns,
        kept_ratio=kept_ratio,
        objective=objective,
    )
    rated = [
        _rate(replay, stages, kept_ratio)
        for replay in _replay_built_in(stages, num_microbatches, communication_ns)
    ]
    by_span = objective == "span"
    return ScheduleChoice(
        source=source,
        num_microbatches=num_microbatches,
        communication_ns=communication_ns,
        kept_ratio=kept_ratio,
        objective=objective,
        stages=tuple(stages),
        found=_rate(found.replay, stages, kept_ratio),
        built_in=tuple(sorted(rated, key=lambda r: r.span_ns if by_span else r.makespan_ns)),
        text=found.schedule.to_text(),
    )


def read_costs(work: "StageWork", max_held: float) -> list[StageCosts]:
    """Of each pipeline rank of a recorded run, all its stages together."""
    costs = []
    for position in range(work.num_positions):
        stages = [stage for stage in work.stages if stage.position == position]
        half_ns = sum(stage.kind_ns.get(_B, 0.0) for stage in stages) / 2
        costs.append(
            StageCosts(
                forward_ns=sum(stage.forward_ns for stage in stages),
                input_grad_ns=half_ns + sum(stage.kind_ns.get(_I, 0.0) for stage in stages),
                weight_grad_ns=half_ns + sum(stage.kind_ns.get(_W, 0.0) for stage in stages),
                max_held=max_held,
            )
        )
    return costs


def _replay_built_in(
    stages: Sequence[StageCosts], num_microbatches: int, communication_ns: float
) -> list[ScheduleReplay]:
    replays = []
    for name in BUILDERS:
        try:
            schedule = build_schedule(name, len(stages), num_microbatches)
        except UsageError:
            continue
        replays.append(replay_schedule(schedule, _spread(schedule, stages, communication_ns)))
    return replays


def _spread(
    schedule: Schedule, stages: Sequence[StageCosts], communication_ns: float
) -> ActionCosts:
    """A rank's costs, evenly over the stages that it holds in a schedule."""
    whole = list_costs(stages, communication_ns)
    by_stage = {}
    for stage, rank in enumerate(schedule.stage_ranks):
        num_held = len(schedule.stages_of(rank))
        for kind in (ActionKind.FORWARD, _I, _W):
            by_stage[kind, stage] = whole.by_stage[kind, rank] / num_held
    return ActionCosts(by_stage=by_stage, communication_ns=communication_ns)


def _rate(replay: ScheduleReplay, stages: Sequence[StageCosts], kept_ratio: float) -> RatedSchedule:
    schedule = replay.schedule
    held = [
        peak / len(schedule.stages_of(rank))
        for rank, peak in enumerate(measure_held(schedule, kept_ratio))
    ]
    return RatedSchedule(
        name=schedule.name,
        bubble_ratio=replay.bubble_of_total_ratio,
        span_ns=replay.cost_ns,
        makespan_ns=replay.makespan_ns,
        max_held=max(held),
        fits=all(peak <= stage.max_held + 1e-9 for peak, stage in zip(held, stages, strict=True)),
    )
