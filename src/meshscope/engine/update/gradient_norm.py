"""The norm of all gradients of the model, over the whole mesh, and clipping by it.

A parameter is counted once, wherever its parts are: those cut over tp (or over dp, under FSDP2) are
summed over their ranks, whole ones are counted by the first rank only, and a tied table on the
first stage only. Squares are added up in float64. The norm is the same number on every rank, so
whether it is finite is known to all of them alike, and a step is skipped by all or by none:

    health = clip_gradient_norm(stage, 1.0, tp_group=tp, pp_group=pp)
    if health.is_finite:
        optimizer.step()

Call it when gradients are complete: after `GradientReducer.finish`,
`reduce_sequence_parallel_gradients` and `sync_tied_gradients`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshscope.engine.model.sharding import ParameterShard, find_parameter_shards
from meshscope.engine.model.tensor_regions import Group, drop_single, group_rank
from meshscope.errors import UsageError

_EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientHealth:
    """What the gradients of one step are worth."""

    norm: float
    """L2 over the whole model, before clipping; nan or inf if any gradient is."""
    clip_ratio: float
    """What gradients were multiplied by; 1 when they were left alone."""

    @property
    def is_finite(self) -> bool:
        """Whether to take the step. The same on every rank."""
        return isfinite(self.norm)


@torch.no_grad()
def clip_gradient_norm(
    modules: nn.Module | Sequence[nn.Module],
    max_norm: float | None,
    *,
    tp_group: Group,
    pp_group: Group,
    dp_shard_group: Group = None,
) -> GradientHealth:
    """Scales all gradients so that their norm is at most `max_norm`; None only measures.

    `modules` are this rank's stages; what they say about their parameters tells which are cut over
    tp. `dp_shard_group` is the one FSDP2 spreads gradients over. Collective over all three groups.
    Gradients that are not finite are left as they are.
    """
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}; expected a number above 0, or None")
    tp_group, dp_shard_group = drop_single(tp_group), drop_single(dp_shard_group)
    gradients = ModelGradients(
        [modules] if isinstance(modules, nn.Module) else modules,
        counts_whole=group_rank(tp_group) == 0,
        counts_undivided=group_rank(dp_shard_group) == 0,
    )
    square = gradients.square()
    for group in (tp_group, dp_shard_group, drop_single(pp_group)):
        if group is not None:
            dist.all_reduce(square, group=group)
    norm = square.sqrt().item()
    ratio = clip_ratio(norm, max_norm)
    if ratio < 1.0:
        gradients.scale(ratio)
    return GradientHealth(norm=norm, clip_ratio=ratio)


def clip_ratio(norm: float, max_norm: float | None) -> float:
    """What brings a norm down to `max_norm`; 1 where it is below, and where it is not finite."""
    if max_norm is None or not isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + _EPSILON))


def clip_ratio_on_device(norm: Tensor, max_norm: float | None) -> Tensor:
    """`clip_ratio` without waiting for the device."""
    if max_norm is None:
        return torch.ones_like(norm)
    ratio = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    return torch.where(norm.isfinite(), ratio, 1.0)


class ModelGradients:
    """All gradients of this rank's stages, and which of them it counts for the mesh.

    Looks up once which parameters there are: make a new one after parameters have changed.
    """

    def __init__(
        self, modules: Iterable[nn.Module], *, counts_whole: bool, counts_undivided: bool
    ) -> None:
        """`counts_whole` is for one rank of each tp group, which counts what every tp rank holds;
        `counts_undivided` for one rank of each dp group, which counts what is not cut over dp."""
        found = _find_parameters(modules)
        self._is_counted = {
            parameter: shard.tied_to is None
            and (shard.num_shards > 1 or counts_whole)
            and (hasattr(parameter, "to_local") or counts_undivided)
            for parameter, shard in found.items()
        }
        self._device = next((parameter.device for parameter in found), torch.device("cpu"))

    @torch.no_grad()
    def square(self) -> Tensor:
        """This rank's part of the squared norm, float64; the mesh's is the sum over its ranks."""
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        # Those not counted times 0 rather than left out: nan and inf are seen wherever they are.
        for is_counted, weight in ((True, 1.0), (False, 0.0)):
            chosen = [p for p, counted in self._is_counted.items() if counted is is_counted]
            grads = _local_gradients(chosen)
            if grads:
                square += _sum_squares(grads) * weight
        return square

    @torch.no_grad()
    def scale(self, ratio: float | Tensor) -> None:
        """Multiplies every gradient, in place."""
        grads = _local_gradients(self._is_counted)
        if grads:
            # One kernel for many tensors, as in torch's own optimizers.
            torch._foreach_mul_(grads, ratio)


@torch.no_grad()
def sync_tied_gradients(weight: nn.Parameter | None, group: Group) -> None:
    """Sums the gradients of a tied table over the stages that hold a copy.

    The group has the first and the last stage of one tp and dp coordinate. Other stages hand in
    None (`Stage.tied_weight`), or need not call. A copy without gradient counts as zero.
    """
    group = drop_single(group)
    if weight is None or group is None:
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    grad = _local_gradient(weight)
    assert grad is not None
    if grad.is_contiguous():
        dist.all_reduce(grad, group=group)
    else:
        summed = grad.contiguous()
        dist.all_reduce(summed, group=group)
        grad.copy_(summed)


def _sum_squares(grads: list[Tensor]) -> Tensor:
    # Each norm in float32 for any dtype of gradient; their squares are added up in float64.
    norms = torch._foreach_norm(grads, 2, torch.float32)
    return torch.stack(norms).double().square().sum()


def _find_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, ParameterShard]:
    """Every parameter object once; one that several stages share is no copy if any says so."""
    found: dict[nn.Parameter, ParameterShard] = {}
    for module in modules:
        shards = find_parameter_shards(module)
        for name, parameter in module.named_parameters():
            known = found.get(parameter)
            if known is None or known.tied_to is not None:
                found[parameter] = shards[name]
    return found


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's part, where the gradient is a DTensor."""
    grad = parameter.grad
    if grad is None or not hasattr(grad, "to_local"):
        return grad
    local: Tensor = grad.to_local()
    return local


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of those there are."""
    grads = (_local_gradient(parameter) for parameter in parameters)
    return [grad for grad in grads if grad is not None and grad.numel()]
