"""Coordinates from names, the mesh that follows from them, and axes of groups."""

import pytest

from meshscope.core.group_axis import OTHER, WORLD, AxisSource
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import TraceGroup
from meshscope.ingest.traces.trace_axes import (
    UNKNOWN,
    AxisNamer,
    coordinates_of,
    infer_layout,
    infer_pipeline,
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("runs/a/traces/rank3_dp1_tp1_pp0/x.pt.trace.json.gz", (3, {"dp": 1, "tp": 1, "pp": 0})),
        ("rank12_dp0_tp0_pp3_cp1.json", (12, {"dp": 0, "tp": 0, "pp": 3, "cp": 1})),
        ("rank0_dp0_tp0_pp0/rank5_dp1_tp0_pp0.json", (5, {"dp": 1, "tp": 0, "pp": 0})),
        ("C:\\traces\\rank1_dp1_tp0_pp0\\t.json", (1, {"dp": 1, "tp": 0, "pp": 0})),
        ("rank3.json", None),
        ("rank3_dp1_dp2/t.json", None),
        ("rank1_dp0x/t.json", None),
        ("rank99999999999_dp0/t.json", None),
    ],
)
def test_coordinates_are_read_from_the_innermost_name(source, expected) -> None:
    assert coordinates_of(source) == expected


def name_ranks(layout: Layout, ranks, axes=("dp", "tp", "pp")):
    return {rank: {axis: layout.coordinates(rank).along(axis) for axis in axes} for rank in ranks}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2, pp=2),
        Layout(dp=2, tp=2, pp=2, order=("dp", "tp", "pp")),
        Layout(dp=4),
        Layout(dp=2, tp=4, pp=3),
        Layout(),
    ],
)
def test_names_of_all_ranks_give_the_mesh_back(layout) -> None:
    named = name_ranks(layout, range(layout.world_size))
    assert infer_layout(named, layout.world_size) == layout


def test_a_part_of_the_ranks_is_enough_where_only_one_mesh_fits() -> None:
    """Rank 7 at (1, 1, 1) fits each order of three pairs; with rank 1 tp is the fastest."""
    layout = Layout(dp=2, tp=2, pp=2)
    found = infer_layout(name_ranks(layout, [7]), 8)
    assert isinstance(found, Unavailable)
    assert "several meshes fit" in found.reason
    assert infer_layout(name_ranks(layout, [1, 2, 7]), 8) == layout


@pytest.mark.parametrize(
    ("named", "world_size", "words"),
    [
        ({}, 4, "no folder names coordinates"),
        ({0: {"dp": 0}}, Unavailable("not said"), "not said"),
        ({0: {"dp": 0}, 1: {"tp": 1}}, 2, "do not name the same axes"),
        ({5: {"dp": 1}}, 4, "rank 5 is not one of 4"),
        ({0: {"dp": 0}, 1: {"dp": 0}}, 2, "no mesh of 2 ranks"),
        ({0: {"dp": 0, "tp": 0}}, 1 << 24, "several meshes fit"),
    ],
)
def test_what_would_be_a_guess_is_not_made(named, world_size, words) -> None:
    found = infer_layout(named, world_size)
    assert isinstance(found, Unavailable)
    assert words in found.reason


def listed(name: str, description: str, *ranks: int) -> TraceGroup:
    return TraceGroup(name=name, description=description, backend="", ranks=ranks)


def test_members_come_from_the_table_where_the_event_cuts_them_short() -> None:
    layout = Layout(dp=64, tp=2)
    table = [listed("4", "undefined", *range(0, 128, 2))]
    namer = AxisNamer(table, world_size=128, layout=layout)
    found = namer.name("4", "", "[0, 2, 4, ...]", 64)
    assert (found.axis, found.axis_source, len(found.ranks)) == ("dp", AxisSource.LAYOUT, 64)


def test_a_group_as_large_as_the_job_is_all_of_it() -> None:
    namer = AxisNamer([], world_size=128)
    assert namer.name("0", "", "[0, 1, ...]", 128).axis == WORLD
    assert namer.name("7", "", "[0, 1, ...]", 64).axis == UNKNOWN
    assert namer.name("", "", "", -1).axis == UNKNOWN


def test_a_message_lies_along_the_axis_on_which_its_ranks_differ() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    namer = AxisNamer([listed("0", "default_pg", *range(8))], world_size=8, layout=layout)
    world = namer.name("0", "", "", 8)
    assert namer.name_pair(world, 0, 4) == ("pp", AxisSource.LAYOUT)
    assert namer.name_pair(world, 0, 1) == ("tp", AxisSource.LAYOUT)
    assert namer.name_pair(world, 0, 7) == (OTHER, AxisSource.NONE)
    assert namer.name_pair(world, 0, 99) == (WORLD, AxisSource.WORLD)


def test_events_without_a_group_have_one_only_where_all_are_the_same() -> None:
    pair = (0, 1)
    namer = AxisNamer([listed("0", "default_pg", *pair), listed("1", "x", *pair)], world_size=2)
    assert namer.only_group().ranks == pair
    assert namer.only_group().name == ""
    one = AxisNamer([listed("3", "mesh_tp", *pair), listed("1", "", 0)], world_size=2)
    assert (one.only_group().name, one.only_group().axis) == ("3", "tp")
    mixed = AxisNamer([listed("0", "", 0, 1, 2, 3), listed("1", "", 0, 1)], world_size=4)
    assert mixed.only_group().ranks == ()


def line(*ranks: int) -> set[tuple[int, int]]:
    there = {(ranks[place], ranks[place + 1]) for place in range(len(ranks) - 1)}
    return there | {(after, before) for before, after in there}


def test_messages_along_one_line_both_ways_are_a_pipeline() -> None:
    assert infer_pipeline(line(0, 1, 2, 3), {(0, 1), (0, 1, 2, 3), ()}, 4) == Layout(pp=4)


@pytest.mark.parametrize(
    ("messages", "groups", "world_size"),
    [
        (line(0, 1), set(), 2),  # a ring of two looks the same
        ({(0, 1), (1, 2), (2, 0)}, set(), 3),  # a ring
        (line(0, 1, 2) | line(2, 0), set(), 3),
        ({(0, 1), (1, 2), (2, 3)}, set(), 4),  # nothing comes back
        (line(0, 2, 1, 3), set(), 4),
        (line(0, 2) | line(1, 3), set(), 4),  # beside another axis
        (line(0, 1, 2, 3), {(0, 1, 2)}, 4),
    ],
)
def test_other_messages_tell_no_pipeline(messages, groups, world_size) -> None:
    assert isinstance(infer_pipeline(messages, groups, world_size), Unavailable)
