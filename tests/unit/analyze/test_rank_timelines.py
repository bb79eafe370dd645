"""Pieces of known runs, down to the nanosecond."""

from pathlib import Path

import numpy as np
import pytest

from builders import MS, SECOND, Faults, make_run
from meshscope.analyze.timeline.timeline import PieceKind, build_timeline
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.schema import OperationFlag, StepFlag
from timeline_builders import TimedJob, describe, make_dp_run, timeline_of


def test_slow_rank_works_longer_and_the_other_waits(tmp_path: Path) -> None:
    work = {0: {"forward": 10, "backward": 20}, 1: {"forward": 10, "backward": 32}}
    timeline = timeline_of(make_dp_run(tmp_path, work, num_steps=4))

    assert describe(timeline, 0, 1) == [
        ("WORK", "forward", 10),
        ("WORK", "backward", 20),
        ("WAIT", "", 12),
        ("TRANSFER", "", 5),
    ]
    assert describe(timeline, 1, 1) == [
        ("WORK", "forward", 10),
        ("WORK", "backward", 32),
        ("TRANSFER", "", 5),
    ]
    assert timeline.steps.tolist() == [0, 1, 2, 3]
    assert timeline.starts_window.tolist() == [True, False, False, False]
    assert (timeline.num_left_out, timeline.num_unmarked) == (0, 0)


def test_pieces_name_the_operation_that_holds_the_rank_up(tmp_path: Path) -> None:
    work = {0: {"forward": 10}, 1: {"forward": 11}}
    timeline = timeline_of(make_dp_run(tmp_path, work, num_steps=2))
    pieces, communication = timeline.pieces, timeline.communication

    assert communication is not None
    held = pieces.kind != PieceKind.WORK
    rows = communication.operations.rows
    assert (pieces.row[~held] == -1).all()
    assert (rows.rank[pieces.row[held]] == pieces.rank[held]).all()
    assert (rows.step[pieces.row[held]] == timeline.steps[pieces.step[held]]).all()


def test_step_owns_the_gap_before_it(tmp_path: Path) -> None:
    work = {0: {"forward": 10}, 1: {"forward": 10}}
    timeline = timeline_of(make_dp_run(tmp_path, work, num_steps=3, gap_ms=4))

    assert describe(timeline, 0, 0)[0] == ("WORK", "forward", 10)  # nothing came before it
    assert describe(timeline, 0, 1)[:2] == [("WORK", "", 4), ("WORK", "forward", 10)]
    between = timeline.pieces.select(timeline.pieces.is_between)
    assert set(between.duration_ns.tolist()) == {4 * MS}
    assert (timeline.step_start_ns - timeline.period_start_ns)[:, 1:].tolist() == [[4 * MS] * 2] * 2


def test_innermost_phase_counts(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    job.phase(0, "attention", 12 * MS, 15 * MS, depth=1)
    job.phase(0, "forward", 10 * MS, 20 * MS)
    job.own_step(0, 0, 5 * MS, 25 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 0) == [
        ("WORK", "", 5),
        ("WORK", "forward", 2),
        ("WORK", "attention", 3),
        ("WORK", "forward", 5),
        ("WORK", "", 5),
    ]


def test_phase_around_the_whole_loop_is_left_out(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    for step in range(3):
        job.phase(0, "forward", (10 * step + 1) * MS, (10 * step + 7) * MS, depth=1)
        job.own_step(0, step, 10 * step * MS, (10 * step + 9) * MS)
    job.phase(0, "epoch", -MS, 40 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 0, 1) == [
        ("WORK", "", 1),  # before the step
        ("WORK", "", 1),
        ("WORK", "forward", 6),
        ("WORK", "", 2),
    ]


def test_message_is_waited_for_until_it_is_sent(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(pp=2))
    group = job.group(range(2), description="mesh_pp")
    job.message(group, 0, 1, sent_ns=30 * MS, asked_ns=10 * MS, latency_ns=2 * MS, step=0)
    for rank in range(2):
        job.own_step(rank, 0, 0, 50 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 1) == [
        ("WORK", "", 10),
        ("WAIT", "", 20),
        ("TRANSFER", "", 2),
        ("WORK", "", 18),
    ]


def test_wait_for_an_actions_input(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(pp=2))
    job.action(0, "F", step=0, microbatch=0, stage=0, start_ns=0, end_ns=10 * MS)
    job.action(
        1, "F", step=0, microbatch=0, stage=1, start_ns=12 * MS, end_ns=20 * MS, wait_ns=11 * MS
    )
    for rank in range(2):
        job.own_step(rank, 0, 0, 25 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 1) == [
        ("WORK", "", 1),
        ("WAIT", "pipeline wait", 11),
        ("WORK", "forward", 8),
        ("WORK", "", 5),
    ]
    assert timeline.actions is not None
    assert timeline.actions.wait_ns.tolist() == [-1, 11 * MS]
    own = timeline.pieces.select(timeline.pieces.rank == 1)
    assert own.action.tolist() == [-1, 1, 1, -1]


def test_receive_inside_an_input_wait_splits_it(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(pp=2))
    group = job.group(range(2), description="mesh_pp")
    job.action(
        1, "F", step=0, microbatch=0, stage=1, start_ns=12 * MS, end_ns=20 * MS, wait_ns=12 * MS
    )
    job.message(group, 0, 1, sent_ns=8 * MS, asked_ns=1 * MS, latency_ns=3 * MS, step=0)
    for rank in range(2):
        job.own_step(rank, 0, 0, 25 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 1)[:5] == [
        ("WAIT", "pipeline wait", 1),  # of no operation
        ("WAIT", "pipeline wait", 7),
        ("TRANSFER", "pipeline wait", 3),
        ("WAIT", "pipeline wait", 1),
        ("WORK", "forward", 8),
    ]
    own = timeline.pieces.select(timeline.pieces.rank == 1)
    assert (own.action[:5] == 0).all()


def test_handle_is_exposed_only_while_it_is_waited_for(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    group = job.group(range(2))
    keys = job.collective(
        group, {0: 10 * MS, 1: 22 * MS}, transfer_ns=6 * MS, flags=OperationFlag.ASYNC, step=0
    )
    job.wait(0, keys[0], 20 * MS, 9 * MS, step=0)
    for rank in range(2):
        job.own_step(rank, 0, 0, 40 * MS)
    timeline = timeline_of(job.close())

    # Ready at 22, over at 28, noticed at 29: what comes after the end is still the operation's.
    assert describe(timeline, 0) == [
        ("WORK", "", 20),
        ("WAIT", "", 2),
        ("TRANSFER", "", 7),
        ("WORK", "", 11),
    ]
    assert describe(timeline, 1) == [("WORK", "", 40)]


def test_group_of_one_rank_holds_nobody_up(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    group = job.group([0])
    job.collective(group, {0: 10 * MS}, transfer_ns=6 * MS, step=0)
    for rank in range(2):
        job.own_step(rank, 0, 0, 40 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 0) == [("WORK", "", 40)]


def test_operation_that_a_rank_lacks_is_not_split(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(group, {0: 2 * MS, 1: 2 * MS}, transfer_ns=MS, step=0)
    job.collective(group, {0: 10 * MS}, transfer_ns=6 * MS, step=0)
    for rank in range(2):
        job.own_step(rank, 0, 0, 40 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 0)[2:4] == [("WORK", "", 7), ("UNSPLIT", "", 6)]


def test_operation_timed_by_the_program_is_not_split(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(
        group,
        {0: 10 * MS, 1: 10 * MS},
        transfer_ns=6 * MS,
        kind=Kind.CUSTOM,
        flags=OperationFlag.MANUAL,
        step=0,
    )
    for rank in range(2):
        job.own_step(rank, 0, 0, 40 * MS)
    timeline = timeline_of(job.close())

    assert describe(timeline, 0)[1] == ("UNSPLIT", "", 6)


def test_comm_phase_is_communication_only_where_no_operation_was_seen(tmp_path: Path) -> None:
    phases = (("forward", 10 * MS), ("comm", 5 * MS))
    silent = make_run(tmp_path / "a", world_size=2, num_steps=2, phases=phases, gap_ns=0)
    assert ("UNSPLIT", "comm", 5) in describe(timeline_of(open_run(silent).last_attempt), 0)

    work = {0: {"forward": 10, "comm": 5}, 1: {"forward": 10, "comm": 5}}
    assert ("WORK", "comm", 5) in describe(timeline_of(make_dp_run(tmp_path / "b", work)), 0)


def test_one_rank_without_layout_and_communication(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=6)
    timeline = timeline_of(open_run(tmp_path).last_attempt)

    assert isinstance(timeline.layout, Unavailable)
    assert timeline.communication is None
    assert timeline.actions is None
    assert describe(timeline, 0, 1) == [
        ("WORK", "", 1),
        ("WORK", "data", 2),
        ("WORK", "forward", 30),
        ("WORK", "backward", 60),
        ("WORK", "optimizer", 5),
        ("WORK", "", 3),
    ]


def test_only_steps_that_every_rank_finished_are_kept(tmp_path: Path) -> None:
    faults = Faults(killed={1: 4}, missing=frozenset({2}))
    make_run(tmp_path, layout=Layout(dp=4), num_steps=6, faults=faults)
    timeline = timeline_of(open_run(tmp_path).last_attempt)

    assert timeline.ranks == (0, 1, 3)
    assert timeline.steps.tolist() == [0, 1, 2, 3]


def test_warmup_is_left_out(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=6)
    attempt = open_run(tmp_path).last_attempt

    timeline = build_timeline(attempt)
    assert not isinstance(timeline, Unavailable)
    assert timeline.steps.tolist() == [1, 2, 3, 4, 5]
    assert timeline_of(attempt, warmup_steps=3).steps.tolist() == [3, 4, 5]
    assert build_timeline(attempt, warmup_steps=9) == Unavailable("all 6 steps count as warm-up")


def test_aborted_step_is_not_kept_and_breaks_the_chain(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    for step in range(5):
        flags = StepFlag.ABORTED if step == 2 else 0
        job.own_step(0, step, 10 * step * MS, (10 * step + 8) * MS, flags=flags)
    timeline = timeline_of(job.close())

    assert timeline.steps.tolist() == [0, 1, 3, 4]
    assert timeline.starts_window.tolist() == [True, False, True, False]
    # What comes after an aborted step belongs to the next one.
    assert (timeline.period_end_ns - timeline.period_start_ns).tolist() == [
        [8 * MS, 10 * MS, 10 * MS, 10 * MS]
    ]


def test_no_step(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    assert build_timeline(job.close()) == Unavailable("no step finished")


def test_no_common_step(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    job.own_step(0, 0, 0, MS)
    job.own_step(1, 1, 0, MS)
    assert build_timeline(job.close()) == Unavailable("no step was finished by every rank")


@pytest.mark.parametrize("drift_ppm", [0, 40])
def test_hosts_with_other_clocks_are_aligned(tmp_path: Path, drift_ppm: float) -> None:
    job = TimedJob(
        tmp_path,
        num_ranks=4,
        layout=Layout(dp=4),
        host=lambda rank: f"node{rank // 2}",
        clocks={"node1": (-700 * SECOND, drift_ppm)},
    )
    group = job.group(range(4), description="mesh_dp")
    work = {rank: {"forward": 10.0 if rank != 3 else 30.0} for rank in range(4)}
    job.train(num_steps=30, work_ms=work, transfer_ms=2, group=group)
    timeline = timeline_of(job.close())

    pieces = timeline.pieces
    waited = [
        pieces.duration_ns[(pieces.rank == rank) & (pieces.kind == PieceKind.WAIT)].sum() / 30
        for rank in range(4)
    ]
    assert waited == pytest.approx([20 * MS, 20 * MS, 20 * MS, 0], abs=0.1 * MS)


def _train_on_device(job: TimedJob, num_steps: int, *, without: int = -1) -> None:
    """Host issues at once, the device is 5 ms behind; 3 ms of it idle between two phases."""
    for step in range(num_steps):
        at = 100 * step * MS
        host = ((at, at + 2 * MS), (at + 2 * MS, at + 4 * MS))
        device = ((at + 5 * MS, at + 45 * MS), (at + 48 * MS, at + 95 * MS))
        for name, own, there in zip(("forward", "backward"), host, device, strict=True):
            if step == without:
                job.phase(0, name, *own)
            else:
                job.device_phase(0, name, own, there, offset_ns=7 * SECOND)
        job.phase(0, "data", at + 5 * MS, at + 98 * MS)
        job.own_step(0, step, at, at + 98 * MS)


def test_device_stream_is_what_counts_where_it_is_marked(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    _train_on_device(job, 5)
    timeline = timeline_of(job.close())

    assert timeline.on_device.tolist() == [True]
    assert describe(timeline, 0, 1) == [
        ("WORK", "data", 3),  # the host was fetching until 98
        ("WORK", "", 7),  # and then had issued nothing
        ("WORK", "forward", 40),
        ("WORK", "data", 3),
        ("WORK", "backward", 47),
    ]
    assert (timeline.period_end_ns - timeline.period_start_ns)[0, 1:].tolist() == [100 * MS] * 4
    assert timeline.host_period_ns[0, 1:].tolist() == [100 * MS] * 4


def test_steps_without_device_marks_are_left_out(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    _train_on_device(job, 6, without=2)
    timeline = timeline_of(job.close())

    assert timeline.steps.tolist() == [0, 1, 3, 4, 5]
    assert timeline.num_unmarked == 1
    assert timeline.starts_window.tolist() == [True, False, True, False, False]
    # Where step 2 ended on the device is not known: step 3 is as long as on the host.
    assert describe(timeline, 0, 2) == describe(timeline, 0, 1)


def test_one_in_two_steps_marked(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    for step in range(8):
        at = 20 * step * MS
        if step % 2:
            there = (at + 6 * MS, at + 22 * MS)
            job.device_phase(0, "forward", (at, at + MS), there, offset_ns=SECOND)
        else:
            job.phase(0, "forward", at, at + MS)
        job.own_step(0, step, at, at + 19 * MS)
    timeline = timeline_of(job.close())

    assert timeline.steps.tolist() == [1, 3, 5, 7]
    assert timeline.num_unmarked == 4
    assert timeline.starts_window.all()
    assert describe(timeline, 0, 1) == [("WORK", "", 4), ("WORK", "forward", 16)]


def test_marks_that_cannot_be_placed_leave_the_host(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=4, device_ratio=0.5)
    timeline = timeline_of(open_run(tmp_path).last_attempt)

    assert timeline.on_device.tolist() == [False]
    assert ("WORK", "forward", 30) in describe(timeline, 0, 1)


def test_device_operation_holds_the_stream_up(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    group = job.group(range(2), backend="nccl")
    for rank in range(2):
        job.device_phase(rank, "backward", (0, 2 * MS), (5 * MS, 40 * MS), offset_ns=3 * SECOND)
        job.own_step(rank, 0, 0, 50 * MS)
    started = {
        rank: {"start_ns": job.local_ns(rank, at)} for rank, at in ((0, 10 * MS), (1, 20 * MS))
    }
    job.collective(
        group,
        {0: 1 * MS, 1: 1 * MS},
        transfer_ns=29 * MS,
        flags=OperationFlag.DEVICE,
        overrides=started,
        step=0,
    )
    timeline = timeline_of(job.close())

    assert describe(timeline, 0) == [
        ("WORK", "backward", 5),
        ("WAIT", "backward", 10),
        ("TRANSFER", "backward", 10),
        ("WORK", "backward", 10),
    ]
    assert describe(timeline, 1) == [
        ("WORK", "backward", 15),
        ("TRANSFER", "backward", 10),
        ("WORK", "backward", 10),
    ]


def test_pieces_are_sorted_and_gapless(tmp_path: Path) -> None:
    work = {rank: {"forward": 10 + rank, "backward": 20} for rank in range(3)}
    timeline = timeline_of(make_dp_run(tmp_path, work, gap_ms=1))
    pieces = timeline.pieces

    assert (np.diff(pieces.rank) >= 0).all()
    same = pieces.rank[1:] == pieces.rank[:-1]
    assert (pieces.start_ns[1:][same] == pieces.end_ns[:-1][same]).all()
