"""When every pipeline ran every action, step by step: arrays [action, run] on one clock.

A pipeline is a chain of ranks that pass microbatches on: the ranks that share all coordinates but
pp. A run is one step of one pipeline. Only runs with the most common order of actions are kept, so
that they fit into one array; others are counted.

Actions are those the program recorded (table `actions`). If it recorded none, the n-th `forward`
and `backward` phase of a rank with one stage stand for microbatch n; the chain is then that of the
layout, or follows from who sent to whom (`message_chains`).

`work_ns` is the part of an action that no operation held up. Wrong where a rank computes two at
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshscope.analyze.pipeline.action_replay import list_actions
from meshscope.analyze.pipeline.executed_schedule import (
    ExecutedSchedule,
    order_from_rows,
    recognise_schedule,
)
from meshscope.analyze.pipeline.message_chains import Chains, find_message_chains
from meshscope.analyze.pipeline.phase_actions import actions_from_phases
from meshscope.analyze.timeline.actions import ACTION_KINDS, Actions
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.schedule import Action, ActionKind, Schedule
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.numerics.intervals import Intervals
from meshscope.store.read.arrays import Int32s, Int64s
from meshscope.store.read.run import Attempt

MAX_CELLS = 2_000_000
"""The most actions times runs; beyond it steps are left out evenly."""

_KINDS = tuple(ActionKind(letter) for letter in ACTION_KINDS)


class ActionSource(StrEnum):
    """Where the times of actions come from."""

    RECORDED = "recorded actions"
    PHASES = "forward and backward phases"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """All runs of one order of actions."""

    chains: Chains
    """Global ranks of each pipeline, in the order of the pipeline."""
    executed: ExecutedSchedule
    source: ActionSource
    chain: Int32s
    """Per run: index in `chains`."""
    step: Int32s
    """Per run: index in `Timeline.steps`; ascending."""
    start_ns: Int64s
    """[action, run], on the reference clock."""
    end_ns: Int64s
    wait_start_ns: Int64s
    """When the rank began to wait for the action's input; -1 if not recorded."""
    work_ns: Int64s
    """The part of the action that nothing held up."""
    ready_ns: Int64s
    """[pipeline rank, run]: when it could have started its first action."""
    num_other_runs: int
    """Runs left out: incomplete, or in another order."""
    num_runs_skipped: int
    """Runs left out to stay within memory."""

    @property
    def schedule(self) -> Schedule:
        return self.executed.schedule

    @property
    def num_runs(self) -> int:
        """Steps of all pipelines together."""
        return len(self.step)

    @property
    def duration_ns(self) -> Int64s:
        """[action, run]."""
        return self.end_ns - self.start_ns

    def ranks_of(self, position: int) -> tuple[int, ...]:
        """Global ranks of one pipeline rank, over all pipelines."""
        return tuple(sorted({chain[position] for chain in self.chains}))


@or_unavailable
def collect_pipeline_times(timeline: Timeline, attempt: Attempt) -> PipelineTimes:
    if timeline.actions is not None and len(timeline.actions):
        actions, source = timeline.actions, ActionSource.RECORDED
        chains = _find_chains(timeline, actions)
    else:
        source = ActionSource.PHASES
        chains = need(_chains_without_actions(timeline))
        actions = need(actions_from_phases(timeline, attempt, chains))
    if all(len(chain) < 2 for chain in chains):
        raise Missing("there is one pipeline stage only: nothing waits for another")
    return need(_arrange(timeline, actions, chains, source))


def _find_chains(timeline: Timeline, actions: Actions) -> Chains:
    layout = timeline.layout
    if not isinstance(layout, Unavailable) and layout.pp > 1:
        return layout.groups_of("pp", timeline.ranks)
    return _chains_from_stages(actions)


def _chains_from_stages(actions: Actions) -> Chains:
    """Without a layout: the n-th rank of every set of stages belongs to pipeline n."""
    by_stages: dict[tuple[int, ...], list[int]] = {}
    for rank in np.unique(actions.rank).tolist():
        stages = np.unique(actions.stage[actions.rank == rank])
        by_stages.setdefault(tuple(stages.tolist()), []).append(rank)
    ordered = [by_stages[stages] for stages in sorted(by_stages)]
    return tuple(zip(*ordered, strict=False))


def _chains_without_actions(timeline: Timeline) -> Chains | Unavailable:
    layout = timeline.layout
    if not isinstance(layout, Unavailable):
        if layout.pp == 1:
            return Unavailable("the layout has one pipeline stage")
        return layout.groups_of("pp", timeline.ranks)
    return find_message_chains(timeline)


def _arrange(
    timeline: Timeline, actions: Actions, chains: Chains, source: ActionSource
) -> PipelineTimes | Unavailable:
    chain_of, position_of = _place_ranks(timeline, chains)
    chain, position = chain_of[actions.rank], position_of[actions.rank]
    row = np.flatnonzero(chain >= 0)
    order = np.lexsort((actions.start_ns[row], position[row], actions.step[row], chain[row]))
    row = row[order]
    run_key = chain[row].astype(np.int64) * len(timeline.steps) + actions.step[row]
    cuts = np.flatnonzero(np.diff(run_key, prepend=-1, append=-1))
    picked = _pick_order(actions, row, position[row], cuts, len(chains[0]))
    if isinstance(picked, Unavailable):
        return picked
    schedule, kept = picked
    num_actions = count_actions(schedule)
    kept, num_skipped = _thin_out(kept, num_actions, actions.step[row[cuts[kept]]])
    rows = row[cuts[kept][None, :] + np.arange(num_actions)[:, None]]
    times = _take(timeline, actions, chains, schedule, rows)
    return replace(
        times,
        source=source,
        num_other_runs=len(cuts) - 1 - len(kept) - num_skipped,
        num_runs_skipped=num_skipped,
        chain=chain[rows[0]].astype(np.int32),
        ready_ns=_find_ready(timeline, actions, times, rows),
    )


def _pick_order(
    actions: Actions, row: Int64s, position: Int32s, cuts: Int64s, num_ranks: int
) -> tuple[Schedule, list[int]] | Unavailable:
    """The most common order that is a whole step, and the runs with it.

    `row` lists actions run by run, rank by rank and in order; `cuts` are the borders of runs.
    """
    columns = (position, actions.kind[row], actions.stage[row], actions.microbatch[row])
    what = np.stack(columns, axis=1).astype(np.int32)
    by_order: dict[bytes, list[int]] = {}
    for index in range(len(cuts) - 1):
        key = what[cuts[index] : cuts[index + 1]].tobytes()
        by_order.setdefault(key, []).append(index)
    problem = Unavailable("no pipeline action was recorded in a step")
    for runs in sorted(by_order.values(), key=len, reverse=True):
        schedule = _order_of(what[cuts[runs[0]] : cuts[runs[0] + 1]], num_ranks)
        if not isinstance(schedule, Unavailable):
            return schedule, runs
        problem = schedule
    return problem


def _place_ranks(timeline: Timeline, chains: Chains) -> tuple[Int32s, Int32s]:
    size = 1 + max([*timeline.ranks, *(rank for chain in chains for rank in chain)])
    chain_of = np.full(size, -1, dtype=np.int32)
    position_of = np.full(size, -1, dtype=np.int32)
    for index, chain in enumerate(chains):
        chain_of[list(chain)] = index
        position_of[list(chain)] = np.arange(len(chain))
    return chain_of, position_of


def _order_of(what: Int32s, num_ranks: int) -> Schedule | Unavailable:
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for position, kind, stage, microbatch in what.tolist():
        if kind >= len(_KINDS) or microbatch < 0 or stage < 0:
            return Unavailable("a recorded action has no kind or microbatch that can be")
        rows[position].append(Action(_KINDS[kind], stage, microbatch))
    if not all(rows):
        silent = [index for index, row in enumerate(rows) if not row]
        return Unavailable(f"no actions were recorded at places {silent} of the pipeline")
    return order_from_rows(rows)


def _thin_out(kept: list[int], num_actions: int, step: Int32s) -> tuple[list[int], int]:
    """Leaves out whole steps evenly if they do not fit."""
    indices, index = np.unique(step, return_inverse=True)
    per_step = num_actions * len(kept) / len(indices)
    every = int(np.ceil(len(indices) * per_step / MAX_CELLS))
    if every <= 1:
        return kept, 0
    is_kept = index % every == 0
    chosen = [position for position, keep in zip(kept, is_kept, strict=True) if keep]
    return chosen, len(kept) - len(chosen)


def _take(
    timeline: Timeline, actions: Actions, chains: Chains, schedule: Schedule, rows: Int64s
) -> PipelineTimes:
    # Only kept runs are read; the order stays that of the actions.
    kept, index = np.unique(rows, return_inverse=True)
    index = index.reshape(rows.shape)
    start, end = _device_extents(timeline, actions)
    work = _measure_action_work(timeline, actions.rank[kept], start[kept], end[kept])
    no_runs = np.zeros(0, dtype=np.int32)
    return PipelineTimes(
        chains=chains,
        executed=recognise_schedule(schedule),
        source=ActionSource.RECORDED,
        chain=no_runs,
        step=actions.step[rows[0]],
        start_ns=start[rows],
        end_ns=end[rows],
        wait_start_ns=actions.wait_start_ns[rows],
        work_ns=work[index],
        ready_ns=np.zeros((0, 0), dtype=np.int64),
        num_other_runs=0,
        num_runs_skipped=0,
    )


def _device_extents(timeline: Timeline, actions: Actions) -> tuple[Int64s, Int64s]:
    """On a device an action lasts as long as its pieces that are not waits."""
    start, end = actions.start_ns, actions.end_ns
    if not timeline.on_device.any():
        return start, end
    device_ranks = np.array(timeline.ranks)[timeline.on_device]
    pieces = timeline.pieces
    is_of_action = (pieces.action >= 0) & (pieces.kind != PieceKind.WAIT)
    is_of_action &= np.isin(pieces.rank, device_ranks)
    touched = pieces.action[is_of_action]
    first = np.full(len(start), np.iinfo(np.int64).max)
    last = np.full(len(start), np.iinfo(np.int64).min)
    np.minimum.at(first, touched, pieces.start_ns[is_of_action])
    np.maximum.at(last, touched, pieces.end_ns[is_of_action])
    has_any = last > first
    return np.where(has_any, first, start), np.where(has_any, last, end)


def _measure_action_work(timeline: Timeline, rank: Int32s, start: Int64s, end: Int64s) -> Int64s:
    """The WORK time of every action in the timeline; its duration if that is unknown.

    Actions are sorted by rank and start, as pieces are.
    """
    pieces = timeline.pieces
    work = end - start
    ranks, first = np.unique(rank, return_index=True)
    for one, low, high in zip(ranks.tolist(), first, [*first[1:], len(rank)], strict=True):
        mine = slice(*np.searchsorted(pieces.rank, [one, one + 1]))
        is_work = np.flatnonzero(pieces.kind[mine] == PieceKind.WORK)
        if mine.stop > mine.start:
            worked = Intervals(pieces.start_ns[mine][is_work], pieces.end_ns[mine][is_work])
            work[low:high] = worked.within(start[low:high], end[low:high])
    return work


def _find_ready(timeline: Timeline, actions: Actions, times: PipelineTimes, rows: Int64s) -> Int64s:
    """When each rank came to its first action: at its wait, else after its previous step.

    The head of the pipeline waits for no rank, so it was ready when it started.
    """
    first = _first_indices(times.schedule)
    start = times.start_ns[first]
    waited = times.wait_start_ns[first]
    index_of = {rank: index for index, rank in enumerate(timeline.ranks)}
    ranks = actions.rank[rows[first]]
    indices = np.vectorize(index_of.__getitem__, otypes=[np.int64])(ranks)
    came = timeline.period_start_ns[indices, times.step[None, :]]
    is_head = np.array([not times.schedule.needs(row[0]) for row in times.schedule.actions])
    ready = np.where(waited >= 0, waited, np.where(is_head[:, None], start, came))
    return np.minimum(ready, start)


def _first_indices(schedule: Schedule) -> Int64s:
    lengths: Sequence[int] = [len(row) for row in schedule.actions]
    return np.cumsum([0, *lengths[:-1]])


def count_actions(schedule: Schedule) -> int:
    return len(list_actions(schedule))
