"""Times a pipeline step again, for many steps at once: `core.schedule_replay` on columns.

Arrays are [action, run]: actions in the order of `list_actions` (row by row), runs are steps of
pipelines. An action starts when the one before it in its row has ended and `gap_ns` has passed, and
when `lag_ns` has passed since the end of the action on another rank that made its input. The first
of a row starts no earlier than the rank was ready.

If sends wait for their receiver, a rank goes on only when the receiver has come to the receive:
after the receiver's previous action (`BATCHED`: sends and receives wait together), and after the
receiver's own send (`BLOCKING`: one after the other).

Wrong where transfers queue for a link, and where actions slow each other down.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.core.dependency_order import sort_by_needs
from meshscope.core.schedule import Action, ActionKind, Schedule, output_of
from meshscope.store.read.arrays import Floats, Int64s

_NO_ACTION = -1


class SendMode(StrEnum):
    """What a sending rank waits for."""

    FREE = "free"
    """Nothing: it goes on at once."""
    BATCHED = "batched"
    """Until its receiver has ended the action before; sends and receives wait together."""
    BLOCKING = "blocking"
    """Until its receiver has ended the action before and has sent what that made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayPlan:
    """A schedule in the order in which its actions can be timed."""

    schedule: Schedule
    actions: tuple[Action, ...]
    """Row by row."""
    rank: Int64s
    """Pipeline rank of each."""
    before: Int64s
    """The previous action in the same row; _NO_ACTION for the first."""
    remote: Int64s
    """The action of another rank that makes its input; _NO_ACTION for none."""
    mode: SendMode
    receiver: Int64s
    """If sends wait: the action of another rank that receives what the previous action sends;
    _NO_ACTION for none."""
    order: tuple[tuple[int, bool], ...]
    """Index in `actions`, with False for when the rank comes to it and True for when it runs; each
    after all that it waits for."""

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    def replay(
        self,
        duration_ns: Floats,
        *,
        lag_ns: Floats | float = 0.0,
        gap_ns: Floats | float = 0.0,
        ready_ns: Floats | float = 0.0,
    ) -> tuple[Floats, Floats]:
        """Start and end of every action, from durations [action, run].

        `lag_ns` and `gap_ns` are [action, run] or what broadcasts to it, `ready_ns` [rank, run].
        """
        num_runs = duration_ns.shape[1]
        lag = np.broadcast_to(lag_ns, duration_ns.shape)
        gap = np.broadcast_to(gap_ns, duration_ns.shape)
        ready = np.broadcast_to(ready_ns, (self.num_ranks, num_runs))
        free = np.empty_like(duration_ns)
        start, end = np.empty_like(duration_ns), np.empty_like(duration_ns)
        for index, is_run in self.order:
            if not is_run:
                before, receiver = self.before[index], self.receiver[index]
                at = ready[self.rank[index]] if before < 0 else end[before] + gap[index]
                if receiver >= 0 and self.mode is SendMode.BLOCKING:
                    at = np.maximum(at, free[receiver])
                elif receiver >= 0:
                    earlier = self.before[receiver]
                    came = ready[self.rank[receiver]] if earlier < 0 else end[earlier]
                    at = np.maximum(at, came)
                free[index] = at
                continue
            remote, at = self.remote[index], free[index]
            start[index] = at if remote < 0 else np.maximum(at, end[remote] + lag[index])
            end[index] = start[index] + duration_ns[index]
        return start, end

    def cost_ns(self, start: Floats, end: Floats) -> Floats:
        """Per run: the longest time of any rank from its own first start to its own last end."""
        spans = [
            end[rows].max(axis=0) - start[rows].min(axis=0) for rows in self._rows() if len(rows)
        ]
        cost: Floats = np.max(spans, axis=0)
        return cost

    def busy_ns(self, duration: Floats) -> Floats:
        """[rank, run]: the sum of a rank's actions."""
        busy: Floats = np.stack([duration[rows].sum(axis=0) for rows in self._rows()])
        return busy

    def _rows(self) -> list[Int64s]:
        return [np.flatnonzero(self.rank == rank) for rank in range(self.num_ranks)]

    def spread(self, by_stage: dict[tuple[ActionKind, int], float]) -> Floats:
        """[action, 1] from a value for each kind and stage."""
        values = [by_stage[action.kind, action.stage] for action in self.actions]
        return np.array(values, dtype=np.float64)[:, None]


def list_actions(schedule: Schedule) -> tuple[Action, ...]:
    """All actions row by row, the order of the arrays."""
    return tuple(action for row in schedule.actions for action in row)


def plan_replay(schedule: Schedule, mode: SendMode = SendMode.FREE) -> ReplayPlan | None:
    """The plan of a valid schedule; None if waiting sends would deadlock."""
    actions = list_actions(schedule)
    rank = np.repeat(np.arange(schedule.num_ranks), [len(row) for row in schedule.actions])
    is_first = np.diff(rank, prepend=-1) > 0
    before = np.where(is_first, _NO_ACTION, np.arange(len(actions)) - 1)
    maker = {output_of(action): index for index, action in enumerate(actions)}
    remote = np.full(len(actions), _NO_ACTION, dtype=np.int64)
    for index, action in enumerate(actions):
        for output in schedule.needs(action):
            if rank[maker[output]] != rank[index]:
                remote[index] = maker[output]
    receiver = np.full(len(actions), _NO_ACTION, dtype=np.int64)
    if mode is not SendMode.FREE:
        receiver = _find_receivers(rank, before, remote)
    order = _sort(before, remote, receiver, mode)
    if order is None:
        return None
    return ReplayPlan(
        schedule=schedule,
        actions=actions,
        rank=rank,
        before=before,
        remote=remote,
        mode=mode,
        receiver=receiver,
        order=order,
    )


def _find_receivers(rank: Int64s, before: Int64s, remote: Int64s) -> Int64s:
    """For each action the one that receives what the previous action sends."""
    taker = np.full(len(rank), _NO_ACTION, dtype=np.int64)
    users = np.flatnonzero(remote >= 0)
    taker[remote[users]] = users
    return np.where(before >= 0, taker[before], _NO_ACTION)


def _sort(
    before: Int64s, remote: Int64s, receiver: Int64s, mode: SendMode
) -> tuple[tuple[int, bool], ...] | None:
    """Nodes are 2·index (the rank comes to it) and 2·index + 1 (it runs)."""
    needs: list[list[int]] = []
    for index in range(len(before)):
        come, run = [], [2 * index]
        if before[index] >= 0:
            come.append(2 * int(before[index]) + 1)
        other = int(receiver[index])
        if other >= 0 and mode is SendMode.BLOCKING:
            come.append(2 * other)
        elif other >= 0 and before[other] >= 0:
            come.append(2 * int(before[other]) + 1)
        if remote[index] >= 0:
            run.append(2 * int(remote[index]) + 1)
        needs += [come, run]
    order = sort_by_needs(needs)
    return None if order is None else tuple((node // 2, node % 2 == 1) for node in order)
