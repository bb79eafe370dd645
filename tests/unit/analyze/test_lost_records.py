"""Runs whose tables stopped at their limit: what is left is measured, the rest is not guessed."""

import pytest

from builders import MS
from made_programs import ProgramRun, reduce, work
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.study import Study
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import ConfidenceLevel
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from meshscope.report.run_study import RunStudy
from meshscope.store.read.run import open_run
from meshscope.store.write.writer import RankWriter

LIMIT_BYTES = 2 << 16
NUM_STEPS = 40
NUM_OPERATIONS = 100
WORK_NS, TRANSFER_NS = MS // 4, 3 * MS // 4
SLOW_RANK = 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """100 operations a step: the limit has room for those of 19 steps, and phases of as many."""

    def program(rank, step):
        own_ns = WORK_NS + (MS // 4 if rank == SLOW_RANK else 0)
        return [
            one
            for _ in range(NUM_OPERATIONS)
            for one in (work("forward", own_ns), reduce((0, 1), TRANSFER_NS))
        ]

    path = tmp_path_factory.mktemp("limited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RankWriter.__init__.__kwdefaults__, "max_detail_bytes", LIMIT_BYTES)
        ProgramRun(program, num_ranks=2, num_steps=NUM_STEPS).record(path)
    return open_run(path)


@pytest.mark.parametrize("choice", [None, StepChoice(max_rank_steps=60, max_rows=100_000)])
def test_operations_that_are_lost_are_not_compute(run, choice):
    """Whole or in windows of steps, the shares are those of the steps that are there."""
    study = Study(run.last_attempt, step_choice=choice)
    timeline, budget = study.timeline, study.budget
    assert timeline.num_incomplete >= 15
    assert budget.residual_ratio == 0
    mean_ns = {line.name: one / budget.num_rank_steps for line, one in zip(
        budget.lines, budget.total_ns().tolist(), strict=True
    )}  # fmt: skip
    step_ns = NUM_OPERATIONS * (WORK_NS + MS // 4 + TRANSFER_NS)
    assert sum(mean_ns.values()) == pytest.approx(step_ns, rel=0.01)
    assert mean_ns["compute"] == pytest.approx(NUM_OPERATIONS * (WORK_NS + MS // 8), rel=0.01)


def test_phases_that_are_lost_are_not_unattributed_time(run):
    split = Study(run.last_attempt).time.steady_steps
    own_ns = NUM_OPERATIONS * (WORK_NS + MS // 8)
    step_ns = NUM_OPERATIONS * (WORK_NS + MS // 4 + TRANSFER_NS)
    assert split.phase_ns["forward"] / split.wall_ns == pytest.approx(own_ns / step_ns, rel=0.01)


def test_communication_is_that_of_the_steps_that_have_theirs(run):
    report = RunStudy(run, run.last_attempt).report(with_diagnosis=False)
    facts = report.content.communication.per_rank_step
    assert facts.transfer_ns == pytest.approx(NUM_OPERATIONS * TRANSFER_NS, rel=0.06)


def test_findings_are_less_sure_and_say_why(run):
    study = RunStudy(run, run.last_attempt)
    (found,) = [one for one in study.findings if one.code == "ST001"]
    assert found.ranks == (SLOW_RANK,)
    assert found.confidence.level is ConfidenceLevel.MEDIUM
    assert "steps are lost, which are left out" in found.confidence.text
    assert "steps are lost, which are left out" in study.report().to_text()


def test_the_limit_that_was_reached_is_named(run):
    found = diagnose(Context(Study(run.last_attempt)), rules={"HE003": RULES["HE003"]}).findings
    assert "reached its limit of 131072 bytes, and what came later is missing" in found[0].summary
    assert "max_detail_bytes" in found[0].change
