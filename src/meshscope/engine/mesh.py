"""The process groups of a run: one along each axis of the mesh, for this rank.

    mesh = Mesh(Layout(dp=2, tp=2, pp=2), device)
    mesh.tp_group, mesh.here.pp

Groups come from a torch DeviceMesh, so whatever reads one (FSDP2, DTensor, the recorder) finds its
axes by name. Axes of degree 1 have no group: None, nothing to send. One process without
torch.distributed is a mesh of one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshscope.core.layout import Axis, Coordinates, Layout
from meshscope.engine.model.tensor_regions import Group
from meshscope.errors import LayoutError

AXES = (Axis.DP, Axis.TP, Axis.PP)


class Mesh:
    """Where this rank stands and whom it talks to. Collective over all ranks."""

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
        self.world_group: Group = None
        self.tied_group: Group = None
        """The ranks of the first and the last pipeline rank, for tables that both hold."""
        if world_size > 1:
            self.world_group = dist.group.WORLD
            self.device_mesh = self._make_device_mesh()
            self.tied_group = self._make_tied_group()

    @property
    def dp_group(self) -> Group:
        """Ranks that hold the same part of the model."""
        return self._group(Axis.DP)

    @property
    def tp_group(self) -> Group:
        """Ranks that share this stage's matrices."""
        return self._group(Axis.TP)

    @property
    def pp_group(self) -> Group:
        """Ranks that hold the stages of this replica."""
        return self._group(Axis.PP)

    def submesh(self, axis: Axis) -> DeviceMesh:
        """The device mesh along one axis; there must be one."""
        if self.device_mesh is None:
            raise LayoutError("a single process has no device mesh; start at least two ranks")
        return self.device_mesh[axis.value]

    def _group(self, axis: Axis) -> Group:
        if self.device_mesh is None or self.layout.degree(axis) == 1:
            return None
        return self.device_mesh.get_group(axis.value)

    def _make_device_mesh(self) -> DeviceMesh:
        names = [axis for axis in self.layout.order if axis in AXES]
        names += [axis for axis in AXES if axis not in names]
        shape = tuple(self.layout.degree(axis) for axis in names)
        names_of = [str(axis) for axis in names]
        # torch gives a new group its own timeout, 10 or 30 minutes, not that of the world. To gloo
        # it must be told in the making: point-to-point operations keep what they began with.
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
        assert self.world_group is not None, "there are other ranks"
        try:
            return self.world_group._get_backend(self.device).options
        except (AttributeError, RuntimeError):
            return None

    def _make_tied_group(self) -> Group:
        if self.layout.pp == 1:
            return None
        found: Group = None
        options = self._find_world_options()
        timeout = None if options is None else options._timeout
        # All ranks make all groups, in one order: torch asks for it.
        for pipeline in self.layout.groups(Axis.PP):
            ends = [pipeline[0], pipeline[-1]]
            group = dist.new_group(ends, timeout=timeout, group_desc="mesh_pp_ends")
            if self.rank in ends:
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
