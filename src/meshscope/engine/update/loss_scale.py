"""The factor that keeps small fp16 gradients from becoming zero.

The loss is multiplied by it, gradients are divided by it before they are clipped. It halves when
gradients are not finite, and doubles after a long run of finite steps, by the rule of torch's
GradScaler. Whether they are finite is known to all ranks alike (the norm over the whole mesh), so
all ranks keep the same scale without talking.
"""

from collections.abc import Mapping

_GROWTH_FACTOR = 2.0
_BACKOFF_FACTOR = 0.5
_SMALLEST_SCALE = 2.0**-24


class LossScale:
    """1 for ever where it is not enabled."""

    def __init__(self, initial: float, growth_steps: int, *, is_enabled: bool) -> None:
        self.value = initial if is_enabled else 1.0
        self.num_finite_steps = 0
        """In a row, since the scale last changed."""
        self._growth_steps = growth_steps
        self.is_enabled = is_enabled

    def update(self, *, is_finite: bool) -> None:
        """After every step, taken or skipped."""
        if not self.is_enabled:
            return
        if not is_finite:
            self.value = max(self.value * _BACKOFF_FACTOR, _SMALLEST_SCALE)
            self.num_finite_steps = 0
            return
        self.num_finite_steps += 1
        if self.num_finite_steps == self._growth_steps:
            self.value *= _GROWTH_FACTOR
            self.num_finite_steps = 0

    def to_document(self) -> dict[str, float]:
        return {"value": self.value, "num_finite_steps": self.num_finite_steps}

    def restore(self, document: Mapping[str, float]) -> None:
        """From a checkpoint; where scaling is off, nothing."""
        if self.is_enabled:
            self.value = float(document["value"])
            self.num_finite_steps = int(document["num_finite_steps"])
