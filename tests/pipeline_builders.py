"""Recordings of pipelines with known times, through the real writer: the table `actions` or phases.

    make_pipeline_run(path, build_schedule("1f1b", 4, 8), stage_ms={0: (2, 4), …})

Times are those of `core.schedule_replay`, so that what a pipeline must cost is known. All ranks end
a step together, `TAIL_NS` after the last action of any pipeline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builders import MS, START_MONO_NS, make_writer, put_span, put_step
from meshscope.core.layout import Layout
from meshscope.core.schedule import Action, ActionKind, Schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.store.schema import ACTION_KINDS
from meshscope.store.write.writer import RankWriter

TAIL_NS = 2 * MS
GAP_NS = 1 * MS
"""Between steps."""

Cost = Callable[[int, int, Action], float]
"""Nanoseconds from step, pipeline and action."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run of pipelines is written."""

    schedule: Schedule
    cost: Cost
    communication_ns: int = 0
    num_chains: int = 1
    num_steps: int = 6
    layout: bool = True
    records_actions: bool = True
    parts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """What stages hold, as `set_stage_layers` writes it; empty: nothing is said."""


def stage_cost(stage_ms: Mapping[int, Sequence[float]]) -> Cost:
    """By stage: F and B, or F, I and W, in milliseconds."""

    def cost(step: int, chain: int, action: Action) -> float:
        times = stage_ms[action.stage]
        place = {"F": 0, "B": 1, "I": 1, "W": 2}[action.kind.value]
        return round(times[place] * MS)

    return cost


def make_pipeline_run(path: Path, recipe: Recipe) -> Path:
    """Writes it. Rank = pipeline · p + place (dp slowest, pp fastest)."""
    schedule = recipe.schedule
    p = schedule.num_ranks
    layout = Layout(dp=recipe.num_chains, pp=p, order=("dp", "pp"))
    writers = []
    for rank in range(layout.world_size):
        stages = schedule.stages_of(rank % p)
        told = {str(s): dict(recipe.parts[s]) for s in stages if s in recipe.parts}
        header = {"stage_layers": told or None}
        if recipe.layout:
            header["layout"] = layout.to_dict()
        writers.append(make_writer(path, rank, layout.world_size, **header))
    now_ns = START_MONO_NS
    for step in range(recipe.num_steps):
        replays = [_replay(recipe, step, chain) for chain in range(recipe.num_chains)]
        end_ns = now_ns + round(max(replay.makespan_ns for replay in replays)) + TAIL_NS
        for rank, writer in enumerate(writers):
            times = replays[rank // p].ranks[rank % p].times
            _write_row(writer, recipe, step, now_ns, times)
            put_step(writer, step, now_ns, end_ns)
        now_ns = end_ns + GAP_NS
    for writer in writers:
        writer.close(end_host_mono_ns=now_ns, last_step=recipe.num_steps - 1, num_errors=0)
    return path


def _replay(recipe: Recipe, step: int, chain: int):
    schedule = recipe.schedule
    return replay_schedule(
        schedule,
        ActionCosts(
            by_stage={},
            by_microbatch={
                (action.kind, action.stage, action.microbatch): recipe.cost(step, chain, action)
                for row in schedule.actions
                for action in row
            },
            communication_ns=recipe.communication_ns,
        ),
    )


def _write_row(writer: RankWriter, recipe: Recipe, step: int, origin_ns: int, times) -> None:
    stages = sorted({time.action.stage for time in times})
    came_ns = origin_ns
    for time in times:
        action = time.action
        start_ns, end_ns = origin_ns + round(time.start_ns), origin_ns + round(time.end_ns)
        name = "forward" if action.kind is ActionKind.FORWARD else "backward"
        if recipe.records_actions:
            is_waiting = start_ns > came_ns
            if is_waiting:
                put_span(writer, "pipeline wait", came_ns, start_ns - came_ns)
            code = ACTION_KINDS.index(action.kind.value)
            writer.table("actions").put(
                code | stages.index(action.stage) << 16 | action.stage << 32,
                step,
                action.microbatch,
                start_ns,
                end_ns - start_ns,
                came_ns if is_waiting else -1,
                start_ns - came_ns if is_waiting else -1,
            )
        put_span(writer, name, start_ns, end_ns - start_ns)
        came_ns = end_ns
