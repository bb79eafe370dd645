"""Ranks that share processors: closed forms, and the plain replay where each has its own."""

import pytest

from meshscope.core.schedule import ActionKind
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.plan.timing.shared_replay import StageWork, replay_shared

KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


def make_work(schedule, times=(1.0, 1.5, 0.75)):
    forward, inputs, weights = ((one,) * schedule.num_stages for one in times)
    return StageWork(forward_s=forward, input_grad_s=inputs, weight_grad_s=weights)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_with_a_processor_each_it_is_the_plain_replay(name):
    schedule = build_schedule(name, 4, 8, None)
    times = (1.0, 1.5, 0.75)
    by_stage = {
        (kind, s): time
        for s in range(schedule.num_stages)
        for kind, time in zip(KINDS, times, strict=True)
    }
    plain = replay_schedule(schedule, ActionCosts(by_stage=by_stage, communication_ns=0.25))
    shared = replay_shared(
        schedule, make_work(schedule, times), 0.25, num_replicas=1, num_processors=4
    )
    assert shared.makespan_s == pytest.approx(plain.makespan_ns)
    assert shared.busy_s == pytest.approx([one.busy_ns for one in plain.ranks])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_v"])
def test_one_processor_takes_the_sum_of_all_work(name):
    """Whoever waits leaves it to the others: there is no bubble on it."""
    schedule = build_schedule(name, 4, 8, None)
    shared = replay_shared(schedule, make_work(schedule), 0.0, num_replicas=3, num_processors=1)
    assert shared.makespan_s == pytest.approx(3 * 8 * schedule.num_stages * (1 + 1.5 + 0.75))


def test_two_processors_are_in_between():
    """GPipe of 2 ranks and 1 microbatch never runs two at once; its two replicas always do."""
    schedule = build_schedule("gpipe", 2, 1, None)
    alone, both, four = (
        replay_shared(schedule, make_work(schedule), 0.0, num_replicas=n, num_processors=2)
        for n in (1, 2, 4)
    )
    assert alone.makespan_s == pytest.approx(2 * 3.25)
    assert both.makespan_s == pytest.approx(2 * 3.25)
    assert four.makespan_s == pytest.approx(4 * 3.25)
