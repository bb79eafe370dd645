"""How the ranks are arranged, from what the program made: meshes, groups, wrappers, stages.

Looked at in this order: the DeviceMesh of the models' parameters; process groups whose name or
maker says the axis (DeviceMesh, Megatron, DeepSpeed, DistributedDataParallel, FSDP, pipeline
stages), put together; and, when no name says anything, what the groups carry in which phase. What
is found comes with how it is known. Nothing is searched on the heap: models are those watched, and
a pipeline's stage is met when it computes.

Wrong when other ranks have groups of another shape than this one, and where a mesh's names mean
something else. Megatron's and DeepSpeed's groups are known by the names in their modules.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.model.group_traffic import GroupTraffic
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.capture.steps.taps import Tap
from meshscope.core.layout import Axis, Layout
from meshscope.core.mesh_layout import (
    AxisGroup,
    axis_of_description,
    axis_of_dim,
    layout_from_groups,
    layout_from_mesh,
)
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError

_MAX_MODULES = 5000
_MAX_PARAMETERS = 2000
"""Looked at per model and time: a model's first ones tell as much as all."""
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Torch's classes around a model, and what programs derive from them."""
_MAX_VISITS = 30
"""After so many the program's mesh is what it is."""
_MEGATRON_MODULES = ("megatron.core.parallel_state", "apex.transformer.parallel_state")
_DEEPSPEED_GROUPS = "deepspeed.utils.groups"
_MODULE_GROUPS = (
    "DATA_PARALLEL_GROUP",
    "TENSOR_MODEL_PARALLEL_GROUP",
    "PIPELINE_MODEL_PARALLEL_GROUP",
    "CONTEXT_PARALLEL_GROUP",
    "EXPERT_MODEL_PARALLEL_GROUP",
)
"""Megatron's global variables without their underscore; DeepSpeed has some of them."""
_MPU_GROUPS: tuple[tuple[Axis, tuple[str, ...]], ...] = (
    (Axis.DP, ("get_data_parallel_group",)),
    (
        Axis.TP,
        (
            "get_tensor_model_parallel_group",
            "get_slice_parallel_group",
            "get_model_parallel_group",
        ),
    ),
    (Axis.PP, ("get_pipeline_model_parallel_group", "get_pipe_parallel_group")),
    (Axis.CP, ("get_sequence_parallel_group",)),
)
"""What DeepSpeed asks a program's `mpu` for, and the spellings: the first that is there counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayout:
    """A layout, and how it is known."""

    layout: Layout
    source: str


@dataclass(slots=True)
class _ParameterMesh:
    """A DeviceMesh that parameters are on."""

    mesh: Any
    is_sharded: list[bool]
    """Per dim: some parameter is cut along it."""
    is_fsdp: bool


class LayoutSearch:
    """Looks again and again until a layout is found. Costs milliseconds at most."""

    def __init__(self, guard: Guard, note: Callable[[str, str], None]) -> None:
        self._guard = guard
        self._note = note
        self._num_visits = 0
        self._stage_tap: Tap | None = None
        self._stage_group: tuple[Any] | None = None
        """The group of this rank's pipeline stage, once it is met; None inside: all ranks."""
        self._traffic = GroupTraffic()
        self._problem = ""

    def visit(self, dist: Any, models: Sequence[Any], log: OperationLog) -> FoundLayout | None:
        """The layout, once it can be told."""
        if dist is None or int(dist.get_world_size()) < 2 or self._num_visits >= _MAX_VISITS:
            return None
        self._num_visits += 1
        rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
        self.watch_stages()
        meshes = [mesh for model in models for mesh in _list_meshes(model)]
        groups = self._list_groups(dist, models, meshes)
        found = _read_meshes(meshes, groups, rank, world_size)
        if found is None and groups:
            found = self._combine(groups, rank, world_size)
        if found is None and not groups:
            # A name says more than traffic does, also where it does not say enough.
            guessed = self._traffic.guess(log, rank, world_size)
            found = None if guessed is None else FoundLayout(layout=guessed[0], source=guessed[1])
        if found is not None:
            self.remove()
        elif self._num_visits == _MAX_VISITS:
            self.remove()
            if self._problem:
                self._note("layout", f"the layout is not known: {self._problem}")
        return found

    def _combine(
        self, groups: Sequence[AxisGroup], rank: int, world_size: int
    ) -> FoundLayout | None:
        layout = layout_from_groups(groups, rank, world_size)
        if isinstance(layout, Unavailable):
            self._problem = layout.reason
            return None
        used = [g.description for g in groups if len(g.ranks) > 1]
        return FoundLayout(layout=layout, source=f"groups of {', '.join(dict.fromkeys(used))}")

    def _list_groups(
        self, dist: Any, models: Sequence[Any], meshes: Iterable[_ParameterMesh]
    ) -> list[AxisGroup]:
        """This rank's groups along one axis, by whoever made them."""
        members = _Members(dist)
        found = [*_list_described(dist)]
        found += [group for mesh in meshes for group in _split_mesh(mesh)]
        for model in models:
            found += _list_wrapped(model, members)
        found += _list_module_groups(members)
        if self._stage_group is not None:
            found += members.along(Axis.PP, "pipeline stages", self._stage_group[0])
        return list(dict.fromkeys(found))

    def watch_stages(self) -> None:
        """Listens for the first stage that computes: torch keeps no list of them."""
        if self._stage_tap is not None or self._stage_group is not None:
            return
        stages = sys.modules.get("torch.distributed.pipelining.stage")
        owner = getattr(stages, "_PipelineStageBase", None)
        if owner is not None and hasattr(owner, "forward_one_chunk"):
            begins = self._guard.protect("pipeline stage", self._meet_stage)
            self._stage_tap = Tap(
                owner, "forward_one_chunk", begins, _do_nothing, wants_result=False
            )

    def _meet_stage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stage = args[0]
        self._stage_group = (stage.group,)
        self.remove()

    def remove(self) -> None:
        """Takes the tap out."""
        tap, self._stage_tap = self._stage_tap, None
        if tap is not None:
            tap.remove()


def _do_nothing(token: None) -> None:
    """The end of a tap that needs only the begin."""


class _Members:
    """The ranks of torch's groups."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist

    def along(self, axis: Axis, description: str, group: Any) -> list[AxisGroup]:
        """The group as one along `axis`; nothing when its ranks cannot be told."""
        try:
            ranks = (
                range(int(self._dist.get_world_size()))
                if group is None
                else self._dist.get_process_group_ranks(group)
            )
            members = tuple(sorted(int(rank) for rank in ranks))
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError):
            return []
        return [AxisGroup(axis=axis, description=description, ranks=members)]


def _list_described(dist: Any) -> Iterator[AxisGroup]:
    """Groups that their makers named: DeviceMesh (`mesh_tp`) and Megatron."""
    world = getattr(dist.distributed_c10d, "_world", None)
    for group, members in list(getattr(world, "pg_group_ranks", {}).items()):
        description = str(getattr(group, "group_desc", "") or "")
        axis = axis_of_description(description)
        if axis is not None:
            yield AxisGroup(axis=axis, description=description, ranks=tuple(sorted(members)))


def _list_meshes(model: Any) -> list[_ParameterMesh]:
    """The meshes of a model's parameters, each once."""
    tensors = sys.modules.get("torch.distributed.tensor")
    kind = getattr(tensors, "DTensor", None)
    if kind is None:
        return []
    found: dict[int, _ParameterMesh] = {}
    is_fsdp: bool | None = None
    for parameter in islice(model.parameters(), _MAX_PARAMETERS):
        if not isinstance(parameter, kind):
            continue
        if is_fsdp is None:
            is_fsdp = _has_fsdp(model)
        mesh = parameter.device_mesh
        entry = found.get(id(mesh))
        if entry is None:
            entry = found[id(mesh)] = _ParameterMesh(mesh, [False] * int(mesh.ndim), is_fsdp)
        for dim, placement in enumerate(parameter.placements):
            entry.is_sharded[dim] |= not placement.is_replicate()
    return list(found.values())


def _has_fsdp(model: Any) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    modules = islice(model.modules(), _MAX_MODULES)
    return kind is not None and any(isinstance(module, kind) for module in modules)


def _read_meshes(
    meshes: Iterable[_ParameterMesh], groups: Iterable[AxisGroup], rank: int, world_size: int
) -> FoundLayout | None:
    """The layout of a mesh over all ranks whose dims are named; the whole mesh shows it."""
    whole: dict[int, Any] = {}
    for one in meshes:
        root = one.mesh._get_root_mesh() if hasattr(one.mesh, "_get_root_mesh") else one.mesh
        whole |= {id(mesh): mesh for mesh in (root, one.mesh)}
    for mesh in whole.values():
        try:
            layout = layout_from_mesh(mesh)
        except LayoutError:
            continue
        if layout.world_size == world_size and _agrees(layout, groups, rank):
            sizes = zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)
            dims = ", ".join(f"{name} {size}" for name, size in sizes)
            return FoundLayout(layout=layout, source=f"the parameters' DeviceMesh ({dims})")
    return None


def _agrees(layout: Layout, groups: Iterable[AxisGroup], rank: int) -> bool:
    """Whether it has all groups but those of dp, which may span more, and of experts, which cut
    ranks anew."""
    return all(
        len(group.ranks) < 2 or group.ranks == layout.group_ranks(group.axis, rank)
        for group in groups
        if group.axis in (Axis.TP, Axis.PP, Axis.CP)
    )


def _split_mesh(one: _ParameterMesh) -> Iterator[AxisGroup]:
    """This rank's group along each dim of a mesh, by name or by what is done along it: FSDP2
    shards over dp; else parameters are copies along dp, and cut along tp."""
    mesh = one.mesh
    here = mesh.get_coordinate()
    names = mesh.mesh_dim_names or ()
    for dim in range(int(mesh.ndim) if here is not None else 0):
        name = str(names[dim]) if names else str(dim)
        axis, description = axis_of_dim(name), f"DeviceMesh {name}"
        if axis is None:
            axis = Axis.DP if one.is_fsdp or not one.is_sharded[dim] else Axis.TP
            whose = "FSDP2's" if one.is_fsdp else "DTensors'"
            description = f"{whose} DeviceMesh" + (f" dim {name}" if len(here) > 1 else "")
        index = tuple(slice(None) if d == dim else here[d] for d in range(len(here)))
        ranks = tuple(sorted(int(rank) for rank in mesh.mesh[index].tolist()))
        yield AxisGroup(axis=axis, description=description, ranks=ranks)


def _list_wrapped(model: Any, members: _Members) -> Iterator[AxisGroup]:
    """Groups of DistributedDataParallel, FSDP1 and DeepSpeed's engine."""
    for module in islice(model.modules(), _MAX_MODULES):
        names = {kind.__name__ for kind in type(module).__mro__}
        name = next((one for one in _WRAPPERS if one in names), "")
        if name:
            yield from members.along(Axis.DP, name, module.process_group)
            replicas = getattr(module, "_inter_node_pg", None)
            if replicas is not None:
                yield from members.along(Axis.DP, f"{name}'s replicas", replicas)
        elif type(module).__module__.startswith("deepspeed."):
            mpu = getattr(module, "mpu", None)
            yield from _list_mpu_groups(mpu, members) if mpu is not None else ()


def _list_module_groups(members: _Members) -> Iterator[AxisGroup]:
    """Groups that Megatron and DeepSpeed keep in global variables."""
    for module_name in (*_MEGATRON_MODULES, _DEEPSPEED_GROUPS):
        module = sys.modules.get(module_name)
        for name in _MODULE_GROUPS if module is not None else ():
            group, axis = getattr(module, f"_{name}", None), axis_of_description(name)
            if group is not None and axis is not None:
                yield from members.along(axis, name, group)
    deepspeed: Any = sys.modules.get(_DEEPSPEED_GROUPS)
    if deepspeed is None:
        return
    mpu = getattr(deepspeed, "mpu", None)
    if mpu is not None:
        yield from _list_mpu_groups(mpu, members)
    elif getattr(deepspeed, "_TENSOR_MODEL_PARALLEL_GROUP", None) is None:
        # Without an mpu DeepSpeed's replicas are all ranks, and it has cloned that group.
        world = getattr(deepspeed, "_WORLD_GROUP", None)
        if world is not None:
            yield from members.along(Axis.DP, "DeepSpeed's world group", world)


def _list_mpu_groups(mpu: Any, members: _Members) -> Iterator[AxisGroup]:
    for axis, getters in _MPU_GROUPS:
        getter = next((name for name in getters if hasattr(mpu, name)), None)
        if getter is None:
            continue
        try:
            group = getattr(mpu, getter)()
        except (AssertionError, RuntimeError, AttributeError, TypeError):  # it has no such group
            continue
        if group is not None:
            yield from members.along(axis, f"mpu.{getter}", group)
