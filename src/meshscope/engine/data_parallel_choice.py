"""Makes the data parallelism a configuration asks for: the reducer, DDP or FSDP2."""

import os
from collections.abc import Mapping

import torch
from torch import nn

from meshscope.core.config.train_config import CommunicationConfig, TrainConfig
from meshscope.core.placement import Placement, placement_from_environment
from meshscope.engine.data_parallel.compression import Compressor, make_compressor
from meshscope.engine.data_parallel.fully_sharded import FullyShardedDataParallel
from meshscope.engine.data_parallel.torch_ddp import DataParallel, ReducedDataParallel, TorchDdp
from meshscope.engine.mesh import Mesh, Role

_PARAM_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_data_parallel(
    config: TrainConfig, stages: Mapping[int, nn.Module], mesh: Mesh
) -> DataParallel:
    """Around this rank's stages; FSDP2 changes them in place. Collective.

    With dp 1 there is nothing to average, and it is the reducer, which then does nothing; except
    for FSDP2 in a process group, which cuts over one rank.
    """
    kind, communication = config.parallel.data_parallel, config.communication
    bucket_bytes = round(communication.bucket_mib * 2**20)
    if kind == "fsdp" and mesh.device_mesh is not None:
        return FullyShardedDataParallel(
            stages,
            mesh.submesh(Role.REPLICAS),
            zero_stage=config.parallel.zero_stage,
            param_dtype=_PARAM_DTYPES.get(config.precision.compute),
            reduce_dtype=torch.float32,
        )
    replicas = mesh.group_of(Role.REPLICAS)
    if kind == "ddp" and replicas is not None:
        return TorchDdp(stages, replicas, bucket_bytes=bucket_bytes)
    return ReducedDataParallel(
        stages,
        replicas,
        bucket_bytes=bucket_bytes,
        strategy=communication.strategy,
        compression=_make_compression(communication),
        max_buckets=communication.max_buckets,
        overlaps=communication.overlap,
        local_world_size=communication.ranks_per_node
        or _find_ranks_per_node(communication.strategy),
    )


def _make_compression(communication: CommunicationConfig) -> Compressor | None:
    if communication.compression == "none":
        return None
    return make_compressor(
        communication.compression,
        ratio=communication.compression_ratio,
        bits=communication.compression_bits,
        rank=communication.compression_rank,
        keeps_errors=communication.error_feedback,
    )


def _find_ranks_per_node(strategy: str) -> int | None:
    """What the launcher says; None where it does not, or where it is not needed."""
    if strategy not in ("hierarchical", "adaptive"):
        return None
    placement = placement_from_environment(os.environ)
    return placement.local_world_size if isinstance(placement, Placement) else None
