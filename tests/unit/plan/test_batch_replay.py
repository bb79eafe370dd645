"""The batch replay is the one of core, for every schedule."""

import numpy as np
import pytest

from meshscope.core.schedule import ActionKind
from meshscope.core.schedule_builders import BUILDERS
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.plan.candidate import Candidate, build_cached
from meshscope.plan.timing.batch_replay import compile_schedule, replay_batch, replay_steady

KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


def find_chunks(name):
    return BUILDERS[name].default_chunks


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("pp", "number"), [(1, 3), (2, 2), (4, 8)])
def test_all_ends_are_those_of_the_replay(name, pp, number):
    chunks = find_chunks(name)
    schedule = build_cached(name, pp, number, chunks)
    rng = np.random.default_rng(7)
    times = rng.uniform(1, 5, (3, schedule.num_stages, 2))
    message = np.array([0.0, 0.7])
    found = replay_batch(compile_schedule(name, pp, number, chunks), *times, message)
    for column in range(2):
        costs = ActionCosts(
            by_stage={
                (kind, stage): times[index, stage, column]
                for index, kind in enumerate(KINDS)
                for stage in range(schedule.num_stages)
            },
            communication_ns=message[column],
        )
        expected = replay_schedule(schedule, costs)
        for rank, one in enumerate(expected.ranks):
            assert found.end_s[rank, column] == pytest.approx(one.end_ns)
            assert found.busy_s[rank, column] == pytest.approx(one.busy_ns)


# Zero Bubble, arXiv 2401.10241: p, m, T_F, T_B, T_W, T_comm and the bubble of 1F1B.
ZERO_BUBBLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
]


@pytest.mark.parametrize(("p", "m", "f", "b", "w", "message", "bubble"), ZERO_BUBBLE)
def test_bubbles_are_the_published_ones(p, m, f, b, w, message, bubble):
    stages = np.ones((p, 1))
    found = replay_batch(
        compile_schedule("1f1b", p, m, 1), f * stages, b * stages, w * stages, np.array([message])
    )
    cost = (found.end_s - found.start_s).max()
    assert (cost - found.busy_s.max()) / cost == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_continued_steady_state_is_the_whole_schedule(name):
    candidate = Candidate(pp=4, num_microbatches=64, schedule=name, chunks=find_chunks(name))
    assert candidate.num_steady < 64
    rng = np.random.default_rng(1)
    stages = 4 * find_chunks(name)
    times = rng.uniform(1, 1.2, (3, stages, 3))
    times[:, -1] *= 1.3  # the head
    message = np.full(3, 0.05)
    continued = replay_steady(candidate, *times, message)
    whole = replay_batch(compile_schedule(name, 4, 64, find_chunks(name)), *times, message)
    assert continued.makespan_s == pytest.approx(whole.makespan_s, rel=5e-3)
    assert continued.busy_s == pytest.approx(whole.busy_s)
