"""Arithmetic of transformer training in closed form, and what MFU and HFU make of it.

One multiply-add is two FLOPs; backward is twice forward; only matrix products are counted, the
two of attention at full length (a causal mask is not credited, as in the published tables), and
no embedding look-up. *Model* FLOPs are what the model needs; *hardware* FLOPs also count what is
computed again in backward because activations were not kept.

    MFU = model FLOPs of a step / (step time · devices · peak)
    HFU = hardware FLOPs of a step / (the same)

Formulas: Narayanan et al. (arXiv 2104.04473), Korthikanti et al. (arXiv 2205.05198), in general
form 6·N per token and 12·L·h·s for attention. Neither ratio is clamped: one above 1 means that the
FLOPs, the peak or the time is wrong, and `is_impossible` says so.

Wrong for models that do something else than attention and dense products (state spaces,
convolutions): count those with `Recorder.count_flops`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshscope.core.unavailable import Unavailable

_BACKWARD_PER_FORWARD = 2
"""A matrix product has two in its backward."""


class Recompute(StrEnum):
    """What is computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """The products inside attention."""
    FULL = "full"
    """Every layer's forward, but for the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Of a step, a microbatch or a token."""

    model: float
    hardware: float
    """At least `model`."""

    def scaled(self, factor: float) -> "Flops":
        """So many of them, or a part."""
        return Flops(model=self.model * factor, hardware=self.hardware * factor)

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(model=self.model + other.model, hardware=self.hardware + other.hardware)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """What decides the arithmetic of a decoder."""

    num_layers: int
    hidden_size: int
    sequence_length: int
    vocab_size: int
    ffn_size: int | None = None
    """None: four times the hidden size."""
    num_ffn_inputs: int = 1
    """Matrices that lead into the feed-forward: 2 with a gate (swiglu)."""
    kv_size: int | None = None
    """Width of keys, and of values; None: the hidden size."""
    num_active_experts: int = 1
    """Feed-forwards that one token passes; the shared ones count too."""
    router_width: int = 0
    """Experts there are to choose from; 0 without a router."""

    @property
    def layer_matrix_weights(self) -> int:
        """Weights of one layer that a token is multiplied with."""
        hidden = self.hidden_size
        ffn = 4 * hidden if self.ffn_size is None else self.ffn_size
        kv = hidden if self.kv_size is None else self.kv_size
        attention = 2 * hidden * hidden + 2 * hidden * kv
        expert = (self.num_ffn_inputs + 1) * hidden * ffn
        return attention + self.num_active_experts * expert + hidden * self.router_width

    @property
    def forward_layer_flops(self) -> float:
        """Per token, one layer, the matrices only."""
        return 2.0 * self.layer_matrix_weights

    @property
    def forward_attention_flops(self) -> float:
        """Per token, one layer: scores and their product with the values."""
        return 4.0 * self.sequence_length * self.hidden_size

    @property
    def forward_head_flops(self) -> float:
        """Per token: the logits."""
        return 2.0 * self.hidden_size * self.vocab_size


def count_token_flops(shape: TransformerShape, recompute: Recompute = Recompute.NONE) -> Flops:
    """Forward and backward of one token through the whole model."""
    return count_stage_flops(shape, num_layers=shape.num_layers, has_head=True, recompute=recompute)


def count_stage_flops(
    shape: TransformerShape,
    *,
    num_layers: int,
    has_head: bool,
    recompute: Recompute = Recompute.NONE,
) -> Flops:
    """Forward and backward of one token through some layers, and the head if it is with them."""
    layer, attention = shape.forward_layer_flops, shape.forward_attention_flops
    head = shape.forward_head_flops if has_head else 0.0
    model = (1 + _BACKWARD_PER_FORWARD) * (num_layers * (layer + attention) + head)
    again = {
        Recompute.NONE: 0.0,
        Recompute.SELECTIVE: num_layers * attention,
        Recompute.FULL: num_layers * (layer + attention),
    }[recompute]
    return Flops(model=model, hardware=model + again)


def count_gpt_flops(
    *,
    batch_size: int,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    recompute: Recompute = Recompute.NONE,
) -> Flops:
    """A step of the published GPT: 72·B·s·L·h²(1 + s/6h + V/12Lh), and what recompute adds."""
    b, s, layers, h = batch_size, sequence_length, num_layers, hidden_size
    unit = float(b * s * layers) * h * h
    model = 72 * unit * (1 + s / (6 * h) + vocab_size / (12 * layers * h))
    if recompute is Recompute.FULL:
        hardware = 96 * unit * (1 + s / (6 * h) + vocab_size / (16 * layers * h))
    elif recompute is Recompute.SELECTIVE:
        # As published, and what published HFUs are made with, but an upper bound: it counts all
        # six of attention's products twice, while only the forward two are computed again
        # (`count_stage_flops` has it so).
        hardware = 72 * unit * (1 + s / (3 * h) + vocab_size / (12 * layers * h))
    else:
        hardware = model
    return Flops(model=model, hardware=hardware)


def count_flops_per_token(
    *, active_parameters: float, num_layers: int, hidden_size: int, sequence_length: int,
    is_causal_credited: bool = False,
) -> float:  # fmt: skip
    """6·N + 12·L·h·s. `active_parameters` leaves embeddings out and counts the experts a token
    passes, not those there are. Crediting the causal mask halves the second term."""
    attention = 12.0 * num_layers * hidden_size * sequence_length
    return 6.0 * active_parameters + (attention / 2 if is_causal_credited else attention)


def count_active_parameters(
    *, dense_parameters: float, expert_parameters: float, num_experts: int, num_active: int
) -> float:
    """Of a mixture of experts: `expert_parameters` is all experts' together."""
    return dense_parameters + expert_parameters * num_active / num_experts


def count_gpt_parameters(
    *, num_layers: int, hidden_size: int, vocab_size: int, sequence_length: int
) -> float:
    """12·L·h²(1 + 13/12h + (V + s)/12Lh): with biases, norms, learned positions, a tied head."""
    layers, h = num_layers, hidden_size
    share = 1 + 13 / (12 * h) + (vocab_size + sequence_length) / (12 * layers * h)
    return 12.0 * layers * h * h * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """How much of the peak a step used."""

    mfu_ratio: float
    hfu_ratio: float
    denominator_flops: float
    """Step time · devices · peak."""

    @property
    def is_impossible(self) -> bool:
        """More than the peak: FLOPs, peak or time is wrong."""
        return max(self.mfu_ratio, self.hfu_ratio) > 1


def measure_utilization(
    flops: Flops, *, step_ns: float, num_devices: int, peak_flops_per_s: float
) -> Utilization | Unavailable:
    """MFU and HFU of a step of all devices together."""
    denominator = step_ns / 1e9 * num_devices * peak_flops_per_s
    if not denominator > 0:
        return Unavailable("no MFU: a step time, a number of devices and a peak above 0 are needed")
    return Utilization(
        mfu_ratio=flops.model / denominator,
        hfu_ratio=flops.hardware / denominator,
        denominator_flops=denominator,
    )


Shapes = Sequence[Sequence[int]]
"""Of an operator's inputs; an input that is no tensor has no sizes."""

_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
    "aten::addbmm": (1, 2),
    "aten::addbmm_": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_scaled_mm_v2": (0, 1),
    "aten::_int_mm": (0, 1),
    "aten::matmul": (0, 1),
}
"""Which inputs are multiplied."""
_ATTENTION = frozenset(
    (
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    )
)
_ATTENTION_BACKWARD = frozenset(f"{name.removesuffix('_forward')}_backward" for name in _ATTENTION)
_HEADS_SECOND = ("aten::_flash_attention", "aten::_efficient_attention")
"""Their inputs are [batch, sequence, heads, width]; the others' [batch, heads, sequence, width]."""
_OWN_LENGTHS = {
    "aten::_efficient_attention_forward": 4,
    "aten::_efficient_attention_backward": 6,
}
"""Where the lengths of sequences stand that were laid one behind the other; these have no values in
a trace, and pairs of positions of different sequences are not computed."""
_VECTORS = {"aten::mv": (0, 1), "aten::addmv": (1, 2), "aten::addmv_": (1, 2)}
_LINEAR = frozenset(("aten::linear", "aten::_weight_int8pack_mm"))
"""The weight is [outputs, inputs]."""
_GROUPED = frozenset(
    ("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
)
COUNTED_OPERATORS = frozenset(
    {*_PRODUCTS, *_VECTORS, *_ATTENTION, *_ATTENTION_BACKWARD, *_LINEAR, *_GROUPED}
)
"""What `count_operator_flops` can count."""


def count_operator_flops(name: str, shapes: Shapes) -> int | None:
    """Operations of one call of a matrix product or an attention; None where they are not known.

    Attention counts every pair of positions, causal or not; its backward is four products: a fused
    kernel makes the scores once more, which is neither the model's nor the program's choice.
    """
    if name in _PRODUCTS:
        left, right = _PRODUCTS[name]
        return _count_product(_pick(shapes, left), _pick(shapes, right))
    if _pick(shapes, _OWN_LENGTHS.get(name, len(shapes))):
        return None
    if name in _ATTENTION:
        return _count_attention(name, shapes)
    if name in _ATTENTION_BACKWARD:
        forward = _count_attention(name, shapes[1:])
        return None if forward is None else 2 * forward
    if name in _VECTORS:
        matrix, vector = (_pick(shapes, place) for place in _VECTORS[name])
        return 2 * math.prod(matrix) if len(matrix) == 2 and [matrix[1]] == [*vector] else None
    inputs, weight = _pick(shapes, 0), _pick(shapes, 1)
    if name in _LINEAR and inputs and len(weight) == 2 and inputs[-1] == weight[1]:
        return 2 * math.prod(inputs) * weight[0]
    return _count_grouped(inputs, weight) if name in _GROUPED else None


def _count_grouped(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Products of groups: they share the rows of the left, the columns of the right, the index that
    is summed over, or nothing (a batch)."""
    dimensions = (len(left), len(right))
    if dimensions == (3, 3):
        return _count_product(left, right)
    if dimensions == (3, 2):  # each group has columns of its own
        return 2 * math.prod(left[1:]) * right[1] if left[2] == right[0] else None
    if dimensions in ((2, 2), (2, 3)):
        return 2 * math.prod(left) * right[-1] if left[1] == right[-2] else None
    return None


def _pick(shapes: Shapes, index: int) -> Sequence[int]:
    return shapes[index] if index < len(shapes) else ()


def _count_product(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Two matrices, or as many pairs of them; [..., m, k] and [..., k, n]."""
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return None
    if len(right) > 2 and left[:-2] != right[:-2]:
        return None
    return 2 * math.prod(left) * right[-1]


def _count_attention(name: str, shapes: Shapes) -> int | None:
    """Scores and weighted values: two products for each head."""
    query, key, value = (_pick(shapes, index) for index in range(3))
    if len(query) != 4 or len(key) != 4:
        return None
    heads_second = name.startswith(_HEADS_SECOND)
    batch, heads = query[0], query[2 if heads_second else 1]
    num_queries, num_keys = (query[1], key[1]) if heads_second else (query[2], key[2])
    widths = query[3] + (value[3] if len(value) == 4 else query[3])
    return 2 * batch * heads * num_queries * num_keys * widths


def count_recomputed_flops(name: str, shapes: Shapes) -> int:
    """What a fused backward of attention does beside its four products: the scores, once more. 0
    for anything else."""
    if name not in _ATTENTION_BACKWARD:
        return 0
    query, key = (_pick(shapes, index) for index in (1, 2))
    return _count_attention(name, [query, key, [*query[:3], 0]]) or 0
