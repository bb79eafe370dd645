import os
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosed import context_of, find, make_finding

import hang_builders
from builders import (
    MS,
    START_MONO_NS,
    Faults,
    lose_table,
    make_run,
    make_writer,
    put_device_span,
    put_span,
    put_step,
    table_path,
)
from communication_builders import Job, operation_words
from meshscope.analyze.study import Failure
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import ConfidenceLevel
from meshscope.diagnose.registry import RULES
from meshscope.hang.processes import this_machine
from meshscope.store.read.columns import Problem, ProblemKind


def test_a_failure_is_told_with_its_error(tmp_path):
    context = context_of(make_run(tmp_path))
    assert list(RULES["HE001"]().run(context)) == []
    context.study.failures.append(
        Failure(what="rule XX001", error="ValueError: no", place="x.py:3")
    )
    (found,) = RULES["HE001"]().run(context)
    assert found.title == "rule XX001 failed"
    assert found.severity is Severity.MEDIUM


# --- HE002 ------------------------------------------------------------------------------------


def test_a_rank_without_an_end_among_finished_ones_is_dead(tmp_path):
    make_run(tmp_path, layout=Layout(dp=4), num_steps=20, faults=Faults(killed={3: 12}))
    (found,) = find("HE002", tmp_path)
    assert (found.severity, found.ranks) == (Severity.HIGH, (3,))
    assert found.title == "rank 3 stopped without an end"
    assert "after step 11; the job finished 20 steps" in found.summary
    assert found.confidence.level is ConfidenceLevel.MEDIUM


def test_the_first_to_stop_is_named_when_all_died(tmp_path):
    killed = {0: 20, 1: 20, 2: 7, 3: 20}
    header = {"host": this_machine().host, "pid": find_unused_pid()}
    faults = Faults(killed=killed)
    make_run(tmp_path, layout=Layout(dp=4), num_steps=20, faults=faults, header=header)
    (found,) = find("HE002", tmp_path)
    assert (found.severity, found.ranks) == (Severity.HIGH, (2,))
    assert found.confidence.level is ConfidenceLevel.HIGH


def test_a_job_that_was_killed_as_a_whole_has_no_culprit(tmp_path):
    header = {"host": this_machine().host, "pid": find_unused_pid()}
    make_run(tmp_path, world_size=2, header=header, faults=Faults(killed={0: 5, 1: 5}))
    (found,) = find("HE002", tmp_path)
    assert (found.title, found.ranks) == ("every rank stopped without an end", ())


def test_a_job_elsewhere_that_may_be_running_is_a_low_finding(tmp_path):
    make_run(tmp_path, world_size=2, faults=Faults(killed={0: 5, 1: 5}))
    (found,) = find("HE002", tmp_path)
    assert (found.severity, found.title) == (Severity.LOW, "the recording has no end")


def test_a_job_that_is_running_here_is_no_finding(tmp_path):
    stat = Path("/proc/self/stat").read_text(encoding="ascii")
    ticks = int(stat.rpartition(")")[2].split()[19])
    header = {"host": this_machine().host, "pid": os.getpid(), "process_start_ticks": ticks}
    make_run(tmp_path, world_size=2, header=header, faults=Faults(killed={0: 5, 1: 5}))
    assert find("HE002", tmp_path) == []


@pytest.mark.parametrize(("world_size", "severity"), [(1, Severity.LOW), (2, Severity.MEDIUM)])
def test_processes_that_share_a_rank_have_lost_nothing(tmp_path, world_size, severity):
    for _ in range(2):
        writer = make_writer(tmp_path, 0, world_size)
        for step in range(4):
            put_step(writer, step, START_MONO_NS + step * MS, START_MONO_NS + (step + 1) * MS)
        writer.close(end_host_mono_ns=START_MONO_NS + 10**9)
    (found,) = find("HE003", tmp_path)
    assert (found.title, found.severity) == ("several processes recorded as rank 0", severity)
    assert "--attempt" in found.change


def test_a_rank_that_ended_early_in_order_is_named(tmp_path):
    for rank, num_steps in enumerate((10, 4)):
        writer = make_writer(tmp_path, rank, 2)
        for step in range(num_steps):
            put_step(writer, step, 10**9 + step * MS, 10**9 + (step + 1) * MS)
        writer.close(end_host_mono_ns=2 * 10**9)
    (found,) = find("HE002", tmp_path)
    assert (found.title, found.severity) == ("rank 1 stopped before the others", Severity.HIGH)


@pytest.mark.parametrize(("num_last", "is_named"), [(8, False), (4, True)])
def test_a_rank_without_batches_that_takes_part_to_the_end_did_not_stop(
    tmp_path, num_last, is_named
):
    """As within `DistributedDataParallel.join`: the others' sums need it."""
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2), description="default_pg")
    for step in range(8):
        if step < num_last:
            job.collective(group, {0: step * 10 * MS, 1: step * 10 * MS})
        else:
            alone = job.group([0], description=f"{step}")
            job.collective(alone, {0: step * 10 * MS})
        for rank, writer in job.writers.items():
            if rank == 0 or step < 4:
                begin_ns = job.local_ns(rank, step * 10 * MS)
                put_step(writer, step, begin_ns, begin_ns + 9 * MS)
    for _ in range(8 - num_last):
        job.writers[0].table("collectives").put(
            *operation_words(enqueue_ns=START_MONO_NS, sequence=8, group_id=group)
        )
    job.close()
    titles = [finding.title for finding in find("HE002", tmp_path)]
    assert titles == ["rank 1 stopped before the others"] * is_named


def test_a_rank_whose_steps_are_lost_did_not_stop(tmp_path):
    for rank in range(2):
        writer = make_writer(tmp_path, rank, 2)
        for step in range(10):
            put_step(writer, step, 10**9 + step * MS, 10**9 + (step + 1) * MS)
        writer.close(end_host_mono_ns=2 * 10**9, last_step=9)
    lose_table(table_path(tmp_path / "rank00001" / "attempt000", "steps"))
    assert find("HE002", tmp_path) == []
    (found,) = find("HE003", tmp_path)
    assert found.ranks == (1,)
    assert found.change.startswith("Copy the run again")


@pytest.mark.parametrize(
    ("exception", "titles"),
    [
        ("ValueError: made up", ["rank 1 stopped with ValueError"]),
        ("KeyboardInterrupt", []),
    ],
)
def test_an_exception_that_ended_a_rank_is_told_unless_somebody_wanted_it(
    tmp_path, exception, titles
):
    for rank in range(2):
        writer = make_writer(tmp_path, rank, 2)
        for step in range(10):
            put_step(writer, step, 10**9 + step * MS, 10**9 + (step + 1) * MS)
        if rank == 1:
            writer.journal.write("exit", exception=exception)
        writer.close(end_host_mono_ns=2 * 10**9)
    found = find("HE002", tmp_path)
    assert [one.title for one in found] == titles
    assert all(one.confidence.level is ConfidenceLevel.HIGH for one in found)


def test_who_ended_in_order_is_named_and_not_who_failed_for_want_of_it(tmp_path):
    """A rank whose batches ran out one too early: its peer's connection is lost."""
    job = hang_builders.Job(tmp_path / "run", world_size=2)
    for rank in range(2):
        job.rank(rank).finishes("all_reduce", job.world, ago_s=3)
    job.rank(1).closes(2)
    job.rank(0).fails("all_reduce", job.world, 1.0, hang_builders.CONNECTION_LOST)
    job.rank(0).closes(0.5, exception=hang_builders.CONNECTION_LOST)
    (found,) = find("HE002", tmp_path / "run")
    assert (found.title, found.ranks) == ("rank 1 stopped before the others", (1,))


def test_missing_ranks_are_a_medium_finding(tmp_path):
    make_run(tmp_path, layout=Layout(dp=4), faults=Faults(missing=frozenset({1, 2})))
    (found,) = find("HE002", tmp_path)
    assert (found.severity, found.ranks) == (Severity.MEDIUM, (1, 2))


def find_unused_pid() -> int:
    pid = 2**22 - 7
    while Path(f"/proc/{pid}").exists():
        pid -= 1
    return pid


# --- the others ---------------------------------------------------------------------------------


def test_steps_of_two_threads_at_once_are_no_damage(tmp_path):
    writer = make_writer(tmp_path, 0, 1)
    for step in range(8):
        begin_ns = START_MONO_NS + step * MS
        put_step(writer, step, begin_ns, begin_ns + 3 * MS // 2)
    writer.close(end_host_mono_ns=START_MONO_NS + 10**9)
    (found,) = find("HE003", tmp_path)
    assert (found.title, found.severity) == ("steps of rank 0 overlap in time", Severity.LOW)
    assert "4 step(s) of rank 0" in found.summary


def test_a_sound_recording_is_silent(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=40)
    for code in ("HE002", "HE003", "HE004", "HE005", "HE006", "HE007", "HE008"):
        assert find(code, tmp_path) == []


def test_damage_and_errors_are_told_apart(tmp_path):
    faults = Faults(damaged={1: "spans"}, errors={0: {"scalar": 3}})
    make_run(tmp_path, layout=Layout(dp=2), faults=faults)
    damage, errors = find("HE003", tmp_path)
    assert (damage.title, damage.ranks) == ("part of the recording is lost", (1,))
    assert damage.severity is Severity.LOW
    assert (errors.ranks, errors.severity) == ((0,), Severity.LOW)
    assert "3 errors inside the recorder, most in scalar" in errors.summary


def test_dropped_records_are_medium(tmp_path):
    context = context_of(make_run(tmp_path))
    problem = Problem(kind=ProblemKind.DROPPED, rank=0, text="no space", num_records=7)
    object.__setattr__(context.study.health, "problems", (problem,))
    (found,) = RULES["HE003"]().run(context)
    assert found.severity is Severity.MEDIUM
    assert "7 records lost; the first: no space." in found.summary


def write_timed_steps(path, *, num_steps, recorder_ns):
    writer = make_writer(path)
    for step in range(num_steps):
        begin = 10**9 + step * 10 * MS
        put_step(writer, step, begin, begin + 10 * MS, recorder_ns=recorder_ns)
    writer.close(end_host_mono_ns=10**9 + num_steps * 10 * MS)


def test_a_costly_recorder_is_graded_by_its_share(tmp_path):
    write_timed_steps(tmp_path, num_steps=100, recorder_ns=MS)
    (found,) = find("HE005", tmp_path)
    assert found.severity is Severity.HIGH
    assert found.gain.saved_ratio == pytest.approx(0.1)


def test_few_timed_steps_make_it_a_hint(tmp_path):
    write_timed_steps(tmp_path, num_steps=20, recorder_ns=MS)
    (found,) = find("HE005", tmp_path)
    assert found.severity is Severity.LOW
    assert find("HE005", tmp_path, recorder_max_overhead_ratio=0.2) == []


def write_device_steps(path, *, lead_ns, stride=1, is_marked=True):
    """100 steps of 10 ms, all timed: 1 ms of host time with marks on the device, else 0.2 ms.

    Every tenth step the device has caught up, so that its clock is known there.
    """
    writer = make_writer(path)
    for step in range(100):
        begin = 10**9 + step * 10 * MS
        has_marks = is_marked and step % stride == 0
        put_span(writer, "forward", begin, 8 * MS)
        put_step(writer, step, begin, begin + 10 * MS, recorder_ns=MS if has_marks else MS // 5)
        writer.table("memory").put(step, begin + 10 * MS, 0, 1, 1, 1, 1)
        if has_marks:
            lead = lead_ns if step % 10 else 0
            start = step * 10 * MS + lead
            put_device_span(
                writer,
                "forward",
                begin,
                8 * MS,
                start_device_ns=start,
                offset_min_ns=begin - start,
                offset_max_ns=10**9 + 5 * MS,
            )
    writer.close(end_host_mono_ns=10**9 + 1000 * MS)


def test_host_time_that_the_devices_queue_hides_is_no_cost(tmp_path):
    write_device_steps(tmp_path, lead_ns=3 * MS)
    overhead = context_of(tmp_path).study.health.overhead
    # The device had caught up in every tenth step; 9 of the 99 after warm-up.
    assert overhead.host_ratio == pytest.approx(0.1)
    assert overhead.starved_ratio == pytest.approx(9 / 99)
    assert find("HE005", tmp_path) == []


def test_host_time_that_a_device_waits_for_is_a_cost(tmp_path):
    write_device_steps(tmp_path, lead_ns=MS // 2)
    (found,) = find("HE005", tmp_path)
    assert found.severity is Severity.HIGH
    assert found.gain.saved_ratio == pytest.approx(0.1)
    assert "the device waited at 100" in found.summary


def test_without_marks_on_the_device_host_time_is_a_bound_and_low(tmp_path):
    write_device_steps(tmp_path, lead_ns=0, is_marked=False)
    (found,) = find("HE005", tmp_path, recorder_max_overhead_ratio=0.01)
    assert found.severity is Severity.LOW
    assert found.title == "recording takes at most a part of every step"
    assert "no mark on the device says" in found.summary


def test_marked_steps_count_as_often_as_they_are(tmp_path):
    write_device_steps(tmp_path, lead_ns=0, stride=4)
    overhead = context_of(tmp_path).study.health.overhead
    # 24 of the 99 steps after warm-up have marks and take 1 ms, the others 0.2 ms.
    assert overhead.host_ns == pytest.approx((24 * 1.0 + 75 * 0.2) / 99 * MS)


def test_few_steps_are_said(tmp_path):
    make_run(tmp_path, num_steps=6)
    (found,) = find("HE008", tmp_path)
    assert (found.title, found.severity) == ("the diagnosis is based on few steps", Severity.LOW)
    assert find("HE008", tmp_path, diagnosis_min_steps=5) == []


def test_findings_compare_without_their_edits():
    assert make_finding() == make_finding(edit=object())
    assert make_finding().label == "ST001 something is slow"


def communicate(path, *, host=lambda rank: "node0", groups=((0, 1, 2),), odd=None):
    """Three ranks with one all-reduce per step and group; `odd` changes what one rank calls."""
    job = Job(path, num_ranks=3, layout=Layout(dp=3), host=host)
    numbers = {ranks: job.group(ranks) for ranks in groups}
    for step in range(12):
        begin = step * 10 * MS
        for ranks, group in numbers.items():
            arrivals = dict.fromkeys(ranks, begin + 5 * MS)
            overrides = odd if step == 6 else None
            job.collective(group, arrivals, step=step, overrides=overrides)
        job.step(step, begin, begin + 10 * MS)
    job.close()
    return path


def test_ranks_that_call_different_operations_are_named(tmp_path):
    communicate(tmp_path, odd={1: {"size_bytes": 8192}})
    (found,) = find("HE006", tmp_path)
    assert (found.severity, found.ranks, found.first_step) == (Severity.HIGH, (1,), 6)
    assert "rank 1: all_reduce of 8,192 bytes" in found.summary
    assert "ranks 0, 2: all_reduce of 4,096 bytes" in found.summary


def test_clocks_that_no_operation_connects_are_told(tmp_path):
    def host(rank):
        return f"node{rank // 2}"

    communicate(tmp_path / "joined", host=host)
    assert find("HE004", tmp_path / "joined") == []
    communicate(tmp_path / "apart", host=host, groups=((0, 1),))
    found = find("HE004", tmp_path / "apart")
    assert all(one.severity <= Severity.MEDIUM for one in found)


def test_agreeing_ranks_on_one_clock_are_silent(tmp_path):
    communicate(tmp_path)
    for code in ("HE004", "HE006", "HE007"):
        assert find(code, tmp_path) == []


def test_a_replay_that_misses_the_clock_is_said(tmp_path):
    context = context_of(communicate(tmp_path))
    fidelity = replace(context.replay.fidelity, error_ratio=0.07)
    context.replay = replace(context.replay, fidelity=fidelity)
    (found,) = RULES["HE007"]().run(context)
    assert found.severity is Severity.LOW
    assert "by 7.0 %" in found.summary
