"""What can be made to go wrong on purpose: faults as values.

`text` reads and checks them, `injector` makes them happen. docs/faults.md says
what each kind does. No torch here.
"""

from dataclasses import dataclass
from enum import StrEnum

from meshscope.core.layout import Coordinates


class FaultKind(StrEnum):
    SLOW = "slow"
    SLOW_LINK = "slow_link"
    STALLED_LOADER = "stalled_loader"
    LEAK = "leak"
    NAN = "nan"
    GC_PAUSE = "gc_pause"
    CRASH = "crash"
    HANG = "hang"


class Phase(StrEnum):
    STEP = "step"
    """The start of the step."""
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole backward, or where it is split, its input gradient."""
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    OPTIMIZER = "optimizer"
    SEND = "send"
    """Before a message to another rank is handed to torch."""
    COLLECTIVE = "collective"
    """Before a collective is handed to torch."""


PIPELINE_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
"""Phases of a stage and a microbatch."""

_DEFAULT_PHASE = {
    FaultKind.SLOW: Phase.FORWARD,
    FaultKind.STALLED_LOADER: Phase.DATA,
}
"""Phase.STEP for all others."""

_ENDS_RUNS = (FaultKind.CRASH, FaultKind.HANG)
NEEDS_STEPS = (*_ENDS_RUNS, FaultKind.NAN)
EVERY_ATTEMPT: tuple[int, ...] = ()
CRASH_WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "exception", "exit")
NAN_TARGETS = ("gradient", "loss", "activation")
LINK_OPERATIONS = ("all", "send", "collective")


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps `first`, `first + every`, … up to `last`; None has no end."""

    first: int = 0
    last: int | None = None
    every: int = 1

    def __contains__(self, step: int) -> bool:
        is_inside = step >= self.first and (self.last is None or step <= self.last)
        return is_inside and (step - self.first) % self.every == 0

    def __str__(self) -> str:
        text = f"{self.first}" if self.last == self.first else f"{self.first}-"
        if self.last not in (None, self.first):
            text += f"{self.last}"
        return text if self.every == 1 else f"{text}/{self.every}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong: what, where and when. Only the fields of its kind matter."""

    kind: FaultKind
    ranks: tuple[int, ...] = ()
    """Global ranks; empty is all that `coordinates` allow."""
    coordinates: tuple[tuple[str, int], ...] = ()
    """Axis and index: (("dp", 1), ("tp", 0)); (("pp", 2),) is a whole stage."""
    steps: tuple[StepRange, ...] = ()
    """Empty means every step."""
    attempts: tuple[int, ...] | None = None
    """Attempts of a restarted run; () is all. None: the first for crash and hang, else all."""
    phase: Phase | None = None
    """None means the kind's usual phase."""
    stage: int | None = None
    """Pipeline stage, counted over all ranks; None is every stage the rank has."""
    microbatch: int | None = None
    delay_ns: int | None = None
    factor: float | None = None
    """Factor on a phase's time; more than 1."""
    burns_cpu: bool = False
    """Keeps a core busy instead of sleeping."""
    bytes_per_s: float | None = None
    """Delay of a slow link for each byte."""
    link: tuple[int, int] | None = None
    """The two ranks at its ends."""
    axis: str | None = None
    """Only operations of groups along it."""
    operation: str = "all"
    """What a slow link slows: send, collective or all."""
    size_bytes: int | None = None
    """Bytes leaked per step."""
    on_device: bool = False
    target: str = "loss"
    """What becomes NaN."""
    parameter: str = ""
    """Part of a parameter's name; the first match with a gradient is used."""
    num_objects: int = 200_000
    """Objects in garbage cycles."""
    how: str = "SIGKILL"
    exit_code: int = 1

    @property
    def point(self) -> Phase:
        """Where in a step it happens."""
        return self.phase or _DEFAULT_PHASE.get(self.kind, Phase.STEP)

    def concerns(self, rank: int, coordinates: Coordinates, attempt: int) -> bool:
        """Whether it happens on this rank in this attempt, at any step."""
        attempts = self.attempts
        if attempts is None:
            attempts = (0,) if self.kind in _ENDS_RUNS else EVERY_ATTEMPT
        return (
            (not self.ranks or rank in self.ranks)
            and all(coordinates.along(axis) == index for axis, index in self.coordinates)
            and (self.link is None or rank in self.link)
            and (not attempts or attempt in attempts)
        )

    def is_due(self, step: int) -> bool:
        """Whether it happens at this step."""
        return not self.steps or any(step in one for one in self.steps)
