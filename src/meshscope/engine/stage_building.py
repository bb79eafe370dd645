"""Builds the stages of this rank: their modules, cut over tp, with a memory strategy, compiled."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from meshscope.core.config.layer_memory import count_in_flight
from meshscope.core.config.train_config import TrainConfig
from meshscope.engine.memory.recompute import Recompute
from meshscope.engine.memory.strategy import MemoryStrategy, make_memory_strategy
from meshscope.engine.mesh import Mesh, Role
from meshscope.engine.model.dtensor_parallel import parallelize_stage
from meshscope.engine.model.model_source import ModelSource, StageSetup
from meshscope.engine.model.transformer import Stage


def make_rank_strategy(config: TrainConfig, pp_rank: int, device: torch.device) -> MemoryStrategy:
    """The configured memory strategy, for as many microbatches as this rank holds at once."""
    schedule, memory = config.schedule, config.memory
    strategy = make_memory_strategy(
        memory.strategy,
        device=device,
        offload_dir=memory.offload_dir or Path(tempfile.gettempdir()),
        num_in_flight=count_in_flight(schedule, pp_rank),
    )
    strategy.follow(schedule, pp_rank)
    return strategy


def build_stages(
    config: TrainConfig,
    mesh: Mesh,
    source: ModelSource,
    memory: MemoryStrategy,
    device: torch.device,
) -> dict[int, nn.Module]:
    parallel, schedule = config.parallel, config.schedule
    tp_group = mesh.group_of(Role.MATRICES)
    stages: dict[int, nn.Module] = {}
    for index in schedule.stages_of(mesh.here.pp):
        stage = source.build(
            StageSetup(
                index=index,
                num_stages=schedule.num_stages,
                stage_sizes=parallel.stage_sizes,
                tp_group=tp_group if parallel.tensor_parallel == "plain" else None,
                sequence_parallel=parallel.sequence_parallel,
                seed=config.seed,
                device=device,
            )
        )
        if parallel.tensor_parallel == "dtensor" and tp_group is not None:
            assert isinstance(stage, Stage), "validation refuses other models"
            tp_mesh = mesh.submesh(Role.MATRICES)
            parallelize_stage(stage, tp_mesh, sequence_parallel=parallel.sequence_parallel)
        memory.prepare(stage)
        if config.compile:
            _compile(stage, memory)
        stages[index] = stage
    return stages


def _compile(stage: nn.Module, memory: MemoryStrategy) -> None:
    """As much in one graph as recomputation allows, which torch.compile cannot trace."""
    layers = getattr(stage, "layers", None)
    if memory.recompute is Recompute.LAYERS and isinstance(layers, nn.ModuleDict):
        for layer in layers.values():
            layer.compile()
    else:
        stage.compile()


def count_parts(stage: nn.Module) -> dict[str, int]:
    """Layers of a stage by class, and what else it holds."""
    parts: dict[str, int] = {}
    for name, child in stage.named_children():
        is_list = name == "layers"
        for part in child.children() if is_list else (child,):
            kind = type(part).__name__ if is_list else name
            parts[kind] = parts.get(kind, 0) + 1
    return parts
