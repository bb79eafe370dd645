"""What no replay can beat, for all layouts at once: a shortest step and a least memory.

Time, for p ranks of v chunks and m microbatches. The last rank starts after p − 1 forwards of a
chunk, does its m microbatches, and where backwards are whole, p − 1 chunks' backwards follow its
own last. The first rank does m microbatches of the largest stage. The longer counts; then come the
gradients of one stage's layers, less the longest backward that can hide them, and the update.
Memory: a rank with layers only and the least its schedule must hold (`_count_held`); allowances
included.

Both are below what `pricing` and `memory` find (tests/unit/plan/test_search.py), so nothing that is
thrown away by them belongs among the best.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshscope.plan.candidate import Candidate, read_segment
from meshscope.plan.memory.memory import make_layer_shape, measure_layer
from meshscope.plan.memory.memory_parts import CONTEXT_BYTES, FRAGMENTATION_RATIO, NCCL_BYTES
from meshscope.plan.model.model_shape import ModelShape
from meshscope.plan.recipe import Recipe
from meshscope.plan.timing.layer_time import Columns, smooth_max
from meshscope.plan.timing.pricing import Job, time_steps, time_update

Floats = npt.NDArray[np.float64]
Texts = npt.NDArray[np.str_]
SPLIT_SCHEDULES = ("zb_h1", "zb_h2", "zb_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """Least bytes of the fullest rank."""

    states_bytes: Floats
    activations_bytes: Floats

    @property
    def total_bytes(self) -> Floats:
        return self.states_bytes + self.activations_bytes


def bound_steps(job: Job, columns: Columns, schedules: Texts) -> Floats:
    """Seconds that a step takes at least."""
    model = job.model
    times = time_steps(job, columns)
    layer, dense = times.layer, times.dense
    forward = np.minimum(layer.forward_s, dense.forward_s)
    inputs = np.minimum(layer.input_grad_s, dense.input_grad_s)
    weights = np.minimum(layer.weight_grad_s, dense.weight_grad_s)
    least = np.floor(model.num_layers / (columns.pp * columns.chunks))
    head = times.head_forward_s + times.head_backward_s
    number, per_layer = columns.num_microbatches, forward + inputs + weights
    last_busy = number * (columns.chunks * least * per_layer + head)
    before = (columns.pp - 1) * least * forward
    is_split = np.isin(schedules, SPLIT_SCHEDULES)
    after = np.where(is_split, 0.0, (columns.pp - 1) * least * (inputs + weights))
    # zb_v's last stage is on the first rank.
    is_v = schedules == "zb_v"
    last = np.where(is_v, last_busy, before + last_busy + after)
    most = np.ceil(model.num_layers / columns.pp)
    rows = number * np.where(columns.pp > 1, most * per_layer, most * per_layer + head)
    per_layer = np.minimum(
        layer.host_forward_s + layer.host_backward_s, dense.host_forward_s + dense.host_backward_s
    )
    host = number * columns.chunks * least * per_layer
    pipeline = smooth_max(np.maximum(last, rows), host)
    part_dense, part_routed = _count_least_parameters(model, columns)
    sync, update = time_update(job, columns, part_dense, part_routed)
    longest = np.maximum(layer.input_grad_s, dense.input_grad_s)
    longest = longest + np.maximum(layer.weight_grad_s, dense.weight_grad_s)
    longest = longest + np.maximum(layer.host_backward_s, dense.host_backward_s)
    # The stage that finishes last hides its part behind its own last backward at most.
    stage = np.ceil(model.num_layers / (columns.pp * columns.chunks)) + 1
    hidden = stage * longest + times.head_backward_s
    hides = job.recipe.stack.overlaps_gradients
    exposed = np.maximum(0.0, sync / columns.chunks - hidden) if hides else sync
    found: Floats = pipeline + exposed + update + job.constants.step_s
    return found


def _count_least_parameters(model: ModelShape, columns: Columns) -> tuple[Floats, Floats]:
    """Of a rank with layers only, and the fewest it can have."""
    num_layers = columns.chunks * np.floor(model.num_layers / (columns.pp * columns.chunks))
    dense = min(model.count_dense_part(), model.dense.count_dense_part())
    dense_part = num_layers * dense / columns.tp
    num_mixed = np.maximum(0.0, num_layers - model.num_dense_layers)
    routed = num_mixed * model.count_expert_part() / (columns.tp * columns.ep)
    is_mixed = model.experts is not None
    return dense_part, routed if is_mixed else np.zeros(len(columns))


def bound_memory(
    model: ModelShape, recipe: Recipe, columns: Columns, schedules: Texts, recomputes: Texts
) -> MemoryBound:
    """Bytes that the first rank needs at least."""
    dense, routed = _count_least_parameters(model, columns)
    dense = dense + model.count_table() / columns.tp
    precision = recipe.precision
    shards = columns.shards
    expert_shards = np.maximum(1.0, np.floor(shards / columns.ep))

    def cut(size: float, from_stage: int) -> Floats:
        is_cut = columns.zero_stage >= from_stage
        return size * np.where(is_cut, dense / shards + routed / expert_shards, dense + routed)

    states = (
        cut(precision.weight_bytes + precision.cast_bytes, 3)
        + cut(precision.gradient_bytes, 2)
        + cut(precision.master_bytes + recipe.optimizer_bytes, 1)
    )
    keys = list(
        zip(
            columns.microbatch_size.astype(int).tolist(),
            columns.tp.astype(int).tolist(),
            columns.cp.astype(int).tolist(),
            recomputes.tolist(),
            (columns.sequence_parallel > 0).tolist(),
            (columns.zero_stage < 3).tolist(),
            strict=True,
        )
    )
    known = {
        key: _measure_key(model, recipe, *key[:4], sp=key[4], cast=key[5]) for key in set(keys)
    }
    kept = np.array([known[key][0] for key in keys])
    again = np.array([known[key][1] for key in keys])
    activations = _count_held(model, columns, schedules) * kept + again
    used = sum(
        (degree > 1).astype(float)
        for degree in (columns.dp * columns.cp, columns.tp, columns.pp, columns.ep)
    )
    allowance = CONTEXT_BYTES + NCCL_BYTES * used
    return MemoryBound(
        states_bytes=(1 + FRAGMENTATION_RATIO) * states + allowance,
        activations_bytes=(1 + FRAGMENTATION_RATIO) * activations,
    )


@lru_cache(maxsize=65536)
def _measure_key(
    model: ModelShape,
    recipe: Recipe,
    size: int,
    tp: int,
    cp: int,
    how: str,
    *,
    sp: bool,
    cast: bool,
) -> tuple[float, float]:
    """Bytes that a layer keeps, and that backward makes again, of the leanest kind of layer."""
    candidate = Candidate(microbatch_size=size, tp=tp, cp=cp, sequence_parallel=sp, recompute=how)
    found = [
        measure_layer(
            make_layer_shape(kind, candidate, recipe), how, recipe.stack.selective,
            is_cast_kept=cast,
        )
        for kind in (model, model.dense)
    ]  # fmt: skip
    kept, again = (min(one[index] for one in found) for index in range(2))
    segment = read_segment(how) or 1
    return (0.0, float(again)) if how == "offload" else (kept / segment, float(again))


def _count_held(model: ModelShape, columns: Columns, schedules: Texts) -> Floats:
    """Layers' activations that the first rank must hold at once, at least."""
    number, pp, chunks = columns.num_microbatches, columns.pp, columns.chunks
    least = np.floor(model.num_layers / (pp * chunks))
    ahead = np.where(
        schedules == "interleaved_1f1b",
        np.minimum(number * chunks, (chunks - 1) * np.minimum(pp, number) + 1),
        np.minimum(number, pp) * chunks,
    )
    everything = np.isin(schedules, ("gpipe", "round_robin", "looped_bfs"))
    units = np.where(everything, number * chunks, ahead)
    units = np.where(schedules == "zb_v", np.minimum(number, pp), units)
    return units * least
