"""Which part of a parameter a rank holds."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshscope.engine.model.sharding import (
    ParameterCount,
    ParameterShard,
    count_parameters,
    find_parameter_shards,
    shard_range,
)


@pytest.mark.parametrize("size", [1, 4, 5, 7, 101])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_ranges_are_those_of_torch_chunk(size: int, num_shards: int) -> None:
    found = [list(shard_range(size, num_shards, index)) for index in range(num_shards)]
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_shards)]
    assert [part for part in found if part] == chunks


def test_stacked_matrices_are_cut_each_by_itself() -> None:
    shard = ParameterShard(full_shape=(8, 2), dim=0, parts=(4, 2, 2), num_shards=2, shard_index=1)
    assert shard.ranges() == [range(2, 4), range(5, 6), range(7, 8)]
    assert shard.shape == (4, 2)
    full = torch.arange(16).view(8, 2)
    assert shard.take(full).tolist() == [[4, 5], [6, 7], [10, 11], [14, 15]]
    parts = [replace(shard, shard_index=index).take(full) for index in range(2)]
    assert torch.equal(shard.join(parts), full)


def test_a_replicated_parameter_is_whole() -> None:
    shard = ParameterShard(full_shape=(3,))
    full = torch.arange(3)
    assert shard.shape == (3,)
    assert shard.take(full) is full
    assert shard.join([full, full]) is full


def test_shards_are_found_by_full_name_and_what_is_not_declared_is_whole() -> None:
    inner = nn.Linear(4, 3)
    declared = ParameterShard(full_shape=(6, 4), dim=0, parts=(6,), num_shards=2)
    inner.parameter_shards = {"weight": declared}
    model = nn.Sequential(nn.Sequential(inner))
    assert find_parameter_shards(model) == {
        "0.0.weight": declared,
        "0.0.bias": ParameterShard(full_shape=(3,)),
    }
    wrapped = checkpoint_wrapper(model)
    assert next(iter(find_parameter_shards(wrapped).values())) == declared, "whatever its name"
    assert count_parameters(model) == ParameterCount(full=27, local=15)
