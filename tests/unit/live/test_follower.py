"""A run that grows under the eyes of a follower, written by the store's own writer."""

from pathlib import Path

import numpy as np
import pytest

from builders import MS, START_MONO_NS, make_writer, put_scalar, put_step
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunError
from meshscope.live import follower as follower_module
from meshscope.live.changes import ChangeKind, SeenFinding, compare_findings
from meshscope.live.follower import Analysis, Follower
from meshscope.live.pace import Pace
from meshscope.page.run_state import StateKind
from meshscope.report.run_study import study
from meshscope.store.write.writer import RankWriter

NUM_RANKS = 4


def start_ranks(path: Path, launch: str = "launch") -> list[RankWriter]:
    return [
        make_writer(path, rank, NUM_RANKS, launch_id=launch, layout={"dp": NUM_RANKS})
        for rank in range(NUM_RANKS)
    ]


def write_step(writers: list[RankWriter], step: int) -> None:
    """Rank r takes 10 + r ms, plus the step's number in microseconds."""
    for rank, writer in enumerate(writers):
        begin = START_MONO_NS + step * 20 * MS
        put_scalar(writer, "loss", step, begin, 5.0 - step / 100 + rank)
        put_step(writer, step, begin, begin + (10 + rank) * MS + step * 1000, input_tokens=512)


def close(writers: list[RankWriter]) -> None:
    for writer in writers:
        writer.close(end_host_mono_ns=START_MONO_NS + 10_000 * MS, num_errors=0, errors={})


def test_what_is_told_step_by_step_is_what_the_study_of_the_whole_run_has(tmp_path: Path) -> None:
    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    steps: list[int] = []
    job_ns: list[int] = []
    loss: dict[int, float] = {}

    def hear() -> None:
        moment = follower.poll()
        steps.extend(moment.steps.tolist())
        job_ns.extend(moment.job_ns.tolist())
        for points in moment.series:
            assert points.key == "loss"
            loss.update(zip(points.step.tolist(), points.value.tolist(), strict=True))

    for step in range(30):
        write_step(writers, step)
        if step % 7 == 0:
            hear()
    close(writers)
    hear()
    whole = study(tmp_path).study
    assert steps == whole.steps.step.tolist() == list(range(30))
    assert job_ns == whole.steps.duration_ns.tolist()
    assert job_ns[3] == int(11.5 * MS) + 3000
    found = whole.convergence
    assert loss == dict(zip(found.loss.step.tolist(), found.loss.value.tolist(), strict=True))


def test_a_step_is_told_when_all_ranks_that_keep_up_finished_it(tmp_path: Path) -> None:
    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    write_step(writers, 0)
    assert follower.poll().step == 0
    write_step(writers[:3], 1)
    moment = follower.poll()
    assert (moment.step, moment.steps.tolist()) == (0, [])
    for step in range(2, 80):
        write_step(writers[:3], step)
    assert follower.poll().step == 79


def test_state_goes_from_open_to_live_to_finished(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        Follower(tmp_path).poll()
    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    assert follower.poll().state.kind is StateKind.OPEN
    write_step(writers, 0)
    assert follower.poll().state.kind is StateKind.LIVE
    moment = follower.poll()
    assert moment.age_ns is not None
    assert not moment.is_over
    close(writers)
    moment = follower.poll()
    assert moment.state.kind is StateKind.FINISHED
    assert moment.is_over


def test_another_launch_of_the_job_is_followed(tmp_path: Path) -> None:
    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    for step in range(3):
        write_step(writers, step)
    assert follower.poll().attempt == 0
    again = start_ranks(tmp_path, launch="again")
    write_step(again, 0)
    follower._next_listing = 0
    moment = follower.poll()
    assert (moment.attempt, moment.is_other_attempt, moment.steps.tolist()) == (1, True, [0])
    assert not follower.poll().is_other_attempt


def test_a_report_comes_when_it_is_due_and_the_run_has_changed(tmp_path: Path) -> None:
    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    assert follower.report() is None
    for step in range(12):
        write_step(writers, step)
    follower.poll()
    first = follower.report()
    assert first is not None
    assert (first.number, first.report.study.steps.num_steps) == (1, 12)
    assert {change.kind for change in first.changes} <= {ChangeKind.NEW}
    write_step(writers, 12)
    follower.poll()
    assert follower.report() is None  # not due
    close(writers)
    follower.poll()
    last = follower.report()  # its end is told at once
    assert last is not None
    assert (last.number, last.report.study.steps.num_steps) == (2, 13)
    assert follower.report() is None
    assert follower.last_report is last


def test_a_run_that_goes_on_is_read_in_part_and_whole_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "LIVE_CHOICE", StepChoice(max_rank_steps=10 * NUM_RANKS))
    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    for step in range(40):
        write_step(writers, step)
    follower.poll()
    going = follower.report()
    close(writers)
    follower.poll()
    over = follower.report()
    assert going is not None
    assert over is not None
    assert count_read(going) < 20
    assert count_read(over) == 39  # the first is left out


def count_read(analysis: Analysis) -> int:
    """Steps that were read in full."""
    found = analysis.report.study.timeline
    return 0 if isinstance(found, Unavailable) else len(found.steps)


def test_excess_of_new_steps_is_that_of_the_whole_study(tmp_path: Path) -> None:
    from meshscope.page.heat.cells import measure_cells

    writers = start_ranks(tmp_path)
    follower = Follower(tmp_path)
    for step in range(20):
        write_step(writers, step)
    follower.poll()
    found = follower.excess()
    close(writers)
    whole = measure_cells(study(tmp_path).study, "excess")
    assert found is not None
    assert found.steps.tolist() == whole.steps.tolist()
    assert np.array_equal(found.value, whole.value)
    assert found.value[3, 5] == 2 * MS  # 13 ms against 11 in the middle of the others
    assert follower.excess() is None


def test_pace_allows_a_share_of_a_core() -> None:
    now = 100.0
    pace = Pace(least_s=10, cpu_ratio=20, clock=lambda: now)
    assert pace.is_due
    pace.note(now, 0.1)
    now = 109.9
    assert not pace.is_due
    now = 110.0
    assert pace.is_due
    pace.note(now, 2.0)
    now = 149.9
    assert not pace.is_due
    now = 150.0
    assert pace.is_due


def test_findings_are_new_gone_or_changed_by_rule_and_ranks() -> None:
    def seen(number: int, code: str, rank: int, title: str = "slow") -> SeenFinding:
        return SeenFinding(
            id=f"{code}.{number}", code=code, severity="high", title=title, ranks=(rank,)
        )

    before = (seen(1, "ST001", 5), seen(2, "ST001", 6), seen(1, "CO002", 0, "was"))
    after = (seen(1, "ST001", 6), seen(1, "CO002", 0, "is"), seen(1, "ME001", 1))
    changes = compare_findings(before, after)
    assert [(one.kind.value, one.found.code, one.found.ranks) for one in changes] == [
        ("changed", "CO002", (0,)),
        ("new", "ME001", (1,)),
        ("gone", "ST001", (5,)),
    ]
    assert compare_findings(after, after) == ()
