"""Who is to blame, for every way in which a job can get stuck or die."""

import pytest

from hang_builders import (
    CONNECTION_LOST,
    TIMED_OUT,
    Job,
    JobGroup,
    Process,
    wait_for_state,
)
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.hang.hang import Hang
from meshscope.hang.hang_rules import ErrorClass, Reason, VerdictKind, classify_error
from meshscope.report.sections import hang_words
from meshscope.store.write.now_file import NOW_NAME
from meshscope.store.write.pack import PACK_NAME

CUBE = Layout(dp=2, tp=2, pp=2)


def verdict(hang: Hang) -> tuple[VerdictKind, list[tuple[int, Reason]]]:
    return hang.kind, [(culprit.rank, culprit.reason) for culprit in hang.culprits]


def ranks_of(held) -> set[int]:
    return {one.rank for one in held}


# --- waiting --------------------------------------------------------------------------------------


def make_stuck_cube(path, waiter, sleeper) -> Job:
    """Rank 5 sleeps; some wait for it, others for those, and others for these."""
    job = Job(path, layout=CUBE)
    for rank in range(8):
        job.rank(rank, sleeper if rank == 5 else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=9)
    job.rank(4).enters("all_reduce", job.axis_group("tp", 4), ago_s=8)
    job.rank(7).enters("all_gather", job.axis_group("dp", 7), ago_s=7.5)
    job.rank(1).enters("recv", job.axis_group("pp", 1), ago_s=7, peer=5)
    job.rank(6).enters("all_reduce", job.axis_group("dp", 6), ago_s=6.8)
    job.rank(0).enters("all_reduce", job.axis_group("tp", 0), ago_s=6.5)
    job.rank(3).enters("all_reduce", job.axis_group("dp", 3), ago_s=6.4)
    job.rank(2).enters("all_reduce", job.axis_group("dp", 2), ago_s=6)
    job.rank(5).is_in_phase("data", ago_s=8.5)
    return job


def test_chains_of_waits_lead_to_the_rank_that_waits_for_nobody(tmp_path, waiter, sleeper):
    hang = make_stuck_cube(tmp_path / "run", waiter, sleeper).diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(5, Reason.NOT_ENTERED)])
    assert hang.is_stuck
    operation = hang.operation
    assert (operation.kind, operation.axis, operation.sequence) == (Kind.ALL_REDUCE, "tp", 0)
    assert (operation.ranks, operation.entered, operation.missing) == ((4, 5), (4,), (5,))
    assert ranks_of(hang.waiting) == {4, 7, 1}
    assert ranks_of(hang.cascade) == {0, 2, 3, 6}
    assert 8 <= hang.age_ns / 1e9 < 9
    state = hang.culprits[0].state
    assert state.phase.name == "data"
    assert state.process.system_call == "clock_nanosleep"
    assert hang.others == ()


def test_a_message_knows_the_axis_it_travels_along(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", layout=CUBE)
    for rank in range(8):
        job.rank(rank, sleeper if rank == 1 else waiter).knows(job.world)
    job.rank(5).enters("recv", job.world, ago_s=6, peer=1)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(1, Reason.NOT_ENTERED)])
    operation = hang.operation
    assert (operation.axis, operation.source, operation.destination) == ("pp", 1, 5)


def test_a_young_wait_names_whom_it_leads_to_and_is_no_hang(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", world_size=3)
    for rank in range(3):
        job.rank(rank, waiter if rank else sleeper)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=0.8)
    job.rank(1).enters("all_reduce", job.world, ago_s=0.7)
    job.rank(2).enters("all_reduce", job.world, ago_s=0.6)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MOVING, [(0, Reason.NOT_ENTERED)])
    assert not hang.is_stuck
    at_once = job.diagnose(after_s=0)
    assert verdict(at_once) == (VerdictKind.MISSING, [(0, Reason.NOT_ENTERED)])
    assert at_once.is_stuck


def test_a_job_that_moves_is_left_alone(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).finishes("all_reduce", job.world, ago_s=0.05)
    job.rank(0).enters("all_reduce", job.world, ago_s=0.01)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MOVING, [])
    assert (hang.is_stuck, hang.operation) == (False, None)
    assert (hang.asked_unix_ns - hang.last_operation_unix_ns) / 1e9 < 5


def test_waits_that_are_usual_for_the_job_are_not_talked_about(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, sleeper if rank else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=1, took_s=0.4)
    job.rank(0).enters("all_reduce", job.world, ago_s=0.5)
    assert verdict(job.diagnose()) == (VerdictKind.MOVING, [])


def test_several_ranks_that_are_missing_from_one_operation_are_named_together(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=4)
    for rank in range(4):
        job.rank(rank, waiter).finishes("barrier", job.world, ago_s=9)
    job.rank(0).enters("all_reduce", job.world, ago_s=8)
    hang = job.diagnose()
    assert verdict(hang) == (
        VerdictKind.MISSING,
        [(rank, Reason.NOT_ENTERED) for rank in (1, 2, 3)],
    )


def test_an_operation_that_all_are_in_is_a_transfer(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).enters("all_reduce", job.world, ago_s=20 - 3 * rank)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.TRANSFER, [])
    assert 17 <= hang.age_ns / 1e9 < 18  # since the last of them came
    assert verdict(job.diagnose(after_s=18.5)) == (VerdictKind.MOVING, [])


def test_a_handle_of_an_attended_operation_may_be_over(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).enters("all_reduce", job.world, ago_s=60, is_async=True)
        job.rank(rank).is_in_phase("forward", ago_s=2)
    assert verdict(job.diagnose()) == (VerdictKind.MOVING, [])
    silent = job.diagnose(after_s=1)
    assert verdict(silent) == (VerdictKind.TRANSFER, [])
    assert not silent.is_certain


def test_a_job_of_long_steps_may_be_silent_for_long(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).enters("all_reduce", job.world, ago_s=20, is_async=True)
        for step in range(3):
            job.rank(rank).ends_step(step, ago_s=50 - 10 * step)
    assert verdict(job.diagnose()) == (VerdictKind.MOVING, [])


def test_a_receive_without_its_send(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", world_size=2)
    for rank, (kind, process) in enumerate((("recv", waiter), ("send", sleeper))):
        job.rank(rank, process).finishes(kind, job.world, ago_s=9, peer=1 - rank)
    job.rank(0).enters("recv", job.world, ago_s=8, peer=1)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(1, Reason.NOT_ENTERED)])
    assert (hang.operation.source, hang.operation.destination, hang.operation.sequence) == (1, 0, 1)


def test_messages_are_told_apart_by_their_tags(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", world_size=2)
    job.rank(0, waiter).enters("recv", job.world, ago_s=8, peer=1, tag=2)
    job.rank(1, sleeper)
    for _ in range(3):
        job.rank(1).finishes("send", job.world, ago_s=9, peer=0, tag=1)
    assert verdict(job.diagnose()) == (VerdictKind.MISSING, [(1, Reason.NOT_ENTERED)])


# --- circles --------------------------------------------------------------------------------------


def test_ranks_in_different_operations_wait_for_each_other(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=3)
    first, second = JobGroup("a", (0, 1), "mesh_tp"), JobGroup("b", (0, 1), "mesh_dp")
    job.rank(0, waiter).enters("all_reduce", first, ago_s=9)
    job.rank(1, waiter).enters("all_gather", second, ago_s=8)
    job.rank(2, waiter).enters("barrier", job.world, ago_s=7)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.CYCLE, [(0, Reason.IN_CIRCLE), (1, Reason.IN_CIRCLE)])
    sides = {held.rank: (held.operation.group.axis, held.missing) for held in hang.waiting}
    assert sides == {0: ("tp", (1,)), 1: ("dp", (0,))}
    assert ranks_of(hang.cascade) == {2}
    assert 8 <= hang.age_ns / 1e9 < 9  # since the circle closed


def test_ranks_that_call_different_operations_are_shown_side_by_side(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=3)
    for rank, kind in enumerate(("all_reduce", "all_reduce", "broadcast")):
        job.rank(rank, waiter).enters(kind, job.world, ago_s=8)
    hang = job.diagnose()
    assert hang.kind is VerdictKind.CYCLE
    assert hang.operation.kinds == {Kind.ALL_REDUCE: (0, 1), Kind.BROADCAST: (2,)}
    assert {culprit.reason for culprit in hang.culprits} == {Reason.MISMATCH}


def test_threads_that_share_a_group_are_told_from_a_branch(tmp_path, waiter):
    """As a checkpoint written beside training does, in the group of the gradients."""
    shared, branched = (Job(tmp_path / name, world_size=2) for name in ("shared", "branched"))
    kinds = ("all_reduce", "gather")
    for rank in range(2):
        for kind in kinds if rank else kinds[::-1]:
            shared.rank(rank, waiter).enters(kind, shared.world, ago_s=8)
        branched.rank(rank, waiter).enters(kinds[rank], branched.world, ago_s=8)
    assert "two threads use the group at once" in hang_words.advise(shared.diagnose())
    assert "came by another branch" in hang_words.advise(branched.diagnose())


def test_of_a_rank_that_was_alone_nothing_is_said_of_others(tmp_path, processes):
    job = Job(tmp_path / "run", world_size=1)
    job.rank(0, processes.killed()).finishes("barrier", job.world, ago_s=1)
    hang = job.diagnose()
    said = f"{hang_words.make_sentence(hang)} {hang_words.advise(hang)}"
    assert "rank 0 died" in said.lower()
    assert "waits for it" not in said
    assert "others" not in said


def test_a_rank_that_only_holds_a_handle_is_the_one_waited_for(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    first, second = JobGroup("a", (0, 1)), JobGroup("b", (0, 1))
    job.rank(0).enters("all_reduce", first, ago_s=9, is_async=True)
    job.rank(1).enters("all_reduce", second, ago_s=8)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(0, Reason.NOT_ENTERED)])
    assert not hang.is_certain


def test_a_rank_seen_to_sleep_does_not_wait_for_its_handles(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", world_size=2)
    job.rank(0, sleeper).enters("send", job.world, ago_s=9, peer=1)
    job.rank(1, waiter).enters("send", job.world, ago_s=8, peer=0)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(0, Reason.NOT_ENTERED)])
    assert hang.is_certain


# --- stopped and dead -----------------------------------------------------------------------------


def test_a_rank_stopped_inside_an_operation_that_all_have_entered(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=4)
    for rank in range(4):
        job.rank(rank, processes.stopped() if rank == 2 else waiter)
        job.rank(rank).enters("all_reduce", job.world, ago_s=0.4)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.STOPPED, [(2, Reason.STOPPED)])
    assert hang.is_stuck  # however young
    assert (hang.operation.kind, hang.operation.missing) == (Kind.ALL_REDUCE, ())
    assert ranks_of(hang.waiting) == {0, 1, 3}


def test_a_stopped_rank_whose_peers_hold_handles_with_it(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=2)
    for rank, process in enumerate((processes.stopped(), waiter)):
        job.rank(rank, process).enters("all_reduce", job.world, ago_s=0.4, is_async=True)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.STOPPED, [(0, Reason.STOPPED)])
    assert hang.operation.kind is Kind.ALL_REDUCE
    assert ranks_of(hang.waiting) == {1}


def test_a_job_that_is_stopped_as_a_whole(tmp_path, processes):
    job = Job(tmp_path / "run", world_size=2)
    stopped = processes.stopped()
    job.rank(0, stopped).enters("all_reduce", job.world, ago_s=1)
    job.rank(1, stopped).knows(job.world)
    assert [culprit.rank for culprit in job.diagnose().culprits] == [0, 1]


def test_a_killed_rank_and_not_those_whose_connections_it_took_down(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=4)
    for rank in range(4):
        job.rank(rank, processes.zombie() if rank == 2 else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=2)
    tp = JobGroup("tp", (0, 1), "mesh_tp")
    job.rank(0).fails("all_reduce", job.world, 1.0, CONNECTION_LOST).closes(0.9)
    job.rank(3).fails("all_reduce", job.world, 0.99, CONNECTION_LOST)
    job.rank(1).fails("all_reduce", tp, 0.8, CONNECTION_LOST).closes(0.7)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.DEAD, [(2, Reason.KILLED)])
    assert (hang.operation.axis, hang.operation.sequence) == ("world", 1)
    assert ranks_of(hang.waiting) == {0, 3}
    assert ranks_of(hang.cascade) == {1}
    assert (hang.first_error.rank, hang.num_errors) == (0, 3)


def test_survivors_that_ended_without_a_closing_line_are_not_taken_for_killed(tmp_path, processes):
    job = Job(tmp_path / "run", world_size=3)
    gone = processes.killed()
    for rank in range(3):
        job.rank(rank, gone).finishes("all_reduce", job.world, ago_s=2)
    for rank in (0, 2):
        job.rank(rank).fails("all_reduce", job.world, 1.0, CONNECTION_LOST)
    assert verdict(job.diagnose()) == (VerdictKind.DEAD, [(1, Reason.KILLED)])


def test_of_several_that_are_gone_the_one_that_was_struck(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=3)
    gone = processes.start("raise SystemExit(1)")
    wait_for_state(gone.pid, "Z")
    for rank, process in enumerate((gone, processes.zombie(), waiter)):
        job.rank(rank, process).finishes("all_reduce", job.world, ago_s=2)
    job.rank(2).fails("all_reduce", job.world, 1.0, CONNECTION_LOST)
    assert verdict(job.diagnose()) == (VerdictKind.DEAD, [(1, Reason.KILLED)])


def test_whoever_lived_when_others_felt_a_death_did_not_die_it(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=3)
    gone = processes.killed()
    for rank, process in enumerate((gone, gone, waiter)):
        job.rank(rank, process).finishes("all_reduce", job.world, ago_s=2)
    job.rank(2).fails("all_reduce", job.world, 1.0, CONNECTION_LOST)
    job.rank(0).is_in_phase("forward", ago_s=0.95)  # and was then ended by the launcher
    assert verdict(job.diagnose()) == (VerdictKind.DEAD, [(1, Reason.KILLED)])


def test_of_a_job_killed_as_a_whole_the_rank_that_the_others_waited_for(tmp_path, processes):
    job = Job(tmp_path / "run", world_size=3)
    gone = processes.killed()
    for rank in range(3):
        job.rank(rank, gone).finishes("all_reduce", job.world, ago_s=9)
    for rank in (0, 2):
        job.rank(rank).enters("all_reduce", job.world, ago_s=8)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.DEAD, [(1, Reason.KILLED)])
    assert ranks_of(hang.waiting) == {0, 2}


def test_a_rank_of_another_host_that_fell_silent(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=3)
    for rank in range(3):
        job.rank(rank, None if rank == 1 else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=2)
    for rank in (0, 2):
        job.rank(rank).fails("all_reduce", job.world, 1.0, CONNECTION_LOST)
    assert verdict(job.diagnose()) == (VerdictKind.DEAD, [(1, Reason.LOST)])


def test_whoever_raised_first_and_not_those_it_took_down(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=3)
    for rank in range(3):
        job.rank(rank, processes.killed() if rank == 2 else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=2)
    job.rank(0).closes(1.5, exception="ValueError: the loss is not a number")
    job.rank(1).fails("all_reduce", job.world, 1.4, CONNECTION_LOST)
    job.rank(1).closes(1.3, exception=CONNECTION_LOST)
    job.rank(2).enters("all_reduce", job.world, ago_s=1.6)  # killed by the launcher
    assert verdict(job.diagnose()) == (VerdictKind.DEAD, [(0, Reason.RAISED)])


def test_a_pid_that_belongs_to_another_process_now(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    job.rank(0, waiter).enters("barrier", job.world, ago_s=1)
    job.rank(1, Process(waiter.pid, waiter.start_ticks - 1)).knows(job.world)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.DEAD, [(1, Reason.KILLED)])
    assert hang.culprits[0].state.process.reason == "its pid belongs to another process now"


def test_a_death_is_told_before_anybody_waits(tmp_path, waiter, processes):
    job = Job(tmp_path / "run", world_size=2)
    job.rank(0, waiter).finishes("barrier", job.world, ago_s=1)
    job.rank(1, processes.killed()).finishes("barrier", job.world, ago_s=1)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.DEAD, [(1, Reason.KILLED)])
    assert hang.operation is None


# --- timeouts, ends, absences ---------------------------------------------------------------------


def test_who_was_missing_when_operations_timed_out(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", layout=Layout(dp=2, tp=2))
    for rank in range(4):
        job.rank(rank, sleeper if rank == 3 else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=20)
    tp, dp, other_dp = (
        job.axis_group(axis, rank) for axis, rank in (("tp", 2), ("dp", 1), ("dp", 0))
    )
    # The first to time out waited for a rank that itself waited for the culprit.
    job.rank(0).fails("all_reduce", other_dp, 4.0, TIMED_OUT, took_s=5.2)
    job.rank(2).fails("all_reduce", tp, 3.9, TIMED_OUT, took_s=5.0)
    job.rank(1).fails("all_reduce", dp, 3.8, TIMED_OUT, took_s=5.0)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(3, Reason.LATE)])
    assert ranks_of(hang.waiting) == {1, 2}
    assert ranks_of(hang.cascade) == {0}


def test_a_rank_that_came_too_late_is_the_one_that_was_missing(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).finishes("barrier", job.world, ago_s=20)
    job.rank(0).fails("all_reduce", job.world, 6.0, TIMED_OUT, took_s=5.0).closes(5.9)
    job.rank(1).fails("all_reduce", job.world, 1.0, CONNECTION_LOST, took_s=0.1)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(1, Reason.LATE)])
    assert hang.operation.missing == (1,)


def test_an_error_the_program_got_over_is_forgotten(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).fails("all_reduce", job.world, 6.0, TIMED_OUT, took_s=5.0)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=0.01)
    assert verdict(job.diagnose()) == (VerdictKind.MOVING, [])


def test_a_rank_that_left_early(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).finishes("barrier", job.world, ago_s=2)
    job.rank(1).closes(1.0)
    job.rank(0).enters("all_reduce", job.world, ago_s=0.5)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(1, Reason.LEFT)])
    assert hang.is_stuck  # it will never come, however young the wait is


def test_a_rank_that_never_recorded_anything(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=3)
    for rank in (0, 2):
        job.rank(rank, waiter).enters("barrier", job.world, ago_s=8)
    assert verdict(job.diagnose()) == (VerdictKind.MISSING, [(1, Reason.NEVER_RECORDED)])


def test_a_rank_whose_operations_are_not_recorded_is_not_blamed(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=3)
    for rank in range(3):
        job.rank(rank, waiter).finishes("barrier", job.world, ago_s=9)
    job.rank(0).enters("barrier", job.world, ago_s=8)
    job.rank(1).writer.journal.write("update", config={"communication": "False"})
    job.rank(2).writer.journal.write("health", cause="gap", where="communication", text="no")
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.TRANSFER, [])
    assert hang.notes == ("communication is not, or not all, recorded on 1-2",)


def test_where_files_are_written_now_and_then_young_waits_may_be_none(tmp_path, waiter, sleeper):
    job = Job(tmp_path / "run", world_size=2)
    job.rank(0, waiter, mapped=False).enters("barrier", job.world, ago_s=0.1)
    job.rank(1, sleeper).knows(job.world)
    assert verdict(job.diagnose(after_s=0)) == (VerdictKind.MOVING, [])


def test_of_silent_ranks_on_other_hosts_the_one_waited_for(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=4)
    tp = JobGroup("tp", (1, 2), "mesh_tp")
    for rank in range(4):
        job.rank(rank, None if rank in (1, 2) else waiter)
        job.rank(rank).finishes("all_reduce", job.world, ago_s=9)
    for rank in (0, 3):
        job.rank(rank).fails("all_reduce", job.world, 5.0, CONNECTION_LOST)
    job.rank(1).enters("all_reduce", tp, ago_s=6)
    job.rank(2).knows(tp)
    assert verdict(job.diagnose()) == (VerdictKind.DEAD, [(2, Reason.LOST)])


def test_a_finished_job(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).finishes("barrier", job.world, ago_s=2).closes(1)
    assert verdict(job.diagnose()) == (VerdictKind.FINISHED, [])


def test_a_job_without_operations(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank, waiter)
    hang = job.diagnose()
    assert verdict(hang) == (VerdictKind.MOVING, [])
    assert hang.last_operation_unix_ns is None


def test_what_is_damaged_is_left_out(tmp_path, waiter, sleeper):
    job = make_stuck_cube(tmp_path / "run", waiter, sleeper)
    (job.rank(2).directory / NOW_NAME).write_bytes(b"not this")
    (job.rank(3).directory / PACK_NAME).write_bytes(b"nor this")
    assert verdict(job.diagnose()) == (VerdictKind.MISSING, [(5, Reason.NOT_ENTERED)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONNECTION_LOST, ErrorClass.CONNECTION),
        ("RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer", ErrorClass.CONNECTION),
        ("DistBackendError: NCCL error: remote process exited", ErrorClass.CONNECTION),
        (TIMED_OUT, ErrorClass.TIMEOUT),
        ("DistBackendError: Watchdog caught collective operation timeout", ErrorClass.TIMEOUT),
        ("KeyboardInterrupt", ErrorClass.INTERRUPT),
        ("ValueError: loss is NaN", ErrorClass.OWN),
        ("OutOfMemoryError: CUDA out of memory", ErrorClass.OWN),
    ],
)
def test_errors_of_connections_are_told_from_a_rank_s_own(text, expected):
    assert classify_error(text) is expected


def test_a_disagreement_is_told_after_the_job_was_ended_as_a_whole(tmp_path, processes):
    job = Job(tmp_path / "run", world_size=3)
    gone = processes.killed()
    for rank, kind in enumerate(("all_reduce", "all_reduce", "broadcast")):
        job.rank(rank, gone).finishes("barrier", job.world, ago_s=9)
        job.rank(rank).enters(kind, job.world, ago_s=8)
    hang = job.diagnose()
    assert hang.kind is VerdictKind.CYCLE
    assert {culprit.reason for culprit in hang.culprits} == {Reason.MISMATCH}


def test_a_disagreement_is_a_hang_at_any_age(tmp_path, waiter):
    job = Job(tmp_path / "run", world_size=2)
    for rank, kind in enumerate(("all_reduce", "barrier")):
        job.rank(rank, waiter).enters(kind, job.world, ago_s=1)
    hang = job.diagnose()
    assert hang.kind is VerdictKind.CYCLE
    assert hang.is_stuck


def test_whoever_slept_through_a_timeout_and_was_ended_afterwards_did_not_die(
    tmp_path, waiter, processes
):
    job = Job(tmp_path / "run", world_size=3)
    gone = processes.killed()
    for rank in range(3):
        job.rank(rank, gone if rank == 2 else waiter).finishes("barrier", job.world, ago_s=20)
    for rank in (0, 1):
        job.rank(rank).fails("all_reduce", job.world, 6.0, TIMED_OUT, took_s=5.0).closes(5.9)
    hang = job.diagnose()
    assert hang.kind is VerdictKind.MISSING
    assert [culprit.rank for culprit in hang.culprits] == [2]


def make_resting(path, waiter, step: int) -> Job:
    """Rank 1 is in step 17, whose operations it does not record; rank 0 in one of `step`."""
    job = Job(path, world_size=2)
    for rank in range(2):
        job.rank(rank, waiter).finishes("all_reduce", job.world, ago_s=9)
        job.rank(rank).ends_step(16, ago_s=8.9).is_in_phase("forward", ago_s=8.8)
    job.rank(0)._numbers[job.world, 0, -1, 0] = step << 14
    job.rank(0).enters("all_reduce", job.world, ago_s=8)
    job.rank(1).in_flight.rest(17)
    return job


def test_a_rank_that_rests_has_not_entered_what_a_later_step_brings(tmp_path, waiter):
    hang = make_resting(tmp_path / "run", waiter, step=18).diagnose()
    assert verdict(hang) == (VerdictKind.MISSING, [(1, Reason.NOT_ENTERED)])
    [note] = [note for note in hang.notes if "not recorded" in note]
    assert "operations of the current step" in note
    assert "on 1:" in note


def test_a_rank_that_rests_is_not_blamed_for_what_it_may_have_entered(tmp_path, waiter):
    hang = make_resting(tmp_path / "run", waiter, step=17).diagnose()
    assert hang.culprits == ()
    assert (hang.states[1].resting_since_step, hang.states[0].resting_since_step) == (17, None)


def test_there_is_advice_for_every_reason():
    assert set(hang_words._ADVICE) == set(Reason)
    assert all("{who}" in text for text in hang_words._ADVICE.values())
