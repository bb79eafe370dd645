"""Pipeline schedules as data: which action each pipeline rank runs, in which order.

A schedule holds no times. The engine executes it, the replay times it, the analysis of bubbles
measures against it, and all three take what an action must wait for from here. Ranks are positions
along the pipeline (0..p−1), not global ranks. Stages are the pieces of the model in forward order;
a rank may hold several of them (chunks), placed as `stage_ranks` says.

Wrong where microbatches depend on each other in more ways than through the stages: sequence chunks
that read earlier chunks' keys and values, or a stage that feeds two others.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Self

from meshscope.errors import UsageError


class ActionKind(StrEnum):
    """What a rank does with one microbatch of one stage. The letters are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    INPUT_GRAD = "I"
    """The gradient of the input only, which the previous stage waits for."""
    WEIGHT_GRAD = "W"
    """The gradient of the weights only, which no other rank waits for."""

    # Enum's own is written in Python, and schedules are looked up by kind a million times.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One cell of a schedule, written `stage kind microbatch`: `2F0`."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """An action from its written form."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not an action; expected a stage, F, B, I or W, and a microbatch, "
                f"such as 2F0; write only compute actions (torch: format compute_only)"
            )
        return cls(ActionKind(match["kind"]), int(match["stage"]), int(match["microbatch"]))


class Product(IntEnum):
    """What actions wait for. B and I both give the gradient that the previous stage needs."""

    ACTIVATION = 0
    GRADIENT = 1
    WEIGHT_GRADIENT = 2

    __hash__ = int.__hash__


Output = tuple[Product, int, int]
"""A product of one stage for one microbatch: product, stage, microbatch."""

_ACTION = re.compile(r"(?P<stage>[0-9]+)(?P<kind>[FBIW])(?P<microbatch>[0-9]+)")
_HEADER = re.compile(r"(?P<name>.+) microbatches=(?P<count>[0-9]+) stage_ranks=(?P<ranks>[0-9,]+)")
_PRODUCTS = {
    ActionKind.FORWARD: Product.ACTIVATION,
    ActionKind.BACKWARD: Product.GRADIENT,
    ActionKind.INPUT_GRAD: Product.GRADIENT,
    ActionKind.WEIGHT_GRAD: Product.WEIGHT_GRADIENT,
}
# How many actions a message names before it only counts.
_MAX_NAMED = 6


# No slots: the cached property needs the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of one training step, for each pipeline rank in the order it runs them.

    Any rows can be held, wrong ones too, so that they can be shown; `require_valid` tells.
    """

    name: str
    """One line for people and files, such as `1f1b`."""
    num_microbatches: int
    """At least 1."""
    stage_ranks: tuple[int, ...]
    """The pipeline rank of each stage, in the order of the forward pass."""
    actions: tuple[tuple[Action, ...], ...]
    """One row for each pipeline rank."""

    def __post_init__(self) -> None:
        _raise_if_any(_find_shape_problems(self))

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks, p."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """The number of stages, p·v when each rank holds v chunks."""
        return len(self.stage_ranks)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds `stage`."""
        if not 0 <= stage < self.num_stages:
            raise UsageError(
                f"stage {stage} is outside 0..{self.num_stages - 1} of schedule {self.name}; "
                f"pass a stage below the number of stages"
            )
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in forward order."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """The actions that must end before `action` starts, other than the one before it in its
        row.

        Where the next stage runs its backward whole and this one in parts, or the other way
        round, the answer names the kind that the next stage runs.
        """
        return tuple(self._producer(*output, action.kind) for output in self.needs(action))

    def needs(self, action: Action) -> tuple[Output, ...]:
        """The same in terms of outputs, for loops over many actions."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is ActionKind.FORWARD:
            return ((Product.ACTIVATION, stage - 1, microbatch),) if stage > 0 else ()
        if kind is ActionKind.WEIGHT_GRAD:
            return ((Product.GRADIENT, stage, microbatch),)
        own = (Product.ACTIVATION, stage, microbatch)
        if stage == self.num_stages - 1:
            return (own,)
        return (own, (Product.GRADIENT, stage + 1, microbatch))

    def to_text(self) -> str:
        """A line with name, microbatches and placement, then a line of actions for each rank."""
        placement = ",".join(map(str, self.stage_ranks))
        header = f"{self.name} microbatches={self.num_microbatches} stage_ranks={placement}"
        rows = (" ".join(map(str, row)) for row in self.actions)
        return "\n".join([header, *rows]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """A schedule from `to_text`'s form."""
        header, *rows = text.removesuffix("\n").split("\n")
        match = _HEADER.fullmatch(header)
        if match is None:
            raise UsageError(
                f"{header!r} is not the first line of a schedule; expected for example "
                f"'1f1b microbatches=4 stage_ranks=0,1', then one line of actions for each rank"
            )
        return cls(
            name=match["name"],
            num_microbatches=int(match["count"]),
            stage_ranks=tuple(int(rank) for rank in match["ranks"].split(",") if rank),
            actions=_parse_rows([row.split() for row in rows]),
        )

    def to_csv(self) -> str:
        """Rows that torch's schedule runtime loads as `compute_only`; name and gaps are not kept.

        torch pads rows with empty cells to draw them as time steps. It does not need them.
        """
        return "".join(",".join(map(str, row)) + "\n" for row in self.actions)

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv") -> Self:
        """A schedule from torch's compute-only rows; empty cells are skipped.

        Placement and the number of microbatches are those that the actions show.
        """
        lines = text.rstrip().splitlines()
        rows = _parse_rows([[cell for cell in line.split(",") if cell.strip()] for line in lines])
        found = {action.stage: rank for rank, row in enumerate(rows) for action in row}
        gaps = sorted(set(range(max(found, default=0) + 1)) - set(found))
        if gaps:
            raise UsageError(
                f"no row has actions of stages {gaps}, but stages are numbered from 0 without "
                f"gaps; add their actions or renumber the stages"
            )
        return cls(
            name=name,
            num_microbatches=1 + max(action.microbatch for row in rows for action in row),
            stage_ranks=tuple(found[stage] for stage in range(len(found))),
            actions=rows,
        )

    @cached_property
    def _split_backwards(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward that is run in parts."""
        return frozenset(
            (action.stage, action.microbatch)
            for row in self.actions
            for action in row
            if action.kind is ActionKind.INPUT_GRAD
        )

    def _producer(self, product: Product, stage: int, microbatch: int, asker: ActionKind) -> Action:
        if product is Product.ACTIVATION:
            return Action(ActionKind.FORWARD, stage, microbatch)
        is_split = (stage, microbatch) in self._split_backwards or asker is ActionKind.WEIGHT_GRAD
        return Action(ActionKind.INPUT_GRAD if is_split else ActionKind.BACKWARD, stage, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A rank that can never go on."""

    rank: int
    action: Action
    """The action that cannot run."""
    missing: Output
    """The actions it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """A schedule carried out as far as it goes, without a clock."""

    order: tuple[tuple[int, Action], ...]
    """Ranks and their actions, each after all that it waits for."""
    blocked: tuple[Blocked, ...]
    """The ranks that did not reach the end of their row; empty when there is no deadlock."""


def output_of(action: Action) -> Output:
    """What others may wait for once `action` has ended."""
    return _PRODUCTS[action.kind], action.stage, action.microbatch


def walk_schedule(schedule: Schedule) -> _Walk:
    """Run every row as far as the others let it; time grows with the number of actions only.

    A rank that stops is visited again when the output it waits for appears, not before.
    """
    position = [0] * schedule.num_ranks
    done: set[Output] = set()
    waiting: dict[Output, list[int]] = {}
    order: list[tuple[int, Action]] = []
    runnable = list(reversed(range(schedule.num_ranks)))
    while runnable:
        rank = runnable.pop()
        row = schedule.actions[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            missing = _first_missing(schedule.needs(action), done)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            output = output_of(action)
            done.add(output)
            runnable.extend(waiting.pop(output, ()))
            order.append((rank, action))
            position[rank] += 1
    blocked = [
        Blocked(rank=rank, action=schedule.actions[rank][position[rank]], missing=missing)
        for missing, ranks in waiting.items()
        for rank in ranks
    ]
    return _Walk(order=tuple(order), blocked=tuple(sorted(blocked, key=lambda one: one.rank)))


def count_peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most stage activations it holds at once.

    A stage's activations of a microbatch live from the start of F to the end of B, or to the end
    of W where the backward is split (some of them could go after I; none are counted as gone). A
    rank runs one action at a time, so its order alone decides. One unit is one stage: with v
    chunks on each rank, divide by v to compare with whole-rank figures such as 1F1B's p.
    """
    return tuple(_count_peak(row) for row in schedule.actions)


def check_schedule(schedule: Schedule) -> list[str]:
    """Every reason why `schedule` is not one whole, runnable training step; empty when it is."""
    return [
        *_find_placement_problems(schedule),
        *_find_count_problems(schedule),
        *_find_order_problems(schedule),
        *find_deadlock(schedule, walk_schedule(schedule)),
    ]


def require_valid(schedule: Schedule) -> Schedule:
    """`schedule` itself, or one UsageError that lists everything `check_schedule` finds."""
    problems = check_schedule(schedule)
    _raise_if_any([f"schedule {schedule.name}: {problem}" for problem in problems])
    return schedule


def find_deadlock(schedule: Schedule, walk: _Walk) -> list[str]:
    """One problem that shows where each blocked rank stops and why; empty when none is blocked."""
    if not walk.blocked:
        return []
    present = {output_of(action) for row in schedule.actions for action in row}
    stops = [
        f"rank {stop.rank} stops at {stop.action}, which waits for "
        f"{_name_output(schedule, stop)}{'' if stop.missing in present else ', which no rank runs'}"
        for stop in walk.blocked
    ]
    return [f"deadlock: {_shorten(stops, '; ')}; run what is waited for earlier"]


def _first_missing(needs: tuple[Output, ...], done: set[Output]) -> Output | None:
    for output in needs:
        if output not in done:
            return output
    return None


def _count_peak(row: Iterable[Action]) -> int:
    live = peak = 0
    for action in row:
        if action.kind is ActionKind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind is not ActionKind.INPUT_GRAD:
            live -= 1
    return peak


def _find_shape_problems(schedule: Schedule) -> list[str]:
    """What would make the schedule's own methods fail."""
    problems = []
    if not schedule.name.strip() or len(schedule.name.splitlines()) != 1:
        problems.append(f"the name is {schedule.name!r}, but one line of text is expected; set it")
    if schedule.num_microbatches < 1:
        problems.append(
            f"num_microbatches is {schedule.num_microbatches}, but at least 1 is expected; "
            f"set it to the number of microbatches in a step"
        )
    if not schedule.stage_ranks:
        problems.append("stage_ranks is empty, but at least one stage is expected; place one")
    problems += [
        f"stage {stage} is placed on rank {rank}, but there are rows for ranks "
        f"0..{schedule.num_ranks - 1}; place it on one of these or add a row"
        for stage, rank in enumerate(schedule.stage_ranks)
        if not 0 <= rank < schedule.num_ranks
    ]
    return problems


def _find_placement_problems(schedule: Schedule) -> list[str]:
    problems = [
        f"rank {rank} holds no stage; give it one or remove its row"
        for rank in range(schedule.num_ranks)
        if rank not in schedule.stage_ranks
    ]
    placed = [(rank, action) for rank, row in enumerate(schedule.actions) for action in row]
    unknown = [str(action) for _, action in placed if not _is_known(schedule, action)]
    misplaced = [
        f"{action} on rank {rank} instead of {schedule.stage_ranks[action.stage]}"
        for rank, action in placed
        if _is_known(schedule, action) and schedule.stage_ranks[action.stage] != rank
    ]
    if unknown:
        problems.append(
            f"{_shorten(unknown)}: there are only stages 0..{schedule.num_stages - 1} and "
            f"microbatches 0..{schedule.num_microbatches - 1}; correct or remove them"
        )
    if misplaced:
        problems.append(
            f"{_shorten(misplaced)}: a stage runs only on the rank that holds it; "
            f"move the actions or change stage_ranks"
        )
    return problems


def _find_count_problems(schedule: Schedule) -> list[str]:
    counts = Counter(action for row in schedule.actions for action in row)
    missing: list[str] = []
    mixed: list[str] = []
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            forward, whole, inputs, weights = (
                counts[Action(kind, stage, microbatch)] for kind in ActionKind
            )
            pair = f"stage {stage} microbatch {microbatch}"
            if not forward:
                missing.append(str(Action(ActionKind.FORWARD, stage, microbatch)))
            if whole and (inputs or weights):
                mixed.append(pair)
            elif not whole and not (inputs and weights):
                missing += _name_missing_backward(stage, microbatch, inputs, weights)
    repeated = [f"{action} {count} times" for action, count in counts.items() if count > 1]
    problems = []
    if missing:
        problems.append(f"{_shorten(missing)} missing; every rank must run each of its once")
    if repeated:
        problems.append(f"{_shorten(repeated)}; run each action once")
    if mixed:
        problems.append(
            f"{_shorten(mixed)}: the backward is there both whole (B) and in parts (I, W); "
            f"keep B, or I and W"
        )
    return problems


def _name_missing_backward(stage: int, microbatch: int, inputs: int, weights: int) -> list[str]:
    if not inputs and not weights:
        return [f"{Action(ActionKind.BACKWARD, stage, microbatch)} (or I and W)"]
    absent = ActionKind.WEIGHT_GRAD if inputs else ActionKind.INPUT_GRAD
    return [str(Action(absent, stage, microbatch))]


def _find_order_problems(schedule: Schedule) -> list[str]:
    backward_first: list[str] = []
    weight_first: list[str] = []
    for rank, row in enumerate(schedule.actions):
        first: dict[Action, int] = {}
        for position, action in enumerate(row):
            first.setdefault(action, position)
        for action, position in first.items():
            cell = f"{action} on rank {rank}"
            if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
                before = Action(ActionKind.FORWARD, action.stage, action.microbatch)
                if first.get(before, -1) > position:
                    backward_first.append(cell)
            elif action.kind is ActionKind.WEIGHT_GRAD:
                before = Action(ActionKind.INPUT_GRAD, action.stage, action.microbatch)
                if first.get(before, -1) > position:
                    weight_first.append(cell)
    problems = []
    if backward_first:
        problems.append(f"{_shorten(backward_first)} before its forward; run F first")
    if weight_first:
        problems.append(f"{_shorten(weight_first)} before its input gradient; run I first")
    return problems


def _is_known(schedule: Schedule, action: Action) -> bool:
    return (
        0 <= action.stage < schedule.num_stages
        and 0 <= action.microbatch < schedule.num_microbatches
    )


def _name_output(schedule: Schedule, stop: Blocked) -> str:
    product, stage, microbatch = stop.missing
    names = schedule.dependencies(stop.action)
    outputs = [output_of(action) for action in names]
    return str(names[outputs.index((product, stage, microbatch))])


def _parse_rows(rows: Sequence[Sequence[str]]) -> tuple[tuple[Action, ...], ...]:
    problems: list[str] = []
    parsed: list[tuple[Action, ...]] = []
    for rank, row in enumerate(rows):
        bad = [cell for cell in row if _ACTION.fullmatch(cell.strip()) is None]
        if bad:
            problems.append(
                f"row of rank {rank}: {_shorten([repr(cell) for cell in bad])} not understood; "
                f"expected a stage, F, B, I or W, and a microbatch, such as 2F0; write only "
                f"compute actions (torch: format compute_only)"
            )
        else:
            parsed.append(tuple(Action.parse(cell) for cell in row))
    if not any(rows):
        problems.append("there are no actions; expected one row of actions for each rank")
    _raise_if_any(problems)
    return tuple(parsed)


def _shorten(items: Sequence[str], separator: str = ", ") -> str:
    more = len(items) - _MAX_NAMED
    named = separator.join(items[:_MAX_NAMED])
    return f"{named} and {more} more" if more > 0 else named


def _raise_if_any(problems: Iterable[str]) -> None:
    listed = list(problems)
    if listed:
        raise UsageError("\n".join(listed))
