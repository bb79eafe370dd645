import math

import numpy as np
import pytest

from meshscope.analyze.training.convergence import (
    LossCourse,
    analyze_convergence,
    find_level_change,
)
from meshscope.analyze.training.loss_rises import find_rises
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from signal_builders import make_signal_run

NOISE = np.random.default_rng(0).normal(size=1000)


def analyze(path, **options):
    return analyze_convergence(open_run(make_signal_run(path, **options)).last_attempt)


def of_loss(path, loss, num_steps=100):
    return analyze(path, num_steps=num_steps, scalars={"loss": lambda rank, step: loss(step)})


def test_a_loss_that_falls(tmp_path):
    found = of_loss(tmp_path / "run", lambda step: 4 * math.exp(-step / 80) + 0.01 * NOISE[step])
    assert found.course is LossCourse.FALLING
    assert found.change_ratio[2] < -0.3
    assert found.divergence is None
    assert found.loss_nonfinite is None


def test_a_loss_that_fell_and_stopped_is_a_plateau(tmp_path):
    found = of_loss(
        tmp_path / "run", lambda step: 2 + 2 * math.exp(-step / 10) + 0.002 * NOISE[step], 200
    )
    assert found.course is LossCourse.PLATEAU


def test_noise_that_could_hide_a_trend_is_no_plateau(tmp_path):
    found = of_loss(
        tmp_path / "run", lambda step: 2 + 2 * math.exp(-step / 10) + 0.3 * NOISE[step], 60
    )
    assert found.course is LossCourse.UNCLEAR


def test_a_loss_that_was_always_level_is_no_plateau(tmp_path):
    assert of_loss(tmp_path / "run", lambda step: 2.0).course is LossCourse.UNCLEAR


def test_a_loss_that_leaves_its_level_for_good_has_diverged(tmp_path):
    def loss(step):
        return 2 - 0.01 * min(step, 60) + 0.05 * max(0, step - 60) + 0.01 * NOISE[step]

    found = of_loss(tmp_path / "run", loss)
    assert found.course is LossCourse.DIVERGED
    assert found.divergence.best == pytest.approx(1.4, abs=0.05)
    assert 58 <= found.divergence.since_step <= 66


def test_a_spike_that_comes_back_is_no_divergence(tmp_path):
    found = of_loss(tmp_path / "run", lambda step: 2 + 3 * (step in (94, 95)) + 0.01 * NOISE[step])
    assert found.divergence is None
    assert [spike.step for spike in found.loss_spikes.up] == [94, 95]


def fall_three_times(rank, step):
    return 4 * math.exp(-(step % 40) / 8) + 0.01 * NOISE[step]


def test_the_loss_of_another_model_begins_anew(tmp_path):
    updates = [{"new_model_step": 40}, {"new_model_step": 80}]
    scalars = {"loss": fall_three_times}
    found = analyze(tmp_path / "run", num_steps=100, scalars=scalars, updates=updates)
    assert found.divergence is None
    assert found.course is LossCourse.FALLING
    assert (found.latest_loss.step[0], found.loss.step[0]) == (80, 0)
    assert find_rises(found) == ()
    alone = analyze(tmp_path / "one", num_steps=100, scalars=scalars)
    assert alone.divergence is not None or find_rises(alone)


def test_a_model_that_trains_beside_the_first_begins_nothing(tmp_path):
    updates = [{"new_model_step": 10}, {"new_model_step": -1}]
    scalars = {"loss": lambda rank, step: 2 - 0.01 * step}
    found = analyze(tmp_path / "run", scalars=scalars, updates=updates)
    assert found.latest_loss.step[0] == 0


def test_a_new_model_without_a_loss_has_none(tmp_path):
    scalars = {"loss": lambda rank, step: 2 - 0.01 * step}
    found = analyze(tmp_path / "run", scalars=scalars, updates=[{"new_model_step": 40}])
    assert "no value of loss since another model began in step 40" in found.course.reason
    assert found.loss.step[-1] == 39


def test_the_first_value_that_is_not_finite_is_told_with_its_rank(tmp_path):
    def loss(rank, step):
        if step >= 31 or (step == 30 and rank == 2):
            return math.nan if rank != 1 else math.inf
        return 2.0

    bad = analyze(tmp_path / "run", num_ranks=3, scalars={"loss": loss}).loss_nonfinite
    assert (bad.first_step, bad.first_ranks, bad.first_kind) == (30, (2,), "NaN")
    assert (bad.ranks, bad.num_steps, bad.num_values) == ((0, 1, 2), 10, 28)
    assert bad.is_lasting


def test_one_value_that_is_not_finite_does_not_last(tmp_path):
    bad = of_loss(tmp_path / "run", lambda step: -math.inf if step == 20 else 1.0).loss_nonfinite
    assert (bad.first_step, bad.first_kind, bad.is_lasting) == (20, "-Inf", False)


def test_the_jobs_loss_is_the_median_of_the_ranks(tmp_path):
    found = analyze(
        tmp_path / "run", num_ranks=3, scalars={"loss": lambda rank, step: [1.0, 5.0, 2.0][rank]}
    )
    assert set(found.loss.value.tolist()) == {2.0}


@pytest.mark.parametrize("last_of_rank_1", [39, 19], ids=["to the end", "dies"])
def test_a_step_that_some_ranks_left_out_is_not_in_the_curve(tmp_path, last_of_rank_1):
    """The ranks' losses differ by 4; what a rank has no value of is not finite here."""

    def log(rank, step):
        is_there = rank == 0 or (step <= last_of_rank_1 and (step % 3 or step == last_of_rank_1))
        return 4.0 * rank + step if is_there else math.nan

    found = analyze(tmp_path / "run", num_ranks=2, scalars={"loss": log})
    first = 1  # rank 1 begins with it: step 0 is rank 0's alone
    whole = [s for s in range(first, last_of_rank_1 + 1) if s % 3 or s == last_of_rank_1]
    alone = [0, *range(last_of_rank_1 + 1, 40)]
    expected = {step: step + 2.0 for step in whole} | {step: float(step) for step in alone}
    assert dict(zip(found.loss.step.tolist(), found.loss.value.tolist(), strict=True)) == expected


def test_nothing_logged_is_unavailable_not_zero(tmp_path):
    found = analyze(tmp_path / "run")
    assert found.loss == Unavailable("no rank logged loss or backward_loss")
    assert isinstance(found.course, Unavailable)
    assert isinstance(found.loss_spikes, Unavailable)


def test_only_nan_is_unavailable_and_counted(tmp_path):
    found = of_loss(tmp_path / "run", lambda step: math.nan)
    assert isinstance(found.loss, Unavailable)
    assert found.loss_nonfinite.num_values == 100


def test_a_level_that_ends_far_from_its_middle_is_told(tmp_path):
    found = analyze(
        tmp_path / "run",
        num_steps=100,
        scalars={"grad_norm": lambda rank, step: 1.0 if step < 85 else 50.0},
    )
    change = find_level_change(found.grad_norm, factor=10)
    assert (change.usual, change.last, change.since_step) == (1.0, 50.0, 85)
    assert find_level_change(found.grad_norm, factor=100) is None
    assert find_level_change(found.grad_norm, factor=0.01) is None
