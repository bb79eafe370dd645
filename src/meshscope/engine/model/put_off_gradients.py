"""Weight gradients computed apart from input gradients: the W of zero-bubble schedules.

    put_off = put_off_weight_gradients(stage)          # once
    with put_off.collect() as later:
        output.backward(grad)                          # B: the input's gradient, no more
    ...
    later.compute()                                    # W: into each weight's .grad

Between the two, inputs and output gradients of the linear layers stay in memory. Gradients of
norms, positions and embeddings, and biases of row-parallel layers, are computed in B: they are
cheap. Hooks on gradients (DDP's, FSDP's) do not see what W computes. With sequence parallel W
communicates, so the ranks of a tp group must run it in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradients = Sequence[Tensor | None]


class LaterGradients:
    """Weight gradients that backward postponed."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Sequence[nn.Parameter | None], Callable[[], Gradients]]] = []

    def add(
        self, parameters: Sequence[nn.Parameter | None], compute: Callable[[], Gradients]
    ) -> None:
        """Called by a layer: its parameters, and what makes their gradients (or None)."""
        self._jobs.append((parameters, compute))

    @torch.no_grad()
    def compute(self) -> None:
        """Adds the gradients to those the parameters have; once."""
        jobs, self._jobs = self._jobs, []
        for parameters, compute in jobs:
            for parameter, grad in zip(parameters, compute(), strict=True):
                if parameter is not None and grad is not None:
                    _accumulate(parameter, grad.to(parameter.dtype))


class PutOffGradients:
    """Shared by the linear layers of a stage: where to put weight gradients off to, if at all."""

    def __init__(self) -> None:
        self.later: LaterGradients | None = None
        """None when backward is to compute weight gradients at once."""

    @contextmanager
    def collect(self) -> Iterator[LaterGradients]:
        """Weight gradients of backwards inside are put off."""
        self.later = LaterGradients()
        try:
            yield self.later
        finally:
            self.later = None


def _accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
