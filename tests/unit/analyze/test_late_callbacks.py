"""Ends of what backward waited for, where torch called back late."""

import pytest

from builders import MS
from meshscope.analyze.job.job import load_job
from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource
from meshscope.store.read.run import open_run
from meshscope.store.schema import OperationFlag
from timeline_builders import TimedJob


@pytest.mark.parametrize(
    ("phase", "end_ms"),
    [
        ("gradient norm", 15),  # backward was over when the next phase made its call
        ("backward", 17),  # a call in the midst of backward says nothing
    ],
)
def test_a_callback_is_no_later_than_the_next_phases_call(tmp_path, phase, end_ms):
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2), host=lambda rank: "node")
    group = job.group(range(2), description="mesh_dp")
    for step in range(4):
        start = step * 30 * MS
        job.collective(
            group,
            {0: start + 10 * MS, 1: start + 12 * MS},
            transfer_ns=5 * MS,
            notice_ns={0: 0, 1: 0},
            step=step,
            phase="backward",
            flags=OperationFlag.ENGINE,
            end_source=EndSource.FUTURE,
        )
        calls = dict.fromkeys(range(2), start + 15 * MS)
        job.collective(group, calls, transfer_ns=MS, step=step, phase=phase)
        for rank in range(2):
            job.own_step(rank, step, start, start + 30 * MS)
    job.close()
    loaded = load_job(open_run(tmp_path).last_attempt)
    rows, times = loaded.operations.rows, loaded.times
    is_late = rows.has_flag(OperationFlag.ENGINE)
    begin = rows.step[is_late] * 30 * MS + times.end_ns[is_late][0] - end_ms * MS
    assert (times.end_ns[is_late] - begin == end_ms * MS).all()
    own = times.end_ns[is_late] - times.arrival_ns[is_late]
    assert sorted(set(own.tolist())) == [(end_ms - 12) * MS, (end_ms - 10) * MS]


@pytest.mark.parametrize(
    ("after", "end_ms"),
    [
        ("optimizer", 16),  # backward had returned when the next phase began
        ("own name", 90),  # in another thread, perhaps: it says nothing
    ],
)
def test_a_callback_is_no_later_than_the_phase_after_backward(tmp_path, after, end_ms):
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2), host=lambda rank: "node")
    group = job.group(range(2), description="mesh_dp")
    for step in range(3):
        start = step * 100 * MS
        job.collective(
            group,
            {0: start + 10 * MS, 1: start + 10 * MS},
            transfer_ns=80 * MS,  # the interpreter was busy
            notice_ns={0: 0, 1: 0},
            step=step,
            phase="backward",
            flags=OperationFlag.ENGINE,
            end_source=EndSource.FUTURE,
        )
        for rank in range(2):
            job.phase(rank, "forward", start, start + 5 * MS)
            job.phase(rank, "backward", start + 5 * MS, start + 15 * MS)
            job.phase(rank, after, start + 16 * MS, start + 18 * MS)
            job.own_step(rank, step, start, start + 100 * MS)
    job.close()
    loaded = load_job(open_run(tmp_path).last_attempt)
    own = loaded.times.end_ns - loaded.times.arrival_ns
    first = loaded.operations.rows.step < 2  # the next forward bounds all but the last, at 100
    assert set(own[first].tolist()) == {(end_ms - 10) * MS}
