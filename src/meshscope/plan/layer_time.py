"""How long one layer of one microbatch takes, for many layouts at once.

For each matrix product of m × k by k × n, cut over tp: 2mnk / (peak · ratio), longer by
(1 + c/m)(1 + c/n)(1 + c/k). Attention's products: 2·s·(q + v) for each token, all pairs where the
stack computes masked ones, else half. What only moves bytes, forward: ten passes of the residual
stream, one in and one out of every MLP tensor, half of attention's channels, and ten bytes for each
score where scores are in memory; backward twice that. Collectives of tp: 2 in forward and 2 in
backward; with recompute, forward's again. The host must issue it all: the longer of device and host
counts, in a smooth maximum. Experts see T·k/(E/ep) tokens each, if routing is even.

Backward is split as schedules need it: W has the products' weight gradients, I all else.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.plan.calibration import Constants
from meshscope.plan.candidate import Candidate, read_segment
from meshscope.plan.cluster import Cluster
from meshscope.plan.model_shape import ModelShape, Product
from meshscope.plan.recipe import Recipe

Floats = npt.NDArray[np.float64]
_SMOOTH = 7.0
"""Exponent of the smooth maximum of host and device."""
_SCORE_BYTES = 10
_STREAM_PASSES = 10
_UNFUSED_BYTES = 29
"""More for each score: to float32 and back (6 each), scaled, masked and softmax (8 each, mask 1),
less the fused kernel's 4 and what is shared."""
_UNFUSED_HOST = 0.4
"""More to issue: 8 operations (those, and three that make the mask) beside about 20 of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Candidates as columns, one number each."""

    dp: Floats
    tp: Floats
    pp: Floats
    cp: Floats
    ep: Floats
    microbatch_size: Floats
    num_microbatches: Floats
    chunks: Floats
    zero_stage: Floats
    shards: Floats
    again: Floats
    """Of a layer's forward in backward: 0 none, 1 all of it."""
    attention_again: Floats
    """Of attention alone, with selective recompute."""
    sequence_parallel: Floats

    def __len__(self) -> int:
        return len(self.dp)


def make_columns(candidates: list[Candidate], recipe: Recipe) -> Columns:
    """Of a list of candidates."""
    return Columns(
        **{
            name: np.array([getattr(one, name) for one in candidates], dtype=np.float64)
            for name in (
                "dp", "tp", "pp", "cp", "ep", "microbatch_size", "num_microbatches", "chunks",
                "zero_stage", "sequence_parallel",
            )
        },
        shards=np.array([one.num_shards for one in candidates], dtype=np.float64),
        again=np.array([count_again(one.recompute, recipe) for one in candidates]),
        attention_again=np.array(
            [count_attention_again(one.recompute, recipe) for one in candidates]
        ),
    )  # fmt: skip


def count_again(recompute: str, recipe: Recipe) -> float:
    """Share of a layer's forward that backward makes again."""
    if recompute == "selective":
        return 0.5 if recipe.stack.selective == "half" else 0.0
    return 0.0 if read_segment(recompute) is None else 1.0


def count_attention_again(recompute: str, recipe: Recipe) -> float:
    return float(recompute == "selective" and recipe.stack.selective == "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Of one layer and microbatch, in seconds, with what is inside of them."""

    forward_s: Floats
    input_grad_s: Floats
    weight_grad_s: Floats
    tp_s: Floats
    """Of collectives in forward and backward, inside the three above."""
    cp_s: Floats
    ep_s: Floats
    dp_s: Floats
    """What gathering cut weights adds beyond what compute hides."""
    host_share: Floats
    """Of a little more work for the host, how much makes forward longer."""


def time_layer(
    model: ModelShape, columns: Columns, recipe: Recipe, cluster: Cluster, constants: Constants
) -> LayerTimes:
    """One layer of this kind (`ModelShape.dense` for those without experts)."""
    stack, compute = recipe.stack, recipe.precision.compute_bytes
    rate = find_rate(recipe, cluster, constants)
    tokens = columns.microbatch_size * model.sequence_length / columns.cp
    products = sum(
        (_time_product(one, tokens, columns.tp, rate, constants) for one in _list_dense(model)),
        start=np.zeros(len(columns)),
    )
    if model.experts is not None:
        products = products + _time_experts(model, tokens, columns, rate, constants)
    pairs = 1.0 if stack.counts_full_attention else 0.5
    peak = rate / _gemm_ratio(cluster, constants)
    attention = pairs * tokens * model.attention_flops / columns.tp
    attention = attention / (peak * constants.attention_ratio)
    memory = _count_moved(model, tokens, columns, recipe)
    is_unfused = _find_unfused(model, columns, recipe)
    scores = 0.0 if stack.has_fused_attention else _SCORE_BYTES + _UNFUSED_BYTES * is_unfused
    pairs_bytes = scores * tokens * model.sequence_length * model.num_heads / columns.tp
    bandwidth = cluster.device.bandwidth_bytes_per_s * constants.memory_ratio
    moved, score_time = memory / bandwidth, pairs_bytes / bandwidth
    tp_s = 2 * time_all_reduce(
        compute * tokens * model.hidden_size, columns.tp, np.ones(len(columns)), cluster, constants
    )
    cp_s = _time_context(model, columns, attention, compute, cluster, constants)
    ep_s = _time_routing(model, columns, tokens, compute, cluster, constants)
    # The pace is of compute alone; what a layer was measured to take is of all of it.
    pace = constants.pace_ratio
    products, attention = pace * products, pace * attention
    moved, score_time = pace * moved, pace * score_time
    inside = products + attention + moved + score_time
    forward = inside + tp_s + cp_s + ep_s
    rest = 2 * (attention + moved + score_time) + products
    again = columns.again * forward + columns.attention_again * (attention + score_time)
    added = pace * _count_added(model, columns, recipe) / bandwidth
    inputs, weights = rest + tp_s + 2 * cp_s + ep_s + again, products + added
    host = pace * constants.host_layer_s * (1 + _UNFUSED_HOST * is_unfused)
    # A device computes while its host issues what comes next; a host that computes does both.
    join = np.add if cluster.is_host else _smooth_max
    issued_forward = join(forward, host)
    backward = inputs + weights
    issued_backward = join(backward, (2 + columns.again) * host if cluster.is_host else 2 * host)
    stretch = issued_backward / backward
    ratio = _find_layer_ratios(model, columns, constants)
    gathered = _time_gathering(model, columns, recipe, cluster, constants)
    shown_forward, shown_backward = ratio * issued_forward, ratio * issued_backward
    hidden_forward = np.maximum(shown_forward, gathered)
    extra_forward = hidden_forward - shown_forward
    reduced = 2 * gathered * (recipe.precision.gradient_bytes / compute + 1) / 2
    extra_backward = np.maximum(0, reduced - shown_backward)
    return LayerTimes(
        forward_s=hidden_forward,
        input_grad_s=ratio * stretch * inputs + extra_backward,
        weight_grad_s=ratio * stretch * weights,
        tp_s=ratio * (2 + columns.again) * tp_s,
        cp_s=ratio * (3 + columns.again) * cp_s,
        ep_s=ratio * (2 + columns.again) * ep_s,
        dp_s=extra_forward + extra_backward,
        host_share=ratio * (1.0 if cluster.is_host else (host / issued_forward) ** (_SMOOTH - 1)),
    )


def _find_unfused(model: ModelShape, columns: Columns, recipe: Recipe) -> Floats:
    """1 where the fused softmax cannot take so few heads and sequences."""
    rows = columns.microbatch_size * model.num_heads / columns.tp
    return np.where(rows % recipe.stack.softmax_group > 0, 1.0, 0.0)


def _count_added(model: ModelShape, columns: Columns, recipe: Recipe) -> Floats:
    """Bytes that adding a microbatch's weight gradients to those before reads and writes."""
    precision = recipe.precision
    size = 2 * precision.gradient_bytes
    size += 0 if recipe.stack.accumulates_in_product else precision.compute_bytes
    weights = model.count_dense_part() / columns.tp
    weights = weights + model.count_expert_part() / (columns.tp * columns.ep)
    cut = np.where(columns.zero_stage >= 2, columns.shards, 1.0)
    return size * weights / cut * (1 - 1 / columns.num_microbatches)


def time_head(
    model: ModelShape, columns: Columns, recipe: Recipe, cluster: Cluster, constants: Constants
) -> tuple[Floats, Floats]:
    """Forward and backward of the logits and the loss."""
    tokens = columns.microbatch_size * model.sequence_length / columns.cp
    rate = find_rate(recipe, cluster, constants)
    head = Product(model.vocab_size, model.hidden_size, is_cut_outputs=True)
    product = _time_product(head, tokens, columns.tp, rate, constants)
    bandwidth = cluster.device.bandwidth_bytes_per_s * constants.memory_ratio
    passes = 4 * constants.logit_passes * tokens * model.vocab_size / columns.tp / bandwidth
    pace = constants.pace_ratio
    return pace * (product + passes / 3), pace * (2 * product + 2 * passes / 3)


def find_rate(recipe: Recipe, cluster: Cluster, constants: Constants) -> float:
    """FLOP/s of large matrix products."""
    peak = cluster.find_peak(recipe.precision.dtype)
    if not isinstance(peak, float):
        peak = cluster.device.flops_per_s["float32"]
    return peak * _gemm_ratio(cluster, constants)


def _gemm_ratio(cluster: Cluster, constants: Constants) -> float:
    return cluster.gemm_ratio if constants.gemm_ratio is None else constants.gemm_ratio


def _list_dense(model: ModelShape) -> tuple[Product, ...]:
    if model.experts is None:
        return (*model.attention_products, *model.list_mlp_products(model.ffn_hidden_size))
    shared = model.experts.num_shared * model.experts.width
    mlp = model.list_mlp_products(shared) if shared else ()
    return (*model.attention_products, *mlp)


def _time_product(
    product: Product, tokens: Floats, tp: Floats, rate: float, constants: Constants
) -> Floats:
    cut = 1.0 if product.is_whole else tp
    outputs = product.outputs / (cut if product.is_cut_outputs else 1.0)
    inputs = product.inputs / (1.0 if product.is_cut_outputs else cut)
    half = constants.gemm_half_size
    longer = (1 + half / tokens) * (1 + half / outputs) * (1 + half / inputs)
    return 2 * tokens * outputs * inputs / rate * longer


def _time_experts(
    model: ModelShape, tokens: Floats, columns: Columns, rate: float, constants: Constants
) -> Floats:
    mixture = model.experts
    assert mixture is not None
    num_here = np.maximum(1.0, mixture.count / columns.ep)
    each = tokens * mixture.active / num_here
    total = np.zeros(len(columns))
    for one in model.list_mlp_products(mixture.width):
        total = total + num_here * _time_product(one, each, columns.tp, rate, constants)
    return total


def _count_moved(model: ModelShape, tokens: Floats, columns: Columns, recipe: Recipe) -> Floats:
    """Bytes that one forward of a layer reads and writes outside of products."""
    parts = np.where(columns.sequence_parallel > 0, columns.tp, 1.0)
    compute = recipe.precision.compute_bytes
    stream = _STREAM_PASSES * recipe.stack.stream_element_bytes * model.hidden_size / parts
    widths = (model.num_ffn_inputs + 1) * model.mlp_width + model.num_attention_channels / 2
    routed = 4 * model.num_routed_copies * model.hidden_size
    return tokens * (stream + compute * (widths + routed) / columns.tp)


def _time_context(
    model: ModelShape,
    columns: Columns,
    attention: Floats,
    compute: int,
    cluster: Cluster,
    constants: Constants,
) -> Floats:
    """What passing keys and values around the ring adds beyond attention's own time."""
    tokens = columns.microbatch_size * model.sequence_length / columns.cp
    width = 2 * model.kv_size if model.latent is None else model.num_latent_channels
    size = compute * tokens * width / (1 if model.latent is not None else columns.tp)
    sent = (columns.cp - 1) * (
        size / find_bandwidth(columns.cp, columns.tp, cluster, constants) + constants.p2p_latency_s
    )
    return np.where(columns.cp > 1, np.maximum(0.0, sent - attention), 0.0)


def _time_routing(
    model: ModelShape,
    columns: Columns,
    tokens: Floats,
    compute: int,
    cluster: Cluster,
    constants: Constants,
) -> Floats:
    """Two all-to-alls over ep, there and back."""
    if model.experts is None:
        return np.zeros(len(columns))
    size = compute * tokens * model.experts.active * model.hidden_size
    share = (columns.ep - 1) / columns.ep
    bandwidth = find_bandwidth(columns.ep, columns.tp * columns.cp, cluster, constants)
    latency = constants.collective_latency_s * np.log2(np.maximum(2.0, columns.ep))
    return np.where(columns.ep > 1, 2 * (share * size / bandwidth + latency), 0.0)


def _time_gathering(
    model: ModelShape, columns: Columns, recipe: Recipe, cluster: Cluster, constants: Constants
) -> Floats:
    """Of one layer's weights over the ranks that ZeRO 3 cuts them over."""
    weights = model.count_dense_part(1) / columns.tp
    weights = weights + model.count_expert_part(1, 1) / (columns.tp * columns.ep)
    size = recipe.precision.compute_bytes * weights
    stride = columns.tp
    bandwidth = find_bandwidth(columns.shards, stride, cluster, constants)
    share = (columns.shards - 1) / columns.shards
    latency = constants.collective_latency_s * np.log2(np.maximum(2.0, columns.shards))
    found = share * size / bandwidth + latency
    return np.where((columns.zero_stage >= 3) & (columns.shards > 1), found, 0.0)


def find_bandwidth(
    degree: Floats, stride: Floats, cluster: Cluster, constants: Constants
) -> Floats:
    """Bytes per second of one group: ranks `stride` apart, `degree` of them.

    A group inside a node has the link of a device. One across nodes is held up by its share of the
    node's adapters: as many groups as there are ranks of different groups in a node use them.
    """
    per_node = cluster.per_node
    own = np.clip(np.floor(per_node / stride), 1, degree)
    groups = np.maximum(1.0, per_node / own)
    across = cluster.between.bytes_per_s * constants.network_ratio / groups
    is_inside = own >= degree
    inside = cluster.inside.bytes_per_s
    return np.where(is_inside, inside, np.minimum(across, inside))


def time_all_reduce(
    size: Floats, degree: Floats, stride: Floats, cluster: Cluster, constants: Constants
) -> Floats:
    """2(n−1)/n · S / B and a latency for each doubling of the group."""
    bandwidth = find_bandwidth(degree, stride, cluster, constants)
    latency = constants.collective_latency_s * np.log2(np.maximum(1.0, degree))
    found = 2 * (degree - 1) / degree * size / bandwidth + latency
    return np.where(degree > 1, found, 0.0)


def _find_layer_ratios(model: ModelShape, columns: Columns, constants: Constants) -> Floats:
    """Measured over computed, 1 where nothing was measured."""
    if not constants.layer_ratios:
        return np.ones(len(columns))
    keys = zip(columns.microbatch_size, columns.tp, strict=True)
    return np.array(
        [
            constants.layer_ratios.get(
                (model.hidden_size, model.sequence_length, int(size), int(tp)), 1.0
            )
            for size, tp in keys
        ]
    )


def _smooth_max(one: Floats, other: Floats) -> Floats:
    found: Floats = (one**_SMOOTH + other**_SMOOTH) ** (1 / _SMOOTH)
    return found
