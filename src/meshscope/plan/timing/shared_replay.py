"""A schedule whose ranks share processors: processes on cores, NCCL ranks on one GPU.

A processor works for one rank at a time or evenly for several, so ranks that run at the same time
slow each other down, and one that waits leaves its share to the others. `num_replicas` pipelines
run alike (dp · tp ranks of a stage, in step), so of a active pipeline ranks each advances at
min(1, processors / (a · replicas)). Whatever a rank does in its row is such work, collectives
inside a layer too: over shared memory or one device they are copies and sums on the same
processors. Messages between stages only take time. Not modelled: the cost of switching, caches that
ranks take from each other, and placement of ranks on certain cores.
"""

import heapq
from dataclasses import dataclass

from meshscope.core.schedule import Action, ActionKind, Output, Schedule, output_of

_LEAST = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReplay:
    end_s: tuple[float, ...]
    """Of each pipeline rank."""
    busy_s: tuple[float, ...]
    """Wall time in which a rank had an action under way, longer than its work."""

    @property
    def makespan_s(self) -> float:
        return max(self.end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds on a processor of its own, by stage."""

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]

    def measure(self, action: Action) -> float:
        """Of one action."""
        stage = action.stage
        if action.kind is ActionKind.FORWARD:
            return self.forward_s[stage]
        inputs, weights = self.input_grad_s[stage], self.weight_grad_s[stage]
        kinds = {ActionKind.INPUT_GRAD: inputs, ActionKind.WEIGHT_GRAD: weights}
        return kinds.get(action.kind, inputs + weights)


class _Rows:
    """What each rank runs now, and what has been made when."""

    def __init__(self, schedule: Schedule, work: StageWork, message_s: float) -> None:
        self.schedule, self.work, self.message_s = schedule, work, message_s
        self.place = [0] * schedule.num_ranks
        self.left: dict[int, float] = {}
        self.made: dict[Output, float] = {}
        self.end_s = [0.0] * schedule.num_ranks
        self.busy_s = [0.0] * schedule.num_ranks
        self.arrivals: list[float] = []

    def start_ready(self, now: float) -> None:
        """Begins the next action of every rank that has what it needs."""
        for rank, row in enumerate(self.schedule.actions):
            if rank in self.left or self.place[rank] >= len(row):
                continue
            action = row[self.place[rank]]
            times = [self._find_arrival(rank, one) for one in self.schedule.needs(action)]
            if all(one is not None and one <= now + _LEAST for one in times):
                self.left[rank] = max(self.work.measure(action), _LEAST)

    def _find_arrival(self, rank: int, output: Output) -> float | None:
        made = self.made.get(output)
        if made is None or self.schedule.stage_ranks[output[1]] == rank:
            return made
        return made + self.message_s

    def advance(self, now: float, step_s: float, rate: float) -> None:
        """All that run, by so many seconds of wall time."""
        for rank in list(self.left):
            self.left[rank] -= step_s * rate
            self.busy_s[rank] += step_s
            if self.left[rank] <= _LEAST:
                del self.left[rank]
                output = output_of(self.schedule.actions[rank][self.place[rank]])
                self.made[output] = self.end_s[rank] = now + step_s
                heapq.heappush(self.arrivals, now + step_s + self.message_s)
                self.place[rank] += 1


def replay_shared(
    schedule: Schedule,
    work: StageWork,
    message_s: float,
    *,
    num_replicas: int,
    num_processors: float,
) -> SharedReplay:
    """For a schedule that ends; one that does not (`find_deadlock`) stops where it is stuck."""
    rows, now = _Rows(schedule, work, message_s), 0.0
    while True:
        rows.start_ready(now)
        while rows.arrivals and rows.arrivals[0] <= now + _LEAST:
            heapq.heappop(rows.arrivals)
        if not rows.left and not rows.arrivals:
            return SharedReplay(end_s=tuple(rows.end_s), busy_s=tuple(rows.busy_s))
        if not rows.left:
            now = rows.arrivals[0]
            continue
        rate = min(1.0, num_processors / (len(rows.left) * num_replicas))
        step_s = min(rows.left.values()) / rate
        if rows.arrivals:
            step_s = min(step_s, rows.arrivals[0] - now)
        rows.advance(now, step_s, rate)
        now += step_s
