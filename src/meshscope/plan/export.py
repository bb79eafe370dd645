"""A chosen layout in the words of other programs: flags of Megatron-LM, keys of torchtitan, and
the TOML of `meshscope train`. What a program cannot do is said, not left out."""

from collections.abc import Sequence
from dataclasses import fields

from meshscope.core.config.model_config import split_layers
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.unavailable import Unavailable
from meshscope.plan.candidate import Candidate, read_segment
from meshscope.plan.model.model_shape import ModelShape

_TITAN_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS", "zb_v": "ZBVZeroBubble",
}  # fmt: skip


def list_megatron_flags(model: ModelShape, candidate: Candidate) -> tuple[str, ...] | Unavailable:
    """Of Megatron-LM's pretrain_gpt.py."""
    if candidate.schedule not in ("1f1b", "interleaved_1f1b"):
        return Unavailable(f"Megatron-LM has no schedule {candidate.schedule}")
    if candidate.zero_stage in (2, 3):
        return Unavailable("Megatron-LM's own optimizer is ZeRO 1; ZeRO 2 and 3 need its FSDP")
    flags = [
        f"--tensor-model-parallel-size {candidate.tp}",
        f"--pipeline-model-parallel-size {candidate.pp}",
        f"--micro-batch-size {candidate.microbatch_size}",
        f"--global-batch-size {candidate.global_batch_size}",
        f"--seq-length {model.sequence_length}",
    ]
    if candidate.cp > 1:
        flags.append(f"--context-parallel-size {candidate.cp}")
    if candidate.ep > 1:
        flags.append(f"--expert-model-parallel-size {candidate.ep}")
    sizes = _list_stage_sizes(model, candidate)
    if len(set(sizes)) > 1:
        flags.append(f"--pipeline-model-parallel-layout '{_describe_layout(sizes)}'")
    elif candidate.chunks > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {sizes[0]}")
    if candidate.sequence_parallel:
        flags.append("--sequence-parallel")
    if candidate.zero_stage:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        num_instances = candidate.dp * candidate.cp // candidate.num_shards
        if num_instances > 1:
            flags.append(f"--num-distributed-optimizer-instances {num_instances}")
    segment = read_segment(candidate.recompute)
    if segment is not None:
        flags.append(
            f"--recompute-granularity full --recompute-method uniform "
            f"--recompute-num-layers {segment}"
        )
    elif candidate.recompute == "selective":
        flags.append("--recompute-granularity selective")
    return tuple(flags)


def _list_stage_sizes(model: ModelShape, candidate: Candidate) -> tuple[int, ...]:
    """Layers of each stage, in the model's order."""
    stages = split_layers(model.num_layers, candidate.num_stages, candidate.stage_sizes)
    return tuple(map(len, stages))


def _describe_layout(sizes: Sequence[int]) -> str:
    """`Et*3|t*2|t*2|t*2L`: E is the embedding, t a layer, L the head and loss."""
    return "E" + "|".join(f"t*{size}" for size in sizes) + "L"


def list_torchtitan_keys(model: ModelShape, candidate: Candidate) -> tuple[str, ...] | Unavailable:
    """Of torchtitan's job configuration."""
    if candidate.pp > 1 and candidate.schedule not in _TITAN_SCHEDULES:
        return Unavailable(f"torchtitan has no schedule {candidate.schedule}")
    if candidate.zero_stage not in (0, 3):
        return Unavailable("torchtitan has DDP and FSDP2 (ZeRO 3) only")
    cut = candidate.num_shards if candidate.zero_stage == 3 else 1
    keys = [
        f"--parallelism.data_parallel_replicate_degree {candidate.dp * candidate.cp // cut}",
        f"--parallelism.data_parallel_shard_degree {max(1, cut // candidate.cp)}",
        f"--parallelism.tensor_parallel_degree {candidate.tp}",
        f"--parallelism.context_parallel_degree {candidate.cp}",
        f"--parallelism.pipeline_parallel_degree {candidate.pp}",
        f"--training.local_batch_size {candidate.microbatch_size * candidate.num_microbatches}",
        f"--training.global_batch_size {candidate.global_batch_size}",
        f"--training.seq_len {model.sequence_length}",
    ]
    if candidate.ep > 1:
        keys.append(f"--parallelism.expert_parallel_degree {candidate.ep}")
    if candidate.pp > 1:
        less = _count_less(candidate)
        if less is None:
            return Unavailable(
                "torchtitan's flags only take layers off the first and the last stage; name the "
                "modules of these stages in its configuration (module_fqns_per_model_part)"
            )
        keys += [
            f"--parallelism.pipeline_parallel_first_stage_less_layers {less[0]}",
            f"--parallelism.pipeline_parallel_last_stage_less_layers {less[1]}",
            f"--parallelism.pipeline_parallel_schedule {_TITAN_SCHEDULES[candidate.schedule]}",
            f"--parallelism.pipeline_parallel_microbatch_size {candidate.microbatch_size}",
        ]
    mode = {"none": "none", "selective": "selective", "full": "full"}.get(candidate.recompute)
    if mode is None:
        return Unavailable(f"torchtitan has no {candidate.recompute} recompute")
    return (*keys, f"--activation_checkpoint.mode {mode}")


def _count_less(candidate: Candidate) -> tuple[int, int] | None:
    """Layers that the first and the last stage have less than the others, as torchtitan asks for
    them; None where that does not say it all."""
    sizes = candidate.stage_sizes
    if sizes is None:
        return 0, 0
    most = max(sizes)
    is_even_between = len(sizes) > 1 and set(sizes[1:-1]) <= {most}
    return (most - sizes[0], most - sizes[-1]) if is_even_between else None


def write_train_toml(config: TrainConfig) -> str:
    """What `meshscope train` reads; values that are defaults are left out."""
    lines = ["# Written by meshscope plan.", 'device = "cuda"', ""]
    for name in ("model", "parallel", "batch", "precision", "memory"):
        table = getattr(config, name)
        kept = []
        for one in fields(table):
            value = getattr(table, one.name)
            if value is None or one.name == "order" or value == one.default:
                continue
            kept.append(f"{one.name} = {_as_toml(value)}")
        if kept:
            lines += [f"[{name}]", *kept, ""]
    return "\n".join(lines)


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return str(value)
