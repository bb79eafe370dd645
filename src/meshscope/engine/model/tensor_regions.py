"""What tensor-parallel ranks send each other: collectives along a dimension, and their gradients.

A region is the part of a model in which every rank holds other columns or rows. Each function here
is one way into it or out of it, an autograd function on plain tensors whose backward is the
communication that the forward's gradient needs (f and g of Megatron-LM, arXiv 1909.08053; the
sequence-parallel pair of arXiv 2205.05198):

    function               forward           backward
    copy_to_region         nothing           all-reduce
    reduce_from_region     all-reduce        nothing
    gather_from_region     all-gather        keep own part
    scatter_to_region      keep own part     all-gather
    gather_sequence        all-gather        reduce-scatter
    reduce_scatter_sequence  reduce-scatter  all-gather

With group None all of them hand back what they were given.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshscope.engine.model.sharding import ParameterShard, shard_range
from meshscope.errors import UsageError

Group = dist.ProcessGroup | None
"""A process group, or None: one rank, nothing to send."""

Finish = Callable[[], Tensor]
"""Waits for a collective and hands back its result."""

# torch 2.13 renamed both and warns about the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def drop_single(group: Group) -> Group:
    """None for a group of one rank, which needs no communication."""
    return None if group is None or group.size() == 1 else group


def group_size(group: Group) -> int:
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    return 0 if group is None else group.rank()


# --- collectives ---------------------------------------------------------------------------------
# Those that `start_` return without waiting, so that callers can compute in between.


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Finish:
    """Begins to sum `x` over the group, in place where it is contiguous."""
    x = x.contiguous()
    work = dist.all_reduce(x, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


def start_all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Finish:
    """Begins to put equally large parts together along `dim`, in the order of ranks."""
    x = x.contiguous()
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    work = _all_gather_single(gathered, x, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        by_rank = gathered.view(group.size(), *x.shape)
        return by_rank.movedim(0, dim).flatten(dim, dim + 1)

    return finish


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Finish:
    """Begins to sum `x` over the group and to keep this rank's equal part along `dim`."""
    size = group.size()
    if x.shape[dim] % size:
        raise UsageError(
            f"a sequence of {x.shape[dim]} tokens cannot be cut into {size} equal parts for "
            "sequence parallel; pad it to a multiple of tp"
        )
    by_rank = torch.unflatten(x, dim, (size, -1)).movedim(dim, 0).contiguous()
    kept = x.new_empty(by_rank.shape[1:])
    work = _reduce_scatter_single(kept, by_rank.flatten(0, 1), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return kept

    return finish


def _all_gather_parts(x: Tensor, group: Group, dim: int, full_size: int) -> Tensor:
    """Parts cut by `shard_range` put together along `dim`; they need not be equally large."""
    if group is None:
        return x
    part_size = len(shard_range(full_size, group.size(), 0))
    if x.shape[dim] < part_size:
        missing = list(x.shape)
        missing[dim] = part_size - x.shape[dim]
        x = torch.cat([x, x.new_zeros(missing)], dim)
    return start_all_gather(x, group, dim)().narrow(dim, 0, full_size)


def gather_parameter(local: Tensor, shard: ParameterShard, group: Group) -> Tensor:
    """The full parameter, or its full gradient, from every rank's part; collective over tp."""
    if group is None or shard.dim is None:
        return local
    sizes = [len(own) for own in shard.ranges()]
    pieces = zip(torch.split(local, sizes, shard.dim), shard.parts, strict=True)
    return torch.cat([_all_gather_parts(x, group, shard.dim, n) for x, n in pieces], shard.dim)


def _keep_own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    own = shard_range(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, own.start, len(own)).contiguous()


# --- autograd functions --------------------------------------------------------------------------


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may have handed the same tensor to another branch.
        return start_all_reduce(grad.clone(), ctx.group)(), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        # In place, and marked dirty: autograd raises if the op that made x still needs it.
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, full_size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather_parts(x, group, dim, full_size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _keep_own_part(grad, ctx.group, ctx.dim), None, None, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.full_size = group, dim, x.shape[dim]
        return _keep_own_part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather_parts(grad, ctx.group, ctx.dim, ctx.full_size), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_all_gather(x, group, dim)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(grad, ctx.group, ctx.dim)(), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return start_reduce_scatter(x, group, dim)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_all_gather(grad, ctx.group, ctx.dim)(), None, None


def apply_function(function: Any, *arguments: Any) -> Tensor:
    """Calls an autograd function; torch has no types for it."""
    result: Tensor = function.apply(*arguments)
    return result


def _apply(function: Any, x: Tensor, group: Group, *arguments: int) -> Tensor:
    return x if group is None else apply_function(function, x, group, *arguments)


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Into the region: every rank uses all of `x`, so their gradients of it are summed."""
    return _apply(_CopyToRegion, x, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """Out of the region: the sum of every rank's `x`, which must be contiguous; in place."""
    return _apply(_ReduceFromRegion, x, group)


def gather_from_region(x: Tensor, group: Group, dim: int, full_size: int) -> Tensor:
    """Out of the region: every rank's part along `dim`; what follows is the same on each rank."""
    return _apply(_GatherFromRegion, x, group, dim % x.ndim, full_size)


def scatter_to_region(x: Tensor, group: Group, dim: int) -> Tensor:
    """Into the region: this rank's part along `dim` of what every rank has."""
    return _apply(_ScatterToRegion, x, group, dim % x.ndim)


def gather_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """Into the region from sequence parallel: the whole sequence."""
    return _apply(_GatherSequence, x, group, dim % x.ndim)


def reduce_scatter_sequence(x: Tensor, group: Group, dim: int) -> Tensor:
    """Out of the region to sequence parallel: the sum, of which this rank keeps its tokens."""
    return _apply(_ReduceScatterSequence, x, group, dim % x.ndim)
