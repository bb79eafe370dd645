"""`core.schedule_replay` for many sets of costs of one schedule at once.

A schedule is compiled once into levels: actions that depend on earlier levels only. One level is
one step over arrays of all cost sets, so that a thousand layouts with the same schedule cost as
much as a few. Gives what `replay_schedule` gives (tests/unit/plan/test_batch_replay.py).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshscope.core.schedule import Action, ActionKind, Product, output_of, walk_schedule
from meshscope.plan.candidate import Candidate, build_cached

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_KINDS = {
    ActionKind.FORWARD: 0,
    ActionKind.BACKWARD: 1,
    ActionKind.INPUT_GRAD: 2,
    ActionKind.WEIGHT_GRAD: 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    actions: Indices
    before: Indices
    """The action before it in its row; the last slot, which is 0, where there is none."""
    needs: Indices
    """The one that another stage must have ended."""
    is_remote: Floats
    costs: Indices
    """Kind · stages + stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSchedule:
    levels: tuple[_Level, ...]
    num_actions: int
    num_stages: int
    first: tuple[int, ...]
    """Each rank's first action."""
    last: tuple[int, ...]
    cost_counts: Floats
    """How often each rank runs each kind and stage."""


@lru_cache(maxsize=512)
def compile_schedule(name: str, pp: int, num_microbatches: int, chunks: int) -> CompiledSchedule:
    """Levels of a schedule that `core.schedule_builders` has."""
    schedule = build_cached(name, pp, num_microbatches, chunks)
    order = walk_schedule(schedule).order
    slot: dict[tuple[Product, int, int], int] = {}
    level_of = np.zeros(len(order) + 1, dtype=np.int64)
    none = len(order)
    before = np.full(none, none, dtype=np.int64)
    needs = np.full(none, none, dtype=np.int64)
    remote = np.zeros(none)
    costs = np.zeros(none, dtype=np.int64)
    row_end: dict[int, int] = {}
    first: dict[int, int] = {}
    counts = np.zeros((schedule.num_ranks, 4 * schedule.num_stages))
    for index, (rank, action) in enumerate(order):
        level = 0
        if rank in row_end:
            before[index] = row_end[rank]
            level = level_of[row_end[rank]] + 1
        first.setdefault(rank, index)
        for output in schedule.needs(action):
            if output[1] != action.stage:
                needs[index] = slot[output]
                remote[index] = schedule.stage_ranks[output[1]] != rank
                level = max(level, level_of[slot[output]] + 1)
        level_of[index] = level
        costs[index] = _cost_index(action, schedule.num_stages)
        counts[rank, costs[index]] += 1
        slot[output_of(action)] = row_end[rank] = index
    by_level = np.argsort(level_of[:none], kind="stable")
    cuts = np.flatnonzero(np.diff(level_of[:none][by_level])) + 1
    return CompiledSchedule(
        levels=tuple(
            _Level(
                actions=part,
                before=before[part],
                needs=needs[part],
                is_remote=remote[part][:, None],
                costs=costs[part],
            )
            for part in np.split(by_level, cuts)
        ),
        num_actions=none,
        num_stages=schedule.num_stages,
        first=tuple(first[rank] for rank in range(schedule.num_ranks)),
        last=tuple(row_end[rank] for rank in range(schedule.num_ranks)),
        cost_counts=counts,
    )


def _cost_index(action: Action, num_stages: int) -> int:
    return _KINDS[action.kind] * num_stages + action.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReplay:
    """Ends and busy times of each rank (rows) for each set of costs (columns)."""

    start_s: Floats
    end_s: Floats
    busy_s: Floats

    @property
    def makespan_s(self) -> Floats:
        found: Floats = self.end_s.max(axis=0)
        return found


def replay_steady(
    candidate: Candidate,
    forward_s: Floats,
    input_grad_s: Floats,
    weight_grad_s: Floats,
    communication_s: Floats,
) -> BatchReplay:
    """A candidate's whole schedule: replayed, or its steady state continued.

    With many microbatches two replays, of four and of five rounds of pp, give the time of one more
    microbatch; the rest adds as much each. Not exact where the schedule has no steady state.
    """
    durations = (forward_s, input_grad_s, weight_grad_s, communication_s)
    steady, number = candidate.num_steady, candidate.num_microbatches
    key = (candidate.schedule, candidate.pp)
    real = replay_batch(compile_schedule(*key, steady, candidate.chunks), *durations)
    if steady == number:
        return real
    num_more = candidate.pp
    further = replay_batch(compile_schedule(*key, steady + num_more, candidate.chunks), *durations)
    times = (number - steady) / num_more
    busy_s = real.busy_s + times * (further.busy_s - real.busy_s)
    end_s = real.end_s + times * (further.end_s - real.end_s)
    # Where five rounds leave less of a bubble than four, more rounds do not leave less than none.
    return BatchReplay(
        start_s=real.start_s, end_s=np.maximum(end_s, real.start_s + busy_s), busy_s=busy_s
    )


def replay_batch(
    compiled: CompiledSchedule,
    forward_s: Floats,
    input_grad_s: Floats,
    weight_grad_s: Floats,
    communication_s: Floats,
) -> BatchReplay:
    """Durations by stage (rows) for each set of costs (columns)."""
    if len(compiled.first) == 1 and compiled.num_stages == 1:
        # One rank and stage never wait.
        busy = compiled.cost_counts[:, :1] * (forward_s + input_grad_s + weight_grad_s)
        return BatchReplay(start_s=0 * busy, end_s=busy, busy_s=busy)
    costs = np.concatenate([forward_s, input_grad_s + weight_grad_s, input_grad_s, weight_grad_s])
    ends = np.zeros((compiled.num_actions + 1, costs.shape[1]))
    for level in compiled.levels:
        arrived = ends[level.needs]
        # Where nothing is waited for, the last row is 0 and the link takes no time.
        arrived += level.is_remote * communication_s
        ends[level.actions] = np.maximum(ends[level.before], arrived) + costs[level.costs]
    end = ends[list(compiled.last)]
    first = list(compiled.first)
    kinds = np.concatenate([level.costs for level in compiled.levels])
    actions = np.concatenate([level.actions for level in compiled.levels])
    cost_of = np.empty(compiled.num_actions, dtype=np.int64)
    cost_of[actions] = kinds
    start = ends[first] - costs[cost_of[first]]
    return BatchReplay(start_s=start, end_s=end, busy_s=compiled.cost_counts @ costs)
