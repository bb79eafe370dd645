"""Everything that keeps a configured run from working, found before any process starts.

    problems = find_problems(config, world_size=8, device_memory_bytes=80 * 2**30)
    require_valid_config(config)                       # one UsageError with all of them

All of them at once: where a value is wrong, what builds on it is checked with its default, so that
a wrong batch does not hide a wrong model; only what needs the wrong value itself (batch arithmetic,
the launcher's ranks, memory) is then left out. What is not given is not checked. `find_notes` has
what runs, but hardly as meant. Not seen from here: whether torch can do what is asked for on this
machine, and whether another process takes memory or disk in the meantime.
"""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshscope.capture.profiling.settings import parse_settings
from meshscope.core.config.memory_model import MemoryEstimate, RankEstimate, estimate_memory
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.config.train_config import RecordingConfig, TrainConfig
from meshscope.core.layout import DEFAULT_ORDER, find_groups_across_nodes, find_layout_problems
from meshscope.core.schedule import Schedule, check_schedule
from meshscope.core.schedule_builders import build_schedule
from meshscope.engine.data.token_sources import TokenFile
from meshscope.engine.data_parallel.limits import find_ddp_problems, find_fsdp_problems
from meshscope.engine.faults.text import find_fault_problems
from meshscope.engine.memory.limits import find_memory_problems
from meshscope.engine.model.limits import find_dtensor_problems
from meshscope.errors import LayoutError, UsageError

GIB = 2**30

Rule = tuple[str, Callable[[Any], bool], str]
"""A key, what must hold of its value, and that in words. None is never wrong."""


def _at_least(least: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value >= least, f"at least {least:g}"


def _above(bound: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value > bound, f"more than {bound:g}"


def _ratio(*, with_one: bool) -> tuple[Callable[[Any], bool], str]:
    if with_one:
        return lambda value: 0 <= value <= 1, "0 to 1"
    return lambda value: 0 <= value < 1, "at least 0 and below 1"


_RULES: tuple[Rule, ...] = (
    ("name", lambda value: bool(value.strip()) and "/" not in value, "a name without slashes"),
    ("num_steps", *_at_least(1)),
    ("max_restarts", *_at_least(0)),
    ("log_every", *_at_least(1)),
    ("parallel.chunks_per_rank", *_at_least(1)),
    ("parallel.zero_stage", lambda value: value in (1, 2, 3), "1, 2 or 3"),
    ("batch.microbatch_size", *_at_least(1)),
    ("batch.num_microbatches", *_at_least(1)),
    ("batch.global_batch_size", *_at_least(1)),
    ("precision.initial_loss_scale", *_above(0)),
    ("precision.loss_scale_growth_steps", *_at_least(1)),
    ("memory.cap_gib", *_above(0)),
    ("communication.compression_ratio", lambda value: 0 < value <= 1, "more than 0, at most 1"),
    ("communication.compression_bits", lambda value: 2 <= value <= 8, "2 to 8"),
    ("communication.compression_rank", *_at_least(1)),
    ("communication.bucket_mib", *_above(0)),
    ("communication.max_buckets", *_at_least(1)),
    ("communication.ranks_per_node", *_at_least(1)),
    ("communication.timeout_s", *_above(0)),
    ("optimizer.learning_rate", *_above(0)),
    ("optimizer.momentum", *_ratio(with_one=False)),
    ("optimizer.betas", lambda value: all(0 <= b < 1 for b in value), "numbers from 0 to below 1"),
    ("optimizer.eps", *_above(0)),
    ("optimizer.weight_decay", *_at_least(0)),
    ("optimizer.max_gradient_norm", *_above(0)),
    ("optimizer.num_warmup_steps", *_at_least(0)),
    ("optimizer.num_decay_steps", *_at_least(1)),
    ("optimizer.final_rate_ratio", *_ratio(with_one=True)),
    ("data.evaluate_every", *_at_least(1)),
    ("data.num_evaluation_batches", *_at_least(1)),
    ("data.held_out_fraction", *_ratio(with_one=False)),
    ("checkpoint.every", *_at_least(1)),
    ("checkpoint.keep", *_at_least(1)),
)


def find_problems(
    config: TrainConfig,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device_type: str | None = None,
    device_memory_bytes: int | None = None,
    num_gpus: int | None = None,
    has_own_model: bool = False,
) -> list[str]:
    """One sentence for each thing that is wrong; empty when nothing is.

    `world_size` is how many ranks a launcher has started, `device_memory_bytes` what one rank may
    use, `num_gpus` how many torch finds here. With `has_own_model` the configuration's model is
    not the one that is trained.
    """
    if device_type is None and config.device != "auto":
        device_type = config.device
    problems = _find_value_problems(config)
    if config.device == "cuda" and num_gpus == 0:
        problems.append(
            "device is cuda, but torch finds no GPU here; check the driver and "
            "CUDA_VISIBLE_DEVICES, or use cpu; what another device would hold: --check --device "
            "H100-80GB"
        )
    layout_problems = _find_layout_problems(config, world_size, local_world_size)
    problems += layout_problems + _find_path_problems(config)
    if not layout_problems:
        problems += find_fault_problems(config.faults, config.layout)
    is_sized = not layout_problems and not any(_is_sized_by(problem) for problem in problems)
    config = config if is_sized else _repair(config)
    if is_sized:
        problems += _find_batch_problems(config)
    schedule = _build_schedule(config, problems)
    problems += _find_combination_problems(
        config, schedule, device_type=device_type, has_own_model=has_own_model
    )
    if schedule is None or has_own_model:
        return problems
    model_problems = [f"model: {text}" for text in _find_model_problems(config, schedule)]
    problems += model_problems
    if not model_problems:
        problems += _find_data_problems(config)
        if is_sized:
            problems += _find_memory_problems(config, device_type, device_memory_bytes)
    return problems


def require_valid_config(config: TrainConfig, **given: Any) -> None:
    """Raises one UsageError that lists everything `find_problems` finds."""
    problems = find_problems(config, **given)
    if problems:
        raise UsageError("; ".join(problems))


def find_notes(config: TrainConfig, *, local_world_size: int | None = None) -> list[str]:
    """Settings with no effect or an unexpected one. For a configuration without problems."""
    parallel, num_microbatches = config.parallel, config.num_microbatches
    notes = []
    if parallel.sequence_parallel and parallel.tp == 1:
        notes.append("parallel.sequence_parallel has no effect with tp 1")
    if parallel.dp == 1 and config.communication.compression != "none":
        notes.append("communication.compression has no effect with dp 1")
    strategy, compression = config.communication.strategy, config.communication.compression
    if compression in ("topk", "int8") and strategy != "flat":
        notes.append(
            f"communication.strategy {strategy} has no effect with compression {compression}, "
            "which has collectives of its own"
        )
    if config.data.kind == "synthetic" and config.data.path is not None:
        notes.append("data.path has no effect with data.kind synthetic; set data.kind to file")
    if num_microbatches < parallel.pp:
        notes.append(
            f"{num_microbatches} microbatches cannot fill {parallel.pp} pipeline ranks; with at "
            f"least {parallel.pp} less time is lost"
        )
    if config.max_restarts and config.checkpoint.folder is None:
        notes.append("max_restarts without checkpoint.folder: a restart begins at step 0")
    if local_world_size and config.layout.world_size > local_world_size:
        nodes = [rank // local_world_size for rank in range(config.layout.world_size)]
        across = find_groups_across_nodes(config.layout, "tp", nodes)
        if across:
            notes.append(
                f"{len(across)} tp groups reach over nodes of {local_world_size} ranks, which is "
                "usually slow; put tp last in parallel.order, or lower it"
            )
    return notes


# --- parts ---------------------------------------------------------------------------------------


def _is_sized_by(problem: str) -> bool:
    """Whether it is about a number that schedules and batches are computed from."""
    return problem.startswith(("batch.", "parallel."))


def _find_value_problems(config: TrainConfig) -> list[str]:
    problems = []
    for key, holds, words in _RULES:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not holds(value):
            shown = list(value) if isinstance(value, tuple) else value
            problems.append(f"{key} is {shown}, expected {words}")
    optimizer = config.optimizer
    if optimizer.num_warmup_steps > config.num_steps >= 1:
        problems.append(
            f"optimizer.num_warmup_steps is {optimizer.num_warmup_steps}, but the run has "
            f"{config.num_steps} steps; lower it"
        )
    return problems


def _repair(config: TrainConfig) -> TrainConfig:
    """With defaults in place of degrees that make no layout and of numbers out of range."""
    parallel, batch = config.parallel, config.batch
    try:
        _ = config.layout
    except LayoutError:
        parallel = replace(parallel, dp=1, tp=1, pp=1, order=DEFAULT_ORDER, stage_sizes=None)
    for key, holds, _words in _RULES:
        table, _, name = key.rpartition(".")
        owner: Any = {"parallel": parallel, "batch": batch}.get(table)
        value = None if owner is None else getattr(owner, name)
        if value is None or holds(value):
            continue
        default = {name: getattr(type(owner)(), name)}
        if table == "parallel":
            parallel = replace(parallel, **default)
        else:
            batch = replace(batch, **default)
    return replace(config, parallel=parallel, batch=batch)


def _find_layout_problems(
    config: TrainConfig, world_size: int | None, local_world_size: int | None
) -> list[str]:
    try:
        layout = config.layout
    except LayoutError as error:
        return [f"parallel: {line}" for line in str(error).splitlines()]
    problems = []
    if layout.cp > 1 or layout.ep > 1:
        problems.append("the engine has no cp or ep; use dp, tp and pp")
    return problems + find_layout_problems(
        layout, world_size=world_size, local_world_size=local_world_size
    )


def _find_batch_problems(config: TrainConfig) -> list[str]:
    batch, dp = config.batch, config.parallel.dp
    if batch.global_batch_size is None:
        return []
    per_microbatch = batch.microbatch_size * dp
    told = f"microbatch_size({batch.microbatch_size}) * dp({dp})"
    if batch.num_microbatches is not None:
        product = per_microbatch * batch.num_microbatches
        if product == batch.global_batch_size:
            return []
        return [
            f"batch.global_batch_size is {batch.global_batch_size}, but {told} * "
            f"num_microbatches({batch.num_microbatches}) = {product}; leave one of them out"
        ]
    if batch.global_batch_size % per_microbatch:
        return [
            f"batch.global_batch_size is {batch.global_batch_size}, which is no multiple of "
            f"{told} = {per_microbatch}; change one of them"
        ]
    return []


def _build_schedule(config: TrainConfig, problems: list[str]) -> Schedule | None:
    """The schedule; None after adding why there is none."""
    parallel, num_microbatches = config.parallel, config.num_microbatches
    if num_microbatches < 1:
        return None  # the batch does not divide, which is reported already
    try:
        schedule = build_schedule(
            parallel.schedule, parallel.pp, num_microbatches, parallel.chunks_per_rank
        )
    except UsageError as error:
        problems.append(f"parallel.schedule: {' '.join(str(error).split())}")
        return None
    problems += [f"parallel.schedule: {text}" for text in check_schedule(schedule)]
    return schedule


def _find_model_problems(config: TrainConfig, schedule: Schedule) -> list[str]:
    parallel = config.parallel
    return config.model.validate(
        parallel.tp,
        schedule.num_stages,
        stage_sizes=parallel.stage_sizes,
        sequence_parallel=parallel.sequence_parallel,
    )


def _find_combination_problems(
    config: TrainConfig, schedule: Schedule | None, *, device_type: str | None, has_own_model: bool
) -> list[str]:
    parallel, communication = config.parallel, config.communication
    compression = None if communication.compression == "none" else communication.compression
    uses_dtensor = parallel.tensor_parallel == "dtensor" and parallel.tp > 1
    problems = []
    if parallel.data_parallel == "fsdp":
        problems += find_fsdp_problems(
            zero_stage=parallel.zero_stage,
            device_type=device_type or "cpu",
            compression=compression,
            strategy=communication.strategy,
        )
    if parallel.data_parallel == "ddp":
        problems += find_ddp_problems(
            schedule=schedule,
            compression=compression,
            strategy=communication.strategy,
            uses_dtensor=uses_dtensor,
        )
    if uses_dtensor:
        is_timed = isinstance(config.model, TimedModelConfig)
        problems += find_dtensor_problems(
            dp=parallel.dp,
            data_parallel=parallel.data_parallel,
            is_user_model=has_own_model or is_timed,
            has_checkpoints=config.checkpoint.folder is not None
            or config.checkpoint.load is not None,
        )
    problems += _find_compile_problems(config, uses_dtensor=uses_dtensor)
    per_node = communication.ranks_per_node
    if per_node is not None and config.layout.world_size % per_node:
        problems.append(
            f"communication.ranks_per_node is {per_node}, which does not divide the "
            f"{config.layout.world_size} ranks; correct it"
        )
    return problems


def _find_compile_problems(config: TrainConfig, *, uses_dtensor: bool) -> list[str]:
    """What torch.compile cannot do with the rest."""
    if not config.compile:
        return []
    problems = []
    if config.memory.strategy in ("aggressive", "extreme"):
        problems.append(
            f"compile is on, but torch.compile cannot trace how {config.memory.strategy} "
            "recomputes; use basic or standard, or compile = false"
        )
    if uses_dtensor:
        problems.append(
            "compile is on, but torch.compile fails on DTensor tensor parallel; use "
            'tensor_parallel "plain", or compile = false'
        )
    return problems


def _find_data_problems(config: TrainConfig) -> list[str]:
    data = config.data
    if data.kind != "file" or data.path is None or not data.path.is_file():
        return []  # reported with the paths
    try:
        tokens = TokenFile(
            data.path,
            config.model.vocab_size,
            config.model.sequence_length,
            dtype=data.token_dtype,
        )
    except UsageError as error:
        return [f"data.path: {error}"]
    num_held_out = round(tokens.num_samples * data.held_out_fraction)
    needed = config.global_batch_size * data.num_evaluation_batches
    if data.evaluate_every is None or num_held_out >= needed:
        return []
    return [
        f"data.evaluate_every is set, but of the {tokens.num_samples} samples in {data.path} "
        f"{num_held_out} are held out, and num_evaluation_batches({data.num_evaluation_batches}) * "
        f"global batch({config.global_batch_size}) = {needed} are needed; raise "
        "data.held_out_fraction, or give more data"
    ]


def _find_memory_problems(
    config: TrainConfig, device_type: str | None, device_memory_bytes: int | None
) -> list[str]:
    # A CPU needs more for the same, so where the device is not known, it is the safe guess.
    estimate = estimate_memory(config, device_type=device_type or "cpu")
    problems = _find_strategy_problems(config, device_type, estimate)
    limits = []
    if config.memory.cap_gib is not None:
        limits.append((round(config.memory.cap_gib * GIB), "memory.cap_gib allows"))
    if device_memory_bytes is not None:
        limits.append((device_memory_bytes, "a rank's device has"))
    limit_bytes, whose = min(limits, default=(None, ""))
    worst = estimate.worst
    if limit_bytes is None or worst.total_bytes <= limit_bytes:
        return problems
    return [
        *problems,
        f"memory: pipeline rank {worst.pp_rank} needs about {_gib(worst.total_bytes)} "
        f"({_describe_parts(worst)}), but {whose} {_gib(limit_bytes)}; "
        f"{_find_remedy(config, worst, limit_bytes)}",
    ]


def _find_strategy_problems(
    config: TrainConfig, device_type: str | None, estimate: MemoryEstimate
) -> list[str]:
    """Why the memory strategy cannot work here."""
    memory = config.memory
    if memory.strategy == "cpu_offload" and device_type is None:
        return []  # right on an accelerator only, and the device is not known
    folder = memory.offload_dir or Path(tempfile.gettempdir())
    needed_bytes = max(rank.offloaded_bytes for rank in estimate.ranks)
    found = find_memory_problems(
        memory.strategy, device_type or "cpu", offload_dir=folder, needed_bytes=needed_bytes
    )
    return [f"memory: {text}" for text in found]


def _describe_parts(rank: RankEstimate) -> str:
    """The parts of a rank's memory, largest first."""
    parts = {
        "parameters": rank.parameters_bytes,
        "gradients": rank.gradients_bytes,
        "optimizer": rank.optimizer_bytes,
        "activations": rank.activations_bytes,
        "logits": rank.logits_bytes,
        "communication": rank.communication_bytes,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in largest if size)


def _find_remedy(config: TrainConfig, worst: RankEstimate, limit_bytes: int) -> str:
    passing = worst.activations_bytes + worst.logits_bytes
    states = worst.total_bytes - passing
    # No batch is small enough where the states alone are too large.
    if states > min(passing, limit_bytes):
        return "raise pp or tp, or cut states over dp with parallel.data_parallel fsdp"
    if config.memory.strategy == "basic":
        return "lower batch.microbatch_size, or use memory.strategy standard"
    return "lower batch.microbatch_size, or raise tp with sequence_parallel"


def _gib(size: int) -> str:
    value = size / GIB
    return f"{value:.3g} GiB" if value >= 0.1 else f"{size / 2**20:.3g} MiB"


# --- paths ---------------------------------------------------------------------------------------


def _find_path_problems(config: TrainConfig) -> list[str]:
    data, checkpoint = config.data, config.checkpoint
    problems = []
    if data.kind == "file" and data.path is None:
        problems.append("data.kind is file, but data.path is missing; give the file of tokens")
    elif data.kind == "file" and data.path is not None and not data.path.is_file():
        problems.append(f"data.path is {data.path}, but there is no such file; correct it")
    if checkpoint.load is not None and not checkpoint.load.exists():
        problems.append(f"checkpoint.load is {checkpoint.load}, but there is no such checkpoint")
    if checkpoint.every is not None and checkpoint.folder is None:
        problems.append("checkpoint.every is set, but checkpoint.folder is missing; give it")
    if checkpoint.folder is not None:
        problems += _find_folder_problems("checkpoint.folder", checkpoint.folder)
    if config.recording.enabled and config.recording.run_dir is not None:
        problems += _find_folder_problems("recording.run_dir", config.recording.run_dir)
    return problems + _find_profiling_problems(config.recording)


def _find_profiling_problems(recording: RecordingConfig) -> list[str]:
    try:
        parse_settings(recording.profiling or "")
    except UsageError as error:
        return [f"recording.profiling: {error}"]
    if recording.profiling is not None and not recording.enabled:
        return ["traces are part of the recording, which is off; record, or take no traces"]
    return []


def _find_folder_problems(key: str, folder: Path) -> list[str]:
    """Why a folder is not writable; a missing one is tested in its nearest parent."""
    if folder.exists() and not folder.is_dir():
        return [f"{key} is {folder}, which is a file; give a folder"]
    nearest = next(each for each in _and_parents(folder) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return []
    except OSError as error:
        return [
            f"{key} is {folder}, but {nearest} cannot be written to ({error.strerror}); choose "
            "another folder"
        ]


def _and_parents(folder: Path) -> Iterable[Path]:
    absolute = folder.absolute()
    return (absolute, *absolute.parents)
