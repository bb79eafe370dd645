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

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshscope.engine.sharding import ParameterShard, find_parameter_shards
from meshscope.engine.tensor_regions import Group, drop_single, group_rank
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
    modules = [modules] if isinstance(modules, nn.Module) else list(modules)
    tp_group, dp_shard_group = drop_single(tp_group), drop_single(dp_shard_group)
    square = measure_square(
        modules,
        counts_whole=group_rank(tp_group) == 0,
        counts_undivided=group_rank(dp_shard_group) == 0,
    )
    for group in (tp_group, dp_shard_group, drop_single(pp_group)):
        if group is not None:
            dist.all_reduce(square, group=group)
    return clip_to_norm(modules, square.sqrt().item(), max_norm)


@torch.no_grad()
def measure_square(
    modules: Sequence[nn.Module], *, counts_whole: bool, counts_undivided: bool
) -> Tensor:
    """This rank's part of the squared norm, float64; the mesh's is the sum over its ranks.

    `counts_whole` is for one rank of each tp group, which counts what every tp rank holds;
    `counts_undivided` for one rank of each dp group, which counts what is not cut over dp.
    """
    counted: list[Tensor] = []
    left_out: list[Tensor] = []
    device = None
    for parameter, shard in _find_parameters(modules).items():
        device = parameter.device
        grad = _local_gradient(parameter)
        if grad is None or not grad.numel():
            continue
        is_counted = (
            shard.tied_to is None
            and (shard.num_shards > 1 or counts_whole)
            and (hasattr(parameter, "to_local") or counts_undivided)
        )
        (counted if is_counted else left_out).append(grad)
    square = torch.zeros((), dtype=torch.float64, device=device)
    # Those left out times 0 rather than not at all: nan and inf are seen on whatever rank they are.
    for grads, weight in ((counted, 1.0), (left_out, 0.0)):
        if grads:
            square += _sum_squares(grads) * weight
    return square


@torch.no_grad()
def clip_to_norm(
    modules: Sequence[nn.Module], norm: float, max_norm: float | None
) -> GradientHealth:
    """Scales all gradients, whose norm over the mesh is known, so that it is at most `max_norm`."""
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}; expected a number above 0, or None")
    ratio = 1.0
    if max_norm is not None and isfinite(norm):
        ratio = min(1.0, max_norm / (norm + _EPSILON))
    if ratio < 1.0:
        scale_gradients(modules, ratio)
    return GradientHealth(norm=norm, clip_ratio=ratio)


@torch.no_grad()
def scale_gradients(modules: Sequence[nn.Module], ratio: float) -> None:
    """Multiplies every gradient."""
    grads = [_local_gradient(parameter) for parameter in _find_parameters(modules)]
    present = [grad for grad in grads if grad is not None]
    if present:
        torch._foreach_mul_(present, ratio)  # one kernel for many tensors, as torch's optimizers


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
    # Each norm in float32 whatever the gradient's dtype; their squares are added up in float64.
    norms = torch._foreach_norm(grads, 2, torch.float32)
    return torch.stack(norms).double().square().sum()


def _find_parameters(modules: Sequence[nn.Module]) -> dict[nn.Parameter, ParameterShard]:
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
