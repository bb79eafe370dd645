"""How much memory each pipeline rank will need, in closed forms, before anything is started.

    estimate = estimate_memory(config, device_type="cuda")
    estimate.worst.total_bytes, estimate.worst.pp_rank

Weights, gradients and optimizer states are float32. Activations are what `engine.model` keeps for
backward, counted tensor by tensor (b sequences of s tokens, T = b·s; h, a, k, f as in
`ModelConfig`, k the width of all keys; c bytes of the compute dtype; t = tp; d = t under sequence
parallel, else 1). Of one block:

    residual stream, input of both norms           2 · 4·T·h/d      (float32 for any c)
    normalised, before the weight (rmsnorm, cpu)   2 · 4·T·h/d      (fused on an accelerator: 0)
    statistics of the norms                        2 · 4·T/d        (layernorm twice that)
    inputs of qkv and of up                        2 · c·T·h/d
    q, k, v; with rope also q and k turned         c·T·(h + 2k)/t + c·T·(h + k)/t
    attention's output and log-sum-exp             c·T·h/t + 4·T·a/t
    inside the MLP, gelu / swiglu                  2 / 4 · c·T·f/t
    weights cast for this forward (bf16, fp16)     2 · weights of the block / t

The last line is autocast's: it casts once for each forward and autograd keeps the cast, for every
microbatch in flight. The last stage adds its norm, the head's input and the logits; how many
microbatches a rank holds at once comes from the schedule, action by action.

Agrees with the bytes autograd keeps within 2 % on small models (tests/unit/core). Not in it, and
for the caller to leave room for: temporary results of single operations beyond the largest ones,
the allocator's slack, CUDA's context (about 0.5 GiB), NCCL's buffers, the program itself (0.3 GiB
on the host), data waiting to be used. FSDP2's and the offloading strategies' windows are taken from
their descriptions, not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from meshscope.core.config.model_config import ModelConfig, split_layers
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.schedule import Action, ActionKind, Schedule, count_peak_activations

_FULL_BYTES = 4
"""Bytes of a float32."""
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATES_PER_PARAMETER = {"adamw": 2, "sgd": 1}
"""Numbers the optimizer keeps for each; sgd none without momentum."""

MAX_RECEIVES_AHEAD = 2
"""Buffers of the pipeline that may wait for data while nothing needs it yet."""
HOST_WINDOW_BYTES = 256 << 20
"""Device memory for tensors on their way to the host, and as much for those on their way back."""
WEIGHT_ON_DISK = 0.25
"""Of a segment's input that waits on disk, beside one in memory: segments are half as long as with
one microbatch in flight, for any number. At 0 each layer would be one, and disks too slow."""

_KEEPS_ERRORS = ("topk", "int8", "powersgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """What one pipeline rank needs at its fullest; tp and dp ranks alike, up to padding."""

    pp_rank: int
    parameters_bytes: int
    gradients_bytes: int
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
        """Sum of all parts in the device's memory."""
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
    """One estimate per pipeline rank."""

    ranks: tuple[RankEstimate, ...]

    @property
    def worst(self) -> RankEstimate:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total_bytes)


def estimate_memory(config: TrainConfig, *, device_type: str = "cpu") -> MemoryEstimate:
    """Estimates a configuration without problems; the module's docstring says what is left out."""
    schedule = config.schedule
    ranges = split_layers(config.model.num_layers, schedule.num_stages, config.parallel.stage_sizes)
    counts = count_stage_parameters(config)
    return MemoryEstimate(
        ranks=tuple(
            _estimate_rank(config, schedule, pp_rank, ranges, counts, device_type)
            for pp_rank in range(schedule.num_ranks)
        )
    )


# --- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What decides how much one block keeps."""

    model: ModelConfig
    microbatch_size: int
    compute_bytes: int = _FULL_BYTES
    tp: int = 1
    sequence_parallel: bool = False
    has_fused_norm: bool = False
    """Whether rmsnorm keeps its input only, as on accelerators."""

    @property
    def num_tokens(self) -> int:
        """Tokens in one microbatch."""
        return self.microbatch_size * self.model.sequence_length

    @property
    def num_parts(self) -> int:
        """Number of parts that the residual stream is cut into."""
        return self.tp if self.sequence_parallel else 1

    @property
    def stream_bytes(self) -> int:
        """Residual stream at one point: what a stage hands to the next."""
        return _FULL_BYTES * self.num_tokens * self.model.hidden_size // self.num_parts

    @property
    def norm_bytes(self) -> int:
        is_layernorm = self.model.norm == "layernorm"
        num_copies = 1 if is_layernorm or self.has_fused_norm else 2
        statistics = _FULL_BYTES * self.num_tokens * (2 if is_layernorm else 1) // self.num_parts
        return num_copies * self.stream_bytes + statistics

    @property
    def linear_input_bytes(self) -> int:
        """Kept by a matrix that leads out of the residual stream."""
        return self.compute_bytes * self.num_tokens * self.model.hidden_size // self.num_parts

    @property
    def attention_bytes(self) -> int:
        """Kept by the first half of a block."""
        model, tokens = self.model, self.num_tokens
        width = 2 * model.hidden_size + 2 * model.kv_size
        if model.position == "rope":
            width += model.hidden_size + model.kv_size
        inside = self.compute_bytes * tokens * width + _FULL_BYTES * tokens * model.num_heads
        return self.norm_bytes + self.linear_input_bytes + inside // self.tp

    @property
    def mlp_bytes(self) -> int:
        num_widths = 4 if self.model.activation == "swiglu" else 2
        inside = num_widths * self.compute_bytes * self.num_tokens * self.model.ffn_hidden_size
        return self.norm_bytes + self.linear_input_bytes + inside // self.tp

    @property
    def cast_bytes(self) -> int:
        """The block's weights, cast for one forward."""
        if self.compute_bytes == _FULL_BYTES:
            return 0
        return self.compute_bytes * self.model.num_layer_matrix_weights // self.tp

    @property
    def layer_bytes(self) -> int:
        return self.attention_bytes + self.mlp_bytes + self.cast_bytes

    @property
    def num_head_weights(self) -> int:
        """On the tp rank with most of them."""
        return ceil(self.model.vocab_size / self.tp) * self.model.hidden_size

    @property
    def head_bytes(self) -> int:
        """Kept by the final norm and the head, without the logits."""
        cast = (
            0 if self.compute_bytes == _FULL_BYTES else self.compute_bytes * self.num_head_weights
        )
        return self.norm_bytes + self.linear_input_bytes + cast

    @property
    def logits_bytes(self) -> int:
        """Kept by the loss: their log-softmax in float32; on several tp ranks, themselves."""
        size = _FULL_BYTES if self.tp == 1 else self.compute_bytes
        return size * self.num_tokens * ceil(self.model.vocab_size / self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageActivations:
    """What one stage holds of a microbatch from its forward to its backward."""

    kept_bytes: int
    temporary_bytes: int
    """Made again in backward, for one microbatch at a time."""
    logits_bytes: int = 0
    temporary_logits_bytes: int = 0
    offloaded_bytes: int = 0
    """Bytes kept in host memory or on disk."""


def estimate_stage(
    shape: LayerShape,
    num_layers: int,
    strategy: str,
    *,
    is_first: bool,
    is_last: bool,
    num_in_flight: int = 1,
) -> _StageActivations:
    """Activations of a stage. `num_in_flight` decides how `aggressive` cuts its segments."""
    head = shape.head_bytes if is_last else 0
    logits = shape.logits_bytes if is_last else 0
    gradient = _FULL_BYTES * logits // shape.compute_bytes if shape.tp > 1 else logits
    if strategy in ("basic", "cpu_offload"):
        whole = _StageActivations(
            kept_bytes=num_layers * shape.layer_bytes + head,
            temporary_bytes=0,
            logits_bytes=logits,
            temporary_logits_bytes=gradient,
        )
        return whole if strategy == "basic" else _offload(whole, 2 * HOST_WINDOW_BYTES)
    if strategy == "standard":
        return _StageActivations(
            kept_bytes=num_layers * shape.stream_bytes + head,
            temporary_bytes=shape.layer_bytes,
            logits_bytes=logits,
            temporary_logits_bytes=gradient,
        )
    weight = num_in_flight if strategy == "aggressive" else WEIGHT_ON_DISK
    num_segments = choose_num_segments(num_layers, weight)
    num_chunks = max(1, ceil(shape.model.vocab_size / _mlp_width(shape.model)))
    # The inputs of both halves of a segment's layers, and the insides of one half.
    window = 2 * ceil(num_layers / num_segments) * shape.stream_bytes
    half = max(shape.attention_bytes, shape.mlp_bytes) + shape.cast_bytes
    cut = _StageActivations(
        # The first segment of the first stage begins with tokens; the loss keeps its own input.
        kept_bytes=(num_segments - is_first + is_last) * shape.stream_bytes,
        temporary_bytes=window + max(half, head),
        temporary_logits_bytes=(logits + gradient) // num_chunks,
    )
    return cut if strategy == "aggressive" else _offload(cut, 2 * shape.stream_bytes)


def choose_num_segments(num_layers: int, num_in_flight: float) -> int:
    """How many segments keep least, with that many microbatches between forward and backward.

    Each keeps a tensor per segment, and the one in backward two for each layer of a segment
    (attention's input and the MLP's): m·k + 2·n/k is least at k = √(2n/m).
    """
    return max(1, min(num_layers, round(sqrt(2 * num_layers / num_in_flight))))


def _offload(stage: _StageActivations, window_bytes: int) -> _StageActivations:
    """The same with what is kept elsewhere, but for what is on its way there or back."""
    kept = stage.kept_bytes + stage.logits_bytes
    return replace(
        stage,
        kept_bytes=0,
        temporary_bytes=stage.temporary_bytes + min(window_bytes, kept),
        logits_bytes=0,
        offloaded_bytes=kept,
    )


def _mlp_width(model: ModelConfig) -> int:
    return model.num_ffn_inputs * model.ffn_hidden_size


def find_peak_bytes(row: Sequence[Action], bytes_by_stage: Mapping[int, int]) -> int:
    """The most bytes that a rank holds at once, each stage's from F to the end of B or W."""
    held = peak = 0
    for action in row:
        size = bytes_by_stage[action.stage]
        if action.kind is ActionKind.FORWARD:
            held += size
            peak = max(peak, held)
        elif action.kind is not ActionKind.INPUT_GRAD:
            held -= size
    return peak


def count_in_flight(schedule: Schedule, pp_rank: int) -> int:
    """The most microbatches of one stage that a rank holds at once."""
    stages = schedule.stages_of(pp_rank)
    row = schedule.actions[pp_rank]
    return max(
        find_peak_bytes(row, {other: other == stage for other in stages}) for stage in stages
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
    activations, logits, offloaded = _estimate_activations(
        config, schedule, pp_rank, ranges, device_type
    )
    return RankEstimate(
        pp_rank=pp_rank,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=states,
        activations_bytes=activations,
        logits_bytes=logits,
        communication_bytes=_estimate_communication(config, schedule, num_parameters),
        offloaded_bytes=offloaded,
    )


def count_stage_parameters(config: TrainConfig) -> tuple[int, ...]:
    """Parameters of each stage, on the tp rank that holds most."""
    schedule = config.schedule
    model, sizes = config.model, config.parallel.stage_sizes
    if isinstance(model, TimedModelConfig):
        return model.count_stage_parameters(schedule.num_stages, sizes)
    return model.count_stage_parameters(schedule.num_stages, sizes, tp=config.parallel.tp)


def _estimate_states(
    config: TrainConfig, ranges: Sequence[range], stages: Sequence[int], counts: Sequence[int]
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states."""
    parallel = config.parallel
    whole = _FULL_BYTES * sum(counts[stage] for stage in stages)
    num_states = _STATES_PER_PARAMETER[config.optimizer.kind]
    if config.optimizer.kind == "sgd" and not config.optimizer.momentum:
        num_states = 0
    if parallel.data_parallel != "fsdp" or parallel.dp == 1:
        return whole, whole, num_states * whole
    cut = ceil(whole / parallel.dp)
    largest = _FULL_BYTES * max(
        _find_largest_group(config, counts[stage], len(ranges[stage])) for stage in stages
    )
    gathered_bytes = _COMPUTE_BYTES[config.precision.compute]
    gathered = 2 * largest if parallel.zero_stage == 3 else whole
    gradients = whole + cut if parallel.zero_stage == 1 else cut + largest
    return cut + gathered * gathered_bytes // _FULL_BYTES, gradients, num_states * cut


def _find_largest_group(config: TrainConfig, num_parameters: int, num_layers: int) -> int:
    """FSDP2 gathers a layer, or all of a stage that is outside of layers, at once."""
    model = config.model
    if isinstance(model, TimedModelConfig):
        return num_parameters
    layer = ceil(model.num_layer_parameters / config.parallel.tp)
    return max(layer, num_parameters - num_layers * layer)


def _estimate_activations(
    config: TrainConfig, schedule: Schedule, pp_rank: int, ranges: Sequence[range], device_type: str
) -> tuple[int, int, int]:
    """Bytes of activations, of logits and of what is offloaded, at the fullest."""
    model = config.model
    if isinstance(model, TimedModelConfig):
        tokens = config.batch.microbatch_size * model.sequence_length
        num_held = count_peak_activations(schedule)[pp_rank]
        per_stage = _FULL_BYTES * tokens * model.hidden_size * max(map(len, ranges))
        return num_held * per_stage, num_held * _FULL_BYTES * tokens * model.vocab_size, 0
    is_own_cast = config.parallel.data_parallel == "fsdp" and config.parallel.dp > 1
    shape = LayerShape(
        model=model,
        microbatch_size=config.batch.microbatch_size,
        compute_bytes=_COMPUTE_BYTES[config.precision.compute],
        tp=config.parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        has_fused_norm=device_type != "cpu",
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
    casts = {stage: len(ranges[stage]) * shape.cast_bytes if is_own_cast else 0 for stage in held}
    row = schedule.actions[pp_rank]
    # FSDP2 gathers weights in the dtype to compute in: there is nothing left to cast.
    kept = {s: max(0, one.kept_bytes - casts[s]) for s, one in held.items()}
    activations = find_peak_bytes(row, kept) + max(one.temporary_bytes for one in held.values())
    logits = find_peak_bytes(row, {stage: one.logits_bytes for stage, one in held.items()})
    logits += max(one.temporary_logits_bytes for one in held.values())
    offloaded = find_peak_bytes(row, {stage: one.offloaded_bytes for stage, one in held.items()})
    return activations, logits, offloaded


def _estimate_communication(config: TrainConfig, schedule: Schedule, num_parameters: int) -> int:
    """Messages of the pipeline on their way, and what gradient synchronisation keeps: buckets,
    and with compression what was left out."""
    parallel, compression = config.parallel, config.communication.compression
    total = 0
    if schedule.num_ranks > 1:
        tokens = config.batch.microbatch_size * config.model.sequence_length
        num_parts = parallel.tp if parallel.sequence_parallel else 1
        message = _FULL_BYTES * tokens * config.model.hidden_size // num_parts
        # As many receives as may wait, and a message each way that is being sent.
        total += (MAX_RECEIVES_AHEAD + 2) * message
    if parallel.dp > 1 and parallel.data_parallel == "fsdp":
        total += 2 * _FULL_BYTES * ceil(num_parameters / config.model.num_layers)
    elif parallel.dp > 1:
        whole = _FULL_BYTES * num_parameters
        bucket = min(round(config.communication.bucket_mib * 2**20), whole)
        # Gradients of microbatches add up beside the buckets, which stay: both are whole at the
        # last backward. Where the first backward is the last, a gradient goes as it is sent.
        total += whole if _adds_up(schedule) else bucket
        if compression in _KEEPS_ERRORS:
            total += whole + bucket
        elif compression in ("fp16", "bf16"):
            total += whole // 2
    return total


def _adds_up(schedule: Schedule) -> bool:
    """Whether gradients are kept beside buckets until the end of a step."""
    has_weight_grads = any(a.kind is ActionKind.WEIGHT_GRAD for a in schedule.actions[0])
    return schedule.num_microbatches > 1 or has_weight_grads
