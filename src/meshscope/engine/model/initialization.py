"""Initial weights that do not depend on the layout.

A full parameter is cut into blocks of rows of a fixed size, and every block has a generator of its
own, keyed by seed, parameter name and block number (Philox, a counter-based generator: any two
keys are independent streams). A rank makes the blocks it holds a part of, one after the other, on
the CPU in float32, and keeps its part. So the same seed gives the same weights for any dp×tp×pp,
device and dtype, and memory stays at one block.

Wrong when a parameter's name, full shape or BLOCK_ELEMENTS changes: the weights change with them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

from meshscope.engine.model.sharding import ParameterShard, find_parameter_shards

BLOCK_ELEMENTS = 1 << 20
"""Elements generated at a time: 4 MiB in float32."""


@torch.no_grad()
def initialize_parameters(module: nn.Module, *, seed: int) -> None:
    """Fills every parameter as its shard says. Names within `module` must be the model's.

    Blocks are made by as many threads as torch uses; which makes one has no effect on it.
    """
    shards = find_parameter_shards(module)
    blocks: list[_Block] = []
    for name, parameter in module.named_parameters():
        shard = shards[name]
        if shard.init_std == 0:
            parameter.fill_(shard.init_mean)
        else:
            blocks += _list_blocks(parameter, shard, shard.tied_to or name, seed)
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        for block in blocks:
            block.put(block.make())
        return
    with ThreadPoolExecutor(num_threads) as threads:
        # A few at a time, or blocks would pile up until they are the whole model.
        for some in _batched(blocks, 2 * num_threads):
            for block, values in zip(some, threads.map(_Block.make, some), strict=True):
                block.put(values)


@contextmanager
def seeded_by_name(name: str, *, seed: int) -> Iterator[None]:
    """torch's own generators seeded by a name: for layers that users' code initialises."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_make_key(seed, name, 0) % 2**63)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Some rows of a full parameter, and what of them this rank holds."""

    local: Tensor
    shard: ParameterShard
    key: int
    rows: range
    kept_rows: list[tuple[int, range]]
    """Where kept rows begin in `local`, and which of the full parameter they are."""
    kept_columns: list[tuple[int, range]]
    num_columns: int

    def make(self) -> Tensor:
        """All its values; in any thread."""
        generator = np.random.Generator(np.random.Philox(key=self.key))
        shape = (len(self.rows), self.num_columns)
        values = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
        return values.mul_(self.shard.init_std).add_(self.shard.init_mean)

    def put(self, values: Tensor) -> None:
        """The kept ones into the parameter."""
        start = self.rows.start
        for row, kept in self.kept_rows:
            for column, kept_columns in self.kept_columns:
                part = values[kept.start - start : kept.stop - start]
                self.local[row : row + len(kept), column : column + len(kept_columns)] = part[
                    :, kept_columns.start : kept_columns.stop
                ]


def _list_blocks(
    parameter: Tensor, shard: ParameterShard, name: str, seed: int
) -> Iterator[_Block]:
    """Parameters that this rank holds a part of."""
    num_rows, num_columns = (*shard.full_shape, 1)[:2]
    rows = shard.ranges() if shard.dim == 0 else [range(num_rows)]
    columns = shard.ranges() if shard.dim == 1 else [range(num_columns)]
    block_rows = max(1, BLOCK_ELEMENTS // num_columns)
    for index, start in enumerate(range(0, num_rows, block_rows)):
        block_range = range(start, min(start + block_rows, num_rows))
        kept_rows = list(_overlaps(rows, block_range))
        if kept_rows:
            yield _Block(
                local=parameter if parameter.ndim == 2 else parameter.unsqueeze(1),
                shard=shard,
                key=_make_key(seed, name, index),
                rows=block_range,
                kept_rows=kept_rows,
                kept_columns=list(_with_offsets(columns)),
                num_columns=num_columns,
            )


def _make_key(seed: int, name: str, block_index: int) -> int:
    text = f"{seed}/{name}/{block_index}"
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


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


def _batched(blocks: Sequence[_Block], size: int) -> Iterator[Sequence[_Block]]:
    for start in range(0, len(blocks), size):
        yield blocks[start : start + size]
