"""Candidates as configurations of `meshscope train`, and their memory by the engine's own model."""

from meshscope.core.config.memory_model import estimate_memory
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import (
    BatchConfig,
    MemoryConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from meshscope.core.schedule_builders import BUILDERS
from meshscope.core.unavailable import Missing, need, or_unavailable
from meshscope.plan.candidate import Candidate
from meshscope.plan.memory.memory_parts import FRAGMENTATION_RATIO, RankMemory, count_context
from meshscope.plan.model.model_shape import ModelShape

_STRATEGIES = {"none": "basic", "full": "standard"}


@or_unavailable
def make_model_config(model: ModelShape) -> ModelConfig:
    """What the engine would build; it has no experts, no latent attention, and even heads."""
    if model.experts is not None or model.latent is not None:
        raise Missing("the engine has neither experts nor latent attention")
    if model.head_size * model.num_heads != model.hidden_size:
        raise Missing("the engine's heads together are as wide as the hidden size")
    return ModelConfig(
        vocab_size=model.vocab_size,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        sequence_length=model.sequence_length,
        norm=model.norm,  # type: ignore[arg-type]
        position=model.position,  # type: ignore[arg-type]
        activation=model.activation,  # type: ignore[arg-type]
        bias=model.bias,
        tie_embeddings=model.tie_embeddings,
    )


def make_shape(config: ModelConfig) -> ModelShape:
    """The planner's view of what the engine builds."""
    return ModelShape(
        name="model of the configuration",
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.hidden_size // config.num_heads,
        ffn_hidden_size=config.ffn_hidden_size,
        sequence_length=config.sequence_length,
        norm=config.norm,
        position=config.position,
        activation=config.activation,
        bias=config.bias,
        tie_embeddings=config.tie_embeddings,
    )


@or_unavailable
def make_candidate(config: TrainConfig) -> Candidate:
    """The layout of a configuration."""
    parallel = config.parallel
    if parallel.schedule not in BUILDERS:
        raise Missing("the schedule was given as text, which the planner does not price")
    strategies = {strategy: recompute for recompute, strategy in _STRATEGIES.items()}
    if config.memory.strategy not in strategies:
        raise Missing(f"the planner has no price for memory strategy {config.memory.strategy}")
    is_cut = parallel.data_parallel == "fsdp" and parallel.dp > 1
    return Candidate(
        dp=parallel.dp,
        tp=parallel.tp,
        pp=parallel.pp,
        microbatch_size=config.batch.microbatch_size,
        num_microbatches=config.num_microbatches,
        schedule=parallel.schedule,
        chunks=config.schedule.num_stages // parallel.pp,
        zero_stage=parallel.zero_stage if is_cut else 0,
        recompute=strategies[config.memory.strategy],
        sequence_parallel=parallel.sequence_parallel,
        stage_sizes=parallel.stage_sizes,
    )


@or_unavailable
def make_train_config(
    model: ModelShape, candidate: Candidate, *, compute: str = "bf16"
) -> TrainConfig:
    """The configuration that trains this layout."""
    config = need(make_model_config(model))
    if candidate.cp > 1 or candidate.ep > 1:
        raise Missing("the engine has no cp or ep")
    if candidate.recompute not in _STRATEGIES:
        raise Missing(f"the engine has no {candidate.recompute} recompute; it has none and full")
    if candidate.zero_stage and candidate.shard_size is not None:
        raise Missing("the engine cuts over all of dp")
    is_chunked = candidate.chunks > 1 and candidate.schedule != "zb_v"
    return TrainConfig(
        model=config,
        parallel=ParallelConfig(
            dp=candidate.dp,
            tp=candidate.tp,
            pp=candidate.pp,
            schedule=candidate.schedule,
            chunks_per_rank=candidate.chunks if is_chunked else None,
            stage_sizes=candidate.stage_sizes,
            sequence_parallel=candidate.sequence_parallel,
            data_parallel="fsdp" if candidate.zero_stage else "reducer",
            zero_stage=candidate.zero_stage or 3,
        ),
        batch=BatchConfig(
            microbatch_size=candidate.microbatch_size, num_microbatches=candidate.num_microbatches
        ),
        precision=PrecisionConfig(compute=compute),  # type: ignore[arg-type]
        memory=MemoryConfig(strategy=_STRATEGIES[candidate.recompute]),  # type: ignore[arg-type]
    )


def estimate_engine_ranks(
    config: TrainConfig, *, device_type: str = "cuda"
) -> tuple[RankMemory, ...]:
    """What `train --check` estimates, in the planner's categories."""
    parallel = config.parallel
    num_axes = sum(degree > 1 for degree in (parallel.dp, parallel.tp, parallel.pp))
    return tuple(
        RankMemory(
            pp_rank=rank.pp_rank,
            parameters_bytes=rank.parameters_bytes,
            gradients_bytes=rank.gradients_bytes,
            optimizer_bytes=rank.optimizer_bytes,
            master_bytes=0,
            activations_bytes=rank.activations_bytes,
            logits_bytes=rank.logits_bytes,
            casts_bytes=0,
            communication_bytes=rank.communication_bytes,
            workspace_bytes=0,
            context_bytes=count_context(num_axes) if device_type != "cpu" else 0,
            fragmentation_bytes=round(FRAGMENTATION_RATIO * rank.total_bytes),
            offloaded_bytes=rank.offloaded_bytes,
        )
        for rank in estimate_memory(config, device_type=device_type).ranks
    )
