"""A schedule made to measure: from what actions take on each stage and what each stage may hold.

One stage on each rank, backwards split into I and W, as in Zero Bubble's automatic schedules
(arXiv 2401.10241, section 3.1): forwards go ahead as far as memory allows until the first gradient
is back, then F and I take turns, W fills the gaps and makes room, and what is left of W ends the
row. A rank decides when it is free, by what has arrived and what is on its way (list scheduling on
the clock of `core.schedule_replay`). Two choices have no best answer for all costs and are tried
out: whether the warm-up starts a forward that makes the first gradient wait, and how much longer
than a gap a W may be that fills it. The built-in schedules of one stage that fit the memory
are tried as well, so the result is never worse than these.

Memory is counted in microbatches of a stage's activations: 1 from F to the end of I, and
`kept_ratio` of it from there to the end of W. That is 1 where nothing is freed before W; a
transformer without fused attention keeps 32h / (34h + 5as) (the paper's table 1: h hidden size,
a heads, s sequence length).

Not an optimum: the search is greedy, and has no answer for stages in chunks.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from meshscope.core.schedule import Action, ActionKind, Schedule
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.schedule_replay import ActionCosts, ScheduleReplay, replay_schedule
from meshscope.errors import UsageError

NAME = "auto"
Objective = Literal["span", "makespan"]
"""`span`: the longest time of any rank from its own start to its own end, the paper's cost.
`makespan`: from the first start to the last end, which counts where all ranks meet after a step."""

_OVERHANGS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares of a W by which it may outlast the gap that it fills."""
_FIXED = ("1f1b", "zb_h1", "zb_h2")
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What one microbatch takes on a stage, and what the stage may hold."""

    forward_ns: float
    input_grad_ns: float
    weight_grad_ns: float
    max_held: float
    """In microbatches of this stage's activations, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSchedule:
    replay: ScheduleReplay
    peak_held: tuple[float, ...]
    """Of each rank, counted as its limit is."""
    num_tried: int

    @property
    def schedule(self) -> Schedule:
        return self.replay.schedule


def search_schedule(
    stages: Sequence[StageCosts],
    num_microbatches: int,
    *,
    communication_ns: float = 0.0,
    kept_ratio: float = 1.0,
    objective: Objective = "span",
) -> FoundSchedule:
    """The best schedule found for these costs; raises UsageError with everything wrong in them."""
    _check(stages, num_microbatches, communication_ns, kept_ratio)
    costs = list_costs(stages, communication_ns)
    tried = [
        _Packing(
            stages,
            num_microbatches,
            communication_ns,
            kept_ratio,
            starts_late_forward=starts_late,
            overhang=overhang,
        ).pack()
        for starts_late, overhang in product((False, True), _OVERHANGS)
    ]
    tried += [build_schedule(name, len(stages), num_microbatches) for name in _FIXED]
    best: ScheduleReplay | None = None
    for schedule in tried:
        peaks = measure_held(schedule, kept_ratio)
        if any(peak > stage.max_held + _SLACK for peak, stage in zip(peaks, stages, strict=True)):
            continue
        replay = replay_schedule(schedule, costs)
        if best is None or _rate(replay, objective) < _rate(best, objective):
            best = replay
    assert best is not None, "a packing keeps to its limits"
    return FoundSchedule(
        replay=best, peak_held=measure_held(best.schedule, kept_ratio), num_tried=len(tried)
    )


def list_costs(stages: Sequence[StageCosts], communication_ns: float) -> ActionCosts:
    """The same costs for a replay."""
    by_stage: dict[tuple[ActionKind, int], float] = {}
    for index, stage in enumerate(stages):
        by_stage[ActionKind.FORWARD, index] = stage.forward_ns
        by_stage[ActionKind.INPUT_GRAD, index] = stage.input_grad_ns
        by_stage[ActionKind.WEIGHT_GRAD, index] = stage.weight_grad_ns
    return ActionCosts(by_stage=by_stage, communication_ns=communication_ns)


def measure_held(schedule: Schedule, kept_ratio: float) -> tuple[float, ...]:
    """For each rank, the most activations it holds at once, in microbatches of a stage."""
    freed = {
        ActionKind.INPUT_GRAD: 1.0 - kept_ratio,
        ActionKind.WEIGHT_GRAD: kept_ratio,
        ActionKind.BACKWARD: 1.0,
    }
    peaks = []
    for row in schedule.actions:
        held = peak = 0.0
        for action in row:
            held += 1.0 if action.kind is ActionKind.FORWARD else -freed[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _rate(replay: ScheduleReplay, objective: Objective) -> tuple[float, float]:
    """Smaller is better; the other measure decides between equals."""
    both = (replay.cost_ns, replay.makespan_ns)
    return both if objective == "span" else both[::-1]


def _check(
    stages: Sequence[StageCosts], num_microbatches: int, communication_ns: float, kept_ratio: float
) -> None:
    problems = [] if stages else ["no stage is given; give at least one"]
    if num_microbatches < 1:
        problems.append(f"num_microbatches is {num_microbatches}, but at least 1 is expected")
    if not 0.0 <= communication_ns < math.inf:
        problems.append(f"communication_ns is {communication_ns}, but 0 or more is expected")
    if not 0.0 <= kept_ratio <= 1.0:
        problems.append(f"kept_ratio is {kept_ratio}, but 0 to 1 is expected")
    for index, stage in enumerate(stages):
        times = {
            "forward_ns": stage.forward_ns,
            "input_grad_ns": stage.input_grad_ns,
            "weight_grad_ns": stage.weight_grad_ns,
        }
        problems += [
            f"stage {index}: {name} is {value}, but a finite number of at least 0 is expected"
            for name, value in times.items()
            if not 0.0 <= value < math.inf
        ]
        if not stage.max_held >= 1.0:
            problems.append(
                f"stage {index}: max_held is {stage.max_held}, but the activations of one "
                "microbatch are the least that a stage can hold"
            )
    if not problems and not any(s.forward_ns + s.input_grad_ns + s.weight_grad_ns for s in stages):
        problems.append("no action takes any time; give costs")
    if problems:
        raise UsageError("\n".join(problems))


@dataclass(slots=True)
class _Rank:
    """One rank of a packing: how far it is, and when what it waits for is there."""

    arrival_ns: dict[ActionKind, list[float]]
    """When the input of each F and of each I is there; infinite while nobody knows."""
    row: list[Action] = field(default_factory=list)
    free_ns: float = 0.0
    num_run: dict[ActionKind, int] = field(
        default_factory=lambda: dict.fromkeys(
            (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD), 0
        )
    )
    is_forward_next: bool = False
    """After an I; F and I take turns."""

    @property
    def num_put_off(self) -> int:
        """Microbatches whose W is still to come."""
        return self.num_run[ActionKind.INPUT_GRAD] - self.num_run[ActionKind.WEIGHT_GRAD]

    def next_arrival_ns(self, kind: ActionKind) -> float:
        arrivals = self.arrival_ns[kind]
        index = self.num_run[kind]
        return arrivals[index] if index < len(arrivals) else math.inf


class _Packing:
    """Builds one schedule: ranks take what they can start, in the order of the clock."""

    def __init__(
        self,
        stages: Sequence[StageCosts],
        num_microbatches: int,
        communication_ns: float,
        kept_ratio: float,
        *,
        starts_late_forward: bool,
        overhang: float,
    ) -> None:
        self._stages = stages
        self._num_microbatches = num_microbatches
        self._communication_ns = communication_ns
        self._kept_ratio = kept_ratio
        self._starts_late_forward = starts_late_forward
        self._overhang = overhang
        self._ranks = [self._make_rank(is_first=index == 0) for index in range(len(stages))]

    def _make_rank(self, *, is_first: bool) -> _Rank:
        count = self._num_microbatches
        return _Rank(
            {
                ActionKind.FORWARD: [0.0 if is_first else math.inf] * count,
                ActionKind.INPUT_GRAD: [math.inf] * count,
            }
        )

    def pack(self) -> Schedule:
        # A rank looks around when it gets free and when something arrives.
        calls = [(0.0, index) for index in range(len(self._ranks))]
        while calls:
            now_ns, index = heapq.heappop(calls)
            rank = self._ranks[index]
            if now_ns < rank.free_ns - _SLACK:
                continue
            kind = self._choose(rank, self._stages[index], now_ns)
            if kind is not None:
                for call in self._run(index, kind, now_ns):
                    heapq.heappush(calls, call)
        return Schedule(
            name=NAME,
            num_microbatches=self._num_microbatches,
            stage_ranks=tuple(range(len(self._ranks))),
            actions=tuple(tuple(rank.row) for rank in self._ranks),
        )

    def _choose(self, rank: _Rank, stage: StageCosts, now_ns: float) -> ActionKind | None:
        """What to start now; None waits for the next arrival."""
        num_forward = rank.num_run[ActionKind.FORWARD]
        num_input = rank.num_run[ActionKind.INPUT_GRAD]
        held = num_forward - num_input + self._kept_ratio * rank.num_put_off
        has_room = held + 1.0 <= stage.max_held + _SLACK
        forward_ns = rank.next_arrival_ns(ActionKind.FORWARD)
        input_ns = rank.next_arrival_ns(ActionKind.INPUT_GRAD)
        can_forward = has_room and forward_ns <= now_ns + _SLACK
        can_input = input_ns <= now_ns + _SLACK
        if can_input and not (can_forward and rank.is_forward_next):
            return ActionKind.INPUT_GRAD
        # In the warm-up there is no turn yet: forwards go on until a gradient is due.
        is_warming_up = num_input == 0 and self._fits_before(input_ns, stage, now_ns)
        if can_forward and (rank.is_forward_next or is_warming_up):
            return ActionKind.FORWARD
        if rank.num_put_off and self._is_gap(rank, stage, now_ns, has_room=has_room):
            return ActionKind.WEIGHT_GRAD
        return None

    def _fits_before(self, input_ns: float, stage: StageCosts, now_ns: float) -> bool:
        return self._starts_late_forward or now_ns + stage.forward_ns <= input_ns + _SLACK

    def _is_gap(self, rank: _Rank, stage: StageCosts, now_ns: float, *, has_room: bool) -> bool:
        """Whether a W is the best use of the time until something else can start."""
        is_more = rank.num_run[ActionKind.FORWARD] < self._num_microbatches
        if is_more and not has_room:
            return True
        next_ns = rank.next_arrival_ns(ActionKind.INPUT_GRAD)
        if has_room:
            next_ns = min(next_ns, rank.next_arrival_ns(ActionKind.FORWARD))
        return next_ns - now_ns >= stage.weight_grad_ns * (1.0 - self._overhang)

    def _run(self, index: int, kind: ActionKind, now_ns: float) -> list[tuple[float, int]]:
        """Starts an action; who has to look around when."""
        rank, stage = self._ranks[index], self._stages[index]
        microbatch = rank.num_run[kind]
        rank.row.append(Action(kind, index, microbatch))
        rank.num_run[kind] += 1
        duration_ns = {
            ActionKind.FORWARD: stage.forward_ns,
            ActionKind.INPUT_GRAD: stage.input_grad_ns,
            ActionKind.WEIGHT_GRAD: stage.weight_grad_ns,
        }[kind]
        end_ns = rank.free_ns = now_ns + duration_ns
        calls = [(end_ns, index)]
        if kind is not ActionKind.WEIGHT_GRAD:
            rank.is_forward_next = kind is ActionKind.INPUT_GRAD
            calls += self._deliver(index, kind, microbatch, end_ns)
        return calls

    def _deliver(
        self, index: int, kind: ActionKind, microbatch: int, end_ns: float
    ) -> list[tuple[float, int]]:
        if kind is ActionKind.FORWARD and index == len(self._ranks) - 1:
            self._ranks[index].arrival_ns[ActionKind.INPUT_GRAD][microbatch] = end_ns
            return []
        target = index + (1 if kind is ActionKind.FORWARD else -1)
        if target < 0:
            return []
        arrival_ns = end_ns + self._communication_ns
        self._ranks[target].arrival_ns[kind][microbatch] = arrival_ns
        return [(arrival_ns, target)]
