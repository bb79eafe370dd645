"""Flat buffers that hold the gradients of several parameters, so that one collective sends many.

Parameters are taken in reverse order of registration, about the order in which backward makes their
gradients, and one buffer holds one dtype on one device. The cut depends on the parameters only, so
it is the same on every rank.

From the moment it is sent a parameter's gradient is its part of the buffer, as under DDP's
`gradient_as_bucket_view`: nothing is copied back. A caller that keeps one over the next step
copies it. Until then backward adds up in a separate tensor, so at the last of several microbatches
gradients take their memory twice. Where buffers have another dtype than parameters, gradients stay
separate tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshscope.errors import UsageError

_REDUCED_ELSEWHERE = "_meshscope_reduced_elsewhere"


def mark_reduced_elsewhere(parameter: nn.Parameter) -> None:
    """Excludes a parameter from data parallel: its gradient is not averaged over dp."""
    setattr(parameter, _REDUCED_ELSEWHERE, True)


def is_reduced_elsewhere(parameter: nn.Parameter) -> bool:
    """Whether it was marked so, or is a DTensor, as parameters under FSDP2 are."""
    return getattr(parameter, _REDUCED_ELSEWHERE, False) or hasattr(parameter, "to_local")


@dataclass(frozen=True, slots=True)
class _SentGradient:
    """A gradient as it was when it was copied into the buffer."""

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_SentGradient":
        grad = parameter.grad
        return cls(grad, -1 if grad is None else grad._version)

    def is_current(self, parameter: nn.Parameter) -> bool:
        """Whether it was neither changed nor replaced since."""
        now = _SentGradient.of(parameter)
        return self.tensor is now.tensor and self.version == now.version


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Bucket:
    index: int
    """Index in the order of sending."""
    parameters: tuple[nn.Parameter, ...]
    buffer: Tensor
    """Flat; stays allocated between steps."""
    views: tuple[Tensor, ...]
    """The parts of the buffer, in the shapes of the parameters."""
    sent: list[_SentGradient] = field(default_factory=list)

    @torch.no_grad()
    def fill(self, scale: float) -> None:
        """Puts gradients in, times `scale`; zero for a parameter that has none."""
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
            elif grad.data_ptr() == view.data_ptr():
                view.mul_(scale)
            else:
                targets.append(view)
                sources.append(grad)
                if grad.dtype == view.dtype:
                    parameter.grad = view.data  # with a separate version counter
        self.sent = [_SentGradient.of(parameter) for parameter in self.parameters]
        _copy_all(targets, sources, scale)
        for source in sources:
            if source.is_cuda:
                # Made on the stream of backward and freed here: not to be used again for what
                # that stream makes next before this one has copied it.
                source.record_stream(torch.cuda.current_stream(source.device))

    @torch.no_grad()
    def write_back(self, is_used: Sequence[bool] | None = None) -> None:
        """Makes views of the buffer the gradients; None where no rank has one (`is_used`)."""
        targets, sources = [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if is_used is not None and not is_used[index]:
                parameter.grad = None
            elif parameter.dtype == view.dtype:
                if parameter.grad is None:
                    parameter.grad = view.data
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                targets.append(parameter.grad)
                sources.append(view)
        _copy_all(targets, sources, 1.0)
        self.sent = []

    def find_stale(self) -> list[nn.Parameter]:
        """Parameters whose gradient is not the one that was sent."""
        pairs = zip(self.parameters, self.sent, strict=True)
        return [parameter for parameter, sent in pairs if not sent.is_current(parameter)]


def build_buckets(
    parameters: Iterable[nn.Parameter], bucket_bytes: int, gradient_dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Buckets of at most `bucket_bytes`, or of one parameter that is larger.

    `gradient_dtype` is that of the buffers, by default each parameter's own.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes}; expected at least 1")
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[Any, tuple[list[nn.Parameter], int]] = {}
    ordered = list(reversed(list(dict.fromkeys(parameters))))
    for parameter in ordered:
        key = (gradient_dtype or parameter.dtype, parameter.device)
        size_bytes = parameter.numel() * key[0].itemsize
        members, filled_bytes = open_groups.get(key, ([], 0))
        if members and filled_bytes + size_bytes > bucket_bytes:
            groups.append(members)
            members, filled_bytes = [], 0
        members.append(parameter)
        open_groups[key] = (members, filled_bytes + size_bytes)
    groups += [members for members, _ in open_groups.values()]
    # Sent in the order in which backward fills them, about.
    position = {parameter: index for index, parameter in enumerate(ordered)}
    groups.sort(key=lambda members: position[members[-1]])
    return [
        make_bucket(index, members, gradient_dtype=gradient_dtype)
        for index, members in enumerate(groups)
    ]


def make_bucket(
    index: int, parameters: Sequence[nn.Parameter], *, gradient_dtype: torch.dtype | None = None
) -> Bucket:
    """A bucket for parameters of one dtype on one device."""
    buffer = torch.zeros(
        sum(parameter.numel() for parameter in parameters),
        dtype=gradient_dtype or parameters[0].dtype,
        device=parameters[0].device,
    )
    parts = torch.split(buffer, [parameter.numel() for parameter in parameters])
    return Bucket(
        index=index,
        parameters=tuple(parameters),
        buffer=buffer,
        views=tuple(part.view(p.shape) for part, p in zip(parts, parameters, strict=True)),
    )


def _copy_all(targets: list[Tensor], sources: list[Tensor], scale: float) -> None:
    if not targets:
        return
    if targets[0].is_cuda and hasattr(torch, "_foreach_copy_"):  # private; few kernels
        torch._foreach_copy_(targets, sources)
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)
        return
    for target, source in zip(targets, sources, strict=True):
        if scale != 1.0 and source.dtype == target.dtype:
            torch.mul(source, scale, out=target)  # one pass over memory
        else:
            target.copy_(source)
            if scale != 1.0:
                target.mul_(scale)
