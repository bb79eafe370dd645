"""Trains in 3D on torch.distributed: models in tensor-parallel shards and pipeline stages."""

from meshscope.engine.initialization import initialize_parameters
from meshscope.engine.model import Stage, build_stage
from meshscope.engine.model_config import ModelConfig, split_layers
from meshscope.engine.sharding import (
    ParameterCount,
    ParameterShard,
    count_parameters,
    find_parameter_shards,
)
from meshscope.engine.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    put_off_weight_gradients,
    reduce_sequence_parallel_gradients,
    vocab_parallel_cross_entropy,
)
from meshscope.engine.tensor_regions import gather_parameter
from meshscope.engine.user_model import LayerPlan, UserStage, build_user_stage

__all__ = [
    "ColumnParallelLinear",
    "LayerPlan",
    "ModelConfig",
    "ParameterCount",
    "ParameterShard",
    "RowParallelLinear",
    "Stage",
    "UserStage",
    "VocabParallelEmbedding",
    "build_stage",
    "build_user_stage",
    "count_parameters",
    "find_parameter_shards",
    "gather_parameter",
    "initialize_parameters",
    "put_off_weight_gradients",
    "reduce_sequence_parallel_gradients",
    "split_layers",
    "vocab_parallel_cross_entropy",
]
