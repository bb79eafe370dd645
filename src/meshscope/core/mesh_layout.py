"""Layouts read from what a framework already knows: a DeviceMesh, or process groups.

Both give named dims, each with a degree and a stride in rank; a layout exists when the strides
nest like the digits of a number (1, then 1 × degree, …) and fill the world. Names are looked up,
never guessed: an unknown name is an error or `Unavailable`, and so is a mesh numbered otherwise.
Torch is not imported: a mesh is anything with `mesh_dim_names` and a `mesh` tensor.

A trace and a process know one rank's own groups only, so what is inferred from them assumes that
the other ranks have groups of the same shape.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Protocol

from meshscope.core.layout import DEFAULT_ORDER, Axis, Layout
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.errors import LayoutError


class RankTensor(Protocol):
    """The part of a tensor of ranks that is read here."""

    @property
    def shape(self) -> Sequence[int]:
        """The size of each dim."""

    def tolist(self) -> object:
        """The ranks as nested lists."""


class NamedMesh(Protocol):
    """The part of torch's DeviceMesh that is read here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per dim, slowest first."""

    @property
    def mesh(self) -> RankTensor:
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
    "hsdp": Axis.DP,
    "batch": Axis.DP,
    "replicate": Axis.DP,
    "shard": Axis.DP,
    "dp_replicate": Axis.DP,
    "dp_shard": Axis.DP,
    "dp_shard_mod_ep": Axis.DP,
    "dp_shard_in_ep": Axis.DP,
    "tp": Axis.TP,
    "tensor": Axis.TP,
    "tensor_parallel": Axis.TP,
    "model": Axis.TP,
    "mp": Axis.TP,
    "pp": Axis.PP,
    "pipe": Axis.PP,
    "pipeline": Axis.PP,
    "pipeline_parallel": Axis.PP,
    "stage": Axis.PP,
    # A dim of its own that cuts sequences (Ulysses); Megatron's sequence parallelism is tp's.
    "sp": Axis.CP,
    "sequence": Axis.CP,
    "sequence_parallel": Axis.CP,
    "cp": Axis.CP,
    "context": Axis.CP,
    "context_parallel": Axis.CP,
    "ep": Axis.EP,
    "expert": Axis.EP,
    "expert_parallel": Axis.EP,
}

# Megatron's descriptions of groups along one axis. Its combined groups (…_WITH_CP,
# MODEL_PARALLEL_GROUP, EXPERT_DATA_PARALLEL_GROUP and the like) are left out: they are products.
_AXIS_BY_MEGATRON_GROUP = {
    "DATA_PARALLEL_GROUP": Axis.DP,
    "TENSOR_MODEL_PARALLEL_GROUP": Axis.TP,
    "PIPELINE_MODEL_PARALLEL_GROUP": Axis.PP,
    "CONTEXT_PARALLEL_GROUP": Axis.CP,
    "EXPERT_MODEL_PARALLEL_GROUP": Axis.EP,
}
_MESH_GROUP_PREFIX = "mesh_"
"""DeviceMesh describes the group of dim `tp` as `mesh_tp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """A process group of one rank that lies along one axis."""

    axis: Axis
    description: str
    """What makes it one; groups of one description are one thing, and cannot differ."""
    ranks: tuple[int, ...]
    """In ascending order."""

    @property
    def stride(self) -> int:
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1


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


@or_unavailable
def layout_from_process_groups(distributed_info: Mapping[str, object]) -> Layout:
    """The layout that a Kineto trace's `distributedInfo` shows, or why it shows none.

    Expert groups that re-cut ranks which the other axes already count are left out: see
    `core.layout` on folded expert parallelism.
    """
    rank, world_size = distributed_info.get("rank"), distributed_info.get("world_size")
    if not isinstance(rank, int) or not isinstance(world_size, int):
        raise Missing(f"the trace gives rank {rank!r} of world size {world_size!r}")
    if world_size == 1:
        return Layout()
    groups = distributed_info.get("pg_config")
    if not isinstance(groups, list) or not groups:
        raise Missing(
            f"the trace lists no process groups (pg_config) for its {world_size} ranks; "
            f"give the layout by hand, such as dp={world_size}"
        )
    named = _read_named_groups(groups, rank, world_size)
    return need(layout_from_groups(named, rank, world_size))


def axis_of_dim(name: str) -> Axis | None:
    """The axis that a name of a mesh's dim stands for; None: it is not known."""
    return _AXIS_BY_DIM_NAME.get(name.lower())


def axis_of_description(description: str) -> Axis | None:
    """The axis that the description of a process group names; None: none, or several."""
    # Megatron makes a gloo twin of some groups, with the same ranks.
    axis = _AXIS_BY_MEGATRON_GROUP.get(description.removesuffix("_GLOO"))
    if axis is None and description.startswith(_MESH_GROUP_PREFIX):
        axis = axis_of_dim(description.removeprefix(_MESH_GROUP_PREFIX))
    return axis


@or_unavailable
def layout_from_groups(groups: Sequence[AxisGroup], rank: int, world_size: int) -> Layout:
    """The layout whose groups of `rank` these are, or why there is none."""
    for description in {group.description: None for group in groups}:
        rivals = {g.ranks for g in groups if g.description == description and len(g.ranks) > 1}
        if len(rivals) > 1:
            raise Missing(
                f"process groups called {description} have different ranks "
                f"({', '.join(_shorten(list(ranks)) for ranks in sorted(rivals))}), so there is "
                f"more than one mesh; give the layout by hand"
            )
    single = [_without_context(group, groups, rank) for group in groups]
    widest = _without_folded_experts(_drop_parts(single), world_size)
    dims = [_Dim(axis=g.axis, degree=len(g.ranks), stride=g.stride) for g in widest]
    layout = need(_layout_from_dims(dims, world_size=world_size))
    for group in widest:
        if not set(group.ranks) <= set(layout.group_ranks(group.axis, rank)):
            raise Missing(
                f"process group {group.description} holds ranks {_shorten(list(group.ranks))}, "
                f"which no order of axes gives rank {rank} of {world_size}; "
                f"give the layout by hand"
            )
    return layout


def _without_context(group: AxisGroup, groups: Sequence[AxisGroup], rank: int) -> AxisGroup:
    """Of a dp group that spans cp too, as parameters are sharded over both, the part along dp."""
    if group.axis != Axis.DP:
        return group
    for other in groups:
        if other.axis != Axis.CP or len(other.ranks) < 2 or not set(other.ranks) <= {*group.ranks}:
            continue
        first, stride, degree = group.ranks[0], other.stride, len(other.ranks)
        own = (rank - first) // stride % degree
        along = tuple(r for r in group.ranks if (r - first) // stride % degree == own)
        return AxisGroup(axis=Axis.DP, description=group.description, ranks=along)
    return group


def _axes_of_dims(names: Sequence[str] | None, shape: tuple[int, ...]) -> list[Axis]:
    if names is None or len(names) != len(shape):
        raise LayoutError(
            f"the mesh of shape {shape} has dim names {names}, but one name per dim is expected; "
            f"pass mesh_dim_names to init_device_mesh"
        )
    axes = [axis_of_dim(name) for name in names]
    unknown = [name for name, axis in zip(names, axes, strict=True) if axis is None]
    if unknown:
        raise LayoutError(
            f"mesh dims {unknown} are not known axes; expected names from "
            f"{', '.join(_AXIS_BY_DIM_NAME)}; rename the dims or give the layout by hand"
        )
    return [axis for axis in axes if axis is not None]


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
    # Axes of degree 1 have no stride; the layout ignores their position.
    unused = tuple(str(axis) for axis in Axis if axis not in order)
    layout = Layout(**dict(merged), order=(*unused, *order))
    usual = replace(layout, order=DEFAULT_ORDER)
    # Ranks that know it from different sources write the same layout down.
    return usual if usual == layout else layout


def _read_named_groups(configs: Sequence[object], rank: int, world_size: int) -> list[AxisGroup]:
    """This rank's groups whose description names an axis."""
    groups: dict[AxisGroup, None] = {}
    descriptions: dict[str, None] = {}
    for config in configs:
        if not isinstance(config, Mapping):
            raise Missing(f"a process group of the trace is {config!r}, not a table of fields")
        description = str(config.get("pg_desc", "undefined"))
        descriptions[description] = None
        axis = axis_of_description(description)
        if axis is None:
            continue
        ranks = _read_ranks(config.get("ranks"), config.get("pg_size"), world_size)
        if ranks is None:
            raise Missing(
                f"process group {description} has ranks {config.get('ranks')!r} and size "
                f"{config.get('pg_size')!r}, which cannot be read as a list of ranks"
            )
        if rank in ranks:
            groups[AxisGroup(axis=axis, description=description, ranks=ranks)] = None
    if not groups:
        raise Missing(
            f"no process group of the trace names an axis (descriptions: "
            f"{', '.join(descriptions)}); give the layout by hand, such as dp={world_size}"
        )
    return list(groups)


def _read_ranks(ranks: object, size: object, world_size: int) -> tuple[int, ...] | None:
    """The ranks of a group from a list, or from text such as `[0, 2, ..., 14]`."""
    if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
        listed = list(ranks)
    elif isinstance(ranks, str) and re.fullmatch(r"\[[0-9,.\s]*\]", ranks):
        if "..." in ranks:
            return _complete_ranks(ranks, size)
        listed = _find_numbers(ranks)
    else:
        return None
    if not listed and size == world_size:
        # c10d leaves the list empty for a group of all ranks.
        return tuple(range(world_size))
    return tuple(sorted(listed)) if listed and size in (None, len(listed)) else None


def _complete_ranks(text: str, size: object) -> tuple[int, ...] | None:
    """Continue evenly spaced ranks to the stated size; whether they fit the world comes later."""
    before, _, after = text.partition("...")
    head, tail = _find_numbers(before), _find_numbers(after)
    if len(head) < 2 or not isinstance(size, int) or size < len(head) + len(tail):
        return None
    stride = head[1] - head[0]
    ranks = [head[0] + index * stride for index in range(size)]
    fits = ranks[: len(head)] == head and ranks[size - len(tail) :] == tail
    return tuple(ranks) if fits else None


def _find_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall("[0-9]+", text)]


def _drop_parts(groups: list[AxisGroup]) -> list[AxisGroup]:
    """Without groups inside a wider one of the same axis: a flattened dp covers its dp_shard."""
    widest: list[AxisGroup] = []
    for group in sorted(groups, key=lambda group: -len(group.ranks)):
        same_axis = (other for other in widest if other.axis == group.axis)
        if not any(set(group.ranks) <= set(other.ranks) for other in same_axis):
            widest.append(group)
    return widest


def _without_folded_experts(groups: list[AxisGroup], world_size: int) -> list[AxisGroup]:
    dense = [group for group in groups if group.axis != Axis.EP]
    fills_world = math.prod(len(group.ranks) for group in dense) == world_size
    return dense if fills_world else groups


def _shorten(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"[{', '.join(map(str, ranks[:8]))}, …, {ranks[-1]}]"
