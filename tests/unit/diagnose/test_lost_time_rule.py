import pytest
from diagnosed import context_of

from made_programs import MS, ProgramRun, reduce, work
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import ConfidenceLevel
from meshscope.diagnose.runner import diagnose

ALL = (0, 1, 2, 3)


def above_low(make, path, *, num_steps=24):
    run = ProgramRun(make, num_ranks=4, num_steps=num_steps, layout=Layout(dp=4))
    run.record(path)
    findings = diagnose(context_of(path)).findings
    return {one.code: one for one in findings if one.severity > Severity.LOW}


def train(rank, *, forward=10, data=2, aside=None):
    return [
        work("data", data * MS),
        work("forward", forward * MS),
        work("backward", 20 * MS),
        reduce(ALL, 2 * MS),
        work("optimizer", 3 * MS),
        *([work(*aside)] if aside else []),
    ]


def test_two_faults_that_hide_each_other_are_both_named_with_their_shares(tmp_path):
    found = above_low(
        lambda rank, step: train(
            rank, forward=50 if rank == 1 else 10, data=42 if rank == 3 else 2
        ),
        tmp_path,
    )
    assert found["ST001"].ranks == (1,)
    assert found["IN001"].ranks == (3,)
    saved = [found[code].saved_ns / MS for code in ("ST001", "IN001")]
    assert saved == pytest.approx([20, 20], abs=0.5)
    assert "Another loss hides it" in found["ST001"].summary
    assert found["ST001"].gain.alone_ns == pytest.approx(0, abs=0.5 * MS)
    assert set(found) == {"ST001", "IN001"}


def test_what_no_rule_names_is_a_finding_of_its_own(tmp_path):
    found = above_low(
        lambda rank, step: train(rank, aside=("eval", 39 * MS) if rank == 0 else None), tmp_path
    )
    (one,) = found.values()
    assert one.ranks == (0,)
    assert one.saved_ns == pytest.approx(39 * MS)
    assert one.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("phase", "update_ms", "least"),
    [("update", 3, Severity.LOW), ("update", 12, Severity.HIGH), ("logging", 3, Severity.MEDIUM)],
)
def test_what_a_rank_does_alone_may_be_its_part(tmp_path, phase, update_ms, least):
    """The last one updates weights for all, of 35 ms a step; logging is nobody's part."""

    def make(rank, step):
        aside = [work(phase, update_ms * MS)] if rank == 3 else []
        return [
            work("forward", 10 * MS),
            work("backward", 20 * MS),
            reduce(ALL, 2 * MS),
            *aside,
            reduce(ALL, 2 * MS),
        ]

    ProgramRun(make, num_ranks=4, num_steps=24, layout=Layout(dp=4)).record(tmp_path)
    (one,) = [one for one in diagnose(context_of(tmp_path)).findings if one.ranks == (3,)]
    assert one.severity is least
    assert ("its part" in one.confidence.text) == (least is Severity.LOW)


def make_bursts(ranks, phase="eval"):
    """39 ms of it in five of fifteen steps."""

    def make(rank, step):
        is_long = rank in ranks(step) and step % 15 < 5
        return train(rank, aside=(phase, 39 * MS) if is_long else None)

    return make


def test_bursts_of_one_rank_are_told_with_their_number(tmp_path):
    found = above_low(make_bursts(lambda step: (2,)), tmp_path, num_steps=49)
    assert set(found) == {"LT001"}
    assert found["LT001"].ranks == (2,)
    assert found["LT001"].title == "rank 2 takes longer in eval in 18 of 48 steps"
    assert found["LT001"].saved_ns == pytest.approx(39 * MS * 18 / 48, rel=0.02)
    assert found["LT001"].confidence.level is ConfidenceLevel.MEDIUM


def test_what_comes_once_in_eight_steps_is_priced_as_that(tmp_path):
    """40 steps from the first one on have it six times."""

    def make(rank, step):
        return train(rank, aside=("eval", 160 * MS) if rank == 2 and step % 8 == 1 else None)

    found = above_low(make, tmp_path, num_steps=42)
    assert found["LT001"].ranks == (2,)
    assert found["LT001"].saved_ns == pytest.approx(160 * MS / 8, rel=0.02)
    assert "once in 8 steps" in found["LT001"].gain.basis


def test_a_rank_with_more_work_is_named_with_its_place(tmp_path):
    """It recovers: no change at one step, and no effect that is the same in all of them. ST004 says
    only that the rank has most in nearly all steps."""

    def make(rank, step):
        more = 75 * (1 - step / 41) if rank == 1 else 0
        return [
            work("forward", 22 * MS),
            work("backward", int((22 + more) * MS)),
            reduce(ALL[:3], 2 * MS),
            work("optimizer", MS),
        ]

    ProgramRun(make, num_ranks=3, num_steps=41, layout=Layout(dp=3)).record(tmp_path)
    findings = diagnose(context_of(tmp_path)).findings
    (one,) = [one for one in findings if one.severity > Severity.LOW]
    assert (one.code, one.title) == ("LT001", "rank 1 takes longer in backward")


def test_bursts_in_which_ranks_take_turns_blame_nobody(tmp_path):
    found = above_low(make_bursts(lambda step: (step % 4,)), tmp_path, num_steps=49)
    assert "LT001" not in found


def test_what_all_ranks_do_beside_training_in_every_step_is_told(tmp_path):
    found = above_low(lambda rank, step: train(rank, data=0, aside=("logging", 30 * MS)), tmp_path)
    assert list(found) == ["LT001"]
    assert found["LT001"].title == "all ranks spend time in logging"
    assert found["LT001"].saved_ns == pytest.approx(30 * MS)


@pytest.mark.parametrize("phase", ["eval", "rollout"])
def test_what_training_may_need_in_every_step_is_no_loss(tmp_path, phase):
    """An agent acts without gradients; a program's own phase may be anything."""
    assert above_low(lambda rank, step: train(rank, data=0, aside=(phase, 30 * MS)), tmp_path) == {}


def test_a_slow_rank_has_one_finding(tmp_path):
    found = above_low(lambda rank, step: train(rank, forward=30 if rank == 1 else 10), tmp_path)
    assert list(found) == ["ST001"]


def test_equal_ranks_have_none(tmp_path):
    assert above_low(lambda rank, step: train(rank, data=0), tmp_path) == {}
