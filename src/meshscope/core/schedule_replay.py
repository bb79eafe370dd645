"""When each action of a schedule runs, given how long actions and transfers take.

Event replay: an action starts when the one before it in its row has ended and all that it waits
for has arrived; what another rank made arrives `communication_ns` after it was made, and the link
never makes a rank wait for it twice (transfers overlap with compute and with each other). All times
are in the unit of the costs, nanoseconds by name; whole numbers stay whole, so results are exact.

Wrong where transfers queue for a link or block the rank that sends, and where actions on a rank
slow each other down.

Costs of one run of a pipeline as in Zero Bubble (arXiv 2401.10241): cost = the longest time of any
rank from its own first start to its own last end. Ideal = the busy time of the busiest rank, which
is m(F+I+W) when stages are equal. The bubble is cost − ideal: `bubble_of_total_ratio` divides it by
cost, which is the paper's bubble rate, `bubble_over_ideal_ratio` by ideal, which is the textbook's
(p−1)/m. Idle time that unequal stages cause is not in it; `idle_of_makespan_ratio` has everything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from meshscope.core.schedule import (
    Action,
    ActionKind,
    Output,
    Schedule,
    count_peak_activations,
    find_deadlock,
    output_of,
    walk_schedule,
)
from meshscope.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCosts:
    """How long every action takes, and how long outputs travel between ranks."""

    by_stage: Mapping[tuple[ActionKind, int], float]
    """Duration in ns for kind and stage. A B that is not given takes as long as I and W."""
    by_microbatch: Mapping[tuple[ActionKind, int, int], float] = field(default_factory=dict)
    """Duration in ns for kind, stage and microbatch, where it differs from the stage's."""
    communication_ns: float = 0
    """From the end of an action to when another rank can use its output, at least 0."""

    @classmethod
    def uniform(
        cls,
        schedule: Schedule,
        *,
        forward_ns: float,
        input_grad_ns: float,
        weight_grad_ns: float,
        communication_ns: float = 0,
    ) -> Self:
        """Equal stages: one microbatch takes these times on a rank, over all that it holds.

        So schedules with any number of chunks do the same work and can be compared.
        """
        held = [len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
        whole = {
            ActionKind.FORWARD: forward_ns,
            ActionKind.INPUT_GRAD: input_grad_ns,
            ActionKind.WEIGHT_GRAD: weight_grad_ns,
        }
        by_stage = {
            (kind, stage): _divide(duration, held[rank])
            for stage, rank in enumerate(schedule.stage_ranks)
            for kind, duration in whole.items()
        }
        return cls(by_stage=by_stage, communication_ns=communication_ns)

    def duration_ns(self, action: Action) -> float | None:
        """How long `action` takes; None where nothing says so."""
        if self.by_microbatch:
            own = self.by_microbatch.get((action.kind, action.stage, action.microbatch))
            if own is not None:
                return own
        given = self.by_stage.get((action.kind, action.stage))
        if given is None and action.kind is ActionKind.BACKWARD:
            return self._whole_backward_ns(action)
        return given

    def _whole_backward_ns(self, action: Action) -> float | None:
        kinds = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
        parts = [self.duration_ns(Action(kind, action.stage, action.microbatch)) for kind in kinds]
        inputs, weights = parts
        return None if inputs is None or weights is None else inputs + weights


@dataclass(frozen=True, slots=True)
class ActionTime:
    action: Action
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReplay:
    times: tuple[ActionTime, ...]
    busy_ns: float
    """Sum of the durations of its actions."""
    peak_activations: int
    """See `core.schedule.count_peak_activations`: in stages, alive from F to the end of B or W."""

    @property
    def start_ns(self) -> float:
        """The start of its first action."""
        return self.times[0].start_ns if self.times else 0

    @property
    def end_ns(self) -> float:
        """The end of its last action."""
        return self.times[-1].end_ns if self.times else 0

    @property
    def span_ns(self) -> float:
        """From its own start to its own end."""
        return self.end_ns - self.start_ns

    @property
    def idle_ns(self) -> float:
        """The part of its own span in which it ran nothing."""
        return self.span_ns - self.busy_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReplay:
    """A schedule on a clock that starts at 0 with the first action."""

    schedule: Schedule
    ranks: tuple[RankReplay, ...]

    @property
    def makespan_ns(self) -> float:
        """From the first start to the last end of all ranks."""
        return max(rank.end_ns for rank in self.ranks)

    @property
    def cost_ns(self) -> float:
        """The longest span of any rank, the paper's cost.

        Shorter than the makespan where the rank that ends last is not the one that began first:
        then steps can overlap at their edges.
        """
        return max(rank.span_ns for rank in self.ranks)

    @property
    def ideal_ns(self) -> float:
        """The busy time of the busiest rank: no order of these actions costs less."""
        return max(rank.busy_ns for rank in self.ranks)

    @property
    def bubble_ns(self) -> float:
        """Cost over ideal, as a time."""
        return self.cost_ns - self.ideal_ns

    @property
    def bubble_of_total_ratio(self) -> float:
        """Bubble / cost, 0..1: the Zero Bubble paper's rate, (p−1)/(m+p−1) for 1F1B."""
        return self.bubble_ns / self.cost_ns

    @property
    def bubble_over_ideal_ratio(self) -> float:
        """Bubble / ideal, may exceed 1: (p−1)/m for 1F1B."""
        return self.bubble_ns / self.ideal_ns

    @property
    def idle_of_makespan_ratio(self) -> float:
        """The share of all ranks' time, first start to last end, in which they ran nothing.

        Includes what unequal stages cost and, unlike the bubble, each rank's own late start.
        """
        busy_ns = sum(rank.busy_ns for rank in self.ranks)
        return 1 - busy_ns / (self.makespan_ns * len(self.ranks))


def replay_schedule(schedule: Schedule, costs: ActionCosts) -> ScheduleReplay:
    """Put every action on the clock; time grows with the number of actions only.

    Parts of a step can be replayed too (forward only). A deadlock raises UsageError.
    """
    walk = walk_schedule(schedule)
    durations = [_look_up(row, costs) for row in schedule.actions]
    problems = find_deadlock(schedule, walk) + _find_cost_problems(schedule, costs, durations)
    if problems:
        raise UsageError("\n".join(problems))
    rows: list[list[ActionTime]] = [[] for _ in schedule.actions]
    # Row ends and the ends of outputs; who holds the stage tells whether an output travels.
    free_ns: list[float] = [0] * schedule.num_ranks
    made_ns: dict[Output, float] = {}
    placement = schedule.stage_ranks
    for rank, action in walk.order:
        start_ns = free_ns[rank]
        for output in schedule.needs(action):
            is_remote = placement[output[1]] != rank
            arrival_ns = made_ns[output] + (costs.communication_ns if is_remote else 0)
            if arrival_ns > start_ns:
                start_ns = arrival_ns
        end_ns = start_ns + durations[rank][len(rows[rank])]
        free_ns[rank] = made_ns[output_of(action)] = end_ns
        rows[rank].append(ActionTime(action, start_ns, end_ns))
    peaks = count_peak_activations(schedule)
    return ScheduleReplay(
        schedule=schedule,
        ranks=tuple(
            RankReplay(times=tuple(rows[rank]), busy_ns=sum(durations[rank]), peak_activations=peak)
            for rank, peak in enumerate(peaks)
        ),
    )


def _look_up(row: Sequence[Action], costs: ActionCosts) -> list[float]:
    """The duration of each action, NaN where none is given."""
    if costs.by_microbatch:
        return [_or_nan(costs.duration_ns(action)) for action in row]
    # Without exceptions there are few different answers, and asking takes longer than the replay.
    known = {(action.kind, action.stage): action for action in row}
    by_stage = {key: _or_nan(costs.duration_ns(action)) for key, action in known.items()}
    return [by_stage[action.kind, action.stage] for action in row]


def _or_nan(duration: float | None) -> float:
    return math.nan if duration is None else duration


def _divide(duration: float, parts: int) -> float:
    # Whole numbers stay whole where they can, so that replays of them are exact.
    if isinstance(duration, int) and duration % parts == 0:
        return duration // parts
    return duration / parts


def _find_cost_problems(
    schedule: Schedule, costs: ActionCosts, durations: Sequence[Sequence[float]]
) -> list[str]:
    wrong: dict[tuple[int, ActionKind], list[str]] = {}
    for row, values in zip(schedule.actions, durations, strict=True):
        for action, value in zip(row, values, strict=True):
            if not _is_duration(value):
                found = "not given" if math.isnan(value) else f"{value} ns"
                wrong.setdefault((action.stage, action.kind), []).append(f"{action} is {found}")
    problems = [
        f"the duration of {examples[0]}, but a finite number of at least 0 is expected; "
        f"give one for {kind} of stage {stage} ({len(examples)} actions)"
        for (stage, kind), examples in sorted(wrong.items())
    ]
    if not _is_duration(costs.communication_ns):
        problems.append(
            f"communication_ns is {costs.communication_ns}, but a finite number of at least 0 is "
            f"expected; correct it"
        )
    if not problems and not any(any(values) for values in durations):
        problems.append("no action takes any time, so there is no bubble to speak of; give costs")
    return problems


def _is_duration(value: float) -> bool:
    return math.isfinite(value) and value >= 0
