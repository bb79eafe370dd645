"""Steps that a timeline lacks count by what they are like: few marks, rare phases, closed form."""

from pathlib import Path

import pytest

from meshscope.analyze.budget.budget import Budget, measure_budget
from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.timeline.device_parts import divide_device_time
from meshscope.core.unavailable import Unavailable
from timeline_builders import MS, TimedJob, timeline_of

NUM_STEPS = 41
STEP_NS = 20 * MS
SAVE_NS, EVAL_NS = 200 * MS, 60 * MS
SAVED, EVALUATED = (10, 20, 30), (15, 35)


def _train(folder: Path, marked: set[int]) -> Budget:
    """A device that is busy for 18 of 20 ms; before some steps the host saves or evaluates, and the
    device waits for it."""
    job = TimedJob(folder, num_ranks=1)
    at = 0
    for step in range(NUM_STEPS):
        for name, steps, long_ns in (("checkpoint", SAVED, SAVE_NS), ("eval", EVALUATED, EVAL_NS)):
            if step in steps:
                job.phase(0, name, at, at + long_ns)
                at += long_ns
        host = (at, at + MS)
        if step in marked:
            there = (at + 2 * MS, at + STEP_NS)
            job.device_phase(0, "forward", host, there, offset_ns=10**9)
        else:
            job.phase(0, "forward", *host)
        job.own_step(0, step, at, at + STEP_NS - MS)
        at += STEP_NS
    attempt = job.close()
    timeline = timeline_of(attempt)
    return measure_budget(timeline, Unavailable("no model"), divide_device_time(attempt, timeline))


def _total_ms(budget: Budget, share: Share) -> float:
    at = [line.share for line in budget.lines].index(share)
    return float(budget.total_ns()[at]) / MS


@pytest.mark.parametrize(
    "marked",
    [
        {0, 3, 4, 10, 13, 15, 22, 27, 33, 40},
        {0, 3, 4, 10, 11, 20, 21, 30, 35, 40},
        set(range(NUM_STEPS)) - {20, 35},
    ],
    ids=["one of each", "all that save", "nearly all"],
)
def test_rare_phases_count_as_often_as_they_were(tmp_path: Path, marked: set[int]) -> None:
    budget = _train(tmp_path, marked)

    assert budget.num_rank_steps == NUM_STEPS
    whole_ms = (NUM_STEPS * STEP_NS + 3 * SAVE_NS + 2 * EVAL_NS) / MS
    # The first step's period begins with its work on the device.
    assert budget.total_wall_ns / MS == pytest.approx(whole_ms, abs=2.1)
    assert budget.total_residual_ns == 0
    assert _total_ms(budget, Share.CHECKPOINT) == pytest.approx(3 * SAVE_NS / MS, rel=0.01)
    assert _total_ms(budget, Share.EVAL) == pytest.approx(2 * EVAL_NS / MS, rel=0.01)


def test_a_phase_in_no_step_with_marks_is_known_by_its_host(tmp_path: Path) -> None:
    budget = _train(tmp_path, {0, 4, 8, 13, 15, 22, 27, 33, 40})

    assert budget.total_residual_ns == 0
    assert _total_ms(budget, Share.CHECKPOINT) == pytest.approx(3 * SAVE_NS / MS, rel=0.02)
    assert _total_ms(budget, Share.EVAL) == pytest.approx(2 * EVAL_NS / MS, rel=0.02)


def test_all_steps_count_once_where_none_is_missing(tmp_path: Path) -> None:
    budget = _train(tmp_path, set(range(NUM_STEPS)))

    assert budget.run.num_steps == NUM_STEPS
    assert (budget.run.time_ns == budget.time_ns.sum(axis=1)).all()
