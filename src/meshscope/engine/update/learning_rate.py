"""Learning rates that depend on the step alone: constant, linear, cosine, and warm-up-stable-decay.

    schedule = LearningRate(kind="cosine", peak=3e-4, num_steps=1000, num_warmup_steps=100,
                            final_ratio=0.1)
    set_learning_rate(optimizer, schedule.at(step))        # before step `step`, counted from 0

With W warm-up steps and D decay steps of N:

    0 … W-1          rises by equal amounts to the peak: peak * (step + 1) / W
    W … N-D-1        the peak
    N-D … N-1        falls from the peak to final_ratio * peak, both ends included
    N …              stays there

`linear` and `cosine` decay over all steps after the warm-up, `wsd` over its last
`num_decay_steps` in a straight line (arXiv 2404.06395), `constant` not at all. There is no state:
a run that is resumed goes on with its step.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import cos, isfinite, pi

import torch

from meshscope.errors import UsageError


class ScheduleKind(StrEnum):
    """What happens after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A learning rate for every step; raises UsageError with every problem."""

    kind: ScheduleKind | str = ScheduleKind.CONSTANT
    peak: float
    """Highest rate; above 0."""
    num_steps: int
    """Steps of the whole training."""
    num_warmup_steps: int = 0
    num_decay_steps: int | None = None
    """Decay steps of wsd; None is a fifth of all steps, as far as the warm-up leaves them."""
    final_ratio: float = 0.0
    """Ratio of the last step's learning rate to the peak, in 0..1; constant has none."""

    def __post_init__(self) -> None:
        problems = self._find_problems()
        if problems:
            raise UsageError("; ".join(problems))

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < 0:
            raise UsageError(f"step is {step}; steps are counted from 0")
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        fallen = self._shape(self._decay_progress(step))
        return self.peak * (1.0 - fallen * (1.0 - self.final_ratio))

    def _decay_progress(self, step: int) -> float:
        """0 before and in the first step of the decay, 1 in its last step and after."""
        num_decay = self._count_decay_steps()
        if num_decay == 0:
            return 0.0
        since_first = step - (self.num_steps - num_decay)
        if num_decay == 1:
            # A single step is the end of a decay, but of a training of one step it is all.
            return float(since_first >= 0 and self.num_steps > 1)
        return min(max(since_first / (num_decay - 1), 0.0), 1.0)

    def _shape(self, progress: float) -> float:
        if self.kind == ScheduleKind.COSINE:
            return 0.5 * (1.0 - cos(pi * progress))
        return progress

    def _count_decay_steps(self) -> int:
        if self.kind == ScheduleKind.CONSTANT:
            return 0
        if self.kind == ScheduleKind.WSD:
            if self.num_decay_steps is None:
                return min(self.num_steps // 5, self.num_steps - self.num_warmup_steps)
            return self.num_decay_steps
        return self.num_steps - self.num_warmup_steps

    def _find_problems(self) -> list[str]:
        problems = []
        if self.kind not in list(ScheduleKind):
            allowed = ", ".join(ScheduleKind)
            problems.append(f"learning-rate kind is {self.kind!r}, expected one of {allowed}")
        if not (isfinite(self.peak) and self.peak > 0):
            problems.append(f"peak learning rate is {self.peak}, expected a number above 0")
        if self.num_steps < 1:
            problems.append(f"num_steps is {self.num_steps}, expected at least 1")
        if not 0 <= self.num_warmup_steps <= self.num_steps:
            problems.append(
                f"num_warmup_steps is {self.num_warmup_steps}, expected 0..{self.num_steps} "
                "(num_steps)"
            )
        if not 0.0 <= self.final_ratio <= 1.0:
            problems.append(f"final_ratio is {self.final_ratio}, expected 0..1")
        return problems + self._find_decay_problems()

    def _find_decay_problems(self) -> list[str]:
        if self.num_decay_steps is None:
            return []
        if self.kind != ScheduleKind.WSD:
            return [f"num_decay_steps is for wsd, but the kind is {self.kind}; leave it out"]
        room = self.num_steps - self.num_warmup_steps
        if not 0 <= self.num_decay_steps <= room:
            return [
                f"num_decay_steps is {self.num_decay_steps}, expected 0..{room} "
                "(the steps after the warm-up)"
            ]
        return []


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets it in all parameter groups, in place where it is a tensor (a captured graph reads it).

    A group with `lr_scale` has that times the value.
    """
    for group in optimizer.param_groups:
        scaled = value * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
