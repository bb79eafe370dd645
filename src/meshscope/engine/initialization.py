"""Initial weights that do not depend on the layout.

A full parameter is cut into blocks of rows of a fixed size, and every block has a generator of its
own, keyed by seed, parameter name and block number (Philox, a counter-based generator: any two
keys are independent streams). A rank makes the blocks it holds a part of, one after the other, on
the CPU in float32, and keeps its part. So the same seed gives the same weights for any dp×tp×pp,
device and dtype, and memory stays at one block.

Wrong when a parameter's name, full shape or BLOCK_ELEMENTS changes: the weights change with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

from meshscope.engine.sharding import ParameterShard, find_parameter_shards

BLOCK_ELEMENTS = 1 << 20
"""Elements generated at a time: 4 MiB in float32."""


@torch.no_grad()
def initialize_parameters(module: nn.Module, *, seed: int) -> None:
    """Fills every parameter as its shard says. Names within `module` must be the model's."""
    shards = find_parameter_shards(module)
    for name, parameter in module.named_parameters():
        shard = shards[name]
        if shard.init_std == 0:
            parameter.fill_(shard.init_mean)
        else:
            _fill_normal(parameter, shard, shard.tied_to or name, seed)


@contextmanager
def seeded_by_name(name: str, *, seed: int) -> Iterator[None]:
    """torch's own generators seeded by a name: for layers that users' code initialises."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_make_key(seed, name, 0) % 2**63)
        yield


def _fill_normal(parameter: Tensor, shard: ParameterShard, name: str, seed: int) -> None:
    local = parameter if parameter.ndim == 2 else parameter.unsqueeze(1)
    num_rows, num_columns = (*shard.full_shape, 1)[:2]
    whole_rows, whole_columns = [range(num_rows)], [range(num_columns)]
    rows = shard.ranges() if shard.dim == 0 else whole_rows
    columns = shard.ranges() if shard.dim == 1 else whole_columns
    block_rows = max(1, BLOCK_ELEMENTS // num_columns)
    for index, start in enumerate(range(0, num_rows, block_rows)):
        block_range = range(start, min(start + block_rows, num_rows))
        wanted = list(_overlaps(rows, block_range))
        if not wanted:
            continue
        block = _make_block(_make_key(seed, name, index), len(block_range), num_columns)
        block.mul_(shard.init_std).add_(shard.init_mean)
        for local_row, kept in wanted:
            for local_column, column in _with_offsets(columns):
                local[
                    local_row : local_row + len(kept), local_column : local_column + len(column)
                ] = block[kept.start - start : kept.stop - start, column.start : column.stop]


def _make_key(seed: int, name: str, block_index: int) -> int:
    text = f"{seed}/{name}/{block_index}"
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def _make_block(key: int, num_rows: int, num_columns: int) -> Tensor:
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(generator.standard_normal((num_rows, num_columns), dtype=np.float32))


def _with_offsets(ranges: list[range]) -> Iterator[tuple[int, range]]:
    """Each range of the full dimension with where it begins in the local one."""
    offset = 0
    for own in ranges:
        yield offset, own
        offset += len(own)


def _overlaps(ranges: list[range], block: range) -> Iterator[tuple[int, range]]:
    """The parts of `ranges` that lie in `block`, with where they begin in the local dimension."""
    for offset, own in _with_offsets(ranges):
        kept = range(max(own.start, block.start), min(own.stop, block.stop))
        if kept:
            yield offset + kept.start - own.start, kept
