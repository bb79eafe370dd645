"""Which axis of the mesh a process group lies along, and how that is known.

Looked up in this order: the description of a DeviceMesh's group (`mesh_tp`) or of one of
Megatron-Core's (`TENSOR_MODEL_PARALLEL_GROUP`), the groups that the layout has, all ranks of the
job. Nothing is guessed: `AxisSource` says which of these it was.
"""

import re
from enum import StrEnum

from meshscope.core.layout import Axis, Layout
from meshscope.core.mesh_layout import axis_of_dim

WORLD = "world"
OTHER = "other"

_MESH_DESCRIPTION = re.compile(r"mesh_(?!dim_[0-9]+$|default$)([A-Za-z0-9_]{1,40})")
_AXIS_NAME = r"(?:dp_replicate|dp_shard|dp|tp|pp|cp|ep)"
_AXES_JOINED = re.compile(rf"{_AXIS_NAME}(?:_{_AXIS_NAME})*")
_SPELT_OUT = {
    "data_parallel": "dp",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
}
"""Names of a mesh's dims in frameworks that do not shorten them."""
_MEGATRON_AXES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "tp+pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp+cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp+cp",
    "HYBRID_DP_CP_GROUP": "dp+cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "dp+tp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "dp+tp+cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp+cp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "embedding",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert_tp",
    "EXPERT_DATA_PARALLEL_GROUP": "expert_dp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert_tp+ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "expert_tp+ep+pp",
}
"""Megatron-Core's descriptions. Experts cut ranks anew: their tp and dp are not the model's."""
_MEGATRON_VARIANT = re.compile(
    r"^HIERARCHICAL_|(?:_GLOO|_AG|_L[0-9]{1,2}|(?<=CP_GROUP)_[0-9]{1,9})+$"
)
"""The same ranks again for another backend or stream, or a part of them."""


class AxisSource(StrEnum):
    """Where the name of a group's axis comes from."""

    DESCRIPTION = "description"
    """The group's maker described it so."""
    LAYOUT = "layout"
    """Its members are those of a group of the layout."""
    WORLD = "world"
    """It holds every rank, and no single axis does."""
    NONE = "none"
    """It lies along no axis that is known."""


def name_axis(
    ranks: tuple[int, ...], description: str, *, layout: Layout | None, world_size: int
) -> tuple[str, AxisSource]:
    """The axis of a group with these members in ascending order, and where its name comes from."""
    described = _MESH_DESCRIPTION.fullmatch(description)
    if described is not None:
        return _name_dim(described[1], ranks, layout), AxisSource.DESCRIPTION
    megatron = _MEGATRON_AXES.get(_MEGATRON_VARIANT.sub("", description))
    if megatron is not None:
        return megatron, AxisSource.DESCRIPTION
    is_world = len(ranks) == world_size
    if layout is not None:
        axes = _axes_along(ranks, layout)
        if axes and (len(axes) == 1 or not is_world):
            return "+".join(axes), AxisSource.LAYOUT
    return (WORLD, AxisSource.WORLD) if is_world else (OTHER, AxisSource.NONE)


def _name_dim(name: str, ranks: tuple[int, ...], layout: Layout | None) -> str:
    """`dp_cp` → `dp+cp`, and `model` → `tp` if these are the layout's; any other name of a dim
    stays as it is."""
    name = _SPELT_OUT.get(name, name)
    if _AXES_JOINED.fullmatch(name) is not None:
        return "+".join(re.findall(_AXIS_NAME, name))
    axis = axis_of_dim(name)
    if axis is None or layout is None or _axes_along(ranks, layout) != (axis,):
        return name
    return str(axis)


def _axes_along(ranks: tuple[int, ...], layout: Layout) -> tuple[str, ...]:
    """The axes that a group spans in full; none when it holds only a part, or is no such group."""
    if len(ranks) < 2 or ranks[-1] >= layout.world_size:
        return ()
    spanned = []
    size = 1
    for axis in Axis:
        stride, degree = layout.stride(axis), layout.degree(axis)
        first = ranks[0] // stride % degree
        if any(rank // stride % degree != first for rank in ranks):
            spanned.append(str(axis))
            size *= degree
    return tuple(spanned) if size == len(ranks) else ()
