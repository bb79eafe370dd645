"""What a model of stated times is made of: how long each layer takes, and its small shape.

`engine.model.timed_model` builds it; what a schedule of it must cost is
`replay_schedule(schedule, config.costs.for_schedule(schedule))`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.core.config.model_config import find_split_problems, split_layers
from meshscope.core.schedule import ActionKind, Schedule
from meshscope.core.schedule_replay import ActionCosts

Milliseconds = float | tuple[float, ...]
"""One number for all layers, or one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCosts:
    """How long each layer takes for one microbatch; one number for each layer."""

    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    weight_grad_ns: tuple[int, ...]

    def for_stage(self, layers: range) -> dict[ActionKind, int]:
        """What one microbatch of a stage of these layers takes."""
        return {
            ActionKind.FORWARD: sum(self.forward_ns[index] for index in layers),
            ActionKind.INPUT_GRAD: sum(self.input_grad_ns[index] for index in layers),
            ActionKind.WEIGHT_GRAD: sum(self.weight_grad_ns[index] for index in layers),
        }

    def for_schedule(
        self, schedule: Schedule, stage_sizes: Sequence[int] | None = None
    ) -> ActionCosts:
        """What `replay_schedule` needs to know: the stated times, and transfers in no time."""
        ranges = split_layers(len(self.forward_ns), schedule.num_stages, stage_sizes)
        return ActionCosts(
            by_stage={
                (kind, stage): duration_ns
                for stage, layers in enumerate(ranges)
                for kind, duration_ns in self.for_stage(layers).items()
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModelConfig:
    """Layers by the time they take; everything else is small."""

    num_layers: int
    forward_ms: Milliseconds
    input_grad_ms: Milliseconds
    weight_grad_ms: Milliseconds
    hidden_size: int = 8
    sequence_length: int = 8
    vocab_size: int = 64

    @property
    def costs(self) -> TimedCosts:
        """In nanoseconds, for each layer."""
        return TimedCosts(
            forward_ns=self._spread(self.forward_ms),
            input_grad_ns=self._spread(self.input_grad_ms),
            weight_grad_ns=self._spread(self.weight_grad_ms),
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the model: a weight for each channel and layer, embedding and head."""
        return sum(self.count_stage_parameters())

    def count_stage_parameters(
        self, num_stages: int = 1, stage_sizes: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """What each stage holds, on every tp rank."""
        ranges = split_layers(self.num_layers, num_stages, stage_sizes)
        counts = [len(layers) * self.hidden_size for layers in ranges]
        counts[0] += self.vocab_size * self.hidden_size
        counts[-1] += self.vocab_size * self.hidden_size
        return tuple(counts)

    def validate(
        self,
        tp: int = 1,
        pp: int = 1,
        *,
        stage_sizes: Sequence[int] | None = None,
        sequence_parallel: bool = False,
    ) -> list[str]:
        """Everything that keeps this model from running on tp × pp, one sentence each."""
        values = {
            name: getattr(self, name)
            for name in ("num_layers", "hidden_size", "sequence_length", "vocab_size")
        }
        values |= {"tp": tp, "pp": pp}
        problems = [f"{name} is {n}, expected at least 1" for name, n in values.items() if n < 1]
        for name in ("forward_ms", "input_grad_ms", "weight_grad_ms"):
            problems += self._find_time_problems(name)
        if sequence_parallel:
            problems.append(
                "a timed model has nothing to cut under sequence parallel; turn sequence_parallel "
                "off"
            )
        if self.num_layers >= 1 and pp >= 1:
            problems += find_split_problems(self.num_layers, pp, stage_sizes)
        return problems

    def _find_time_problems(self, name: str) -> list[str]:
        given: Milliseconds = getattr(self, name)
        problems = []
        times = given if isinstance(given, tuple) else (given,)
        if isinstance(given, tuple) and len(given) != self.num_layers:
            problems.append(
                f"{name} has {len(given)} times for {self.num_layers} layers; give one for each, "
                "or a single number for all"
            )
        wrong = [value for value in times if not (math.isfinite(value) and value >= 0)]
        if wrong:
            problems.append(f"{name} has {wrong[0]}, expected a finite time of at least 0 ms")
        return problems

    def _spread(self, given: Milliseconds) -> tuple[int, ...]:
        times = given if isinstance(given, tuple) else (given,) * self.num_layers
        return tuple(round(value * 1_000_000) for value in times)
