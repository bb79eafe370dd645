"""A part of a long run speaks for all of it: its budget, when something changed, and prices."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import MS
from late_runs import STEADY, LateRun, noisy
from meshscope.analyze.budget.budget import Budget
from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.run_weights import weigh_steps
from meshscope.core.layout import Layout
from meshscope.core.unavailable import need
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding, Onset
from meshscope.diagnose.onsets import date_findings
from meshscope.diagnose.runner import diagnose
from meshscope.store.read.run import open_run

NUM_STEPS = 1200
NUM_RANKS = 4
PART = StepChoice(max_rank_steps=NUM_RANKS * 240)
"""Eight windows: seven of 20 steps, the last of 96."""


def record(path: Path, is_slow: Callable[[int], bool]) -> None:
    """Rank 2 works 15 ms longer in forward, in some steps."""
    healthy = noisy(5, num_ranks=NUM_RANKS, num_steps=NUM_STEPS, sigma=0.01)

    def work(rank: int, step: int) -> dict[str, int]:
        own = dict(healthy(rank, step))
        own["forward"] += 15 * MS * (rank == 2 and is_slow(step))
        return own

    LateRun(layout=Layout(dp=NUM_RANKS), work=work, num_steps=NUM_STEPS).record(path)


def study(path: Path, choice: StepChoice | None = None) -> Study:
    return Study(open_run(path).last_attempt, step_choice=choice)


def shares(budget: Budget) -> np.ndarray:
    return budget.total_ns() / budget.total_wall_ns


def find(path: Path, code: str, choice: StepChoice | None = None) -> Finding:
    found = diagnose(Context(study(path, choice))).findings
    return next(one for one in found if one.code == code)


@pytest.mark.parametrize("onset", [640, 700, 775])
def test_a_part_has_the_budget_and_the_onset_of_the_whole_run(tmp_path: Path, onset: int) -> None:
    """In a window, and between that and the next."""
    record(tmp_path, lambda step: step >= onset)
    whole, part = need(study(tmp_path).budget), need(study(tmp_path, PART).budget)
    assert whole.lines == part.lines
    assert len(part.steps) < NUM_STEPS / 4
    # By its own steps alone the part has up to 3 points more waiting: its last window is long.
    assert shares(part) == pytest.approx(shares(whole), abs=0.004)
    assert part.total_wall_ns == pytest.approx(whole.total_wall_ns, rel=1e-3)
    assert int(part.run.time_ns.sum()) + part.total_residual_ns == part.total_wall_ns
    finding = find(tmp_path, "ST003", PART)
    assert finding.ranks == (2,)
    assert finding.first_step == pytest.approx(onset, abs=1)
    bounds = [one.value for one in finding.evidence if one.name.startswith("first slow step")]
    if bounds:
        assert bounds[0] <= onset <= bounds[1]
        assert bounds[1] - bounds[0] <= 8
        assert f"became slow between steps {bounds[0]} and {bounds[1]}" in finding.summary
    expected = find(tmp_path, "ST003")
    assert expected.first_step == pytest.approx(onset, abs=1)
    assert need(finding.gain).saved_ratio == pytest.approx(
        need(expected.gain).saved_ratio, abs=0.01
    )


def test_what_began_and_ended_between_windows_still_counts_in_the_wall_clock(
    tmp_path: Path,
) -> None:
    record(tmp_path, lambda step: 660 <= step < 760)
    whole, part = need(study(tmp_path).budget), need(study(tmp_path, PART).budget)
    assert part.total_wall_ns == pytest.approx(whole.total_wall_ns, rel=1e-3)


def test_recovery_is_dated_too(tmp_path: Path) -> None:
    record(tmp_path, lambda step: 300 <= step < 720)
    finding = find(tmp_path, "ST003", PART)
    assert finding.first_step == pytest.approx(300, abs=1)
    assert finding.last_step == pytest.approx(719, abs=1)


def test_a_change_that_held_nobody_up_is_dated_by_its_windows(tmp_path: Path) -> None:
    """Rank 2 waits for rank 0 with or without the fault: steps are as long as before."""

    def work(rank: int, step: int) -> dict[str, int]:
        own = dict(STEADY)
        own["forward"] = {0: 40 * MS, 2: (10 + 15 * (step >= 700)) * MS}.get(rank, 10 * MS)
        own["forward"] += int(MS * 0.1 * np.random.default_rng(step * 8 + rank).standard_normal())
        return own

    LateRun(layout=Layout(dp=NUM_RANKS), work=work, num_steps=NUM_STEPS).record(tmp_path)
    made = [one for one in diagnose(Context(study(tmp_path, PART))).findings if one.code == "ST003"]
    assert [one.ranks for one in made] == [(2,)]
    bounds = [one.value for one in made[0].evidence if one.name.startswith("first slow step")]
    steps = need(study(tmp_path, PART).timeline).steps
    border = np.flatnonzero(steps == made[0].first_step)[0]
    assert bounds == [steps[border - 1] + 1, steps[border]]
    assert bounds[0] < 700 < bounds[1]


def test_nothing_is_weighed_where_all_steps_were_looked_at(tmp_path: Path) -> None:
    record(tmp_path, lambda step: step >= 600)
    timeline = need(study(tmp_path).timeline)
    assert (weigh_steps(timeline) == 1).all()
    part = need(study(tmp_path, PART).timeline)
    assert weigh_steps(part).sum() == part.steps[-1] - part.steps[0] + 1


def test_every_finding_that_begins_between_windows_is_dated_by_lengths(tmp_path: Path) -> None:
    """ST003 dates itself; others are dated by the runner, from what their edit removes."""
    record(tmp_path, lambda step: step >= 500)
    finding = replace(find(tmp_path, "ST003", PART), first_step=None, last_step=None)
    (dated,) = date_findings([finding], Context(study(tmp_path, PART)))
    assert isinstance(dated.onset, Onset)
    assert abs(dated.onset.step - 500) <= 1
