"""Who is in which group, on a mesh of all five axes, against products of coordinates."""

import math
from collections.abc import Iterator
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from meshscope.core.layout import Axis, Layout  # noqa: E402
from meshscope.engine.mesh import AXES_OF, Mesh, Role  # noqa: E402
from meshscope.errors import LayoutError  # noqa: E402

ALL_AXES = Layout(dp=2, tp=2, pp=2, cp=2, ep=3)
LAYOUTS = [
    ALL_AXES,
    Layout(dp=2, tp=3, pp=2, cp=2, ep=2, order=("tp", "cp", "pp", "ep", "dp")),
    Layout(dp=2, tp=2, pp=2),
    Layout(tp=2, cp=4),
    Layout(dp=4),
]


@pytest.fixture
def make_mesh() -> Iterator[object]:
    def make(layout: Layout, rank: int) -> Mesh:
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        return Mesh(layout)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def expect_ranks(layout: Layout, rank: int, axes: tuple[Axis, ...]) -> list[int]:
    """All indices along the axes, with this rank's own along the others."""
    here = layout.coordinates(rank)
    ranges = [range(layout.degree(axis)) for axis in axes]
    indices = (dict(zip(map(str, axes), chosen, strict=True)) for chosen in product(*ranges))
    return sorted(layout.rank_of(here, **one) for one in indices)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("where", [0.0, 0.4, 0.99])
def test_a_role_is_the_product_of_its_axes(make_mesh, layout: Layout, where: float) -> None:
    rank = int(where * layout.world_size)
    mesh = make_mesh(layout, rank)
    for role, axes in AXES_OF.items():
        expected = expect_ranks(layout, rank, axes)
        assert len(expected) == math.prod(layout.degree(axis) for axis in axes)
        group = mesh.group_of(role)
        assert (group is None) == (len(expected) == 1)
        if group is not None:
            assert dist.get_process_group_ranks(group) == expected
        assert mesh.is_first_of(role) == (rank == expected[0])


def test_roles_cover_the_mesh_without_overlap() -> None:
    # Whatever cuts the model and whatever copies it multiply to the world, and share no axis.
    model = {Axis.TP, Axis.PP}
    assert set(AXES_OF[Role.REPLICAS]) | model == set(Axis)
    assert not set(AXES_OF[Role.REPLICAS]) & model
    experts = {*AXES_OF[Role.EXPERTS], *model}
    assert set(AXES_OF[Role.EXPERT_REPLICAS]) | experts == set(Axis)
    assert not set(AXES_OF[Role.EXPERT_REPLICAS]) & experts


def test_a_group_is_made_once_for_the_axes_in_use(make_mesh) -> None:
    mesh = make_mesh(ALL_AXES, 5)
    assert mesh.group(Axis.CP, Axis.DP) is mesh.group_of(Role.EXPERT_REPLICAS)
    assert mesh.group(*Axis) is dist.group.WORLD
    tp_and_pp = mesh.group(Axis.TP, Axis.PP)
    assert mesh.group(Axis.PP, Axis.TP) is tp_and_pp
    assert dist.get_process_group_ranks(tp_and_pp) == expect_ranks(ALL_AXES, 5, (Axis.TP, Axis.PP))


def test_the_submesh_of_replicas_has_one_dimension(make_mesh) -> None:
    mesh = make_mesh(ALL_AXES, 0)
    replicas = mesh.submesh(Role.REPLICAS)
    assert replicas.ndim == 1
    assert sorted(replicas.mesh.tolist()) == expect_ranks(ALL_AXES, 0, AXES_OF[Role.REPLICAS])
    assert mesh.submesh(Role.MATRICES).mesh.tolist() == expect_ranks(ALL_AXES, 0, (Axis.TP,))


def test_unused_axes_are_no_dimensions(make_mesh) -> None:
    assert make_mesh(Layout(dp=2), 1).device_mesh.mesh_dim_names == ("pp", "dp", "tp")


def test_a_single_process_has_no_group() -> None:
    mesh = Mesh(Layout())
    assert all(mesh.group_of(role) is None for role in Role)
    assert all(mesh.is_first_of(role) for role in Role)
    with pytest.raises(LayoutError, match="no device mesh"):
        mesh.submesh(Role.REPLICAS)
