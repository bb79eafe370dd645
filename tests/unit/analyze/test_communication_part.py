"""Communication of a run with more operations than are read at once."""

import pytest

from builders import MS, put_step
from communication_builders import Job
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.report.run.report import Report
from meshscope.report.screen import Screen
from meshscope.store.read.run import open_run
from meshscope.store.schema import StepFlag
from report_builders import render_report

NUM_STEPS = 200
PART = StepChoice(max_rank_steps=80)


def make_job(path):
    """Two ranks; rank 1 comes 3 ms late to a transfer of 2 ms in every step."""
    job = Job(path, num_ranks=2, layout=Layout(dp=2))
    group = job.group((0, 1), description="mesh_dp")
    for step in range(NUM_STEPS):
        start = step * 20 * MS
        arrivals = {0: start + 5 * MS, 1: start + 8 * MS}
        job.collective(group, arrivals, transfer_ns=2 * MS, step=step)
        job.step(step, start, start + 20 * MS)
    return job, group


@pytest.fixture
def run(tmp_path):
    make_job(tmp_path)[0].close()
    return open_run(tmp_path)


def means_of(run, **options):
    report = Report(run=run, study=Study(run.last_attempt, **options))
    return report, report.communication.per_rank_step


def test_means_of_a_part_are_those_of_the_whole(run):
    whole, means = means_of(run)
    assert whole.communication.num_steps_left_out == 0
    part, part_means = means_of(run, step_choice=PART)
    assert part.communication.num_steps_left_out == pytest.approx(NUM_STEPS - 1 - 40, abs=4)
    assert part.communication.num_rank_steps < 100
    assert part_means == means
    text = render_report(part, Screen(width=200))
    assert "steps of a long run not read\n" in text


def test_how_a_long_run_ended_is_seen(tmp_path):
    job, group = make_job(tmp_path)
    end = NUM_STEPS * 20 * MS
    differ = {1: {"size_bytes": 77}}
    job.collective(group, {0: end + MS, 1: end + MS}, step=NUM_STEPS, overrides=differ)
    found = Study(job.close(), step_choice=PART).communication
    assert found.part is not None
    assert found.num_desynchronised == 1
    assert found.desynchronisations[0].sequence == NUM_STEPS


def test_steps_without_communication_are_left_out_of_its_means(tmp_path):
    """In three of four steps rank 1 recorded no operation, and in half of them none did."""
    job = Job(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group((0, 1), description="mesh_dp")
    for step in range(80):
        start = step * 20 * MS
        arrivals = {0: start + 5 * MS, 1: start + 8 * MS}
        resting = {rank for rank in (0, 1) if step % (2, 4)[rank]}
        seen = {rank: at for rank, at in arrivals.items() if rank not in resting}
        if seen:
            numbers = {rank: {"sequence": step << 14} for rank in seen}
            job.collective(group, seen, transfer_ns=2 * MS, step=step, overrides=numbers)
        for rank, writer in job.writers.items():
            times = (job.local_ns(rank, start), job.local_ns(rank, start + 20 * MS))
            put_step(writer, step, *times, flags=StepFlag.UNWATCHED * (rank in resting))
    study = Study(job.close())
    found = study.communication
    assert study.timeline.steps.tolist() == [step for step in range(80) if not step % 4][1:]
    assert study.timeline.num_unwatched == 60
    assert (found.health.num_lost, found.num_desynchronised, found.health.num_stopped) == (0, 0, 0)
    [axis] = found.by_axis
    num_steps = found.part.num_steps[0]
    assert found.part.num_steps == {0: 19, 1: 19}
    assert axis.total.transfer_ns == 2 * 2 * MS * num_steps
    assert axis.total.wait_ns == 3 * MS * num_steps
