"""The time of a step: layers on a schedule, then gradients, optimizer and what is fixed.

    prices = price_candidates(job, candidates)       # by event replay of each one's schedule
    lower_s = bound_steps(job, columns, ...)         # no replay is shorter

A step ends when the last rank has run its row of the schedule, reduced its gradients and updated
its weights. Overlap, as the stack does it: gradients hide behind the last backward of their stage
and what the rank does after it, gathered weights behind a layer's compute, keys and values of cp
behind attention, experts' all-to-alls behind other chunks; tp's collectives hide behind nothing.
Pipeline messages arrive after latency and transfer and hold up the sender only where the stack
blocks. Not modelled: links that jobs share, uneven routing, checkpoints, evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshscope.core.config.model_config import split_layers
from meshscope.core.schedule import ActionKind
from meshscope.plan.candidate import Candidate, Tail
from meshscope.plan.cluster import Cluster
from meshscope.plan.model.model_shape import ModelShape
from meshscope.plan.recipe import Recipe
from meshscope.plan.timing.batch_replay import BatchReplay, replay_steady
from meshscope.plan.timing.calibration import Constants
from meshscope.plan.timing.layer_time import (
    AroundTimes,
    Columns,
    LayerTimes,
    count_scatter_passes,
    find_bandwidth,
    host_goes_ahead,
    join_sending,
    make_columns,
    smooth_max,
    time_around,
    time_call,
    time_cutting,
    time_head,
    time_host_head,
    time_latency,
    time_layer,
)
from meshscope.plan.timing.shared_replay import StageWork, replay_shared

Floats = npt.NDArray[np.float64]
_SPLIT_HOST = 0.1
"""More for the host where weight gradients are apart: the engine on a CPU, of narrow layers, 0.10
gated and 0.05 plain (benchmarks/planner_device_terms.py, `host`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, on what, how."""

    model: ModelShape
    recipe: Recipe
    cluster: Cluster
    constants: Constants

    @property
    def update_bytes(self) -> float:
        """That the optimizer reads and writes for each parameter."""
        precision = self.recipe.precision
        states = self.recipe.optimizer_bytes + precision.master_bytes
        return 2 * precision.gradient_bytes + 2 * states + precision.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """Of one candidate, in seconds of a step."""

    candidate: Candidate
    step_s: float
    compute_s: float
    """Of the busiest rank, without the lines below; with its device's waits for the host."""
    bubble_s: float
    """Waits for the pipeline on the busiest rank, transfers in no time."""
    tp_s: float
    cp_s: float
    ep_s: float
    pp_s: float
    """What pipeline messages add."""
    dp_s: float
    """Gradients and gathered weights that nothing hides."""
    optimizer_s: float
    fixed_s: float
    host_s: float
    """Of the busiest host that goes ahead of its device, to issue all but what is fixed."""
    ideal_pipeline_s: float
    """The busiest rank's time in its row, which no order of actions makes shorter."""
    makespan_s: float

    @property
    def bubble_ratio(self) -> float:
        """Of the pipeline's time, as in the Zero Bubble paper."""
        return self.bubble_s / self.makespan_s if self.makespan_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What all layouts' steps are made of, as columns."""

    columns: Columns
    layer: LayerTimes
    """Of layers with experts, or of all."""
    dense: LayerTimes
    head_forward_s: Floats
    head_backward_s: Floats
    around: AroundTimes
    message_s: Floats
    """Of one pipeline message; 0 on one pipeline rank."""


def time_steps(job: Job, columns: Columns) -> StepTimes:
    """The parts, without a schedule."""
    model, recipe, cluster, constants = job.model, job.recipe, job.cluster, job.constants
    layer = time_layer(model, columns, recipe, cluster, constants)
    is_mixed = model.experts is not None and model.experts.num_dense_layers
    dense = time_layer(model.dense, columns, recipe, cluster, constants) if is_mixed else layer
    head_forward, head_backward = time_head(model, columns, recipe, cluster, constants)
    return StepTimes(
        columns=columns,
        layer=layer,
        dense=dense,
        head_forward_s=head_forward,
        head_backward_s=head_backward,
        around=time_around(model, columns, recipe, cluster, constants),
        message_s=_time_messages(job, columns),
    )


def _time_messages(job: Job, columns: Columns) -> Floats:
    model, recipe, cluster = job.model, job.recipe, job.cluster
    tokens = columns.microbatch_size * model.sequence_length / columns.cp
    size = recipe.stack.stream_element_bytes * tokens * model.hidden_size
    parts = np.where(columns.sequence_parallel > 0, columns.tp, 1.0)
    size = size / (columns.tp if recipe.stack.sends_shards else parts)
    stride = columns.tp * columns.cp * columns.dp
    across = cluster.between.bytes_per_s * job.constants.network_ratio / cluster.per_node
    inside = cluster.inside.bytes_per_s
    bandwidth = np.where(stride < cluster.per_node, inside, np.minimum(across, inside))
    sent = size / (bandwidth * job.constants.link_ratio)
    found = join_sending(sent, job.constants.p2p_latency_s, cluster)
    return np.where(columns.pp > 1, found, 0.0)


def time_update(job: Job, columns: Columns, dense: Floats, routed: Floats) -> tuple[Floats, Floats]:
    """Reducing gradients, and updating weights, of so many parameters on a rank."""
    constants, cluster, precision = job.constants, job.cluster, job.recipe.precision
    replicas = columns.dp * columns.cp
    expert_replicas = np.maximum(1.0, replicas / columns.ep)
    # Sums and gathers: with ZeRO, gradients are cut and new weights gathered.
    scattered = count_scatter_passes(cluster) * precision.gradient_bytes
    moved = np.where(
        columns.zero_stage >= 1, scattered + precision.compute_bytes, 2 * precision.gradient_bytes
    )
    # FSDP2, which cuts states between processes too, sends every layer and the tables by itself:
    # gloo's reduce-scatter goes around twice and a gather once, an all-reduce twice.
    num_cut = job.model.num_layers / columns.pp + 1
    cut_calls = 1.5 * num_cut
    num_calls = np.where(cluster.is_host & (columns.zero_stage >= 1), cut_calls, 1.0)
    total = np.zeros(len(columns))
    for number, degree, stride in (
        (dense, replicas, columns.tp),
        (routed, expert_replicas, columns.tp * columns.ep),
    ):
        bandwidth = find_bandwidth(degree, stride, cluster, constants)
        latency = num_calls * time_latency(degree, cluster, constants, num_passes=2)
        sent = (degree - 1) / degree * moved * number / bandwidth
        found = join_sending(sent, latency, cluster)
        total = total + np.where((degree > 1) & (number > 0), found, 0.0)
    is_cut = (columns.zero_stage >= 1) & (columns.shards > 1)
    total = total + np.where(is_cut, num_cut * constants.cut_step_s, 0.0)
    # ZeRO 3 reduces layer by layer, which is in the layers' times.
    total = np.where(columns.zero_stage >= 3, 0.0, total)
    shards = np.where(columns.zero_stage >= 1, columns.shards, 1.0)
    memory = cluster.device.bandwidth_bytes_per_s * constants.memory_ratio
    update = job.update_bytes * (dense + routed) / shards / memory * constants.pace_ratio
    return total, update


def price_candidates(job: Job, candidates: Sequence[Candidate]) -> list[StepPrice]:
    """Every candidate by a replay of its schedule, in the order given."""
    by_schedule: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(candidates):
        key = (one.schedule, one.pp, one.num_microbatches, one.chunks, one.stage_sizes)
        by_schedule.setdefault(key, []).append(index)
    prices: list[StepPrice | None] = [None] * len(candidates)
    for indices in by_schedule.values():
        group = [candidates[index] for index in indices]
        for index, price in zip(indices, _price_group(job, group), strict=True):
            prices[index] = price
    return [price for price in prices if price is not None]


def _price_group(job: Job, group: list[Candidate]) -> list[StepPrice]:
    """Candidates that share a schedule."""
    one, model, stack = group[0], job.model, job.recipe.stack
    columns = make_columns(group, job.recipe)
    times = time_steps(job, columns)
    schedule = one.build_schedule()
    ranges = split_layers(model.num_layers, schedule.num_stages, one.stage_sizes)
    rows = [_time_stage(job, times, layers) for layers in ranges]
    forward, inputs, weights = (np.stack([row[kind] for row in rows]) for kind in range(3))
    forward[-1] += times.head_forward_s
    # Half of the head's backward is the gradient of its weights.
    inputs[-1] += times.head_backward_s / 2
    weights[-1] += times.head_backward_s / 2
    around = times.around
    forward[-1] += around.forward_tp_s + around.forward_dp_s
    inputs[-1] += around.backward_tp_s + around.backward_dp_s
    message = times.message_s
    slower = job.cluster.ranks_per_processor
    held = np.ones((len(rows), 1)) * message
    held_forward, held_inputs = forward + held, inputs + held
    held_forward[-1] = forward[-1]
    held_inputs[0] = inputs[0]
    if slower > 1:
        ideal = _replay_shared(job, group, (forward, inputs, weights), 0 * message)
        # Between processes a message is copied by the cores that compute.
        if job.cluster.is_host:
            real = _replay_shared(job, group, (held_forward, held_inputs, weights), 0 * message)
        else:
            real = _replay_shared(job, group, (forward, inputs, weights), message)
    elif stack.has_blocking_sends:
        real = replay_steady(one, held_forward, held_inputs, weights, 0 * message)
    else:
        real = replay_steady(one, forward, inputs, weights, message)
    if slower == 1:
        ideal = replay_steady(one, forward, inputs, weights, 0 * message)
    host_s, work = _time_hosts(job, times, one, ranges, (forward, inputs, weights))
    # A host waits for none of what its device waits for, so a rank takes the longer of both.
    row_end = smooth_max(real.end_s, host_s)
    counts = [_count_ranks(model, one, candidate.tp, candidate.ep) for candidate in group]
    dense, routed = (
        np.array([[rank[kind] for rank in per_rank] for per_rank in counts], dtype=np.float64).T
        for kind in range(2)
    )
    ends, tails = [], one.list_tails()
    for rank in range(schedule.num_ranks):
        # At the end all ranks are at it at once.
        sync, update = (
            slower * part for part in time_update(job, columns, dense[rank], routed[rank])
        )
        exposed = sync
        if stack.overlaps_gradients:
            exposed = _expose_gradients(
                tails[rank], sync, (forward, inputs, weights), work, job.constants
            )
        ends.append((row_end[rank] + exposed + update, exposed, update))
    tied = _time_tied(job, columns) if schedule.num_ranks > 1 and model.tie_embeddings else 0.0
    finish = np.stack([end for end, _, _ in ends])
    last = finish.argmax(axis=0)
    pick = np.arange(len(group))
    exposed = np.stack([one_exposed for _, one_exposed, _ in ends])[last, pick] + tied
    update = np.stack([one_update for _, _, one_update in ends])[last, pick]
    host_excess = np.maximum(0.0, row_end[last, pick] - real.makespan_s)
    fixed = slower * job.constants.step_s
    step = finish.max(axis=0) + tied + fixed
    busiest = ideal.busy_s.argmax(axis=0)
    num_layers = np.array(
        [sum(len(ranges[s]) for s in schedule.stages_of(r)) for r in range(schedule.num_ranks)]
    )[busiest]
    runs = num_layers * one.num_microbatches
    busy = ideal.busy_s.max(axis=0)
    layer = times.layer
    bubble = ideal.makespan_s - busy
    pipeline = real.makespan_s - ideal.makespan_s
    # Where ranks share processors, all that is in a row takes longer by the same.
    total = one.num_microbatches * sum(part.sum(axis=0) for part in (forward, inputs, weights))
    longer = ideal.busy_s.sum(axis=0) / total if slower > 1 else np.ones(len(group))
    runs = runs * longer
    has_head = busiest == schedule.stage_ranks[-1]
    beside = one.num_microbatches * longer * has_head
    tp_s = layer.tp_s * runs + (around.forward_tp_s + around.backward_tp_s) * beside
    layers_dp_s = layer.dp_s * runs + (around.forward_dp_s + around.backward_dp_s) * beside
    inside = (layer.cp_s + layer.ep_s) * runs + tp_s + layers_dp_s
    # Where the rank that ends last is not the last in its row, others' rows hide some of what it
    # reduces, and the bubble has what is left, so that lines sum.
    rest = step - (busy + bubble + pipeline + host_excess + exposed + update + fixed)
    hidden = np.clip(-rest, 0.0, exposed)
    exposed, rest = exposed - hidden, rest + hidden
    return [
        StepPrice(
            candidate=candidate,
            step_s=float(step[index]),
            compute_s=float(busy[index] - inside[index] + host_excess[index]),
            bubble_s=float(bubble[index] + rest[index]),
            tp_s=float(tp_s[index]),
            cp_s=float(layer.cp_s[index] * runs[index]),
            ep_s=float(layer.ep_s[index] * runs[index]),
            pp_s=float(pipeline[index]),
            dp_s=float(exposed[index] + layers_dp_s[index]),
            optimizer_s=float(update[index]),
            fixed_s=fixed,
            host_s=float(host_s.max(axis=0)[index]),
            ideal_pipeline_s=float(busy[index]),
            makespan_s=float(real.makespan_s[index]),
        )
        for index, candidate in enumerate(group)
    ]


Work = tuple[Floats, Floats, Floats]
"""Forward, input and weight gradients of each stage (rows), in seconds."""


def _time_hosts(
    job: Job, times: StepTimes, one: Candidate, ranges: Sequence[range], device: Work
) -> tuple[Floats, Work]:
    """Of hosts that go ahead of their devices: what each rank's takes for its row, and how long
    actions take if nothing is waited for. Else nothing, and the devices' own times."""
    schedule, number = one.build_schedule(), one.num_microbatches
    rows = np.zeros((schedule.num_ranks, len(times.columns)))
    if not host_goes_ahead(job.recipe, job.cluster):
        return rows, device
    forward, inputs, weights = (part.copy() for part in device)
    call_s = time_call(job.constants)
    is_split = any(action.kind is ActionKind.INPUT_GRAD for action in schedule.actions[0])
    longer = 1 + _SPLIT_HOST * is_split
    for stage, layers in enumerate(ranges):
        num_dense = max(0, min(layers.stop, job.model.num_dense_layers) - layers.start)
        num_mixed = len(layers) - num_dense
        ahead, back = (
            longer
            * (num_dense * getattr(times.dense, name) + num_mixed * getattr(times.layer, name))
            for name in ("host_forward_s", "host_backward_s")
        )
        # To and from each neighbour, there and back; a message counts as two calls.
        num_messages = 2 * ((stage > 0) + (stage < len(ranges) - 1))
        outside = job.constants.host_microbatch_s + 2 * call_s * num_messages
        if stage == len(ranges) - 1:
            outside += time_host_head(job.constants)
        rows[schedule.stage_ranks[stage]] += number * (ahead + back + outside)
        forward[stage] = smooth_max(forward[stage], ahead)
        backward = inputs[stage] + weights[stage]
        stretch = smooth_max(backward, back) / backward
        inputs[stage] *= stretch
        weights[stage] *= stretch
    return rows, (forward, inputs, weights)


def _expose_gradients(
    tails: Sequence[Tail], sync: Floats, device: Work, work: Work, constants: Constants
) -> Floats:
    """What reducing a rank's gradients adds after its row.

    A stage's go while its last microbatch's are made, and behind all that the rank does then: of
    several stages on a rank, those that finish early hide behind the others. What they cost the
    device costs the step only what the device does not wait for its host anyway.
    """
    # Time runs to the row's end, at 0; the stage that finishes first sends first.
    part, end, slack = sync / len(tails), np.full(len(sync), -np.inf), 0 * sync
    for tail in tails:
        left, own = (_time_tail(tail, times, sync) for times in (work, device))
        end = np.maximum(end, -left) + part
        slack = np.maximum(slack, left - own)
    over: Floats = np.clip(end, 0.0, sync)
    return over + np.maximum(0.0, constants.overlap_cost_ratio * (sync - over) - slack)


def _time_tail(tail: Tail, work: Work, like: Floats) -> Floats:
    forward, inputs, weights = work
    times = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: inputs + weights,
        ActionKind.INPUT_GRAD: inputs,
        ActionKind.WEIGHT_GRAD: weights,
    }
    return sum((number * times[kind][stage] for kind, stage, number in tail), start=0 * like)


def _replay_shared(
    job: Job, group: list[Candidate], work: tuple[Floats, Floats, Floats], message: Floats
) -> BatchReplay:
    """Ranks that share processors, each candidate on its own; busy times are longer than work."""
    processors = job.cluster.num_processors
    assert processors is not None
    replays = []
    for index, one in enumerate(group):
        stages = StageWork(
            **{
                name: tuple(part[:, index].tolist())
                for name, part in zip(
                    ("forward_s", "input_grad_s", "weight_grad_s"), work, strict=True
                )
            }
        )
        replay = replay_shared(
            one.build_schedule(),
            stages,
            float(message[index]),
            num_replicas=one.dp * one.tp * one.cp,
            num_processors=processors,
        )
        # Of a schedule that stands for a longer one, all is longer in proportion.
        times = one.num_microbatches / one.num_steady
        replays.append((times * np.array(replay.end_s), times * np.array(replay.busy_s)))
    end, busy = (np.stack([one[kind] for one in replays], axis=1) for kind in range(2))
    return BatchReplay(start_s=0 * end, end_s=end, busy_s=busy)


def _time_stage(job: Job, times: StepTimes, layers: range) -> tuple[Floats, Floats, Floats]:
    num_dense = max(0, min(layers.stop, job.model.num_dense_layers) - layers.start)
    num_mixed = len(layers) - num_dense
    one, two = times.dense, times.layer
    outside = job.constants.pace_ratio * job.constants.host_microbatch_s * two.host_share
    # What is outside of layers is cut as one more of them.
    cut = (len(layers) + 1) * time_cutting(times.columns, job.constants)
    return (
        num_dense * one.forward_s + num_mixed * two.forward_s + outside + cut / 3,
        num_dense * one.input_grad_s + num_mixed * two.input_grad_s + 2 * cut / 3,
        num_dense * one.weight_grad_s + num_mixed * two.weight_grad_s,
    )


def _time_tied(job: Job, columns: Columns) -> Floats:
    """The first and the last stage sum the gradients of their copies of the table."""
    number = job.model.count_table() / columns.tp
    stride = columns.tp * columns.cp * columns.dp
    two = 2 * np.ones(len(columns))
    bandwidth = find_bandwidth(two, stride, job.cluster, job.constants)
    latency = time_latency(two, job.cluster, job.constants, num_passes=2)
    sent = job.recipe.precision.gradient_bytes * number / bandwidth
    return join_sending(sent, latency, job.cluster)


@lru_cache(maxsize=4096)
def _count_cached(
    model: ModelShape, num_stages: int, sizes: tuple[int, ...] | None, tp: int, ep: int
) -> tuple[tuple[int, int], ...]:
    return tuple(model.count_stages(num_stages, sizes, tp=tp, ep=ep))


def _count_ranks(
    model: ModelShape, candidate: Candidate, tp: int, ep: int
) -> list[tuple[int, int]]:
    """Dense and routed parameters of each pipeline rank."""
    schedule = candidate.build_schedule()
    counts = _count_cached(model, schedule.num_stages, candidate.stage_sizes, tp, ep)
    return [
        (
            sum(counts[stage][0] for stage in schedule.stages_of(rank)),
            sum(counts[stage][1] for stage in schedule.stages_of(rank)),
        )
        for rank in range(schedule.num_ranks)
    ]
