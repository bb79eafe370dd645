"""Operations that are handed over late, in pipelines whose actions are known."""

from pathlib import Path

import pytest

from builders import MS
from meshscope.analyze.communication.late_handover import find_late_handovers
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Layout
from meshscope.store.schema import OperationFlag
from timeline_builders import TimedJob, timeline_of

STEP_NS = 200 * MS


def make_last_backward_run(path: Path, extra_ms: float, *, num_steps: int = 15) -> Timeline:
    """Two ranks, four microbatches; the last backward issues the gradients' all-reduce."""
    job = TimedJob(path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    for step in range(num_steps):
        at = step * STEP_NS
        for rank in range(2):
            now = at
            for microbatch in range(4):
                length = 10 * MS + (round(extra_ms * MS) if microbatch == 3 else 0)
                job.action(
                    rank,
                    "B",
                    step=step,
                    microbatch=microbatch,
                    stage=0,
                    start_ns=now,
                    end_ns=now + length,
                )
                now += length
            job.own_step(rank, step, at, at + STEP_NS)
        called = now - MS
        job.collective(
            group,
            {0: called, 1: called},
            transfer_ns=5 * MS,
            flags=OperationFlag.ASYNC,
            step=step,
        )
    return timeline_of(job.close())


def test_actions_that_issue_operations_take_longer(tmp_path: Path) -> None:
    timeline = make_last_backward_run(tmp_path, 15)
    (found,) = find_late_handovers(timeline)

    assert (found.axis, found.ranks) == ("dp", (0, 1))
    assert found.delay_ns == pytest.approx(15 * MS)
    assert found.usual_ns == 10 * MS
    assert found.num_per_step == 1
    saved = (timeline.pieces.duration_ns - found.new_work_ns).sum()
    assert saved == pytest.approx(15 * MS * 2 * 15)
    assert (found.new_work_ns >= 0).all()


@pytest.mark.parametrize("extra_ms", [0, 3])
def test_filling_buckets_is_not_late(tmp_path: Path, extra_ms: float) -> None:
    assert find_late_handovers(make_last_backward_run(tmp_path, extra_ms)) == []


def test_few_steps_say_nothing(tmp_path: Path) -> None:
    assert find_late_handovers(make_last_backward_run(tmp_path, 15, num_steps=6)) == []


def make_sending_run(path: Path, late_ms: dict[int, float]) -> Timeline:
    """Four stages; each sends `late_ms` after its action."""
    job = TimedJob(path, num_ranks=4, layout=Layout(pp=4))
    group = job.group(range(4), description="mesh_pp")
    for step in range(15):
        at = step * STEP_NS
        for rank in range(4):
            start = at + 40 * rank * MS
            end = start + 10 * MS
            job.action(rank, "F", step=step, microbatch=0, stage=rank, start_ns=start, end_ns=end)
            if rank < 3:
                sent = end + round(late_ms.get(rank, 0.05) * MS)
                job.message(
                    group, rank, rank + 1, sent_ns=sent, asked_ns=start, latency_ns=MS, step=step
                )
            job.own_step(rank, step, at, at + STEP_NS)
    return timeline_of(job.close())


def test_sends_long_after_the_action(tmp_path: Path) -> None:
    (found,) = find_late_handovers(make_sending_run(tmp_path, {1: 5}))

    assert (found.axis, found.ranks) == ("pp", (1,))
    assert found.delay_ns == pytest.approx(4.95 * MS)


@pytest.mark.parametrize("late_ms", [0.05, 0.3])
def test_sends_right_after_the_action(tmp_path: Path, late_ms: float) -> None:
    assert find_late_handovers(make_sending_run(tmp_path, {1: late_ms})) == []


def test_nothing_is_said_without_actions(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    job.train(num_steps=15, work_ms={0: {"forward": 10}, 1: {"forward": 10}})
    assert find_late_handovers(timeline_of(job.close())) == []
