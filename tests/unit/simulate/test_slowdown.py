"""Slowdowns of recorded programs with a known even version."""

import pytest

from made_programs import MS, ProgramRun, ddp, reduce, replay_of, work
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.recorded_slowdown import measure_run_slowdown
from meshscope.simulate.straggler.slowdown import (
    Slowdown,
    choose_worst,
    count_worst,
    share_excess,
)


def test_an_even_run_has_no_slowdown(tmp_path):
    found = measure_run_slowdown(replay_of(ddp({}), tmp_path))
    assert isinstance(found, Slowdown)
    assert found.slowdown == 1
    assert set(found.by_worker.values()) == {1.0}
    assert isinstance(found.worst_share, Unavailable)
    assert isinstance(found.last_stage_share, Unavailable)


def test_one_slow_rank_takes_the_blame(tmp_path):
    found = measure_run_slowdown(replay_of(ddp({2: 8 * MS}), tmp_path))
    # Even: everybody forwards 12 ms, two more than the three quick ones and six less than rank 2.
    assert found.step_ns - found.ideal_ns == 6 * MS
    assert next(iter(found.by_type)) == "forward"
    assert found.worst_workers == (2,)
    assert next(iter(found.by_worker)) == 2
    assert found.by_axis["dp"][2] == found.by_worker[2] == found.slowdown
    assert found.worst_share.removed == pytest.approx(1.0)
    assert found.worst_share.added_alone == pytest.approx(1.0)


def test_a_heavy_last_stage(tmp_path):
    def make(rank: int, step: int):
        ns = 14 * MS if rank == 3 else 10 * MS
        return [work("forward", ns), reduce((0, 1, 2, 3), MS)]

    run = ProgramRun(make, num_ranks=4, num_steps=5, layout=Layout(pp=4))
    found = measure_run_slowdown(replay_of(run, tmp_path))
    assert found.ideal_ns == 12 * MS
    assert found.slowdown == pytest.approx(15 / 12)
    assert next(iter(found.by_axis["pp"])) == 3
    # Made even it does 11, and the others still 10: then the step is as an even one.
    assert found.last_stage_share.removed == pytest.approx(1.0)


def test_the_worst_three_percent():
    assert [count_worst(n) for n in (1, 8, 33, 34, 64, 100, 101)] == [1, 1, 1, 2, 2, 3, 4]
    assert choose_worst({0: 1.0, 1: 1.2, 2: 1.2}) == (1,)


def test_no_excess_no_shares():
    assert isinstance(
        share_excess(step_ns=5.0, ideal_ns=5.0, removed_ns=5.0, alone_ns=5.0), Unavailable
    )
    share = share_excess(step_ns=10.0, ideal_ns=5.0, removed_ns=6.0, alone_ns=8.0)
    assert (share.removed, share.added_alone) == (0.8, 0.6)
