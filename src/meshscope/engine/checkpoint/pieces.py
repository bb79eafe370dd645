"""Tensors as rectangles of the full ones they are part of, and how torch's checkpoints take them.

What a rank holds of a parameter is cut twice: by tensor parallel, possibly each of several stacked
matrices by itself (`ParameterShard`), and that part once more by FSDP2 (a DTensor). Either way it
is a list of rectangles of the full tensor, each a view of the rank's memory. Stored with their
offsets, ranks that are cut in any other way can put them together again: the two planners here
tell `torch.distributed.checkpoint` (DCP) what is where, and DCP computes the overlaps. Of ranks
that hold the same rectangle, the one with least to write so far writes it.

    dcp.save({}, storage_writer=…, planner=PieceSavePlanner(tensors))
    dcp.load({}, storage_reader=…, planner=PieceLoadPlanner(tensors))

Wrong for DTensors that are cut in strides (FSDP2 over DTensor tensor parallel), which are refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshscope.engine.model.sharding import ParameterShard, shard_range
from meshscope.errors import UsageError

# torch has no types for either.
_create_read_items: Any = create_read_items_for_chunk_list
_make_index: Any = MetadataIndex


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a full tensor."""

    offsets: tuple[int, ...]
    """Where it begins, in each dimension."""
    values: Tensor
    """A view of this rank's memory."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size(self.offsets), sizes=torch.Size(self.values.shape)
        )


@dataclass(frozen=True, slots=True)
class PiecedTensor:
    """What this rank holds of a full tensor; no piece at all is possible."""

    full_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def cut_into_pieces(tensor: Tensor, shard: ParameterShard) -> PiecedTensor:
    """The pieces of this rank's part, itself possibly a DTensor, of the full tensor."""
    is_cut = shard.dim is not None and shard.num_shards > 1
    if is_cut and hasattr(tensor, "to_local") and tuple(tensor.shape) == shard.full_shape:
        # A DTensor over tp: its own cut and the shard's would both be applied.
        raise UsageError(
            "parameters are DTensors over tensor parallel, which checkpoints cannot hold; train "
            'with tensor_parallel "plain", or without checkpoints'
        )
    window = _find_window(tensor)
    local = local_values(tensor)
    pieces = tuple(
        Piece(offsets, values)
        for offsets, values in _cut(local, window, shard)
        if values.numel() or not values.ndim
    )
    return PiecedTensor(shard.full_shape, tensor.dtype, pieces)


def whole_tensor(tensor: Tensor) -> PiecedTensor:
    """A tensor that every rank holds all of."""
    return cut_into_pieces(tensor, ParameterShard(full_shape=tuple(tensor.shape)))


def local_values(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor, without history."""
    values: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return values.detach()


def _cut(
    local: Tensor, window: list[range], shard: ParameterShard
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    offsets = [own.start for own in window]
    if shard.dim is None or shard.num_shards == 1:
        yield tuple(offsets), local
        return
    dim, seen = shard.dim, window[shard.dim]
    begin = 0  # of a stacked matrix, in the part that tensor parallel left of all of them
    for own in shard.ranges():
        first, last = max(begin, seen.start), min(begin + len(own), seen.stop)
        if first < last:
            offsets[dim] = own.start + first - begin
            yield tuple(offsets), local.narrow(dim, first - seen.start, last - first)
        begin += len(own)


def _find_window(tensor: Tensor) -> list[range]:
    """Which indices of a DTensor this rank holds; all, of a plain tensor."""
    window = [range(size) for size in tensor.shape]
    placements: Any = getattr(tensor, "placements", ())
    mesh: Any = getattr(tensor, "device_mesh", None)
    for axis, placement in enumerate(placements):
        if type(placement).__name__ == "Replicate":
            continue
        if type(placement).__name__ != "Shard":
            raise UsageError(
                f"a parameter is a DTensor placed as {placement}; checkpoints take Shard and "
                "Replicate only, so shard tensor-parallel layers as plain tensors under FSDP2"
            )
        whole = window[placement.dim]
        own = shard_range(len(whole), mesh.size(axis), mesh.get_local_rank(axis))
        window[placement.dim] = whole[own.start : own.stop]
    assert tuple(map(len, window)) == tuple(local_values(tensor).shape), "cut by another rule"
    return window


class PieceSavePlanner(DefaultSavePlanner):
    """Writes the pieces of named tensors."""

    def __init__(self, tensors: Mapping[str, PiecedTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        """Everything this rank holds; DCP takes out what others hold as well."""
        items = [
            WriteItem(
                index=_make_index(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk,
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=torch.Size(tensor.full_shape),
                ),
            )
            for name, tensor in self._tensors.items()
            for piece in tensor.pieces
        ]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: who writes what. DCP's own choice counts a piece as the full tensor."""
        return super().create_global_plan(choose_writers(all_plans))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _find_values(self._tensors, index)


def choose_writers(plans: list[SavePlan]) -> list[SavePlan]:
    """Each piece in the plan of one of the ranks that hold it: largest first, to the least busy."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items[item.index] = item
    num_bytes = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    # Those that only one rank holds come first: there is no choice.
    for index in sorted(items, key=lambda i: (len(holders[i]) > 1, -_count_bytes(items[i]))):
        writer[index] = min(holders[index], key=num_bytes.__getitem__)
        num_bytes[writer[index]] += _count_bytes(items[index])
    return [
        replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _count_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


class PieceLoadPlanner(DefaultLoadPlanner):
    """Reads into the pieces of named tensors, whose names and shapes the caller has checked."""

    def __init__(self, tensors: Mapping[str, PiecedTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001 - torch's signature
    ) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """For each piece, the overlaps with what is stored."""
        assert self.metadata is not None
        items = []
        for name, tensor in self._tensors.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if not tensor.full_shape:
                items.append(_read_scalar(name))
                continue
            items += _create_read_items(name, stored, [piece.chunk for piece in tensor.pieces])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _find_values(self._tensors, index)


def _read_scalar(name: str) -> ReadItem:
    """Not every torch finds the overlap of two things without dimensions."""
    nowhere = torch.Size(())
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=_make_index(name, nowhere),
        dest_offsets=nowhere,
        storage_index=_make_index(name, nowhere),
        storage_offsets=nowhere,
        lengths=nowhere,
    )


def _find_values(tensors: Mapping[str, PiecedTensor], index: MetadataIndex) -> Tensor:
    offsets = tuple(index.offset or ())
    return next(p.values for p in tensors[index.fqn].pieces if p.offsets == offsets)
