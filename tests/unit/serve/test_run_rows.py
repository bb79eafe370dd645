"""The lines of the list of runs."""

import time
from dataclasses import replace

import pytest

from builders import make_run
from meshscope.page.run_state import StateKind
from meshscope.serve.rows import describe_row, judge_open
from meshscope.serve.runs import Runs

S = 10**9


@pytest.fixture
def row(tmp_path):
    """Of a run without an end, whose steps take a second."""
    make_run(tmp_path / "run", num_steps=4)
    found = describe_row(Runs([tmp_path]).list_runs()[0])
    return replace(found, state=str(StateKind.OPEN), spark_ns=(1.0 * S,) * 3)


def test_a_run_that_made_a_step_just_now_is_live_though_nobody_follows_it(row):
    found = judge_open(replace(row, last_step_unix_ns=time.time_ns() - 2 * S))
    assert found.state == StateKind.LIVE
    assert "its last step ended" in found.state_text


@pytest.mark.parametrize("age_s", [60, 3600])
def test_a_run_that_made_none_for_long_may_be_running_or_killed(row, age_s):
    old = replace(row, last_step_unix_ns=time.time_ns() - age_s * S)
    assert judge_open(old) == old


def test_long_steps_have_time(row):
    last = time.time_ns() - 60 * S
    slow = replace(row, last_step_unix_ns=last, spark_ns=(20.0 * S,) * 3)
    assert judge_open(slow).state == StateKind.LIVE


def test_a_run_that_ended_stays_so(row):
    ended = replace(row, state=str(StateKind.FINISHED), last_step_unix_ns=time.time_ns())
    assert judge_open(ended) == ended


def test_step_time_is_from_one_start_to_the_next_as_in_a_report(tmp_path):
    make_run(tmp_path / "run", num_steps=4)
    found = describe_row(Runs([tmp_path]).list_runs()[0])
    assert len(found.spark_ns) == 3
