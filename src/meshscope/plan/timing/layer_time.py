"""How long one layer of one microbatch takes, for many layouts at once.

For each matrix product of m × k by k × n, cut over tp: 2mnk / (peak · ratio), longer by
(1 + c/m)(1 + c/n)(1 + c/k). Attention's products: 2·s·(q + v) for each token, all pairs where the
stack computes masked ones, else half; backward of a fused kernel takes 3.2 times as long. Attention
and the head run in bf16 also under fp8. What only moves bytes, forward (`_count_moved`), and ten
bytes for each score where scores are in memory; backward twice that. Collectives of tp: 2 in
forward and 2 in backward; with recompute, forward's again. The host must issue it all: it goes
ahead of its device, so what it takes is told apart (`pricing` joins the two over a rank's row).
Where it cannot (a host that computes, a stack whose sends block), a layer takes their sum, or the
longer of both, in a smooth maximum. Communication beside compute slows it: by a share of
what is hidden (`overlap_cost_ratio`). Experts see T·k/(E/ep) tokens each, if routing is even.

Backward is split as schedules need it: W has the products' weight gradients, I all else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.plan.candidate import Candidate, read_segment
from meshscope.plan.cluster import Cluster
from meshscope.plan.model.model_shape import ModelShape, Product
from meshscope.plan.recipe import Recipe
from meshscope.plan.timing.calibration import Constants

Floats = npt.NDArray[np.float64]
_SMOOTH = 7.0
"""Exponent of the smooth maximum of host and device."""
_SCORE_BYTES = 10
_STREAM_PASSES = 10
_FUSED_BACKWARD = 3.2
"""Of a fused attention's forward. Five products instead of two, at 0.78 of their rate: cuDNN's
kernels on an H200 (benchmarks/results/planner_gpu.json)."""
_ROPE_BYTES = 20
"""For each turned channel by separate operations: to float32, a complex product, and back."""
_CAST_BYTES = 12
"""For each weight that autocast casts: read and written in forward, and so is its gradient."""
_FLOAT8_BYTES = 5
"""For each input of a product: its largest value is looked for, then it is written in one byte."""
_KERNELS = {"gated": 80, "plain": 67, "fused": 40}
"""Of a layer's forward and backward by separate operations, with rotary positions and a gated MLP
or without (counted on an H200, same results file); fused, an assumption."""
_UNFUSED_BYTES = 29
"""More for each score: to float32 and back (6 each), scaled, masked and softmax (8 each, mask 1),
less the fused kernel's 4 and what is shared."""
_CALL_KERNELS = 6
"""What a collective takes the host to issue, in kernels: of two layouts of the engine on 4 NCCL
ranks, the one's hosts issue layers, the other's 128 collectives and 16 messages beside them (38 and
197 ms, results/planner_gpu.json). A message counts twice (its buffer, its wait), and so does a
collective of FSDP2 (copies in and out)."""
_HEAD_KERNELS = 32
"""Of table, last norm, head and loss, forward and backward (read off the engine)."""
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
    """Of a layer's products and collectives in backward: 0 none, 1 all of them."""
    moved_again: Floats
    """Of what only moves bytes."""
    attention_again: Floats
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
        **list_again([one.recompute for one in candidates], recipe),
    )  # fmt: skip


def list_again(recomputes: Sequence[str], recipe: Recipe) -> dict[str, Floats]:
    """Shares of a layer's forward that backward makes again, by the columns' names."""
    rows = np.array([_count_again(one, recipe) for one in recomputes]).reshape(-1, 3)
    names = ("again", "moved_again", "attention_again")
    return dict(zip(names, rows.T, strict=True))


def _count_again(recompute: str, recipe: Recipe) -> tuple[float, float, float]:
    if recompute == "selective":
        return (0.5, 1.0, 0.0) if recipe.stack.selective == "half" else (0.0, 0.0, 1.0)
    return (0.0, 0.0, 0.0) if read_segment(recompute) is None else (1.0, 1.0, 1.0)


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
    """Of a little more work for the host, how much makes forward longer; 0 where it goes ahead."""
    host_forward_s: Floats
    """Of a host that goes ahead of its device, to issue it; else 0, as it is in the times above."""
    host_backward_s: Floats


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
    attention = pairs * tokens * model.attention_flops / columns.tp
    attention = attention / (_find_wide_peak(recipe, cluster) * constants.attention_ratio)
    memory = _count_moved(model, tokens, columns, recipe)
    is_unfused = _find_unfused(model, columns, recipe)
    scores = 0.0 if stack.has_fused_attention else _SCORE_BYTES + _UNFUSED_BYTES * is_unfused
    pairs_bytes = scores * tokens * model.sequence_length * model.num_heads / columns.tp
    bandwidth = cluster.device.bandwidth_bytes_per_s * constants.memory_ratio
    moved, score_time = memory / bandwidth, pairs_bytes / bandwidth
    num_kernels = _KERNELS["fused"] if stack.is_fused else _count_kernels(model)
    moved = moved + constants.kernel_s * num_kernels / 3
    tp_s = 2 * time_all_reduce(
        compute * tokens * model.hidden_size, columns.tp, np.ones(len(columns)), cluster, constants
    )
    cp_s = _time_context(model, columns, attention, compute, cluster, constants)
    ep_s = _time_routing(model, columns, tokens, compute, cluster, constants)
    # The pace is of compute alone; what a layer was measured to take is of all of it.
    pace = constants.pace_ratio
    products, attention = pace * products, pace * attention
    tp_forward_s, tp_backward_s = _share_sequence(tp_s, products, columns, cluster)
    moved, score_time = pace * moved, pace * score_time
    inside = products + attention + moved + score_time
    ep_forward_s = _hide_routing(ep_s, inside, columns, recipe, cluster, constants)
    forward = inside + tp_forward_s + cp_s + ep_forward_s
    backward_ratio = _FUSED_BACKWARD if stack.has_fused_attention else 2.0
    rest = backward_ratio * attention + 2 * (moved + score_time) + products
    again = columns.again * (products + tp_forward_s + cp_s + ep_s) + columns.moved_again * moved
    again = again + columns.attention_again * (attention + score_time)
    added = pace * _count_added(model, columns, recipe) / bandwidth
    ep_backward_s = _hide_routing(ep_s, rest + products, columns, recipe, cluster, constants)
    inputs, weights = rest + tp_backward_s + 2 * cp_s + ep_backward_s + again, products + added
    host = constants.host_layer_s * (1 + _UNFUSED_HOST * is_unfused)
    host = pace * host if cluster.is_host else host * _count_kernels(model) / _KERNELS["plain"]
    backward = inputs + weights
    host_backward = (2 + constants.host_again_ratio * columns.again) * host
    calls_forward, calls_backward = _count_calls(columns, recipe)
    call_s = time_call(constants)
    share: Floats | float = 0.0
    if host_goes_ahead(recipe, cluster):
        issued_forward, issued_backward = forward, backward
        host_forward = host + call_s * calls_forward
        host_backward = host_backward + call_s * calls_backward
    else:
        # A device computes while its host issues what comes next; a host that computes does both.
        join = np.add if cluster.is_host else smooth_max
        issued_forward, issued_backward = join(forward, host), join(backward, host_backward)
        host_forward = host_backward = np.zeros(len(columns))
        share = 1.0 if cluster.is_host else (host / issued_forward) ** (_SMOOTH - 1)
    stretch = issued_backward / backward
    ratio = _find_layer_ratios(model, columns, constants)
    layer_weights = model.count_dense_part(1) / columns.tp
    layer_weights = layer_weights + model.count_expert_part(1, 1) / (columns.tp * columns.ep)
    gathered = _time_gathering(layer_weights, columns, recipe, cluster, constants)
    shown_forward, shown_backward = ratio * issued_forward, ratio * issued_backward
    reduced = gathered + _time_scattering(gathered, recipe, cluster)
    extra_forward = expose(gathered, shown_forward, constants)
    extra_backward = expose(reduced, shown_backward, constants)
    return LayerTimes(
        forward_s=shown_forward + extra_forward,
        input_grad_s=ratio * stretch * inputs + extra_backward,
        weight_grad_s=ratio * stretch * weights,
        tp_s=ratio * ((1 + columns.again) * tp_forward_s + tp_backward_s),
        cp_s=ratio * (3 + columns.again) * cp_s,
        ep_s=ratio * (ep_forward_s + ep_backward_s + columns.again * ep_s),
        dp_s=extra_forward + extra_backward,
        host_share=ratio * share,
        host_forward_s=host_forward,
        host_backward_s=host_backward,
    )


def host_goes_ahead(recipe: Recipe, cluster: Cluster) -> bool:
    """Whether a host issues what comes later while its device works and waits."""
    return not cluster.is_host and not recipe.stack.has_blocking_sends


def time_host_head(constants: Constants) -> float:
    """Of a host that goes ahead, to issue what is outside of layers."""
    return _HEAD_KERNELS * _time_kernel(constants)


def time_call(constants: Constants) -> float:
    """Of the host, to issue a collective."""
    return _CALL_KERNELS * _time_kernel(constants)


def _time_kernel(constants: Constants) -> float:
    """Of the host. A layer's backward has twice the kernels of its forward."""
    return 3 * constants.host_layer_s / _KERNELS["plain"]


def _count_calls(columns: Columns, recipe: Recipe) -> tuple[Floats, Floats]:
    """Collectives that a layer's forward and backward issue. Under sequence parallel a sum is a
    reduce-scatter and a gather, and backward gathers its two inputs again."""
    is_cut = columns.sequence_parallel > 0
    forward = np.where(columns.tp > 1, np.where(is_cut, 4.0, 2.0), 0.0)
    backward = np.where(columns.tp > 1, np.where(is_cut, 6.0, 2.0), 0.0) + columns.again * forward
    gathers = np.where((columns.zero_stage >= 3) & (columns.shards > 1), 1.0, 0.0)
    if recipe.stack.gathers_once:
        gathers = gathers / np.where(columns.pp > 1, columns.num_microbatches, 1.0)
    return forward + 2 * gathers, backward + 4 * gathers


def count_scatter_passes(cluster: Cluster) -> int:
    """Times that a reduce-scatter sends what a gather does: gloo's costs as much as an all-reduce
    (196 KiB on 8 ranks: 13.5 against 9.6 ms; an all-reduce 14.4)."""
    return 2 if cluster.is_host else 1


def _share_sequence(
    tp_s: Floats, products: Floats, columns: Columns, cluster: Cluster
) -> tuple[Floats, Floats]:
    """Forward's and backward's collectives of tp. Under sequence parallel each all-reduce is a
    reduce-scatter and a gather, and backward gathers its two inputs again: on devices beside the
    products of their gradients, about half of a forward's."""
    is_cut = columns.sequence_parallel > 0
    if not cluster.is_host:
        again = np.maximum(0.0, tp_s / 2 - products / 2)
        return tp_s, tp_s + np.where(is_cut, again, 0.0)
    passes = 1 + count_scatter_passes(cluster)
    return tp_s * np.where(is_cut, passes / 2, 1.0), tp_s * np.where(is_cut, (passes + 1) / 2, 1.0)


def _count_kernels(model: ModelShape) -> int:
    is_gated = model.position == "rope" and model.activation == "swiglu"
    return _KERNELS["gated" if is_gated else "plain"]


def expose(sent_s: Floats, compute_s: Floats, constants: Constants) -> Floats:
    """What communication beside compute adds to it: all that lasts longer, and of the rest what it
    takes from compute (multiprocessors, bandwidth of the memory, power)."""
    hidden = np.minimum(sent_s, compute_s)
    return sent_s - hidden + constants.overlap_cost_ratio * hidden


def _find_wide_peak(recipe: Recipe, cluster: Cluster) -> float:
    """Of attention and the head, which stay in bf16 under fp8: Megatron-LM's output layer is none
    of Transformer Engine's, torchtitan leaves its `output` out of the conversion."""
    dtype = recipe.precision.dtype
    peak = cluster.find_peak("bfloat16" if dtype == "float8" else dtype)
    return peak if isinstance(peak, float) else cluster.device.flops_per_s["float32"]


def _find_unfused(model: ModelShape, columns: Columns, recipe: Recipe) -> Floats:
    """1 where the fused softmax cannot take so few heads and sequences."""
    rows = columns.microbatch_size * model.num_heads / columns.tp
    return np.where(rows % recipe.stack.softmax_group > 0, 1.0, 0.0)


def _count_added(model: ModelShape, columns: Columns, recipe: Recipe) -> Floats:
    """Bytes that casting weights, and adding a microbatch's gradients to those before, reads and
    writes."""
    precision = recipe.precision
    size = 2 * precision.gradient_bytes
    size += 0 if recipe.stack.accumulates_in_product else precision.compute_bytes
    weights = model.count_dense_part() / columns.tp
    weights = weights + model.count_expert_part() / (columns.tp * columns.ep)
    cut = np.where(columns.zero_stage >= 2, columns.shards, 1.0)
    added = size * weights / cut * (1 - 1 / columns.num_microbatches)
    # FSDP gathers weights in the dtype to compute in.
    is_cast = precision.casts_each_forward & (columns.zero_stage < 3)
    return added + np.where(is_cast, _CAST_BYTES * weights, 0.0)


def time_head(
    model: ModelShape, columns: Columns, recipe: Recipe, cluster: Cluster, constants: Constants
) -> tuple[Floats, Floats]:
    """Forward and backward of the logits and the loss."""
    tokens = columns.microbatch_size * model.sequence_length / columns.cp
    rate = _find_wide_peak(recipe, cluster) * _gemm_ratio(cluster, constants)
    head = Product(model.vocab_size, model.hidden_size, is_cut_outputs=True)
    product = _time_product(head, tokens, columns.tp, rate, constants)
    bandwidth = cluster.device.bandwidth_bytes_per_s * constants.memory_ratio
    passes = 4 * constants.logit_passes * tokens * model.vocab_size / columns.tp / bandwidth
    pace = constants.pace_ratio
    return pace * (product + passes / 3), pace * (2 * product + 2 * passes / 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundTimes:
    """Of one microbatch, what ranks send beside its layers, in seconds."""

    forward_tp_s: Floats
    backward_tp_s: Floats
    forward_dp_s: Floats
    backward_dp_s: Floats


def time_around(
    model: ModelShape, columns: Columns, recipe: Recipe, cluster: Cluster, constants: Constants
) -> AroundTimes:
    """tp sums the table's outputs and two rows of the loss, and in backward the head's input
    gradient: between processes on a host as dear as a layer's, on devices in the other
    constants, so 0. ZeRO 3 gathers table and head, and reduces their gradients, where the stack
    does so by itself."""
    nothing = np.zeros(len(columns))
    tokens = columns.microbatch_size * model.sequence_length / columns.cp
    one = np.ones(len(columns))
    size = recipe.precision.compute_bytes * tokens * model.hidden_size
    whole = time_all_reduce(size, columns.tp, one, cluster, constants)
    rows = 2 * time_all_reduce(4 * tokens, columns.tp, one, cluster, constants)
    tables = np.where(columns.pp > 1, 1.0, 2.0) * model.count_table() / columns.tp
    gathered = _time_gathering(tables, columns, recipe, cluster, constants)
    if not recipe.stack.gathers_tables_alone:
        gathered = nothing
    again = nothing if cluster.is_host else gathered
    return AroundTimes(
        forward_tp_s=whole + rows if cluster.is_host else nothing,
        backward_tp_s=whole if cluster.is_host else nothing,
        forward_dp_s=gathered + again,
        backward_dp_s=_time_scattering(gathered, recipe, cluster),
    )


def time_cutting(columns: Columns, constants: Constants) -> Floats:
    """Of FSDP2's own work for a layer and microbatch, beside its collectives."""
    own = np.where(columns.zero_stage >= 3, constants.cut_whole_s, constants.cut_pass_s)
    return np.where((columns.zero_stage >= 1) & (columns.shards > 1), own, 0.0)


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
    """Bytes that one forward of a layer reads and writes outside of products.

    Fused (a compiler, or kernels by hand): ten passes of the residual stream, one in and one out of
    every MLP tensor, half of attention's channels. By separate operations: two norms, two sums,
    rotary positions, keys and values repeated for their queries, and the MLP's activation.
    """
    stack, precision = recipe.stack, recipe.precision
    compute, element = precision.compute_bytes, stack.stream_element_bytes
    parts = np.where(columns.sequence_parallel > 0, columns.tp, 1.0)
    gated = model.num_ffn_inputs == 2
    if stack.is_fused:
        stream = _STREAM_PASSES * element * model.hidden_size
        inside = (model.num_ffn_inputs + 1) * model.mlp_width + model.num_attention_channels / 2
        inside = compute * inside
    else:
        # A norm reads the stream and writes it, and a wider one is then cast; a sum reads two.
        norm = 2 * element + (element + compute if element > compute else 0)
        stream = 2 * (norm + 2 * element + compute) * model.hidden_size
        inside = compute * (5 if gated else 2) * model.mlp_width
        inside += _ROPE_BYTES * model.num_turned_channels * (model.position == "rope")
        if model.num_kv_heads < model.num_heads and model.latent is None:
            inside += 2 * compute * (model.kv_size + model.query_size)
    inside += 4 * compute * model.num_routed_copies * model.hidden_size
    if precision.dtype == "float8":
        stream += _FLOAT8_BYTES * 2 * model.hidden_size
        inside += _FLOAT8_BYTES * (model.value_size + model.mlp_width)
    return tokens * (stream / parts + inside / columns.tp)


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
    """Two all-to-alls over ep, there and back.

    Every rank of a node sends at once, so to other nodes each has its share of the adapters, and a
    token goes once to each node that has some of its experts (DeepEP), if routing is even. Under
    sequence parallel each tp rank sends its part of the tokens.
    """
    if model.experts is None:
        return np.zeros(len(columns))
    number = model.experts.active
    parts = np.where(columns.sequence_parallel > 0, columns.tp, 1.0)
    size = compute * tokens / parts * model.hidden_size
    here = _count_near(columns, cluster)
    nodes = columns.ep / here
    inside = cluster.inside.bytes_per_s * constants.link_ratio
    adapter = cluster.between.bytes_per_s * constants.network_ratio / cluster.per_node
    across = (nodes - 1) * (1 - (1 - 1 / nodes) ** number)
    sent = number * size * (here - 1) / here / inside
    sent = np.maximum(sent, across * size / (adapter * constants.link_ratio))
    latency = time_latency(np.maximum(2.0, columns.ep), cluster, constants)
    return np.where(columns.ep > 1, 2 * (sent + latency), 0.0)


def _hide_routing(
    ep_s: Floats,
    compute_s: Floats,
    columns: Columns,
    recipe: Recipe,
    cluster: Cluster,
    constants: Constants,
) -> Floats:
    """Where ranks have several chunks, one microbatch's all-to-alls can hide behind another's
    compute, if the stack does so and they leave a node: in racks its recipes mostly do not."""
    hidden = expose(ep_s, compute_s, constants)
    can_hide = (columns.chunks > 1) & (columns.ep > _count_near(columns, cluster))
    return np.where(can_hide & recipe.stack.overlaps_routing, hidden, ep_s)


def _count_near(columns: Columns, cluster: Cluster) -> Floats:
    """Ranks of an expert-parallel group on one node."""
    found: Floats = np.floor(cluster.per_node / (columns.tp * columns.cp))
    return np.clip(found, 1, columns.ep)


def _time_scattering(gathered: Floats, recipe: Recipe, cluster: Cluster) -> Floats:
    """Of gradients, by the time that gathering their weights takes."""
    precision = recipe.precision
    ratio = precision.gradient_bytes / precision.compute_bytes
    return gathered * ratio * count_scatter_passes(cluster)


def _time_gathering(
    weights: Floats, columns: Columns, recipe: Recipe, cluster: Cluster, constants: Constants
) -> Floats:
    """Of so many weights over the ranks that ZeRO 3 cuts them over, for a microbatch."""
    size = recipe.precision.compute_bytes * weights
    stride = columns.tp
    bandwidth = find_bandwidth(columns.shards, stride, cluster, constants)
    share = (columns.shards - 1) / columns.shards
    latency = time_latency(np.maximum(2.0, columns.shards), cluster, constants)
    found = join_sending(share * size / bandwidth, latency, cluster)
    if recipe.stack.gathers_once:
        found = found / np.where(columns.pp > 1, columns.num_microbatches, 1.0)
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
    return constants.link_ratio * np.where(is_inside, inside, np.minimum(across, inside))


def time_latency(
    degree: Floats, cluster: Cluster, constants: Constants, *, num_passes: int = 1
) -> Floats:
    """Of one collective beside its bytes: for each doubling of the group, or where gloo passes
    messages around a ring, for each of them (an all-reduce goes around twice)."""
    if cluster.is_host:
        return constants.collective_latency_s * num_passes * (degree - 1)
    return constants.collective_latency_s * np.log2(np.maximum(1.0, degree))


def join_sending(sent_s: Floats, latency_s: Floats | float, cluster: Cluster) -> Floats:
    """Of a transfer, its bytes and its latency: one after the other between devices. Between
    processes copying hides behind waking threads: all-reduces of 4 KiB and 1 MiB take nearly as
    long (benchmarks/planner_host_terms.py)."""
    return smooth_max(sent_s, latency_s + 0 * sent_s) if cluster.is_host else sent_s + latency_s


def time_all_reduce(
    size: Floats, degree: Floats, stride: Floats, cluster: Cluster, constants: Constants
) -> Floats:
    """2(n−1)/n · S / B, and a latency."""
    bandwidth = find_bandwidth(degree, stride, cluster, constants)
    latency = time_latency(degree, cluster, constants, num_passes=2)
    found = join_sending(2 * (degree - 1) / degree * size / bandwidth, latency, cluster)
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


def smooth_max(one: Floats, other: Floats) -> Floats:
    """The longer of two, and a little more where they are near each other."""
    found: Floats = (one**_SMOOTH + other**_SMOOTH) ** (1 / _SMOOTH)
    return found
