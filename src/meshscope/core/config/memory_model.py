"""How much memory each pipeline rank will need, in closed forms, before anything is started.

    estimate = estimate_memory(config, device_type="cuda")
    estimate.worst.total_bytes, estimate.worst.pp_rank

Weights, gradients and optimizer states are float32. Activations are what `engine.model` keeps for
backward, counted tensor by tensor in `layer_memory`. Under bf16 and fp16 autocast casts weights
once for each forward and autograd keeps the cast, for every microbatch in flight. The last stage
adds its norm, the head's input and the logits; how many microbatches a rank holds at once comes
from the schedule, action by action.

Gradients of a stage come while the activations of its first backward go, so a rank is fullest
before that backward, with all that forwards kept and no gradients, or after it, with gradients and
what is kept then, whichever is more. Parts are those of that moment. One microbatch is fullest
before; with several, most schedules are after.

Agrees with the bytes autograd keeps within 2 % on small models (tests/unit/core). Not in it, and
for the caller to leave room for: temporary results of single operations beyond the largest ones,
the allocator's slack, CUDA's context (about 0.5 GiB), NCCL's buffers, the program itself (0.3 GiB
on the host), data waiting to be used. The offloading strategies' windows are taken from their
descriptions, not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshscope.core.config.layer_memory import (
    FULL_BYTES,
    LayerShape,
    count_in_flight,
    estimate_stage,
    find_first_gradients,
    find_peak_bytes,
)
from meshscope.core.config.model_config import split_layers
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.schedule import ActionKind, Schedule, count_peak_activations
from meshscope.core.schedule_transfers import count_kept_messages

_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATES_PER_PARAMETER = {"adamw": 2, "sgd": 1}
"""Numbers the optimizer keeps for each; sgd none without momentum."""

MAX_RECEIVES_AHEAD = 2
"""Buffers of the pipeline that may wait for data while nothing needs it yet."""
_KEEPS_ERRORS = ("topk", "int8", "powersgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """What one pipeline rank needs at its fullest; tp and dp ranks alike, up to padding."""

    pp_rank: int
    parameters_bytes: int
    gradients_bytes: int
    """None where a rank is fullest before its first backward."""
    optimizer_bytes: int
    activations_bytes: int
    """Kept for backward over all microbatches in flight, and the largest temporary ones."""
    logits_bytes: int
    """Kept by the loss, and the gradient of one microbatch's logits."""
    communication_bytes: int
    offloaded_bytes: int = 0
    """On disk or in the host's memory, with the strategies that put activations there; beside the
    total."""

    @property
    def total_bytes(self) -> int:
        """Of all parts in the device's memory."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.communication_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Of all pipeline ranks."""

    ranks: tuple[RankEstimate, ...]

    @property
    def worst(self) -> RankEstimate:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total_bytes)


def estimate_memory(config: TrainConfig, *, device_type: str = "cpu") -> MemoryEstimate:
    """For a configuration without problems; see the module's docstring for what is left out."""
    schedule = config.schedule
    ranges = split_layers(config.model.num_layers, schedule.num_stages, config.parallel.stage_sizes)
    counts = count_stage_parameters(config)
    return MemoryEstimate(
        ranks=tuple(
            _estimate_rank(config, schedule, pp_rank, ranges, counts, device_type)
            for pp_rank in range(schedule.num_ranks)
        )
    )


# --- one rank ------------------------------------------------------------------------------------


def _estimate_rank(
    config: TrainConfig,
    schedule: Schedule,
    pp_rank: int,
    ranges: Sequence[range],
    counts: Sequence[int],
    device_type: str,
) -> RankEstimate:
    stages = schedule.stages_of(pp_rank)
    num_parameters = sum(counts[stage] for stage in stages)
    parameters, gradients, states = _estimate_states(config, ranges, stages, counts)
    moments = _estimate_activations(config, schedule, pp_rank, ranges, device_type)
    made = [sum(counts[stage] for stage in one.done) / max(1, num_parameters) for one in moments]
    sizes = [
        one.size_bytes + gradients.measure(ratio) for one, ratio in zip(moments, made, strict=True)
    ]
    place = sizes.index(max(sizes))
    fullest, is_before = moments[place], not moments[place].done
    return RankEstimate(
        pp_rank=pp_rank,
        parameters_bytes=parameters,
        gradients_bytes=gradients.measure(made[place]),
        optimizer_bytes=states,
        activations_bytes=fullest.activations_bytes,
        logits_bytes=fullest.logits_bytes,
        communication_bytes=_estimate_communication(
            config, schedule, num_parameters, pp_rank, device_type, is_reducing=not is_before
        ),
        offloaded_bytes=fullest.offloaded_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """Outside of buckets, which are counted as communication."""

    first_bytes: int
    """While the first backward has hardly begun."""
    all_bytes: int
    """When those of all stages have ended."""

    def measure(self, ratio: float) -> int:
        """When so much of the rank's weights has gradients."""
        return round(ratio * self.all_bytes) if ratio else self.first_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The most that a rank keeps for backward while the same stages have gradients."""

    done: tuple[int, ...]
    """Stages that have."""
    activations_bytes: int
    logits_bytes: int
    offloaded_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.activations_bytes + self.logits_bytes


def count_stage_parameters(config: TrainConfig) -> tuple[int, ...]:
    """Of each stage, on the tp rank that holds most."""
    schedule = config.schedule
    model, sizes = config.model, config.parallel.stage_sizes
    if isinstance(model, TimedModelConfig):
        return model.count_stage_parameters(schedule.num_stages, sizes)
    return model.count_stage_parameters(schedule.num_stages, sizes, tp=config.parallel.tp)


def _estimate_states(
    config: TrainConfig, ranges: Sequence[range], stages: Sequence[int], counts: Sequence[int]
) -> tuple[int, _Gradients, int]:
    """Bytes of parameters, gradients and optimizer states."""
    parallel = config.parallel
    whole = FULL_BYTES * sum(counts[stage] for stage in stages)
    num_states = _STATES_PER_PARAMETER[config.optimizer.kind]
    if config.optimizer.kind == "sgd" and not config.optimizer.momentum:
        num_states = 0
    if parallel.data_parallel != "fsdp" or parallel.dp == 1:
        # Where the first backward is the last, a gradient goes into its bucket as it is sent.
        is_sent = parallel.dp > 1 and not _adds_up(config.schedule)
        left = min(round(config.communication.bucket_mib * 2**20), whole) if is_sent else whole
        return whole, _Gradients(first_bytes=0, all_bytes=left), num_states * whole
    cut = ceil(whole / parallel.dp)
    groups = [_split_groups(config, counts[stage], len(ranges[stage])) for stage in stages]
    largest = FULL_BYTES * max(max(one) for one in groups)
    # What is outside of layers stays until its backward; beside it the layer that is at work.
    at_once = FULL_BYTES * (sum(outside for _, outside in groups) + max(groups)[0])
    gathered = at_once if parallel.zero_stage == 3 else whole
    gathered_bytes = _COMPUTE_BYTES[config.precision.compute]
    gradients = _Gradients(
        first_bytes=0,
        all_bytes=whole + cut if parallel.zero_stage == 1 else cut + largest,
    )
    return cut + gathered * gathered_bytes // FULL_BYTES, gradients, num_states * cut


def _split_groups(config: TrainConfig, num_parameters: int, num_layers: int) -> tuple[int, int]:
    """FSDP2 gathers a layer, or all of a stage that is outside of layers, at once."""
    model = config.model
    if isinstance(model, TimedModelConfig):
        return num_parameters, 0
    layer = ceil(model.num_layer_parameters / config.parallel.tp)
    return layer, max(0, num_parameters - num_layers * layer)


def _estimate_activations(
    config: TrainConfig, schedule: Schedule, pp_rank: int, ranges: Sequence[range], device_type: str
) -> list[_Held]:
    """At the fullest before the first gradients are made, and after those of each stage."""
    model = config.model
    if isinstance(model, TimedModelConfig):
        tokens = config.batch.microbatch_size * model.sequence_length
        num_held = count_peak_activations(schedule)[pp_rank]
        per_stage = FULL_BYTES * tokens * model.hidden_size * max(map(len, ranges))
        return [
            _Held(
                done=done,
                activations_bytes=num_held * per_stage,
                logits_bytes=num_held * FULL_BYTES * tokens * model.vocab_size,
                offloaded_bytes=0,
            )
            for done in ((), tuple(schedule.stages_of(pp_rank)))
        ]
    is_own_cast = config.parallel.data_parallel == "fsdp" and config.parallel.dp > 1
    shape = LayerShape(
        model=model,
        microbatch_size=config.batch.microbatch_size,
        compute_bytes=_COMPUTE_BYTES[config.precision.compute],
        tp=config.parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        has_fused_norm=device_type != "cpu",
        # No fused kernel of CUDA takes float32 and fewer keys than queries: torch keeps scores.
        keeps_scores=device_type == "cuda"
        and config.precision.compute == "fp32"
        and model.num_kv_heads != model.num_heads,
        # FSDP2 gathers weights in the dtype to compute in: there is nothing left to cast.
        casts_weights=not is_own_cast,
    )
    last, num_in_flight = schedule.num_stages - 1, count_in_flight(schedule, pp_rank)
    held = {
        stage: estimate_stage(
            shape,
            len(ranges[stage]),
            config.memory.strategy,
            is_first=stage == 0,
            is_last=stage == last,
            num_in_flight=num_in_flight,
        )
        for stage in schedule.stages_of(pp_rank)
    }
    row = schedule.actions[pp_rank]
    kept = {stage: one.kept_bytes for stage, one in held.items()}
    logits = {stage: one.logits_bytes for stage, one in held.items()}
    offloaded = find_peak_bytes(row, {stage: one.offloaded_bytes for stage, one in held.items()})
    made = max(one.temporary_bytes for one in held.values())
    made_of_logits = max(one.temporary_logits_bytes for one in held.values())
    split, no_logits = {s: one.split_bytes for s, one in held.items()}, dict.fromkeys(held, 0)
    firsts = find_first_gradients(row)
    moments = []
    for place, start in enumerate((-1, *firsts)):
        end = firsts[place] + 1 if place < len(firsts) else len(row)
        until = row[:end]
        has_more = start + 1 < len(row)
        logits_bytes = find_peak_bytes(until, logits, split_bytes=no_logits, start=start)
        moments.append(
            _Held(
                done=tuple(row[index].stage for index in firsts[:place]),
                activations_bytes=made
                + find_peak_bytes(until, kept, split_bytes=split, start=start),
                logits_bytes=logits_bytes + made_of_logits * has_more,
                offloaded_bytes=offloaded,
            )
        )
    return moments


def _estimate_communication(
    config: TrainConfig,
    schedule: Schedule,
    num_parameters: int,
    pp_rank: int,
    device_type: str,
    *,
    is_reducing: bool,
) -> int:
    """Messages of the pipeline on their way, and what gradient synchronisation keeps: buckets,
    and with compression what was left out."""
    parallel, compression = config.parallel, config.communication.compression
    total = 0
    if schedule.num_ranks > 1:
        tokens = config.batch.microbatch_size * config.model.sequence_length
        num_parts = parallel.tp if parallel.sequence_parallel else 1
        message = FULL_BYTES * tokens * config.model.hidden_size // num_parts
        total += _count_messages(schedule, pp_rank, device_type) * message
    if parallel.dp > 1 and parallel.data_parallel == "fsdp":
        total += is_reducing * 2 * FULL_BYTES * ceil(num_parameters / config.model.num_layers)
    elif parallel.dp > 1:
        whole = FULL_BYTES * num_parameters
        bucket = min(round(config.communication.bucket_mib * 2**20), whole)
        # Buckets stay from the start; gradients of microbatches add up beside them.
        total += whole
        if compression in _KEEPS_ERRORS:
            total += whole + bucket
        elif compression in ("fp16", "bf16"):
            total += whole // 2
    return total


def _count_messages(schedule: Schedule, pp_rank: int, device_type: str) -> int:
    """Of the pipeline, held at once. gloo does not report that a send is done; NCCL does, and its
    receives are issued up to the next send: where a row is fullest, forwards that send and
    backwards that receive alternate, and parts of a backward leave as many waiting as may."""
    if device_type == "cpu":
        return count_kept_messages(schedule, pp_rank, max_ahead=MAX_RECEIVES_AHEAD)
    is_split = any(action.kind is ActionKind.WEIGHT_GRAD for action in schedule.actions[0])
    return MAX_RECEIVES_AHEAD + 2 if is_split else 2


def _adds_up(schedule: Schedule) -> bool:
    """Whether gradients are kept beside buckets until the end of a step."""
    has_weight_grads = any(a.kind is ActionKind.WEIGHT_GRAD for a in schedule.actions[0])
    return schedule.num_microbatches > 1 or has_weight_grads
