"""Which part of each full parameter a tensor-parallel rank holds.

A module says so for its own parameters in its attribute `parameter_shards`, by parameter name.
It stands on the module because wrappers (FSDP2 among them) replace parameter objects.
Initialisation, gathering, checkpoints and norms over the whole mesh read it from there; a
parameter without an entry is whole on every rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def shard_range(size: int, num_shards: int, index: int) -> range:
    """The part of `range(size)` of one shard, by the rule of `torch.chunk` and DTensor.

    All shards but the last are equally large; the last takes what is left.
    """
    step = -(-size // num_shards)
    return range(min(index * step, size), min((index + 1) * step, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """What one parameter of this rank is, of the model's full parameter."""

    full_shape: tuple[int, ...]
    dim: int | None = None
    """The dimension that is cut; None when every rank holds all of it."""
    parts: tuple[int, ...] = ()
    """Sizes of the matrices stacked along `dim`, each cut by itself (queries, keys and values).

    They sum to `full_shape[dim]`; empty when nothing is cut.
    """
    num_shards: int = 1
    shard_index: int = 0
    is_sequence_parallel: bool = False
    """Whether each rank's gradient covers its part of the sequence only, and must be summed."""
    init_mean: float = 0.0
    init_std: float = 0.0
    """Initial values are normal, or all `init_mean` where this is 0."""
    tied_to: str | None = None
    """The parameter of an earlier stage that this one is a copy of."""

    @property
    def num_full(self) -> int:
        return torch.Size(self.full_shape).numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        if self.dim is None:
            return self.full_shape
        size = sum(map(len, self.ranges()))
        return (*self.full_shape[: self.dim], size, *self.full_shape[self.dim + 1 :])

    def ranges(self, shard_index: int | None = None) -> list[range]:
        """The indices along `dim` a shard holds (default: this one), one range for each part."""
        index = self.shard_index if shard_index is None else shard_index
        found, offset = [], 0
        for part in self.parts:
            own = shard_range(part, self.num_shards, index)
            found.append(range(offset + own.start, offset + own.stop))
            offset += part
        return found

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of the full parameter."""
        if self.dim is None:
            return full
        parts = [full.narrow(self.dim, own.start, len(own)) for own in self.ranges()]
        return torch.cat(parts, self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full parameter from all ranks' parts, in the order of ranks."""
        if self.dim is None:
            return shards[0]
        full = shards[0].new_empty(self.full_shape)
        for index, shard in enumerate(shards):
            offset = 0
            for own in self.ranges(index):
                piece = shard.narrow(self.dim, offset, len(own))
                full.narrow(self.dim, own.start, len(own)).copy_(piece)
                offset += len(own)
        return full


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of a module or stage."""

    full: int
    """In the whole model, over all tp ranks."""
    local: int
    """Elements on this rank."""


def find_parameter_shards(module: nn.Module) -> dict[str, ParameterShard]:
    """The shard of every parameter, by the names and in the order of `named_parameters`."""
    # By identity: wrappers (of activation checkpointing, say) give modules and parameters names
    # that do not fit together.
    declared: dict[int, ParameterShard] = {}
    for owner in module.modules():
        for name, shard in getattr(owner, "parameter_shards", {}).items():
            declared.setdefault(id(getattr(owner, name)), shard)
    return {
        name: declared.get(id(parameter)) or ParameterShard(full_shape=tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    }


def count_parameters(module: nn.Module) -> ParameterCount:
    """How many parameters a module has, here and in the whole model."""
    shards: Iterable[ParameterShard] = find_parameter_shards(module).values()
    return ParameterCount(
        full=sum(shard.num_full for shard in shards),
        local=sum(parameter.numel() for parameter in module.parameters()),
    )
