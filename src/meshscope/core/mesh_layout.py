"""Reads the layout of a torch DeviceMesh.

A mesh has named dims, each with a degree and a stride in rank. It is a layout when the strides
nest like the digits of a number (1, then 1 × degree, …) and fill the world. Names are looked up,
never guessed: an unknown name is an error, and so is a mesh numbered otherwise.
Torch is not imported: a mesh is anything with `mesh_dim_names` and a `mesh` tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Protocol

from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError


class _RankTensor(Protocol):
    """The part of a tensor of ranks that is read here."""

    @property
    def shape(self) -> Sequence[int]: ...

    def tolist(self) -> object: ...


class NamedMesh(Protocol):
    """The part of torch's DeviceMesh that is read here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per dim, slowest first."""

    @property
    def mesh(self) -> _RankTensor:
        """The global rank at each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dim:
    """One dim of a mesh. Several dims can be one axis: dp_replicate and dp_shard are both dp."""

    axis: Axis
    degree: int
    stride: int


_AXIS_BY_DIM_NAME = {
    "dp": Axis.DP,
    "data": Axis.DP,
    "data_parallel": Axis.DP,
    "ddp": Axis.DP,
    "fsdp": Axis.DP,
    "dp_replicate": Axis.DP,
    "dp_shard": Axis.DP,
    "tp": Axis.TP,
    "tensor": Axis.TP,
    "tensor_parallel": Axis.TP,
    "model": Axis.TP,
    "pp": Axis.PP,
    "pipe": Axis.PP,
    "pipeline": Axis.PP,
    "pipeline_parallel": Axis.PP,
    "stage": Axis.PP,
    "cp": Axis.CP,
    "context": Axis.CP,
    "context_parallel": Axis.CP,
    "ep": Axis.EP,
    "expert": Axis.EP,
    "expert_parallel": Axis.EP,
}


def layout_from_mesh(mesh: NamedMesh) -> Layout:
    """The layout of a whole DeviceMesh; its dims from slowest to fastest give the order.

    Raises LayoutError for unnamed or unknown dims, for a slice of a mesh, and for a mesh whose
    ranks are not numbered in any order of its axes.
    """
    shape = tuple(mesh.mesh.shape)
    axes = _axes_of_dims(mesh.mesh_dim_names, shape)
    ranks = _ranks_by_position(mesh.mesh.tolist(), shape)
    if sorted(ranks.values()) != list(range(math.prod(shape))):
        raise LayoutError(
            f"the mesh holds ranks {_shorten(sorted(ranks.values()))}, but all of "
            f"0..{math.prod(shape) - 1} are expected; pass the whole mesh, not a slice of it"
        )
    dims = [
        _Dim(axis=axis, degree=degree, stride=_stride_along(ranks, index, shape))
        for index, (axis, degree) in enumerate(zip(axes, shape, strict=True))
    ]
    layout = _layout_from_dims(dims, world_size=math.prod(shape))
    if isinstance(layout, Unavailable):
        raise LayoutError(f"mesh {mesh.mesh_dim_names} is no layout: {layout.reason}")
    if not _is_numbered_by(dims, ranks):
        raise LayoutError(
            f"mesh {mesh.mesh_dim_names} numbers its ranks {_shorten(list(ranks.values()))}, but "
            f"an even step along each dim is expected; build it with init_device_mesh"
        )
    return layout


def _axes_of_dims(names: Sequence[str] | None, shape: tuple[int, ...]) -> list[Axis]:
    if names is None or len(names) != len(shape):
        raise LayoutError(
            f"the mesh of shape {shape} has dim names {names}, but one name per dim is expected; "
            f"pass mesh_dim_names to init_device_mesh"
        )
    unknown = [name for name in names if name.lower() not in _AXIS_BY_DIM_NAME]
    if unknown:
        raise LayoutError(
            f"mesh dims {unknown} are not known axes; expected names from "
            f"{', '.join(_AXIS_BY_DIM_NAME)}; rename the dims or give the layout by hand"
        )
    return [_AXIS_BY_DIM_NAME[name.lower()] for name in names]


def _ranks_by_position(nested: object, shape: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    ranks = {}
    for position in product(*map(range, shape)):
        value = nested
        for index in position:
            value = value[index]  # type: ignore[index]  # tolist() nests as deep as shape is long
        if not isinstance(value, int):
            raise LayoutError(
                f"the mesh holds {value!r} at {position}, but a rank is expected; "
                f"pass a mesh of whole numbers"
            )
        ranks[position] = value
    return ranks


def _stride_along(ranks: Mapping[tuple[int, ...], int], dim: int, shape: tuple[int, ...]) -> int:
    if shape[dim] == 1:
        # No neighbour to measure, and none that the stride could misplace.
        return 1
    origin = (0,) * len(shape)
    neighbour = tuple(int(index == dim) for index in range(len(shape)))
    return ranks[neighbour] - ranks[origin]


def _is_numbered_by(dims: Sequence[_Dim], ranks: Mapping[tuple[int, ...], int]) -> bool:
    return all(
        rank == sum(index * dim.stride for index, dim in zip(position, dims, strict=True))
        for position, rank in ranks.items()
    )


def _layout_from_dims(dims: Sequence[_Dim], *, world_size: int) -> Layout | Unavailable:
    """The layout whose axes have these strides, if they nest and fill the world."""
    used = sorted((dim for dim in dims if dim.degree > 1), key=lambda dim: dim.stride)
    filled = 1
    for dim in used:
        if dim.stride != filled:
            break
        filled *= dim.degree
    if filled != world_size or filled != math.prod(dim.degree for dim in used):
        listed = ", ".join(f"{dim.axis}({dim.degree}, stride {dim.stride})" for dim in used)
        return Unavailable(
            f"the axes {listed or 'with more than one rank: none'} do not fill {world_size} ranks "
            f"without gaps; give the layout by hand"
        )
    return _merge_neighbours(list(reversed(used)))


def _merge_neighbours(slowest_first: Sequence[_Dim]) -> Layout | Unavailable:
    """The layout of dims that fill the world, where several in a row may be one axis."""
    merged = [
        (str(axis), math.prod(dim.degree for dim in dims))
        for axis, dims in groupby(slowest_first, key=lambda dim: dim.axis)
    ]
    order = tuple(axis for axis, _ in merged)
    if len(set(order)) != len(order):
        return Unavailable(
            f"from slowest to fastest its dims belong to {'-'.join(order)}, but each axis is "
            f"expected in one place; make dims of the same axis neighbours"
        )
    # Axes of degree 1 have no place among the strides; the layout ignores where they stand.
    unused = tuple(str(axis) for axis in Axis if axis not in order)
    return Layout(**dict(merged), order=(*unused, *order))


def _shorten(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"[{', '.join(map(str, ranks[:8]))}, …, {ranks[-1]}]"
