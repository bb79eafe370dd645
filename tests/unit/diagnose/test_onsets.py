"""Since when: from the rule where it knows, else from what the finding's edit removes of steps."""

import numpy as np
import pytest
from diagnosed import context_of, make_finding

from builders import MS
from late_runs import LateRun, noisy
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Course, StepLoss
from meshscope.diagnose.onsets import date_findings
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from timeline_builders import TimedJob, make_dp_run

STEPS = 40


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """A run without a fault."""
    path = tmp_path_factory.mktemp("even") / "run"
    LateRun(layout=Layout(dp=4), work=noisy(1), num_steps=STEPS).record(path)
    return context_of(path)


def date(context, **fields):
    (dated,) = date_findings([make_finding(**fields)], context)
    return dated


def test_a_rank_that_is_always_slow_is_so_since_the_first_analysed_step(tmp_path):
    work = {rank: {"forward": 20 + 8 * (rank == 2), "backward": 40} for rank in range(4)}
    context = Context(Study(make_dp_run(tmp_path, work, num_steps=20)))
    finding = diagnose(context, rules={"ST001": RULES["ST001"]}).findings[0]
    assert finding.onset.course is Course.ALWAYS
    assert finding.onset.step == context.study.timeline.steps[0]
    assert finding.first_step is None


def test_a_slow_loader_is_dated_by_the_step_in_which_it_became_slow(tmp_path):
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    for step in range(STEPS):
        at = 100 * step * MS
        for rank, data in ((0, 1), (1, 21 if step >= 12 else 1)):
            job.phase(rank, "data", at, at + data * MS)
            job.own_step(rank, step, at + data * MS, at + 100 * MS)
        job.collective(group, {0: at + 61 * MS, 1: at + 81 * MS}, transfer_ns=19 * MS, step=step)
    context = Context(Study(job.close()))
    finding = diagnose(context, rules={"IN001": RULES["IN001"]}).findings[0]
    assert (finding.ranks, finding.first_step, finding.last_step) == ((1,), 12, None)
    assert (finding.onset.step, finding.onset.course) == (12, Course.SINCE)
    begun = context.study.attempt.ranks[1].read_steps([(12, 12)])
    header = context.study.attempt.ranks[1].header
    begun_ns = int(begun["start_host_mono_ns"][0]) - header["start_host_mono_ns"]
    assert finding.onset.start_unix_ns == header["start_unix_ns"] + begun_ns


def test_the_rules_own_step_holds(even):
    dated = date(even, first_step=15)
    assert (dated.onset.step, dated.onset.course, dated.onset.is_over) == (15, Course.SINCE, False)
    assert date(even, first_step=15, last_step=20).onset.is_over
    assert not date(even, first_step=15, last_step=STEPS - 1).onset.is_over
    assert date(even, first_step=0).onset.course is Course.ALWAYS


def test_steps_that_are_lost_here_and_there_are_called_so(even):
    lost = np.zeros(STEPS)
    lost[[4, 17, 31]] = 5.0 * MS
    here = StepLoss(step=np.arange(STEPS), lost_ns=lost)
    assert date(even, first_step=4, last_step=31, lost_steps=here).onset.course is Course.AT_TIMES
    assert date(even, lost_steps=here).onset.course is Course.AT_TIMES


def test_without_steps_the_reason_is_told(even):
    assert "all steps together" in date(even).onset.reason
    uneven = StepLoss(step=np.arange(6), lost_ns=np.array([0.0, 0, 0, 9, 9, 9]))
    assert isinstance(date(even, lost_steps=uneven).onset, Unavailable)


def test_a_step_that_nobody_recorded_has_no_time(even):
    onset = date(even, first_step=4000).onset
    assert onset.step == 4000
    assert isinstance(onset.start_unix_ns, Unavailable)
