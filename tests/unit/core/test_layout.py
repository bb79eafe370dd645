import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.layout import (
    Axis,
    Coordinates,
    Layout,
    check_layout,
    find_groups_across_nodes,
    find_layout_problems,
)
from meshscope.errors import LayoutError

AXES = [str(axis) for axis in Axis]

# The deadline measures the machine, not the code: CI shares its cores.
any_duration = settings(deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.integers(1, 3)) for axis in AXES}
    order = draw(st.permutations(AXES))
    kept = [axis for axis in order if degrees[axis] > 1 or draw(st.booleans())]
    return Layout(**degrees, order=tuple(kept))


@st.composite
def layouts_with_rank(draw: st.DrawFn) -> tuple[Layout, int]:
    layout = draw(layouts())
    return layout, draw(st.integers(0, layout.world_size - 1))


axes = st.sampled_from(AXES)


class TestNumbering:
    def test_default_order_puts_tp_neighbours_on_consecutive_ranks(self):
        layout = Layout(dp=2, tp=2, pp=2)
        assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
        assert layout.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
        assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))

    def test_default_order_is_megatrons_with_context_and_expert_axes(self):
        layout = Layout(dp=2, tp=2, pp=2, cp=2, ep=2)
        strides = {axis: layout.stride(axis) for axis in AXES}
        assert strides == {"tp": 1, "cp": 2, "ep": 4, "dp": 8, "pp": 16}

    @pytest.mark.parametrize(
        ("rank", "expected"),
        [
            (3, Coordinates(dp=0, tp=1, pp=1)),
            (5, Coordinates(dp=1, tp=0, pp=1)),
            (7, Coordinates(dp=1, tp=1, pp=1)),
        ],
    )
    def test_order_with_pp_fastest_can_be_chosen(self, rank: int, expected: Coordinates):
        layout = Layout(dp=2, tp=2, pp=2, order=("dp", "tp", "pp"))
        assert layout.coordinates(rank) == expected

    def test_rank_of_takes_coordinates_indices_or_both(self):
        layout = Layout(dp=2, tp=2, pp=2)
        assert layout.rank_of(Coordinates(dp=1, tp=0, pp=1)) == 6
        assert layout.rank_of(dp=1, pp=1) == 6
        assert layout.rank_of(layout.coordinates(2), pp=1) == 6

    @any_duration
    @given(layouts())
    def test_ranks_and_coordinates_are_a_bijection(self, layout: Layout):
        every = [layout.coordinates(rank) for rank in range(layout.world_size)]
        assert len(set(every)) == layout.world_size
        assert [layout.rank_of(position) for position in every] == list(range(layout.world_size))
        grid = itertools.product(*(range(layout.degree(axis)) for axis in AXES))
        assert set(every) == {Coordinates(**dict(zip(AXES, cell, strict=True))) for cell in grid}

    @any_duration
    @given(layouts())
    def test_ranks_count_through_the_coordinates_in_order(self, layout: Layout):
        def digits(rank: int) -> list[int]:
            return [layout.coordinates(rank).along(axis) for axis in layout.order]

        assert sorted(range(layout.world_size), key=digits) == list(range(layout.world_size))

    @pytest.mark.parametrize("rank", [8, -1, 1.0, True, "3"])
    def test_a_rank_outside_the_world_is_refused(self, rank: object):
        with pytest.raises(LayoutError, match=r"is outside 0\.\.7 of dp2×tp2×pp2"):
            Layout(dp=2, tp=2, pp=2).coordinates(rank)  # type: ignore[arg-type]

    def test_every_index_outside_its_degree_is_named(self):
        with pytest.raises(LayoutError) as caught:
            Layout(dp=2, tp=2).rank_of(dp=2, tp=-1, pp=1)
        assert [line.split(" of ")[0] for line in str(caught.value).splitlines()] == [
            "dp index 2 is outside 0..1",
            "tp index -1 is outside 0..1",
            "pp index 1 is outside 0..0",
        ]


class TestGroups:
    @any_duration
    @given(layouts(), axes)
    def test_groups_of_an_axis_hold_every_rank_once(self, layout: Layout, axis: str):
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        assert {len(ranks) for ranks in groups} == {layout.degree(axis)}

    @any_duration
    @given(layouts(), axes)
    def test_members_agree_on_their_group_and_differ_only_along_its_axis(
        self, layout: Layout, axis: str
    ):
        for ranks in layout.groups(axis):
            assert {layout.group_ranks(axis, rank) for rank in ranks} == {ranks}
            assert [layout.coordinates(rank).along(axis) for rank in ranks] == list(
                range(layout.degree(axis))
            )
            for other in set(AXES) - {axis}:
                assert len({layout.coordinates(rank).along(other) for rank in ranks}) == 1

    def test_groups_of_some_ranks_are_those_that_hold_them(self):
        layout = Layout(dp=2, tp=2, pp=2)
        for axis in ("dp", "tp", "pp"):
            assert layout.groups_of(axis, range(8)) == layout.groups(axis)
            assert layout.groups_of(axis, [5]) == (layout.group_ranks(axis, 5),)
        huge = Layout(dp=1 << 20, tp=8)
        assert huge.groups_of("tp", [8, 9, 1 << 22]) == (
            tuple(range(8, 16)),
            tuple(range(1 << 22, (1 << 22) + 8)),
        )

    @any_duration
    @given(layouts())
    def test_a_group_name_stands_for_one_group(self, layout: Layout):
        names = []
        for axis in AXES:
            for ranks in layout.groups(axis):
                members_say = {layout.group_name(axis, rank) for rank in ranks}
                assert len(members_say) == 1
                names += members_say
        assert len(set(names)) == len(names)

    def test_names_follow_the_axes_in_use(self):
        layout = Layout(dp=2, tp=2, pp=2, order=("dp", "tp", "pp"))
        assert layout.group_name("dp", 1) == "dp_group_tp0_pp1"
        assert layout.group_name("tp", 5) == "tp_group_dp1_pp1"
        assert layout.group_name("pp", 3) == "pp_group_dp0_tp1"
        assert Layout(dp=2, cp=2).group_name("dp", 1) == "dp_group_tp0_pp0_cp1"

    def test_labels_list_dp_tp_pp_and_further_axes_in_use(self):
        assert Layout(dp=2, tp=2, pp=2).label(1) == "dp0.tp1.pp0"
        assert Layout(ep=2, tp=2).label(2) == "dp0.tp0.pp0.ep1"

    def test_peers_are_the_data_parallel_group_with_the_rank_itself(self):
        assert Layout(dp=4, tp=2).peers(3) == (1, 3, 5, 7)

    def test_peers_differ_along_cp_and_ep_too(self) -> None:
        assert Layout(cp=4).peers(2) == Layout(ep=4).peers(2) == (0, 1, 2, 3)
        layout = Layout(dp=2, cp=2, tp=2, pp=2)
        assert layout.peers(5) == (1, 3, 5, 7)
        for rank in range(16):
            head = layout.rank_of(tp=layout.coordinates(rank).tp, pp=layout.coordinates(rank).pp)
            assert layout.peer_head(rank) == layout.peers(rank)[0] == head

    def test_an_unknown_axis_is_refused(self):
        with pytest.raises(LayoutError, match="'sp' is not an axis of a layout; use dp, tp"):
            Layout().group_ranks("sp", 0)


class TestNeighbours:
    @any_duration
    @given(layouts_with_rank(), axes)
    def test_heads_and_tails_are_the_ends_of_the_group(self, where: tuple[Layout, int], axis: str):
        layout, rank = where
        ranks = layout.group_ranks(axis, rank)
        assert layout.is_head(axis, rank) == (rank == ranks[0])
        assert layout.is_tail(axis, rank) == (rank == ranks[-1])

    @any_duration
    @given(layouts_with_rank())
    def test_next_and_previous_stage_undo_each_other(self, where: tuple[Layout, int]):
        layout, rank = where
        following = layout.next_stage(rank)
        assert (following is None) == layout.is_tail("pp", rank)
        assert (layout.previous_stage(rank) is None) == layout.is_head("pp", rank)
        if following is not None:
            assert layout.previous_stage(following) == rank
            assert following == layout.rank_of(
                layout.coordinates(rank), pp=layout.coordinates(rank).pp + 1
            )


class TestConstruction:
    def test_every_bad_degree_and_order_entry_is_named_at_once(self):
        with pytest.raises(LayoutError) as caught:
            Layout(dp=0, tp=-2, pp=2.5, cp=True, ep=2, order=("dp", "xp", "dp"))  # type: ignore[arg-type]
        assert [line.split(",")[0].split(";")[0] for line in str(caught.value).splitlines()] == [
            "dp is 0",
            "tp is -2",
            "pp is 2.5",
            "cp is True",
            "order names 'xp'",
            "order names dp more than once",
            "ep has degree 2 but is not in order dp-xp-dp",
        ]

    @pytest.mark.parametrize("order", ["dp-tp-pp", ["dp", "tp"], None])
    def test_an_order_that_is_no_tuple_is_refused(self, order: object):
        with pytest.raises(LayoutError, match="a tuple of axis names"):
            Layout(dp=2, order=order)  # type: ignore[arg-type]

    def test_layouts_that_place_ranks_alike_are_equal(self):
        assert Layout(dp=2, tp=2) == Layout(dp=2, tp=2, order=("dp", "tp"))
        assert hash(Layout(dp=2, tp=2)) == hash(Layout(dp=2, tp=2, order=("dp", "tp")))
        assert Layout(dp=2, tp=2) != Layout(dp=2, tp=2, order=("tp", "dp"))
        assert Layout(dp=2) != "dp=2"

    @any_duration
    @given(layouts(), layouts())
    def test_equality_means_the_same_coordinates_for_every_rank(self, one: Layout, two: Layout):
        def places(layout: Layout) -> list[Coordinates]:
            return [layout.coordinates(rank) for rank in range(layout.world_size)]

        assert (one == two) == (places(one) == places(two))


class TestText:
    def test_describe_names_degrees_and_order(self):
        assert Layout(dp=2, tp=2, pp=2).describe() == "dp2×tp2×pp2 (pp-dp-tp, tp fastest)"
        assert Layout(dp=2, cp=4).describe() == "dp2×tp1×pp1×cp4 (dp-cp, cp fastest)"
        assert Layout(dp=8).describe() == "dp8×tp1×pp1"

    @pytest.mark.parametrize(
        "text",
        ["dp=2,tp=2,pp=4", "dp2xtp2xpp4", "dp2×tp2×pp4", " DP = 2, tp=2 ,pp4 ", "dp2 x tp2 x pp4"],
    )
    def test_parse_reads_both_spellings(self, text: str):
        assert Layout.parse(text) == Layout(dp=2, tp=2, pp=4)

    @pytest.mark.parametrize("degrees", ["dp=2,tp=2,pp=2", "dp2xtp2xpp2"])
    def test_parse_reads_an_order(self, degrees: str):
        expected = Layout(dp=2, tp=2, pp=2, order=("dp", "tp", "pp"))
        assert Layout.parse(f"{degrees},order=dp-tp-pp") == expected

    @pytest.mark.parametrize(
        ("text", "complaints"),
        [
            ("", ["names no axis"]),
            ("dp,tp2", ["dp is None"]),
            ("8", ["'8' is not part of a layout"]),
            ("dp=two,fsdp=2", ["'fsdp' is not part of a layout", "dp is 'two'"]),
            ("expert=2", ["'expert' is not part of a layout"]),
            ("dp=2,dp=4,tp=0", ["gives dp more than once", "tp is 0"]),
            ("dp=2,tp=2,order=dp", ["tp has degree 2 but is not in order dp"]),
            ("dp=2,order=dp-qp", ["order names 'qp'"]),
        ],
    )
    def test_parse_names_everything_it_cannot_read(self, text: str, complaints: list[str]):
        with pytest.raises(LayoutError) as caught:
            Layout.parse(text)
        for complaint in complaints:
            assert complaint in str(caught.value)

    @any_duration
    @given(layouts())
    def test_json_round_trip_is_identity(self, layout: Layout):
        restored = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
        assert restored == layout
        assert restored.order == layout.order

    def test_from_dict_fills_in_defaults_and_names_every_problem(self):
        assert Layout.from_dict({"tp": 2}) == Layout(tp=2)
        with pytest.raises(LayoutError) as caught:
            Layout.from_dict({"dp": "2", "zp": 1, "order": 3})
        assert len(str(caught.value).splitlines()) == 3


class TestProblems:
    def test_a_fitting_layout_has_none(self):
        layout = Layout(dp=2, tp=2, pp=2)
        fitting = {"world_size": 8, "num_layers": 24, "num_heads": 16, "num_kv_heads": 4}
        assert find_layout_problems(layout, **fitting, local_world_size=4) == []
        assert find_layout_problems(layout) == []
        check_layout(layout, **fitting)

    def test_all_are_returned_at_once_with_got_expected_and_remedy(self):
        assert find_layout_problems(
            Layout(dp=2, pp=2, tp=4),
            world_size=8,
            local_world_size=3,
            num_layers=7,
            num_heads=6,
            num_kv_heads=2,
        ) == [
            "dp(2) * tp(4) * pp(2) = 16, but the world size is 8; "
            "change a degree or launch 16 ranks",
            "the world size is 8, but nodes of 3 ranks were expected to divide it; "
            "launch the same number of ranks on every node",
            "7 layers do not divide into pp(2) equal stages; "
            "change pp or give the layers of each stage as a stage split",
            "6 attention heads do not divide over tp(4); set tp to a divisor of 6",
            "2 key-value heads do not divide over tp(4); set tp to a divisor of 2",
        ]

    def test_uneven_stages_are_fine_when_the_split_is_given(self):
        assert find_layout_problems(Layout(pp=3), num_layers=7, stage_split=(2, 3, 2)) == []

    @pytest.mark.parametrize(
        ("split", "complaints"),
        [
            ((3, 4), ["has 2 entries, but pp is 3"]),
            ((3, 3, 3), ["sums to 9, but the model has 7 layers"]),
            ((7, 0), ["has 2 entries", "not a whole number of at least 1"]),
            ((4, 4), ["has 2 entries", "sums to 8"]),
        ],
    )
    def test_a_split_must_have_a_layer_for_each_stage_and_sum_up(
        self, split: tuple[int, ...], complaints: list[str]
    ):
        problems = find_layout_problems(Layout(pp=3), num_layers=7, stage_split=split)
        assert len(problems) == len(complaints)
        for problem, complaint in zip(problems, complaints, strict=True):
            assert complaint in problem

    def test_counts_that_are_no_counts_are_problems_themselves(self):
        problems = find_layout_problems(Layout(tp=2), world_size=0, num_heads=-4)
        assert [problem.split(",")[0] for problem in problems] == [
            "world_size is 0",
            "num_heads is -4",
        ]

    def test_check_layout_raises_them_all(self):
        with pytest.raises(LayoutError) as caught:
            check_layout(Layout(tp=4), world_size=8, num_heads=6)
        assert len(str(caught.value).splitlines()) == 2

    def test_groups_that_leave_their_node_are_named(self):
        layout = Layout(dp=2, tp=4)
        nodes = (0, 0, 1, 1, 1, 1, 1, 1)
        assert find_groups_across_nodes(layout, "tp", nodes) == ["tp_group_dp0_pp0"]
        with pytest.raises(LayoutError, match="nodes of 2 ranks"):
            find_groups_across_nodes(layout, "tp", (0, 1))


def test_importing_the_layout_loads_nothing_heavy():
    loaded = subprocess.run(
        [sys.executable, "-c", "import meshscope.core.mesh_layout, sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    ).stdout.split()
    assert {"torch", "numpy", "msgspec", "duckdb"}.isdisjoint(loaded)
