"""Schedules are recognised from the order of actions."""

from dataclasses import replace

import pytest

from meshscope.analyze.pipeline.executed_schedule import (
    UNKNOWN_ORDER,
    order_from_rows,
    recognise_schedule,
)
from meshscope.core.schedule import Action
from meshscope.core.schedule_builders import BUILDERS, build_schedule, gpipe
from meshscope.core.unavailable import Unavailable


def parse_rows(*rows):
    return [[Action.parse(cell) for cell in row.split()] for row in rows]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_every_builder_is_found_under_its_own_name(name, p, m):
    found = recognise_schedule(replace(build_schedule(name, p, m), name=UNKNOWN_ORDER))
    assert (found.name, found.is_exact, found.is_known) == (name, True, True)


def test_chunks_are_counted():
    assert recognise_schedule(build_schedule("interleaved_1f1b", 2, 4, 3)).num_chunks == 3


def test_one_microbatch_is_every_plain_schedule_at_once():
    found = recognise_schedule(gpipe(3, 1))
    assert found.name == "1f1b"
    assert "gpipe" in found.also


def test_another_order_of_microbatches_keeps_the_name_and_says_so():
    rows = parse_rows("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")
    schedule = order_from_rows(rows)
    assert not isinstance(schedule, Unavailable)
    found = recognise_schedule(schedule)
    assert (found.name, found.is_exact) == ("gpipe", False)


def test_an_order_that_nobody_builds_is_kept_as_it_is():
    rows = parse_rows("0F0 0B0 0F1 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    schedule = order_from_rows(rows)
    assert not isinstance(schedule, Unavailable)
    found = recognise_schedule(schedule)
    assert (found.name, found.is_known) == (UNKNOWN_ORDER, False)
    assert found.schedule.actions == tuple(map(tuple, rows))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([[], []], "no action was recorded"),
        (parse_rows("0F0 0B0", "2F0 2B0"), "stage 1"),
        (parse_rows("0F0 0B0", "2000000000F0 2000000000B0"), "stage 1"),
        (parse_rows("0F999999999 0B999999999", "1F0 1B0"), "numbered from 0"),
        (parse_rows("0F0", "1F0 1B0"), "not whole"),
        (parse_rows("0F0 0B0 0F0", "1F0 1B0"), "not whole"),
    ],
)
def test_what_is_no_whole_step_says_why(rows, reason):
    found = order_from_rows(rows)
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_stages_placed_unevenly_are_an_unknown_order():
    schedule = order_from_rows(parse_rows("0F0 1F0 1B0 0B0", "2F0 2B0"))
    assert not isinstance(schedule, Unavailable)
    found = recognise_schedule(schedule)
    assert (found.name, found.num_chunks) == (UNKNOWN_ORDER, 2)
