"""What an operator has to compute and to move, from its inputs' shapes: two sides of a roofline.

Arithmetic is that of matrix products, convolutions and attention (`count_operator_flops`, and
convolutions here); a multiply-add is two operations. It is what the kernel does, not what the model
asks for: backward of fused attention keeps no scores and makes them again, so that it is five
products and not the four of `core.flops`. Attention made of single products has these. Bytes are
what has to pass between the device and its memory at the least: every input that is read and every
output that is written, once. Caches make it less for what is small and was just written, several
passes over a tensor make it more.

Only operators whose inputs are all read, or that say how much of them, are listed: an embedding
reads few rows of its table.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.core.flops import Shapes, count_operator_flops, count_recomputed_flops

ITEM_BYTES = {
    "double": 8, "float": 4, "c10::half": 2, "half": 2, "c10::bfloat16": 2, "bfloat16": 2,
    "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "c10::float8_e4m3fnuz": 1, "c10::float8_e5m2fnuz": 1, "c10::float8_e8m0fnu": 1,
    "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2, "signed char": 1,
    "unsigned char": 1, "char": 1, "bool": 1,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An input as the profiler describes it."""

    sizes: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an operator: what was given to it, place by place."""

    name: str
    inputs: tuple[tuple[Tensor, ...], ...]
    """Of each input its tensors: one, several of a list, none of what is no tensor."""
    values: tuple[str, ...] = ()
    """Numbers and lists as text, "" for tensors; empty where they were not recorded."""

    def sizes(self, place: int) -> tuple[int, ...]:
        """Of a single tensor; () for anything else."""
        own = self.inputs[place] if place < len(self.inputs) else ()
        return own[0].sizes if len(own) == 1 else ()

    def num_bytes(self, *places: int) -> int:
        return sum(one.num_bytes for place in places for one in self._at(place))

    @property
    def all_bytes(self) -> int:
        return sum(one.num_bytes for own in self.inputs for one in own)

    @property
    def largest_bytes(self) -> int:
        """Of what inputs broadcast to, as the first one's type."""
        tensors = [one for own in self.inputs for one in own]
        if not tensors:
            return 0
        item = tensors[0].item_bytes
        return max(math.prod(one.sizes) for one in tensors) * item

    def _at(self, place: int) -> tuple[Tensor, ...]:
        return self.inputs[place] if place < len(self.inputs) else ()

    @property
    def shapes(self) -> Shapes:
        return [self.sizes(place) for place in range(len(self.inputs))]

    @property
    def has_lists(self) -> bool:
        return any(len(own) > 1 for own in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Of one call."""

    flops: int
    """0 where arithmetic is not what it costs."""
    num_bytes: int
    """At least."""


_TRANSPOSED, _GROUPS = "transposed", "groups"
_CONVOLUTIONS: dict[str, dict[str, int]] = {
    "aten::convolution": {"stride": 3, "padding": 4, "dilation": 5, _TRANSPOSED: 6, _GROUPS: 8},
    "aten::_convolution": {"stride": 3, "padding": 4, "dilation": 5, _TRANSPOSED: 6, _GROUPS: 8},
    "aten::cudnn_convolution": {"padding": 2, "stride": 3, "dilation": 4, _GROUPS: 5},
    "aten::miopen_convolution": {"padding": 3, "stride": 4, "dilation": 5, _GROUPS: 6},
    "aten::mkldnn_convolution": {"padding": 3, "stride": 4, "dilation": 5, _GROUPS: 6},
    "aten::cudnn_convolution_relu": {"stride": 3, "padding": 4, "dilation": 5, _GROUPS: 6},
    "aten::cudnn_convolution_add_relu": {"stride": 5, "padding": 6, "dilation": 7, _GROUPS: 8},
    "aten::miopen_convolution_relu": {"stride": 3, "padding": 4, "dilation": 5, _GROUPS: 6},
    "aten::miopen_convolution_add_relu": {"stride": 5, "padding": 6, "dilation": 7, _GROUPS: 8},
    "aten::convolution_overrideable": {
        "stride": 3,
        "padding": 4,
        "dilation": 5,
        _TRANSPOSED: 6,
        _GROUPS: 8,
    },
    "aten::miopen_depthwise_convolution": {"padding": 3, "stride": 4, "dilation": 5, _GROUPS: 6},
    "aten::_conv_depthwise2d": {"stride": 4, "padding": 5, "dilation": 6},
    "aten::conv_depthwise3d": {"stride": 4, "padding": 5, "dilation": 6},
    "aten::slow_conv_dilated2d": {"stride": 4, "padding": 5, "dilation": 6},
    "aten::slow_conv_dilated3d": {"stride": 4, "padding": 5, "dilation": 6},
    "aten::slow_conv3d_forward": {"stride": 4, "padding": 5},
    "aten::_slow_conv2d_forward": {"stride": 4, "padding": 5},
    "aten::thnn_conv2d": {"stride": 4, "padding": 5},
}
"""Where the numbers stand that decide the size of the output."""
_TRANSPOSED_CONVOLUTIONS = frozenset(
    (
        "aten::cudnn_convolution_transpose",
        "aten::miopen_convolution_transpose",
        "aten::slow_conv_transpose2d",
        "aten::slow_conv_transpose3d",
    )
)
_CONVOLUTION_BACKWARDS = {
    "aten::convolution_backward": 7,
    "aten::convolution_backward_overrideable": 6,
}
"""Where it says whether it is that of a transposed one; three places behind stands what is wanted
of the gradients."""
_FLASH_LIBRARY = re.compile(
    r"^(?:flash_attn(?:_\d)?::_?flash_attn(?:_\d)?_(?P<side>forward|backward)|FlashAttnFunc(?P<end>Backward)?$)"
)
_CUDNN_ATTENTION = {"aten::_cudnn_attention_forward": 0, "aten::_cudnn_attention_backward": 1,
                    "aten::_scaled_dot_product_fused_attention_overrideable": 0,
                    "aten::_scaled_dot_product_fused_attention_overrideable_backward": 1,
                    "aten::_scaled_dot_product_cudnn_attention_backward": 1}  # fmt: skip


def count_cost(call: Call) -> OperatorCost | None:
    """What one call costs at the least; None where its name and shapes do not tell."""
    name = call.name
    if name in _CONVOLUTIONS:
        return _count_convolution(call, _CONVOLUTIONS[name])
    if name in _TRANSPOSED_CONVOLUTIONS:
        return _count_transposed(call)
    if name in _CONVOLUTION_BACKWARDS:
        return _count_convolution_backward(call, _CONVOLUTION_BACKWARDS[name])
    if _TRITON_TEMPLATE.match(name):
        return _count_template(call)
    attention = _count_attention(call)
    if attention is not None:
        return attention
    flops = None if call.has_lists else count_operator_flops(name, call.shapes)
    if flops is not None:
        flops += count_recomputed_flops(name, call.shapes)
        return OperatorCost(flops=flops, num_bytes=_count_product_bytes(call))
    num_bytes = _count_bytes(call)
    return None if not num_bytes else OperatorCost(flops=0, num_bytes=num_bytes)


def _numbers(call: Call, place: int) -> list[int]:
    text = call.values[place] if place < len(call.values) else ""
    return [int(one) for one in re.findall(r"-?\d{1,9}", text)][:8]


def _spread(values: Sequence[int], size: int, default: int) -> list[int]:
    if not values:
        return [default] * size
    return list(values[:size]) if len(values) >= size else [values[0]] * size


def _count_convolution(call: Call, at: dict[str, int]) -> OperatorCost | None:
    """2 · output · inputs of one output; the output's size needs stride, padding and dilation."""
    inputs, weight = call.sizes(0), call.sizes(1)
    if len(inputs) < 3 or len(weight) != len(inputs) or not call.values:
        return None
    flag = (
        call.values[at[_TRANSPOSED]].lower() if len(call.values) > at.get(_TRANSPOSED, 99) else ""
    )
    spatial = len(inputs) - 2
    if flag in ("true", "1"):
        return _count_transposed(call)
    stride = _spread(_numbers(call, at["stride"]), spatial, 1)
    padding = _spread(_numbers(call, at["padding"]), spatial, 0)
    dilation = _spread(_numbers(call, at["dilation"]) if "dilation" in at else [], spatial, 1)
    output = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // max(step, 1) + 1
        for size, kernel, step, pad, gap in zip(
            inputs[2:], weight[2:], stride, padding, dilation, strict=True
        )
    ]
    if min(output) < 1:
        return None
    num_outputs = inputs[0] * weight[0] * math.prod(output)
    item = call.inputs[0][0].item_bytes
    return OperatorCost(
        flops=2 * num_outputs * math.prod(weight[1:]),
        num_bytes=call.num_bytes(0, 1) + num_outputs * item,
    )


def _count_transposed(call: Call) -> OperatorCost | None:
    """Every input is multiplied with every weight of its channel."""
    inputs, weight = call.sizes(0), call.sizes(1)
    if len(inputs) < 3 or len(weight) != len(inputs):
        return None
    return OperatorCost(
        flops=2 * math.prod(inputs) * math.prod(weight[1:]),
        num_bytes=call.num_bytes(0, 1) + call.num_bytes(0),
    )


def _count_template(call: Call) -> OperatorCost | None:
    """A product that torch.compile generated: its factors come first, its result is among the rest.
    Of others (attention, convolutions) the sizes do not tell what is computed."""
    tensors = [own[0] for own in call.inputs if len(own) == 1 and len(own[0].sizes) >= 2]
    if len(tensors) < 3 or not _TEMPLATE_PRODUCT.search(call.name):
        return None
    left, right = tensors[0].sizes, tensors[1].sizes
    flops = count_operator_flops("aten::bmm", [left, right])
    result = (*left[:-1], right[-1])
    if flops is None or all(one.sizes != result for one in tensors[2:]):
        return None
    return OperatorCost(flops=flops, num_bytes=call.all_bytes)


def _count_convolution_backward(call: Call, transposed_at: int) -> OperatorCost | None:
    """As much again for the gradient of the input, and for that of the weight."""
    gradient, inputs, weight = (call.sizes(place) for place in range(3))
    if len(gradient) < 3 or len(weight) != len(gradient) or len(inputs) != len(gradient):
        return None
    mask_at = transposed_at + 3
    mask = call.values[mask_at].lower() if len(call.values) > mask_at else ""
    wanted = re.findall(r"true|false|1|0", mask)[:2] or ["true", "true"]
    num = sum(one in ("true", "1") for one in wanted)
    said = call.values[transposed_at] if len(call.values) > transposed_at else ""
    is_transposed = said.lower() in ("true", "1")
    whole = inputs if is_transposed else gradient
    return OperatorCost(
        flops=num * 2 * math.prod(whole) * math.prod(weight[1:]),
        num_bytes=call.num_bytes(0, 1, 2) + call.num_bytes(*(1, 2)[:num]),
    )


def _count_attention(call: Call) -> OperatorCost | None:
    """Attention of libraries; `core.flops` has torch's own."""
    name = call.name
    library = _FLASH_LIBRARY.match(name)
    if name in _CUDNN_ATTENTION:
        is_backward, heads_at, rows_at = bool(_CUDNN_ATTENTION[name]), 1, 2
    elif library is not None:
        is_backward = library["side"] == "backward" or bool(library["end"])
        heads_at, rows_at = 2, 1
    else:
        return None
    first = 1 if is_backward else 0
    query, key, value = (call.sizes(first + place) for place in range(3))
    if len(query) != 4 or len(key) != 4:
        return None
    width = query[3] + (value[3] if len(value) == 4 else query[3])
    pairs = 2 * query[0] * query[heads_at] * query[rows_at] * key[rows_at]
    return OperatorCost(
        flops=pairs * (2 * width + query[3] if is_backward else width),
        num_bytes=call.num_bytes(*range(first, first + 3)) * (2 if is_backward else 1)
        + call.num_bytes(0),
    )


def _count_product_bytes(call: Call) -> int:
    """Both factors and the product, whose sizes are the outer ones of the factors."""
    tensors = [own[0] for own in call.inputs if len(own) == 1 and len(own[0].sizes) > 1]
    if "attention" in call.name:
        outputs = tensors[0].num_bytes if tensors else 0
        return sum(one.num_bytes for one in tensors) + outputs
    factors = tensors[-2:] if call.name.startswith(("aten::add", "aten::badd")) else tensors[:2]
    if len(factors) < 2:
        return call.all_bytes
    left, right = factors
    columns = right.sizes[0] if call.name == "aten::linear" else right.sizes[-1]
    product = math.prod(left.sizes[:-1]) * columns * left.item_bytes
    return left.num_bytes + right.num_bytes + product


def _words(text: str) -> frozenset[str]:
    return frozenset(f"aten::{one}" for one in text.split())


_MAPS = _words(
    """
    add add_ sub sub_ mul mul_ div div_ neg abs exp log sqrt rsqrt pow pow_ sigmoid tanh relu relu_
    gelu silu silu_ sin cos erf clamp clamp_ clamp_min clamp_min_ leaky_relu leaky_relu_ hardtanh
    hardtanh_ mish elu softplus where masked_fill masked_fill_ eq ne lt gt le ge logical_not
    logical_and logical_or bitwise_and bitwise_or bitwise_not maximum minimum reciprocal threshold
    threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward relu_backward
    addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ native_dropout_backward hardswish hardswish_
    hardswish_backward hardsigmoid leaky_relu_backward elu_backward softplus_backward rsub round
    floor ceil sign isnan isinf isfinite mse_loss_backward binary_cross_entropy_backward
    nan_to_num sqrt_ exp_ neg_ sigmoid_ tanh_ remainder fmod atan2 square log1p expm1 to _to_copy
    _softmax _log_softmax softmax log_softmax masked_scatter tril triu tril_ triu_ roll flip
    clone contiguous constant_pad_nd glu hardtanh_backward logit fake_quantize_per_tensor_affine
    cumsum cumprod sort
    """
)
"""Read all inputs, write as much as these broadcast to."""
_SOFTMAX_BACKWARD = _words("_softmax_backward_data _log_softmax_backward_data")
_FILLS = _words("fill_ zero_ zeros_like ones_like normal_ uniform_ random_ bernoulli_ exponential_")
_REDUCTIONS = _words(
    """
    sum mean amax amin max min argmax argmin prod any all norm linalg_vector_norm var std var_mean
    logsumexp mse_loss nll_loss_forward nll_loss2d_forward binary_cross_entropy
    binary_cross_entropy_with_logits _amp_foreach_non_finite_check_and_unscale_ count_nonzero
    max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d topk isin
    native_batch_norm_backward_reduce nonzero bincount
    """
)
"""Read all inputs; what they write is less."""
_NORMS = _words(
    """
    native_layer_norm native_batch_norm cudnn_batch_norm miopen_batch_norm native_group_norm
    _fused_rms_norm rms_norm _native_batch_norm_legit batch_norm_elemt instance_norm
    _batch_norm_with_update native_dropout
    """
)
"""Read all inputs, write as much as the first."""
_NORM_BACKWARDS = _words(
    """
    native_layer_norm_backward native_batch_norm_backward cudnn_batch_norm_backward
    miopen_batch_norm_backward native_group_norm_backward _fused_rms_norm_backward
    batch_norm_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward
    avg_pool2d_backward upsample_nearest2d_backward
    """
)
"""Read all inputs, write as much as the second."""
_FOREACH = re.compile(r"^aten::(?:_foreach_\w+|_fused_(?:adam|adamw|sgd|adagrad)_?)$")
_GATHERS = _words("gather take_along_dim")
_INDEX_ADDS = _words("index_add_ index_add scatter_add_ scatter_add scatter_reduce_ index_copy_")
_INDEX_PUTS = _words("index_put_ _index_put_impl_ index_put _unsafe_index_put")
_LISTS_JOINED = _words("cat stack _cat")
_TRITON = re.compile(r"^triton_")
_TRITON_TEMPLATE = re.compile(r"^triton_tem_")
_TEMPLATE_PRODUCT = re.compile(r"_(?:mm|addmm|bmm|baddbmm)(?:_|$)")
_VLLM_NORM = re.compile(r"^_C::(?:fused_add_)?rms_norm$|^_C::(?:rotary_embedding|silu_and_mul)$")


def _count_bytes(call: Call) -> int | None:
    name = call.name
    if name in _MAPS:
        return call.all_bytes + call.largest_bytes
    if name == "aten::copy_":
        return call.num_bytes(0, 1)
    if name in _FILLS:
        return call.num_bytes(0)
    if name in _REDUCTIONS or _TRITON.match(name) or _VLLM_NORM.match(name):
        # Of Triton's kernels the outputs are among the inputs.
        return call.all_bytes
    if name in _NORMS or name in _SOFTMAX_BACKWARD:
        return call.all_bytes + call.num_bytes(0)
    if name in _NORM_BACKWARDS:
        return call.all_bytes + call.num_bytes(1)
    if name in _LISTS_JOINED:
        return 2 * call.num_bytes(0)
    if _FOREACH.match(name):
        return _count_foreach(call)
    return _count_look_ups(call)


def _count_look_ups(call: Call) -> int | None:
    """Operators that touch as many places of a tensor as they have indices."""
    name = call.name
    if name in ("aten::embedding", "aten::index_select"):
        rows, indices = call.sizes(0), 1 if name == "aten::embedding" else 2
        if len(rows) != 2:
            return None
        moved = math.prod(call.sizes(indices)) * rows[1] * call.inputs[0][0].item_bytes
        return call.num_bytes(indices) + 2 * moved
    if name in ("aten::_embedding_bag", "aten::_embedding_bag_forward_only"):
        rows = call.sizes(0)
        if len(rows) != 2:
            return None
        moved = math.prod(call.sizes(1)) + math.prod(call.sizes(2))
        return call.num_bytes(1, 2) + moved * rows[1] * call.inputs[0][0].item_bytes
    if name == "aten::_embedding_bag_dense_backward":
        # Every row that was looked up is added to, once for each look-up.
        width = call.sizes(0)[-1] if len(call.sizes(0)) == 2 else 0
        added = math.prod(call.sizes(1)) * width * call.inputs[0][0].item_bytes if width else 0
        return call.num_bytes(0, 1, 2) + 2 * added
    if name == "aten::embedding_dense_backward":
        return 2 * call.num_bytes(0) + call.num_bytes(1)
    if name in _GATHERS:
        # One place is read for each index, and written.
        item = call.inputs[0][0].item_bytes if call.sizes(0) else 0
        return call.num_bytes(2) + 2 * math.prod(call.sizes(2)) * item if item else None
    if name in _INDEX_ADDS:
        # What is added is read; the places it is added to are read and written.
        return call.num_bytes(2) + 3 * call.num_bytes(3)
    if name in _INDEX_PUTS:
        # Indices have no shapes; the values tell how many places are written.
        return 2 * call.num_bytes(2)
    return None


def _count_foreach(call: Call) -> int | None:
    """All lists are read; the first is written, by an optimizer also its states."""
    if not call.has_lists and not call.num_bytes(0):
        return None
    written = (0, 2, 3) if "_fused_adam" in call.name else (0,)
    return call.all_bytes + call.num_bytes(*written)
