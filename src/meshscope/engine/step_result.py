"""What a training step did, read on request.

On an accelerator the host runs ahead of the device. A result holds numbers that are on their way to
the host; reading one waits for the step to have run, and for nothing after it. A loop that
reads the result of the step before keeps the device busy.
"""

from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from meshscope.engine.update.gradient_norm import clip_ratio

# torch has no types for it.
_make_event: Any = torch.cuda.Event


class StepResult:
    """The same on every rank. Reading any but the plain attributes may wait for the device."""

    __slots__ = (
        "_event",
        "_max_norm",
        "_numbers",
        "_totals",
        "learning_rate",
        "loss_scale",
        "num_tokens",
        "step",
    )

    def __init__(
        self,
        totals: Tensor,
        *,
        step: int,
        num_tokens: int,
        learning_rate: float,
        loss_scale: float,
        max_norm: float | None,
    ) -> None:
        """`totals`: loss, squared norm of the scaled gradients and stop requests, over all ranks;
        float64."""
        self.step = step
        """Counted from 0."""
        self.num_tokens = num_tokens
        """Tokens of all dp ranks."""
        self.learning_rate = learning_rate
        self.loss_scale = loss_scale
        """What the loss was multiplied by; 1 without fp16."""
        self._max_norm = max_norm
        self._numbers: list[float] | None = None
        self._totals = totals.to("cpu", non_blocking=True)
        self._event: Any = None
        if totals.is_cuda:
            self._event = _make_event()
            self._event.record()

    @property
    def loss(self) -> float:
        """Mean over the global batch, before the step."""
        return self._read()[0]

    @property
    def gradient_norm(self) -> float:
        """L2 over the whole model, before clipping; nan or inf if any gradient is."""
        return sqrt(self._read()[1]) / self.loss_scale

    @property
    def clip_ratio(self) -> float:
        """What gradients were multiplied by."""
        return clip_ratio(self.gradient_norm, self._max_norm)

    @property
    def is_skipped(self) -> bool:
        """Gradients were not finite, so no rank took the step."""
        return not isfinite(self.gradient_norm)

    @property
    def is_stop_wanted(self) -> bool:
        """Some rank was asked to stop."""
        return self._read()[2] > 0

    def _read(self) -> list[float]:
        if self._numbers is None:
            if self._event is not None:
                self._event.synchronize()
            numbers: list[float] = self._totals.tolist()
            self._numbers = numbers
        return self._numbers

    def __repr__(self) -> str:
        return (
            f"StepResult(step={self.step}, loss={self.loss:.6g}, "
            f"gradient_norm={self.gradient_norm:.6g}, is_skipped={self.is_skipped})"
        )
