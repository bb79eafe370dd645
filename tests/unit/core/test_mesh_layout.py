import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.layout import Axis, Layout
from meshscope.core.mesh_layout import layout_from_mesh
from meshscope.errors import LayoutError

# The deadline measures the machine, not the code: CI shares its cores.
any_duration = settings(deadline=None)


@dataclass
class FakeTensor:
    shape: tuple[int, ...]
    ranks: list[int]

    def tolist(self) -> Any:
        nested: list[Any] = self.ranks
        for size in reversed(self.shape[1:]):
            nested = [nested[i : i + size] for i in range(0, len(nested), size)]
        return nested


def make_mesh(
    names: tuple[str, ...] | None, shape: tuple[int, ...], ranks: list[int] | None = None
):
    ranks = list(range(math.prod(shape))) if ranks is None else ranks
    return SimpleNamespace(mesh_dim_names=names, mesh=FakeTensor(shape, ranks))


class TestMesh:
    @pytest.mark.parametrize(
        ("names", "shape", "expected"),
        [
            (("pp", "dp", "tp"), (2, 2, 2), Layout(dp=2, tp=2, pp=2)),
            (("dp", "tp", "pp"), (2, 3, 4), Layout(dp=2, tp=3, pp=4, order=("dp", "tp", "pp"))),
            (("Data", "model"), (4, 2), Layout(dp=4, tp=2)),
            (("stage", "fsdp", "context", "tensor"), (2, 2, 2, 2), Layout(pp=2, dp=2, cp=2, tp=2)),
            (("pp", "dp_replicate", "dp_shard", "tp"), (1, 2, 4, 1), Layout(dp=8)),
            (("dp_replicate", "cp", "dp_shard"), (2, 1, 4), Layout(dp=8)),
            (("expert",), (1,), Layout()),
        ],
    )
    def test_dim_names_from_slowest_to_fastest_give_the_order(
        self, names: tuple[str, ...], shape: tuple[int, ...], expected: Layout
    ):
        assert layout_from_mesh(make_mesh(names, shape)) == expected

    def test_a_transposed_mesh_is_ordered_by_its_ranks(self):
        mesh = make_mesh(("dp", "tp"), (2, 3), [0, 2, 4, 1, 3, 5])
        assert layout_from_mesh(mesh) == Layout(dp=2, tp=3, order=("tp", "dp"))

    @pytest.mark.parametrize(
        ("mesh", "complaint"),
        [
            (make_mesh(None, (2, 2)), "one name per dim is expected"),
            (make_mesh(("dp",), (2, 2)), "one name per dim is expected"),
            (make_mesh(("dp", "seq", "foo"), (2, 2, 2)), r"mesh dims \['seq', 'foo'\] are not"),
            (make_mesh(("dp", "tp"), (2, 2), [4, 5, 6, 7]), "pass the whole mesh, not a slice"),
            (make_mesh(("dp", "tp"), (2, 2), [0, 1, 3, 2]), "do not fill 4 ranks"),
            (make_mesh(("tp",), (4,), [0, 1, 3, 2]), "an even step along each dim"),
            (make_mesh(("dp", "tp"), (2, 2), [3, 2, 1, 0]), "do not fill 4 ranks"),
            (make_mesh(("dp_replicate", "tp", "dp_shard"), (2, 2, 2)), "dp-tp-dp"),
        ],
    )
    def test_a_mesh_that_is_no_layout_is_refused(self, mesh: Any, complaint: str):
        with pytest.raises(LayoutError, match=complaint):
            layout_from_mesh(mesh)

    @any_duration
    @given(st.permutations(list(Axis)), st.lists(st.integers(1, 3), min_size=5, max_size=5))
    def test_coordinates_are_the_positions_on_the_mesh(self, axes: list[Axis], shape: list[int]):
        layout = layout_from_mesh(make_mesh(tuple(map(str, axes)), tuple(shape)))
        for rank, position in enumerate(itertools.product(*map(range, shape))):
            assert [layout.coordinates(rank).along(axis) for axis in axes] == list(position)


class TestTorchMesh:
    @pytest.fixture
    def world_of_eight(self) -> Iterator[None]:
        pytest.importorskip("torch", reason="torch is not installed")
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
        yield
        dist.destroy_process_group()

    @pytest.mark.usefixtures("world_of_eight")
    def test_a_real_mesh_gives_its_layout(self):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert layout_from_mesh(mesh) == Layout(dp=2, tp=2, pp=2)
        with pytest.raises(LayoutError, match="pass the whole mesh, not a slice"):
            layout_from_mesh(mesh["pp"])
