"""The replay on columns equals the scalar one, and blocking sends hold their senders up."""

import numpy as np
import pytest

from meshscope.analyze.pipeline.action_replay import SendMode, plan_replay
from meshscope.core.schedule import Schedule
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 8)])
def test_all_runs_are_timed_as_one_by_one(name, p, m):
    schedule = build_schedule(name, p, m)
    plan = plan_replay(schedule)
    assert plan is not None
    durations = np.random.default_rng(1).integers(1, 50, (len(plan.actions), 5)).astype(float)
    start, end = plan.replay(durations, lag_ns=3.0)
    for run in range(durations.shape[1]):
        costs = ActionCosts(
            by_stage={},
            by_microbatch={
                (a.kind, a.stage, a.microbatch): durations[i, run]
                for i, a in enumerate(plan.actions)
            },
            communication_ns=3.0,
        )
        expected = replay_schedule(schedule, costs)
        times = [time for rank in expected.ranks for time in rank.times]
        assert start[:, run].tolist() == [time.start_ns for time in times]
        assert plan.cost_ns(start, end)[run] == expected.cost_ns
        assert plan.busy_ns(durations)[:, run].tolist() == [r.busy_ns for r in expected.ranks]


def test_gaps_and_late_ranks_shift_what_follows():
    plan = plan_replay(build_schedule("gpipe", 2, 2))
    assert plan is not None
    durations = np.full((8, 1), 10.0)
    start, _ = plan.replay(durations, gap_ns=1.0, ready_ns=np.array([[0.0], [25.0]]))
    # Rank 0: F F, then B when rank 1, ready at 25, has made the gradients.
    assert start[:, 0].tolist() == [0, 11, 57, 68, 25, 36, 47, 58]


def test_blocking_sends_wait_until_the_receiver_comes():
    schedule = Schedule.parse(
        "mine microbatches=2 stage_ranks=0,1\n0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n"
    )
    plain = plan_replay(schedule)
    blocking = plan_replay(schedule, SendMode.BLOCKING)
    assert plain is not None
    assert blocking is not None
    ready = np.array([[0.0], [100.0]])
    durations = np.full((8, 1), 10.0)
    assert plain.replay(durations, ready_ns=ready)[0][1, 0] == 10
    assert blocking.replay(durations, ready_ns=ready)[0][1, 0] == 100


def test_blocking_sends_cannot_run_1f1b():
    assert plan_replay(build_schedule("1f1b", 4, 8), SendMode.BLOCKING) is None
    assert plan_replay(build_schedule("1f1b", 4, 8), SendMode.BATCHED) is not None
