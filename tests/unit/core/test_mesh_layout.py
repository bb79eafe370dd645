import gzip
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.layout import Axis, Layout
from meshscope.core.mesh_layout import (
    AxisGroup,
    layout_from_groups,
    layout_from_mesh,
    layout_from_process_groups,
)
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError

# The deadline measures the machine, not the code: CI shares its cores.
any_duration = settings(deadline=None)

TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"


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


def make_info(layout: Layout, rank: int, descriptions: dict[str, str]) -> dict[str, object]:
    """What a trace of `rank` would hold: the world, then one group for each described axis."""
    world = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": layout.world_size}
    groups = [world | {"ranks": list(range(layout.world_size))}]
    for axis, description in descriptions.items():
        ranks = list(layout.group_ranks(axis, rank))
        groups.append({"pg_desc": description, "pg_size": len(ranks), "ranks": ranks})
    return {"rank": rank, "world_size": layout.world_size, "pg_config": groups}


def reason_of(result: Layout | Unavailable) -> str:
    assert isinstance(result, Unavailable), result
    return result.reason


MESH_DESCRIPTIONS = {str(axis): f"mesh_{axis}" for axis in Axis}
MEGATRON_DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
}


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
    def test_a_real_mesh_and_the_groups_it_makes_give_the_same_layout(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import _get_all_pg_configs

        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert layout_from_mesh(mesh) == Layout(dp=2, tp=2, pp=2)
        # The profiler writes these configs into its traces as they are.
        info = {"rank": 3, "world_size": 8, "pg_config": _get_all_pg_configs()}
        assert layout_from_process_groups(info) == Layout(dp=2, tp=2, pp=2)
        with pytest.raises(LayoutError, match="pass the whole mesh, not a slice"):
            layout_from_mesh(mesh["pp"])


class TestProcessGroups:
    @any_duration
    @given(
        st.permutations(list(Axis)),
        st.lists(st.integers(1, 3), min_size=5, max_size=5),
        st.integers(0, 3**5 - 1),
    )
    def test_the_groups_of_any_one_rank_give_the_layout_back(
        self, axes: list[Axis], degrees: list[int], seed: int
    ):
        order = tuple(map(str, axes))
        layout = Layout(**dict(zip(order, degrees, strict=True)), order=order)
        info = make_info(layout, seed % layout.world_size, MESH_DESCRIPTIONS)
        assert layout_from_process_groups(info) == layout

    @pytest.mark.parametrize("rank", range(16))
    def test_megatron_descriptions(self, rank: int):
        layout = Layout(dp=2, tp=2, pp=2, cp=2)
        info = make_info(layout, rank, MEGATRON_DESCRIPTIONS)
        info["pg_config"] += [  # type: ignore[operator]
            {"pg_desc": "DATA_PARALLEL_GROUP_GLOO", "ranks": list(layout.peers(rank))},
            {"pg_desc": "MODEL_PARALLEL_GROUP", "ranks": list(range(4))},
        ]
        assert layout_from_process_groups(info) == layout

    def test_experts_folded_into_data_parallel_are_left_out(self):
        info = make_info(Layout(dp=4, tp=2), 0, MEGATRON_DESCRIPTIONS)
        expert = {"pg_desc": "EXPERT_MODEL_PARALLEL_GROUP", "pg_size": 2, "ranks": [0, 2]}
        info["pg_config"] += [expert]  # type: ignore[operator]
        assert layout_from_process_groups(info) == Layout(dp=4, tp=2)

    @pytest.mark.parametrize("flattened", [[], [{"pg_desc": "mesh_dp", "ranks": [1, 3, 5, 7]}]])
    def test_replicate_and_shard_are_one_data_parallel_axis(self, flattened: list[object]):
        groups = [
            {"pg_desc": "mesh_dp_replicate", "ranks": [1, 5]},
            {"pg_desc": "mesh_dp_shard", "ranks": [1, 3]},
            {"pg_desc": "mesh_tp", "ranks": [0, 1]},
            *flattened,
        ]
        info = {"rank": 1, "world_size": 8, "pg_config": groups}
        assert layout_from_process_groups(info) == Layout(dp=4, tp=2)

    @pytest.mark.parametrize(
        ("dp_ranks", "dp_size"),
        [
            ("[0, 2, 4, 6]", 4),
            ("[0, 2, ..., 6]", 4),
            ("[0, 2, ...]", 4),
            ("[0,2,4,6]", None),
        ],
    )
    def test_ranks_as_text_even_cut_short(self, dp_ranks: str, dp_size: int | None):
        groups = [
            {"pg_desc": "mesh_dp", "pg_size": dp_size, "ranks": dp_ranks},
            {"pg_desc": "mesh_tp", "pg_size": 2, "ranks": "[0, 1]"},
        ]
        info = {"rank": 0, "world_size": 8, "pg_config": groups}
        assert layout_from_process_groups(info) == Layout(dp=4, tp=2)

    def test_an_empty_list_of_world_size_is_the_world(self):
        groups = [{"pg_desc": "mesh_dp", "pg_size": 8, "ranks": []}]
        info = {"rank": 0, "world_size": 8, "pg_config": groups}
        assert layout_from_process_groups(info) == Layout(dp=8)

    def test_one_rank_needs_no_groups(self):
        assert layout_from_process_groups({"rank": 0, "world_size": 1}) == Layout()

    @pytest.mark.parametrize(
        ("groups", "reason"),
        [
            (None, "lists no process groups"),
            ([], "lists no process groups"),
            (["dp"], "not a table of fields"),
            (
                [{"pg_desc": "default_pg", "ranks": [0, 1, 2, 3]}],
                "names an axis (descriptions: def",
            ),
            ([{"pg_desc": "mesh_dp", "ranks": "0-3"}], "cannot be read as a list of ranks"),
            ([{"pg_desc": "mesh_dp", "pg_size": 4, "ranks": [0]}], "cannot be read"),
            ([{"pg_desc": "mesh_dp", "pg_size": 4, "ranks": "[0, ...]"}], "cannot be read"),
            ([{"pg_desc": "mesh_dp", "pg_size": 4, "ranks": "[0, 1, ..., 7]"}], "cannot be read"),
            ([{"pg_desc": "mesh_dp", "ranks": [0, 2]}], "do not fill 4 ranks"),
            ([{"pg_desc": "mesh_tp", "ranks": [0]}], "do not fill 4 ranks"),
            ([{"pg_desc": "mesh_dp", "ranks": [0, 1, 4, 5]}], "holds ranks [0, 1, 4, 5]"),
            (
                [{"pg_desc": "mesh_dp", "ranks": [0, 1]}, {"pg_desc": "mesh_dp", "ranks": [0, 2]}],
                "more than one mesh",
            ),
        ],
    )
    def test_groups_that_show_no_layout_say_why(self, groups: object, reason: str):
        result = layout_from_process_groups({"rank": 0, "world_size": 4, "pg_config": groups})
        assert reason in reason_of(result)

    def test_the_order_in_which_a_group_lists_its_ranks_does_not_matter(self):
        groups = [{"pg_desc": "mesh_dp", "ranks": [2, 0]}, {"pg_desc": "mesh_tp", "ranks": [1, 0]}]
        info = {"rank": 0, "world_size": 4, "pg_config": groups}
        assert layout_from_process_groups(info) == Layout(dp=2, tp=2)

    def test_a_header_without_rank_or_world_size_says_so(self):
        assert "rank None of world size None" in reason_of(layout_from_process_groups({}))


@pytest.mark.skipif(not TRACES.is_dir(), reason="third-party traces (shared/data) are not here")
class TestRealTraceHeaders:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("a100-ddp-rank0of2", "names an axis (descriptions: default_pg)"),
            ("mi300-resnet-ckpt-rank0of8", "names an axis (descriptions: default_pg)"),
            ("b200-rank0of8", "names an axis (descriptions: default_pg, undefined)"),
            ("sampled-128gpu-rank0", "lists no process groups (pg_config) for its 128 ranks"),
            ("sampled-128gpu-rank1", "lists no process groups (pg_config) for its 128 ranks"),
        ],
    )
    def test_groups_without_axis_names_are_not_guessed_at(self, name: str, reason: str):
        assert reason in reason_of(layout_from_process_groups(read_distributed_info(name)))


def read_distributed_info(name: str) -> dict[str, object]:
    with gzip.open(TRACES / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        head = file.read(100_000)
    start = head.index("{", head.index('"distributedInfo"'))
    info: dict[str, object] = json.JSONDecoder().raw_decode(head, start)[0]
    return info


def cut(layout: Layout, rank: int, *roles: tuple[str, ...]) -> list[AxisGroup]:
    """Groups of a rank: the first name of each is what it is called, all are what it spans."""
    return [
        AxisGroup(
            axis=Axis(axes[0]),
            description="+".join(axes),
            ranks=next(ranks for ranks in layout.joint_groups(*axes) if rank in ranks),
        )
        for axes in roles
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(("pp", "dp", "cp", "tp"))), ids=str)
def test_groups_of_any_rank_give_the_layout_back(order: tuple[str, ...]) -> None:
    layout = Layout(dp=2, tp=2, pp=2, cp=2, order=order)
    for rank in range(layout.world_size):
        groups = cut(layout, rank, ("pp",), ("dp",), ("cp",), ("tp",))
        assert layout_from_groups(groups, rank, 16) == layout


@pytest.mark.parametrize("order", [("pp", "dp", "cp", "tp"), ("cp", "dp", "tp", "pp")], ids=str)
def test_of_a_dp_group_that_spans_cp_the_part_along_dp_counts(order: tuple[str, ...]) -> None:
    """FSDP shards over dp and cp, as torchtitan and Accelerate have it."""
    layout = Layout(dp=3, tp=2, pp=2, cp=2, order=order)
    for rank in range(layout.world_size):
        groups = cut(layout, rank, ("dp", "cp"), ("cp",), ("tp",), ("pp",))
        assert layout_from_groups(groups, rank, 24) == layout


def test_groups_that_leave_ranks_out_are_no_layout() -> None:
    groups = cut(Layout(dp=2, tp=2), 0, ("dp",))
    assert "do not fill 4 ranks" in reason_of(layout_from_groups(groups, 0, 4))


def test_a_layout_is_written_alike_whatever_shows_it() -> None:
    found = layout_from_mesh(make_mesh(("dp", "tp"), (2, 2)))
    assert found.to_dict() == Layout(dp=2, tp=2).to_dict()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("replicate", "shard"), Layout(dp=6)),
        (("dp_shard_mod_ep", "dp_shard_in_ep"), Layout(dp=6)),
        (("fsdp", "sp"), Layout(dp=2, cp=3)),
        (("expert", "mp"), Layout(ep=2, tp=3)),
    ],
)
def test_names_of_frameworks(names: tuple[str, ...], expected: Layout) -> None:
    assert layout_from_mesh(make_mesh(names, (2, 3))) == expected
