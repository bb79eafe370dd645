"""Layers whose weights are spread over a tensor-parallel group, on plain tensors.

Every layer takes its group; None is one rank, where a layer is exactly torch's own. A layer leaves
its memory as it is: `initialization.initialize_parameters` fills it, the same for any group size.

With `sequence_parallel` the activations between these layers hold a part of the sequence
(dimension SEQUENCE_DIM) instead of being the same on every rank. Parameters used there (norms,
biases of row-parallel layers, positions) then get a gradient from their own tokens only:
`reduce_sequence_parallel_gradients` sums these over the group, once per step, before clipping.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshscope.engine.model.put_off_gradients import PutOffGradients
from meshscope.engine.model.sharding import ParameterShard, find_parameter_shards, shard_range
from meshscope.engine.model.tensor_regions import (
    Finish,
    Group,
    apply_function,
    drop_single,
    gather_from_region,
    group_rank,
    group_size,
    reduce_from_region,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from meshscope.errors import UsageError

SEQUENCE_DIM = 1
"""Activations are [batch, sequence, width]."""

_DEFAULT_INIT_STD = 0.02


class _ParallelLayer(nn.Module):
    """Makes parameters and notes what part of the full ones they are."""

    def __init__(self, group: Group, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = drop_single(group)
        self.parameter_shards: dict[str, ParameterShard] = {}
        self._device, self._dtype = device, dtype
        self.put_off: PutOffGradients | None = None
        """Where weight gradients can be left for later; see `put_off_weight_gradients`."""

    def _add(
        self, name: str, full_shape: tuple[int, ...], parts: Sequence[int] = (), **shard: Any
    ) -> None:
        """A parameter cut along `dim` into `parts`; without them, whole on every rank."""
        noted = ParameterShard(
            full_shape=full_shape,
            parts=tuple(parts),
            num_shards=group_size(self.group) if parts else 1,
            shard_index=group_rank(self.group) if parts else 0,
            **shard,
        )
        self.parameter_shards[name] = noted
        local = torch.empty(noted.shape, device=self._device, dtype=self._dtype)
        self.register_parameter(name, nn.Parameter(local))


class ColumnParallelLinear(_ParallelLayer):
    """Y = X·Wᵀ + b with the rows of W, the outputs, spread over the group.

    `out_features` may list several sizes: that many matrices in one, each spread by itself, so
    that a rank's output is its part of the first, then of the second, and so on.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        group: Group = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        init_std: float = _DEFAULT_INIT_STD,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(group, device, dtype)
        parts = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        if gather_output and len(parts) > 1:
            raise UsageError(
                f"gather_output would mix up the outputs of {len(parts)} matrices; "
                "use a layer for each"
            )
        self.out_features = sum(parts)
        self.sequence_parallel = sequence_parallel
        self.gather_output = gather_output
        self.weight: nn.Parameter
        self._add("weight", (self.out_features, in_features), parts, dim=0, init_std=init_std)
        self.bias: nn.Parameter | None
        if bias:
            self._add("bias", (self.out_features,), parts, dim=0)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """From the full width (a part of the sequence, if so set) to this rank's outputs."""
        if self.group is None and self.put_off is None:
            return F.linear(x, self.weight, self.bias)
        call = _LinearCall(self.weight, self.bias, self.put_off, self.group, self.sequence_parallel)
        y = _apply_linear(x, self.weight, self.bias, call)
        if self.gather_output:
            y = gather_from_region(y, self.group, -1, self.out_features)
        return y


@dataclass(frozen=True, slots=True)
class _LinearCall:
    """What `_Linear` needs beside its tensors."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    put_off: PutOffGradients | None
    group: Group = None
    sequence_parallel: bool = False


class _Linear(torch.autograd.Function):
    """The linear map with the communication of its input inside, so that the two can overlap."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _LinearCall
    ) -> Tensor:
        # Only this rank's tokens are kept; backward gathers them again (arXiv 2205.05198, 4.2.2).
        ctx.save_for_backward(x, weight)
        ctx.call = call
        if call.group is not None and call.sequence_parallel:
            x = start_all_gather(x, call.group, SEQUENCE_DIM)()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # What is put off must not keep the graph, whose first node has the stage's input and its
        # gradient.
        x = x.detach()
        call: _LinearCall = ctx.call
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        later = call.put_off.later if call.put_off is not None else None

        def start_x() -> Finish | None:
            return _start_input(x, call) if needs_weight else None

        # While x is gathered, multiply by W; while that is summed over the group, multiply by x.
        finish_x = start_x() if later is None else None
        finish_grad_x = _start_input_gradient(grad_y @ weight, call) if needs_x else None
        grad_weight = grad_bias = None
        if later is None:
            grad_weight, grad_bias = _compute_weight_gradients(grad_y, finish_x, needs_bias)
        else:
            later.add(
                (call.weight, call.bias),
                lambda: _compute_weight_gradients(grad_y, start_x(), needs_bias),
            )
        return finish_grad_x() if finish_grad_x else None, grad_weight, grad_bias, None


def _compute_weight_gradients(
    grad_y: Tensor,
    finish_x: Finish | None,
    needs_bias: bool,  # noqa: FBT001 - one of what autograd says it needs
) -> tuple[Tensor | None, Tensor | None]:
    rows = grad_y.flatten(0, -2)
    grad_weight = rows.t() @ finish_x().flatten(0, -2) if finish_x else None
    return grad_weight, rows.sum(0) if needs_bias else None


def _start_input(x: Tensor, call: _LinearCall) -> Finish:
    """Begins to bring the whole input here."""
    if call.group is None or not call.sequence_parallel:
        return lambda: x
    return start_all_gather(x, call.group, SEQUENCE_DIM)


def _start_input_gradient(grad_x: Tensor, call: _LinearCall) -> Finish:
    """Begins to sum the input's gradient over the group."""
    if call.group is None:
        return lambda: grad_x
    if call.sequence_parallel:
        return start_reduce_scatter(grad_x, call.group, SEQUENCE_DIM)
    return start_all_reduce(grad_x, call.group)


class RowParallelLinear(_ParallelLayer):
    """Y = X·Wᵀ + b with the columns of W, the inputs, spread over the group.

    Takes what a `ColumnParallelLinear` hands out. The bias is added once, after the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group = None,
        bias: bool = False,
        sequence_parallel: bool = False,
        init_std: float = _DEFAULT_INIT_STD,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(group, device, dtype)
        self.sequence_parallel = sequence_parallel
        self.weight: nn.Parameter
        self._add("weight", (out_features, in_features), (in_features,), dim=1, init_std=init_std)
        self.bias: nn.Parameter | None
        if bias:
            self._add("bias", (out_features,), is_sequence_parallel=sequence_parallel)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """From this rank's inputs to the full width (of a part of the sequence, if so set)."""
        if self.group is None and self.put_off is None:
            return F.linear(x, self.weight, self.bias)
        if self.put_off is None:
            y = F.linear(x, self.weight)
        else:
            y = _apply_linear(x, self.weight, None, _LinearCall(self.weight, None, self.put_off))
        y = _sum_over_group(y, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(_ParallelLayer):
    """A table of which every rank holds other rows."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: int,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        init_std: float = _DEFAULT_INIT_STD,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(group, device, dtype)
        self.sequence_parallel = sequence_parallel
        self.rows = shard_range(num_embeddings, group_size(self.group), group_rank(self.group))
        self.weight: nn.Parameter
        self._add(
            "weight", (num_embeddings, embedding_size), (num_embeddings,), dim=0, init_std=init_std
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, which are the same on every rank."""
        if self.group is None:
            return F.embedding(ids, self.weight)
        is_elsewhere, local_ids = _localize(ids, self.rows)
        found = F.embedding(local_ids, self.weight).masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return _sum_over_group(found, self.group, self.sequence_parallel)


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, vocab_size: int, group: Group, ignore_index: int = -100
) -> Tensor:
    """The loss of each token, from logits of which every rank holds other columns.

    `logits` is [..., this rank's part of the vocabulary], `targets` [...] with ids of the whole
    vocabulary, the same on every rank. Nothing is gathered: two all-reduces of one or two numbers
    per token, and float32 or wider throughout. Ignored tokens have loss 0; a target outside of
    the vocabulary gives inf (on one rank torch raises an IndexError).
    """
    if drop_single(group) is None:
        flat_logits, flat_targets = logits.flatten(0, -2), targets.flatten()
        if torch.compiler.is_compiling():  # which fuses what `_CrossEntropy` does by hand
            logs = F.log_softmax(flat_logits, -1, dtype=_wide_dtype(logits))
            losses = F.nll_loss(logs, flat_targets, ignore_index=ignore_index, reduction="none")
        else:
            losses = apply_function(_CrossEntropy, flat_logits, flat_targets, ignore_index)
        return losses.view_as(targets)
    return apply_function(
        _VocabParallelCrossEntropy, logits, targets, vocab_size, group, ignore_index
    )


class _CrossEntropy(torch.autograd.Function):
    """On one rank: float32 throughout, and fewer passes over the logits than torch's own.

    Those are by far the largest tensors of a model. Torch would fill a tensor of that size with
    zeros but for the targets, and go through three of them for the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        logs = F.log_softmax(logits, -1, dtype=_wide_dtype(logits))
        ctx.save_for_backward(logs, targets)
        ctx.dtype, ctx.ignore_index = logits.dtype, ignore_index
        # Checks targets, and leaves out those to ignore.
        return F.nll_loss(logs, targets, ignore_index=ignore_index, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logs, targets = ctx.saved_tensors
        is_ignored = targets == ctx.ignore_index
        rows = grad.masked_fill(is_ignored, 0.0).unsqueeze(-1)
        grad_logits = torch.exp(logs, out=torch.empty_like(logs, dtype=ctx.dtype))
        # softmax less 1 at the target; the 1 is taken off in float32, as it may be all there is.
        indices = targets.masked_fill(is_ignored, 0).unsqueeze(-1)
        at_target = logs.gather(-1, indices).expm1_()
        grad_logits.scatter_(-1, indices, at_target.to(ctx.dtype)).mul_(rows.to(ctx.dtype))
        return grad_logits, None, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        ignore_index: int,
    ) -> Tensor:
        own = shard_range(vocab_size, group.size(), group.rank())
        is_elsewhere, local_targets = _localize(targets, own)
        values = _widen(logits)
        target_logit = values.gather(-1, local_targets.unsqueeze(-1)).squeeze(-1)
        # The rank that holds a target knows its logit, the others offer -inf.
        peaks = torch.stack([values.amax(-1), target_logit.masked_fill(is_elsewhere, -torch.inf)])
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
        peak, target_logit = peaks
        total = (values - peak.unsqueeze(-1)).exp_().sum(-1)
        dist.all_reduce(total, group=group)
        log_total = total.log_().add_(peak)
        is_ignored = targets == ignore_index
        # The softmax is made again in backward from the logits, which live on anyway.
        ctx.save_for_backward(logits, log_total, local_targets, is_elsewhere, is_ignored)
        losses: Tensor = log_total - target_logit
        return losses.masked_fill_(is_ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_total, local_targets, is_elsewhere, is_ignored = ctx.saved_tensors
        grad_logits = (_widen(logits) - log_total.unsqueeze(-1)).exp_()
        at_target = is_elsewhere.to(grad_logits.dtype).sub_(1.0)  # -1 where it is ours
        grad_logits.scatter_add_(-1, local_targets.unsqueeze(-1), at_target.unsqueeze(-1))
        grad_logits.mul_(grad.masked_fill(is_ignored, 0.0).unsqueeze(-1))
        return grad_logits.to(logits.dtype), None, None, None, None


def reduce_sequence_parallel_gradients(module: nn.Module, group: Group) -> None:
    """Sums over the group the gradients that each rank has from its part of the sequence only."""
    sum_gradients(find_sequence_parallel_parameters(module), group)


def find_sequence_parallel_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters whose gradients each rank has from its part of the sequence only."""
    shards = find_parameter_shards(module)
    return [p for name, p in module.named_parameters() if shards[name].is_sequence_parallel]


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """Sums gradients over the group, in one all-reduce for each dtype; in place."""
    group = drop_single(group)
    if group is None:
        return
    # FSDP2's gradients are DTensors over data parallel; over tp their local parts are summed.
    partial: list[Tensor] = [
        grad.to_local() if hasattr(grad, "to_local") else grad
        for parameter in parameters
        if (grad := parameter.grad) is not None
    ]
    for dtype in dict.fromkeys(grad.dtype for grad in partial):
        grads = [grad for grad in partial if grad.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        sums = torch.split(flat, [grad.numel() for grad in grads])
        for grad, summed in zip(grads, sums, strict=True):
            grad.copy_(summed.view_as(grad))


def put_off_weight_gradients(module: nn.Module) -> PutOffGradients:
    """Lets backward leave the weight gradients of all linear layers in `module` for later."""
    put_off = PutOffGradients()
    for layer in module.modules():
        if hasattr(layer, "put_off"):
            layer.put_off = put_off  # type: ignore[assignment]  # a module takes any attribute
    return put_off


def _apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: _LinearCall) -> Tensor:
    return apply_function(_Linear, *_cast_like_autocast(x, weight, bias), call)


def _sum_over_group(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:  # noqa: FBT001
    if group is not None and sequence_parallel:
        return reduce_scatter_sequence(x, group, SEQUENCE_DIM)
    return reduce_from_region(x, group)


def _localize(ids: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Which ids lie outside of `own`, and all of them counted from its start, those as 0."""
    is_elsewhere = (ids < own.start) | (ids >= own.stop)
    return is_elsewhere, (ids - own.start).masked_fill_(is_elsewhere, 0)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _widen(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _cast_like_autocast(*tensors: Tensor | None) -> Any:
    """What autocast does before a linear map; inside of an autograd function it would not.

    There it would cast in forward only, and backward would meet tensors of two dtypes.
    """
    device_type = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(None if x is None else x.to(dtype) for x in tensors)
