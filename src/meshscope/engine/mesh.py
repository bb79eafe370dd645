"""The process groups of a run: for every role the ranks that share it, along one axis or several.

    mesh = Mesh(Layout(dp=2, tp=2, pp=2), device)
    mesh.group(Axis.TP), mesh.group_of(Role.REPLICAS), mesh.here.pp

Code asks for a role, and `AXES_OF` says which axes that is: replicas are dp×ep×cp, so gradients
stay right when an axis is added. Groups come from a torch DeviceMesh, so whatever reads one (FSDP2,
DTensor, the recorder) finds its axes by name. Axes of degree 1 have no group: None, nothing to
send. One process without torch.distributed is a mesh of one.
"""

import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshscope.core.layout import Axis, Coordinates, Layout
from meshscope.engine.model.tensor_regions import Group
from meshscope.errors import LayoutError, UsageError


class Role(StrEnum):
    """What a group of ranks is for."""

    REPLICAS = "replicas"
    """They hold the same dense parameters and see other tokens: gradients are averaged."""
    EXPERT_REPLICAS = "expert_replicas"
    """They hold the same experts."""
    EXPERTS = "experts"
    """Together they hold all experts of a layer, and exchange tokens."""
    CONTEXT = "context"
    """Together they hold one sequence, and exchange keys and values."""
    MATRICES = "matrices"
    """Together they hold the matrices of a stage."""
    STAGES = "stages"
    """Together they hold the stages of one replica."""
    WHOLE_MESH = "whole_mesh"
    """Loss, gradient norm and stop requests."""


AXES_OF: dict[Role, tuple[Axis, ...]] = {
    Role.REPLICAS: (Axis.DP, Axis.EP, Axis.CP),
    Role.EXPERT_REPLICAS: (Axis.DP, Axis.CP),
    Role.EXPERTS: (Axis.EP,),
    Role.CONTEXT: (Axis.CP,),
    Role.MATRICES: (Axis.TP,),
    Role.STAGES: (Axis.PP,),
    Role.WHOLE_MESH: tuple(Axis),
}
"""Every axis multiplies the world size (`core.layout`): ranks along ep share dense parameters."""


class Mesh:
    """Where this rank is and whom it talks to. Collective over all ranks."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.device = _open_device(torch.device(device))
        is_joined = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if is_joined else 1
        if world_size != layout.world_size:
            raise LayoutError(
                f"{layout.describe()} needs {layout.world_size} ranks, but there are {world_size}; "
                f"start {layout.world_size} or change the degrees"
            )
        self.rank = dist.get_rank() if is_joined else 0
        self.here: Coordinates = layout.coordinates(self.rank)
        self.device_mesh: DeviceMesh | None = None
        """None in a single process."""
        self.tied_group: Group = None
        """The ranks of the first and the last pipeline rank, for tables that both hold."""
        self._joint_groups: dict[tuple[Axis, ...], Group] = {}
        if world_size > 1:
            self.device_mesh = self._make_device_mesh()
            self.tied_group = self._make_tied_group()
            for role in Role:
                self.group_of(role)

    def group(self, *axes: Axis) -> Group:
        """The ranks that differ from this one along these axes only; None if there is no other.

        Collective at the first call with several axes that no role has.
        """
        if self.device_mesh is None:
            return None
        if set(axes) == set(Axis):
            return dist.group.WORLD
        used = tuple(axis for axis in Axis if axis in axes and self.layout.degree(axis) > 1)
        if len(used) < 2:
            return self.device_mesh.get_group(used[0].value) if used else None
        if used not in self._joint_groups:
            groups = self.layout.joint_groups(*used)
            self._joint_groups[used] = self._make_group(groups, "mesh_" + "_".join(used))
        return self._joint_groups[used]

    def group_of(self, role: Role) -> Group:
        """The ranks that share a role with this one; None if there is no other."""
        return self.group(*AXES_OF[role])

    def is_first_of(self, role: Role) -> bool:
        """Whether this rank is the one of its group that counts what all of them hold."""
        return not any(self.here.along(axis) for axis in AXES_OF[role])

    def submesh(self, role: Role) -> DeviceMesh:
        """The device mesh of one dimension that a role's ranks make; there must be one."""
        if self.device_mesh is None:
            raise LayoutError("a single process has no device mesh; start at least two ranks")
        names = [str(axis) for axis in self._list_axes() if axis in AXES_OF[role]]
        found = self.device_mesh[tuple(names)]
        return found if len(names) == 1 else found._flatten()

    def _list_axes(self) -> list[Axis]:
        """The dimensions of the device mesh: dp, tp and pp always, cp and ep when in use."""
        named = self.layout.named_axes
        ordered = [Axis(axis) for axis in self.layout.order if axis in named]
        return ordered + [axis for axis in named if axis not in ordered]

    def _make_device_mesh(self) -> DeviceMesh:
        axes = self._list_axes()
        shape = tuple(self.layout.degree(axis) for axis in axes)
        names_of = [str(axis) for axis in axes]
        # torch gives a new group its own timeout, 10 or 30 minutes, not that of the world. To gloo
        # set when it is made: point-to-point operations keep their first timeout.
        options = self._find_world_options()
        is_gloo = dist.get_backend() == "gloo"
        override: Any = dict.fromkeys(names_of, ("gloo", options))
        mesh = init_device_mesh(
            self.device.type,
            shape,
            mesh_dim_names=tuple(names_of),
            backend_override=override if is_gloo and options is not None else None,
        )
        if not is_gloo and options is not None:
            set_timeout: Any = dist.distributed_c10d._set_pg_timeout
            for name in names_of:
                set_timeout(options._timeout, mesh.get_group(name))
        return mesh

    def _find_world_options(self) -> Any:
        """None where this torch does not tell: groups then have torch's own timeout."""
        world: Any = dist.group.WORLD
        try:
            return world._get_backend(self.device).options
        except (AttributeError, RuntimeError):
            return None

    def _make_tied_group(self) -> Group:
        if self.layout.pp == 1:
            return None
        ends = ((pipeline[0], pipeline[-1]) for pipeline in self.layout.groups(Axis.PP))
        return self._make_group(ends, "mesh_pp_ends")

    def _make_group(self, groups: Iterable[Sequence[int]], description: str) -> Group:
        """The one of these groups that this rank is in, if any."""
        found: Group = None
        options = self._find_world_options()
        timeout = None if options is None else options._timeout
        # All ranks make all groups, in one order: torch asks for it.
        for ranks in groups:
            group = dist.new_group(list(ranks), timeout=timeout, group_desc=description)
            if self.rank in ranks:
                found = group
        return found


def _open_device(device: torch.device) -> torch.device:
    """Makes an accelerator this process's, by its index.

    A DeviceMesh would otherwise choose one by local rank, which fails where ranks share a GPU.
    """
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def pick_device(configured: str, given: torch.device | str | None = None) -> torch.device:
    """The device of this process: as given, as configured, or a GPU where there is one.

    Local ranks take GPUs in turn, where a launcher says which local rank this is.
    """
    kind = torch.device(given).type if given is not None else configured
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind != "cuda":
        return torch.device(given or kind)
    if not torch.cuda.is_available():
        raise UsageError(
            "device is cuda, but torch finds no GPU here; check the driver and "
            "CUDA_VISIBLE_DEVICES, or use cpu"
        )
    if given is not None and torch.device(given).index is not None:
        return torch.device(given)
    local_rank = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    return torch.device("cuda", local_rank % torch.cuda.device_count())
