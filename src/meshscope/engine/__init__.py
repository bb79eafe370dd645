"""Trains in 3D on torch.distributed: `Engine` and `TrainConfig`, and the parts they are made of.

    from meshscope.engine import Engine, load_config
    engine = Engine(load_config("train.toml"))

Names are loaded when they are used: parts are of use without the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshscope.core.config.model_config import ModelConfig, split_layers
    from meshscope.core.config.timed_model_config import TimedModelConfig
    from meshscope.core.config.train_config import (
        BatchConfig,
        CheckpointConfig,
        CommunicationConfig,
        DataConfig,
        MemoryConfig,
        OptimizerConfig,
        ParallelConfig,
        PrecisionConfig,
        RecordingConfig,
        TrainConfig,
    )
    from meshscope.engine.checkpoint.folder import find_checkpoints, find_latest
    from meshscope.engine.checkpoint.save_load import load_checkpoint, save_checkpoint
    from meshscope.engine.config.problems import find_problems
    from meshscope.engine.config.toml_file import load_config
    from meshscope.engine.data.token_data import make_data
    from meshscope.engine.data_parallel.data_parallel import GradientReducer
    from meshscope.engine.engine import Engine, EngineStatistics
    from meshscope.engine.mesh import Mesh
    from meshscope.engine.model.initialization import initialize_parameters
    from meshscope.engine.model.model_source import UserModel
    from meshscope.engine.model.sharding import (
        ParameterCount,
        ParameterShard,
        count_parameters,
        find_parameter_shards,
    )
    from meshscope.engine.model.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        put_off_weight_gradients,
        reduce_sequence_parallel_gradients,
        vocab_parallel_cross_entropy,
    )
    from meshscope.engine.model.tensor_regions import gather_parameter
    from meshscope.engine.model.transformer import Stage, build_stage
    from meshscope.engine.model.user_model import LayerPlan, UserStage, build_user_stage
    from meshscope.engine.pipeline.pipeline import PipelineExecutor
    from meshscope.engine.step_result import StepResult
    from meshscope.engine.update.gradient_norm import clip_gradient_norm, sync_tied_gradients
    from meshscope.engine.worker import run_worker

_HOMES = {
    "core.config.model_config": "ModelConfig split_layers",
    "core.config.timed_model_config": "TimedModelConfig",
    "core.config.train_config": "BatchConfig CheckpointConfig CommunicationConfig DataConfig "
    "MemoryConfig OptimizerConfig ParallelConfig PrecisionConfig RecordingConfig TrainConfig",
    "engine.checkpoint.folder": "find_checkpoints find_latest",
    "engine.checkpoint.save_load": "load_checkpoint save_checkpoint",
    "engine.config.problems": "find_problems",
    "engine.config.toml_file": "load_config",
    "engine.data.token_data": "make_data",
    "engine.data_parallel.data_parallel": "GradientReducer",
    "engine.engine": "Engine EngineStatistics",
    "engine.mesh": "Mesh",
    "engine.model.initialization": "initialize_parameters",
    "engine.model.model_source": "UserModel",
    "engine.model.sharding": "ParameterCount ParameterShard count_parameters find_parameter_shards",
    "engine.model.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding "
    "put_off_weight_gradients reduce_sequence_parallel_gradients vocab_parallel_cross_entropy",
    "engine.model.tensor_regions": "gather_parameter",
    "engine.model.transformer": "Stage build_stage",
    "engine.model.user_model": "LayerPlan UserStage build_user_stage",
    "engine.pipeline.pipeline": "PipelineExecutor",
    "engine.step_result": "StepResult",
    "engine.update.gradient_norm": "clip_gradient_norm sync_tied_gradients",
    "engine.worker": "run_worker",
}
"""Module to the names it is home of."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "ColumnParallelLinear",
    "CommunicationConfig",
    "DataConfig",
    "Engine",
    "EngineStatistics",
    "GradientReducer",
    "LayerPlan",
    "MemoryConfig",
    "Mesh",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterCount",
    "ParameterShard",
    "PipelineExecutor",
    "PrecisionConfig",
    "RecordingConfig",
    "RowParallelLinear",
    "Stage",
    "StepResult",
    "TimedModelConfig",
    "TrainConfig",
    "UserModel",
    "UserStage",
    "VocabParallelEmbedding",
    "build_stage",
    "build_user_stage",
    "clip_gradient_norm",
    "count_parameters",
    "find_checkpoints",
    "find_latest",
    "find_parameter_shards",
    "find_problems",
    "gather_parameter",
    "initialize_parameters",
    "load_checkpoint",
    "load_config",
    "make_data",
    "put_off_weight_gradients",
    "reduce_sequence_parallel_gradients",
    "run_worker",
    "save_checkpoint",
    "split_layers",
    "sync_tied_gradients",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'meshscope.engine' has no attribute {name!r}")
    return getattr(import_module(f"meshscope.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
