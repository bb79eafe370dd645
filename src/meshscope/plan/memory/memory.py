"""What one rank of a candidate holds at its fullest, by category, in closed forms.

    ranks = estimate_ranks(model, candidate, recipe)
    max(ranks, key=lambda rank: rank.total_bytes).activations_bytes

Layers keep what `core.config.layer_memory` counts; how many microbatches a pipeline rank holds is
read off its row of the schedule, action by action. N = ranks that ZeRO cuts over, P parameters of
the rank; w, g, o, c bytes of weights, gradients, master plus states, and of the compute dtype:

    ZeRO 0   P·(w + g + o)                 ZeRO 1   P·(w + g + o/N)
    ZeRO 2   P·(w + (g + o)/N)             ZeRO 3   P·(w + g + o)/N, and two gathered layers (c)

(arXiv 1910.02054, section 5; cut gradients also need one layer's whole.) The loss keeps 4 bytes for
each logit and needs some more for one microbatch in backward (`Stack.logit_backward_bytes`).
Not derived but stated allowances: `CONTEXT_BYTES`, `NCCL_BYTES` for each axis in use,
`FRAGMENTATION_RATIO` of all tensors. They are shown as what they are and never fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from meshscope.core.config.layer_memory import FULL_BYTES, LayerShape
from meshscope.core.config.memory_model import MAX_RECEIVES_AHEAD
from meshscope.core.config.model_config import split_layers
from meshscope.core.unavailable import Unavailable
from meshscope.plan.candidate import HOLDS_ALL, Candidate, read_segment
from meshscope.plan.memory.engine_layout import estimate_engine_ranks, make_train_config
from meshscope.plan.memory.memory_parts import FRAGMENTATION_RATIO, RankMemory, count_context
from meshscope.plan.model.model_shape import ModelShape
from meshscope.plan.recipe import Recipe

_BUCKET_BYTES = 40 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Activations of one stage and microbatch."""

    kept_bytes: int
    temporary_bytes: int
    split_bytes: int = 0
    """Kept between the input's and the weights' gradient, where a schedule has them apart."""
    offloaded_bytes: int = 0


def make_layer_shape(model: ModelShape, candidate: Candidate, recipe: Recipe) -> LayerShape:
    """What decides the memory of one layer."""
    return _make_layer_shape(
        model, recipe, candidate.microbatch_size, candidate.tp, candidate.cp,
        sp=candidate.sequence_parallel,
    )  # fmt: skip


@lru_cache(maxsize=65536)
def _make_layer_shape(
    model: ModelShape, recipe: Recipe, microbatch_size: int, tp: int, cp: int, *, sp: bool
) -> LayerShape:
    stack, precision = recipe.stack, recipe.precision
    return LayerShape(
        model=model,
        microbatch_size=microbatch_size,
        compute_bytes=precision.compute_bytes,
        tp=tp,
        sequence_parallel=sp,
        has_fused_norm=True,
        cp=cp,
        stream_element_bytes=max(stack.stream_element_bytes, precision.compute_bytes),
        has_dropout=stack.has_dropout,
        keeps_scores=not stack.has_fused_attention,
        keeps_turned=stack.keeps_turned,
        has_fused_gate=stack.has_fused_gate,
        casts_weights=precision.casts_each_forward,
    )


@lru_cache(maxsize=65536)
def measure_layer(
    shape: LayerShape, recompute: str, selective: str, *, is_cast_kept: bool
) -> tuple[int, int]:
    """Bytes that one layer keeps, and that its backward makes again, for one microbatch."""
    whole = shape.layer_bytes - (0 if is_cast_kept else shape.cast_bytes)
    if recompute == "none":
        return whole, 0
    if recompute == "selective":
        kept = _count_half(shape) if selective == "half" else whole - _count_attention(shape)
        return min(kept, whole), max(0, whole - kept)
    return shape.stream_bytes, whole


def _count_attention(shape: LayerShape) -> int:
    """The scores; where attention is fused, its output and log-sum-exp."""
    if shape.keeps_scores:
        return shape.score_bytes
    width = shape.compute_bytes * shape.model.num_attention_channels // 4
    return (width + FULL_BYTES * shape.model.num_heads) * shape.num_tokens // shape.tp


def _count_half(shape: LayerShape) -> int:
    """The layer's input, attention's output, and half of what the products give."""
    model, tokens = shape.model, shape.num_tokens
    attention = model.num_attention_channels
    inside = (
        attention // 4 + (3 * attention // 4 + model.num_mlp_widths // 2 * model.mlp_width) // 2
    )
    halves = 2 * shape.linear_input_bytes // 2  # the outputs that go back into the stream
    return shape.stream_bytes + halves + shape.compute_bytes * tokens * inside // shape.tp


def estimate_ranks(
    model: ModelShape, candidate: Candidate, recipe: Recipe
) -> tuple[RankMemory, ...]:
    """Every pipeline rank, in order; the engine's by the engine's own model."""
    if recipe.stack.name == "meshscope":
        compute = "fp32" if recipe.precision.name == "fp32" else "bf16"
        config = make_train_config(model, candidate, compute=compute)
        if not isinstance(config, Unavailable):
            return estimate_engine_ranks(config)
    schedule = candidate.build_schedule()
    counts = model.count_stages(
        schedule.num_stages, candidate.stage_sizes, tp=candidate.tp, ep=candidate.ep
    )
    ranges = split_layers(model.num_layers, schedule.num_stages, candidate.stage_sizes)
    holds_all = candidate.schedule in HOLDS_ALL
    scale = candidate.num_microbatches / schedule.num_microbatches if holds_all else 1
    shape = make_layer_shape(model, candidate, recipe)
    last = schedule.num_stages - 1
    made = []
    for pp_rank, held in enumerate(candidate.list_held()):
        stages = schedule.stages_of(pp_rank)
        sizes = [_measure_stage(model, candidate, recipe, ranges[stage]) for stage in stages]
        has_logits = [stage == last for stage in stages]
        fullest = _find_fullest(held, sizes, shape, has_logits)
        whole, split = fullest[: len(stages)], fullest[len(stages) :]
        kept = _sum_held(whole, [one.kept_bytes for one in sizes])
        kept += _sum_held(split, [one.split_bytes for one in sizes])
        made.append(
            assemble_rank(
                model, candidate, recipe, shape,
                pp_rank=pp_rank,
                dense=sum(counts[stage][0] for stage in stages),
                routed=sum(counts[stage][1] for stage in stages),
                activations=round(scale * kept),
                again=max(one.temporary_bytes for one in sizes),
                num_logits=round(scale * _sum_held(whole, has_logits)),
                num_split_logits=_sum_held(split, has_logits),
                offloaded=round(scale * _sum_held(whole, [one.offloaded_bytes for one in sizes])),
            )
        )  # fmt: skip
    return tuple(made)


def _find_fullest(
    held: tuple[tuple[int, ...], ...],
    sizes: Sequence[StageMemory],
    shape: LayerShape,
    has_logits: Sequence[bool],
) -> tuple[int, ...]:
    """The numbers held when they are the most bytes: `core.config.layer_memory.find_peak_bytes`,
    over what is distinct."""
    if len(held[0]) == 1:
        return max(held)
    whole = [
        one.kept_bytes + one.offloaded_bytes + is_last * _count_logits(shape)
        for one, is_last in zip(sizes, has_logits, strict=True)
    ]
    split = [
        one.split_bytes + is_last * _count_split_logits(shape)
        for one, is_last in zip(sizes, has_logits, strict=True)
    ]
    each = [*whole, *split][: len(held[0])]
    return max(held, key=lambda counts: _sum_held(counts, each))


def _sum_held(counts: Sequence[int], sizes: Sequence[int]) -> int:
    """Of none where weight gradients are not apart."""
    return sum(number * size for number, size in zip(counts, sizes, strict=False))


def _count_logits(shape: LayerShape) -> int:
    """Kept by head and loss for a microbatch."""
    size = FULL_BYTES * shape.num_tokens * ceil(shape.model.vocab_size / shape.tp)
    return size + shape.head_bytes


def _count_split_logits(shape: LayerShape) -> int:
    """Kept for the gradient of the head's weights: its input, and the logits' gradient."""
    size = shape.compute_bytes * shape.num_tokens * ceil(shape.model.vocab_size / shape.tp)
    return size + shape.linear_input_bytes


def _measure_stage(
    model: ModelShape,
    candidate: Candidate,
    recipe: Recipe,
    layers: range,
) -> StageMemory:
    num_dense = max(0, min(layers.stop, model.num_dense_layers) - layers.start)
    kept = temporary = split = 0
    is_cast_kept = candidate.zero_stage < 3
    for kind, number in ((model.dense, num_dense), (model, len(layers) - num_dense)):
        if not number:
            continue
        shape = make_layer_shape(kind, candidate, recipe)
        one_kept, one_again = measure_layer(
            shape, candidate.recompute, recipe.stack.selective, is_cast_kept=is_cast_kept
        )
        segment = read_segment(candidate.recompute) or 1
        kept += ceil(number / segment) * one_kept
        split += number * shape.split_bytes
        temporary = max(temporary, min(segment, number) * one_again)
    if candidate.recompute != "offload":
        return StageMemory(kept_bytes=kept, temporary_bytes=temporary, split_bytes=split)
    window = min(2 * make_layer_shape(model, candidate, recipe).stream_bytes, kept)
    return StageMemory(
        kept_bytes=0, temporary_bytes=temporary + window, split_bytes=split, offloaded_bytes=kept
    )


def assemble_rank(
    model: ModelShape,
    candidate: Candidate,
    recipe: Recipe,
    shape: LayerShape,
    *,
    pp_rank: int,
    dense: int,
    routed: int,
    activations: int,
    again: int,
    num_logits: int,
    num_split_logits: int = 0,
    offloaded: int = 0,
) -> RankMemory:
    """A rank's categories from its parameters and activations; logits of `num_logits` microbatches
    are held, and of `num_split_logits` what their weights' gradient needs."""
    precision, stage = recipe.precision, candidate.zero_stage
    shards = candidate.num_shards
    expert_shards = max(1, shards // candidate.ep)
    number = dense + routed

    def cut(size: float, *, from_stage: int) -> int:
        if stage < from_stage:
            return ceil(size * number)
        return ceil(size * dense / shards) + ceil(size * routed / expert_shards)

    weights = cut(precision.weight_bytes, from_stage=3)
    gradients = cut(precision.gradient_bytes, from_stage=2)
    unit = model.count_layer(candidate.tp, candidate.ep)
    is_gathered = recipe.stack.gathers_once and candidate.pp > 1
    if stage >= 2 and shards > 1:
        # Where weights are gathered once a step, gradients are cut once, too.
        gradients += precision.gradient_bytes * (number if is_gathered else unit)
    logits_size = shape.num_tokens * ceil(model.vocab_size / candidate.tp)
    temporary = recipe.stack.logit_backward_bytes * logits_size if num_logits else 0
    width = max(model.mlp_width * model.num_mlp_widths // 2, model.query_size)
    workspace = 2 * precision.compute_bytes * shape.num_tokens * width // candidate.tp
    parts = {
        "parameters_bytes": weights,
        "gradients_bytes": gradients,
        "optimizer_bytes": cut(recipe.optimizer_bytes, from_stage=1),
        "master_bytes": cut(precision.master_bytes, from_stage=1),
        "activations_bytes": activations,
        "logits_bytes": num_logits * _count_logits(shape)
        + num_split_logits * _count_split_logits(shape)
        + temporary,
        "casts_bytes": cut(precision.cast_bytes, from_stage=3),
        "communication_bytes": _count_communication(candidate, recipe, shape, number, unit),
        "workspace_bytes": again + workspace,
    }
    axes = (candidate.dp * candidate.cp, candidate.tp, candidate.pp, candidate.ep)
    num_axes = sum(degree > 1 for degree in axes)
    return RankMemory(
        pp_rank=pp_rank,
        context_bytes=count_context(num_axes),
        fragmentation_bytes=round(FRAGMENTATION_RATIO * sum(parts.values())),
        offloaded_bytes=offloaded,
        **parts,
    )


def _count_communication(
    candidate: Candidate, recipe: Recipe, shape: LayerShape, number: int, unit: int
) -> int:
    total = 0
    if candidate.pp > 1:
        # As many receives as may wait, and a message each way that is being sent.
        total += (MAX_RECEIVES_AHEAD + 2) * shape.stream_bytes
    if candidate.num_shards > 1 and candidate.zero_stage == 3:
        is_gathered = recipe.stack.gathers_once and candidate.pp > 1
        total += recipe.precision.compute_bytes * (number if is_gathered else 2 * unit)
    elif candidate.dp * candidate.cp > 1:
        total += min(_BUCKET_BYTES, recipe.precision.gradient_bytes * number)
    return total
