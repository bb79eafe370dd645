"""Counts the arithmetic of one forward and backward of the real model.

`count_model_flops` runs the model once on fake tensors (shapes without values: no memory, no
device work, no random numbers drawn, no gradient or buffer touched) under a dispatch mode that
sees every operation, and adds up torch's own formulas for matrix products, convolutions and
attention. Frozen parameters and checkpointing are therefore counted as they are: what autograd
does not need is not there, and what runs again in backward is seen there with gradients enabled,
which distinguishes it from backward itself: HFU counts it, MFU does not.

Wrong where operations have no formula: custom ones are named in `uncounted`. Elementwise work is
not counted, as in every published MFU. A model whose course depends on values cannot run on fake
tensors; `is_real=True` counts a real pass instead.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from meshscope.errors import CaptureError

_COUNTED_NAMESPACES = frozenset(("aten", "prim", "prims", "profiler"))
"""Operations of torch itself: without a formula they are not matrix products."""
_FUSED_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)
"""Kernels of `scaled_dot_product_attention`, forward and with `_backward`."""
_MAX_UNCOUNTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFlops:
    """One forward and backward of a model."""

    forward_flops: int
    backward_flops: int
    """Without recomputed forwards."""
    recomputed_flops: int
    flops_by_dtype: Mapping[str, int]
    uncounted: tuple[str, ...]
    """Operations outside of torch that have no formula."""

    @property
    def model_flops(self) -> int:
        """What the model needs: forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def hardware_flops(self) -> int:
        """With recomputed forwards."""
        return self.model_flops + self.recomputed_flops

    @property
    def main_dtype(self) -> str | None:
        """Dtype of most of the arithmetic."""
        return max(self.flops_by_dtype, key=self.flops_by_dtype.__getitem__, default=None)


def count_model_flops(
    torch: Any,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_of: Callable[[Any], Any] | None = None,
    *,
    is_real: bool = False,
) -> CountedFlops:
    """Runs `model(*args, **kwargs)` and its backward once and adds up. Raises what the model does.

    `loss_of` makes the loss of the output; by default the output's `loss`, else the sum of all its
    floating-point tensors, which reaches the same products.
    """
    tally = _Tally()
    one_pass = _make_pass(torch, unwrap(model), loss_of, tally)
    with contextlib.ExitStack() as stack:
        state, args, kwargs = _prepare(torch, stack, one_pass, args, kwargs, is_real=is_real)
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_make_counter(torch, tally))
        torch.func.functional_call(one_pass, state, tuple(args), dict(kwargs))
    if tally.error is not None:
        raise CaptureError(f"an operation could not be counted: {tally.error}") from tally.error
    return CountedFlops(
        forward_flops=tally.forward,
        backward_flops=tally.backward,
        recomputed_flops=tally.recomputed,
        flops_by_dtype=dict(tally.by_dtype),
        uncounted=tuple(sorted(tally.uncounted)),
    )


def _make_pass(
    torch: Any, model: Any, loss_of: Callable[[Any], Any] | None, tally: "_Tally"
) -> Any:
    """A module whose forward is forward and backward: parameters stay replaced in both, so that
    what checkpointing runs again finds the stand-ins, too."""

    class OnePass(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *args: Any, **kwargs: Any) -> None:
            output = self.inner(*args, **kwargs)
            loss = _find_loss(torch, output) if loss_of is None else loss_of(output)
            tally.is_backward = True
            if loss is not None and loss.requires_grad:
                torch.autograd.backward(loss)

    return OnePass()


def unwrap(model: Any) -> Any:
    """The module inside of torch's own wrappers, which communicate or compile."""
    for _ in range(4):
        name = type(model).__name__
        if name in ("DistributedDataParallel", "DataParallel"):
            model = model.module
        elif name == "OptimizedModule":
            model = model._orig_mod
        else:
            break
    return model


def _prepare(
    torch: Any, stack: contextlib.ExitStack, model: Any, args: Any, kwargs: Any, *, is_real: bool
) -> tuple[dict[str, Any], Any, Any]:
    """Stand-ins for everything that the pass could change, and for the inputs."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if is_real:
        stack.enter_context(torch.random.fork_rng(devices=_devices_of(parameters)))
        copy = torch.clone
    else:
        fake_tensor = import_module("torch._subclasses.fake_tensor")
        copy = stack.enter_context(
            fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        ).from_tensor

    def stand_in(value: Any, *, is_copied: bool = True) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = copy(value.detach()) if is_copied else value.detach()
        return made.requires_grad_(value.requires_grad)

    state = {name: stand_in(value, is_copied=not is_real) for name, value in parameters.items()}
    state |= {name: stand_in(value) for name, value in buffers.items()}
    return state, _map_values(stand_in, list(args)), _map_values(stand_in, dict(kwargs))


def _devices_of(parameters: Mapping[str, Any]) -> list[int]:
    found = {value.device.index for value in parameters.values() if value.device.type == "cuda"}
    return sorted(index for index in found if index is not None)


def _map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of everything inside lists, tuples and dicts."""
    if isinstance(value, Mapping):
        return {key: _map_values(function, inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_values(function, inner) for inner in value)
    return function(value)


def _find_loss(torch: Any, output: Any) -> Any:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    total = None
    for value in _tensors_in(torch, output):
        if value.requires_grad:
            total = value.sum() if total is None else total + value.sum()
    return total


def _tensors_in(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(torch, inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(torch, inner)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors_in(torch, getattr(value, name, None))


class _Tally:
    def __init__(self) -> None:
        self.is_backward = False
        self.forward = 0
        self.backward = 0
        self.recomputed = 0
        self.by_dtype: dict[str, int] = {}
        self.uncounted: set[str] = set()
        self.error: Exception | None = None

    def count(
        self, torch: Any, formula: Callable[..., int], result: Any, args: Any, kwargs: Any
    ) -> None:
        """Adds one operation; what is wrong with it is kept for later."""
        try:
            flops = int(formula(*args, **kwargs, out_val=result))
            dtype = _dtype_of(torch, args)
        except (TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
            self.error = self.error or error
            return
        if not self.is_backward:
            self.forward += flops
        elif torch.is_grad_enabled():  # backward proper runs without
            self.recomputed += flops
        else:
            self.backward += flops
        self.by_dtype[dtype] = self.by_dtype.get(dtype, 0) + flops

    def miss(self, packet: Any) -> None:
        """Counts an operation without a formula."""
        if len(self.uncounted) < _MAX_UNCOUNTED:
            self.uncounted.add(str(packet))


def _make_counter(torch: Any, tally: _Tally) -> Any:
    """A dispatch mode that adds every operation to `tally`."""
    modes = import_module("torch.utils._python_dispatch")
    formulas = _load_formulas(torch)

    class Counter(modes.TorchDispatchMode):  # type: ignore[name-defined, misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # Torch also asks for a tensor's device this way, from where an exception would end
            # the process: nothing of our own may raise here.
            result = function(*args, **(kwargs or {}))
            packet = getattr(function, "_overloadpacket", function)
            if packet in formulas:
                tally.count(torch, formulas[packet], result, args, kwargs or {})
            elif getattr(function, "namespace", "aten") not in _COUNTED_NAMESPACES:
                tally.miss(packet)
            return result

    return Counter()


def _load_formulas(torch: Any) -> dict[Any, Callable[..., int]]:
    """Torch's, with our own for attention: torch has none for the CPU's, none for grouped queries,
    and adds to backward the scores that fused kernels compute again."""
    counter = import_module("torch.utils.flop_counter")
    formulas = dict(counter.flop_registry)
    for kernel in _FUSED_ATTENTION:
        for suffix, formula in (("", _attention_flops), ("_backward", _attention_backward_flops)):
            packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}", None)
            if packet is not None:
                formulas[packet] = formula
    return formulas


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores and their product with the values, at full length."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    """Four products. A fused kernel makes the scores once more, which is not counted: that is
    neither the model's nor the program's choice."""
    return 2 * _attention_flops(query, key, value)


def _dtype_of(torch: Any, args: Any) -> str:
    tensors = _tensors_in(torch, list(args))
    first = next((value for value in tensors if value.is_floating_point()), None)
    return "unknown" if first is None else str(first.dtype).removeprefix("torch.")
