import math

import numpy as np
import pytest

from builders import MS
from meshscope.analyze.study import Study
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rules.convergence import (
    GradientNorm,
    JointDisturbances,
    LossDiverged,
    LossNotFinite,
    LossPlateau,
    LossSpikes,
    SkippedSteps,
)
from meshscope.diagnose.rules.loss_rises import LossRises
from meshscope.store.read.run import open_run
from signal_builders import make_signal_run

ALL = [rule for code, rule in RULES.items() if code.startswith("CV")]
NOISE = np.random.default_rng(2).normal(size=(2, 1000))
SPIKES = (30, 70, 110, 150)


def healthy(rank, step):
    return 4 * math.exp(-step / 100) + 0.02 * NOISE[0, step]


def norm(rank, step):
    return 1 + 0.05 * NOISE[1, step]


def constant_rate(rank, step):
    return 1e-3


def find(rule, path, *, loss=healthy, grad_norm=norm, rate=constant_rate, num_steps=200, **options):
    scalars = {"loss": loss, "grad_norm": grad_norm, "lr": rate}
    run = make_signal_run(path / "run", num_steps=num_steps, scalars=scalars, **options)
    return list(rule().run(Context(Study(open_run(run).last_attempt))))


@pytest.mark.parametrize("rule", ALL)
def test_a_healthy_run_is_silent(tmp_path, rule):
    assert find(rule, tmp_path) == []


@pytest.mark.parametrize("rule", ALL)
def test_a_run_that_logged_nothing_is_silent(tmp_path, rule):
    run = make_signal_run(tmp_path / "run")
    assert list(rule().run(Context(Study(open_run(run).last_attempt)))) == []


def nan_from(first, last=10**9, ranks=(0, 1)):
    return lambda rank, step: (
        math.nan if first <= step <= last and rank in ranks else healthy(rank, step)
    )


def test_a_loss_that_stays_nan_is_critical(tmp_path):
    (finding,) = find(LossNotFinite, tmp_path, loss=nan_from(60, ranks=(1,)), num_ranks=2)
    assert (finding.code, finding.severity) == ("CV001", Severity.CRITICAL)
    assert (finding.ranks, finding.first_step) == ((1,), 60)
    assert finding.title == "the loss is NaN from step 60 on"


def test_a_loss_that_is_nan_once_on_all_ranks_names_no_culprit(tmp_path):
    (finding,) = find(LossNotFinite, tmp_path, loss=nan_from(60, 60), num_ranks=2)
    assert (finding.severity, finding.ranks) == (Severity.HIGH, ())
    assert "first in step 60 on all ranks" in finding.summary


@pytest.mark.parametrize("name", ["own_loss", "backward_loss"])
def test_a_shared_nan_names_the_rank_whose_own_loss_it_is(tmp_path, name):
    scalars = {"loss": nan_from(60), name: nan_from(60, ranks=(1,))}
    run = make_signal_run(tmp_path / "run", num_steps=200, num_ranks=2, scalars=scalars)
    (finding,) = LossNotFinite().run(Context(Study(open_run(run).last_attempt)))
    assert finding.title == "the loss is NaN from step 60 on, by rank 1"
    assert finding.ranks == (1,)
    assert "only the own loss of rank 1 is so" in finding.summary


def test_a_nan_of_all_own_losses_is_nobodys(tmp_path):
    """Weights that are no numbers make every rank's loss one; the gradients were so before."""
    bad_norm = lambda rank, step: math.nan if step >= 59 else norm(rank, step)  # noqa: E731
    scalars = {"loss": nan_from(60), "own_loss": nan_from(60), "grad_norm": bad_norm}
    run = make_signal_run(tmp_path / "run", num_steps=200, num_ranks=2, scalars=scalars)
    (finding,) = LossNotFinite().run(Context(Study(open_run(run).last_attempt)))
    assert (finding.ranks, finding.title) == ((), "the loss is NaN from step 60 on")
    assert "The gradient norm is NaN before it, from step 59 on." in finding.summary


@pytest.mark.parametrize("rule", [rule for rule in ALL if rule is not LossNotFinite])
def test_a_nan_is_told_once(tmp_path, rule):
    bad_norm = lambda rank, step: math.nan if step >= 60 else norm(rank, step)  # noqa: E731
    assert find(rule, tmp_path, loss=nan_from(60), grad_norm=bad_norm) == []


def test_a_loss_that_leaves_its_level_diverges(tmp_path):
    loss = lambda rank, step: healthy(rank, step) + 0.05 * max(0, step - 120)  # noqa: E731
    (finding,) = find(LossDiverged, tmp_path, loss=loss)
    assert (finding.code, finding.severity) == ("CV002", Severity.HIGH)
    assert 115 <= finding.first_step <= 150


def test_a_spike_near_the_end_is_no_divergence(tmp_path):
    loss = lambda rank, step: healthy(rank, step) + 3 * (step == 195)  # noqa: E731
    assert find(LossDiverged, tmp_path, loss=loss) == []


def test_a_plateau_is_low_and_a_slow_fall_is_none(tmp_path):
    flat = lambda rank, step: 2 + 2 * math.exp(-step / 10) + 0.005 * NOISE[0, step]  # noqa: E731
    (finding,) = find(LossPlateau, tmp_path / "a", loss=flat)
    assert (finding.code, finding.severity) == ("CV003", Severity.LOW)
    slow = lambda rank, step: flat(rank, step) - 0.002 * step  # noqa: E731
    assert find(LossPlateau, tmp_path / "b", loss=slow) == []


def spiky(steps, height=3.0):
    return lambda rank, step: healthy(rank, step) + height * (step in steps)


def test_several_spikes_are_told_and_one_is_not(tmp_path):
    (finding,) = find(LossSpikes, tmp_path / "a", loss=spiky(SPIKES))
    assert (finding.code, finding.severity) == ("CV004", Severity.MEDIUM)
    assert (finding.first_step, finding.last_step) == (30, 150)
    assert any(evidence.name == "learning rate in step 150" for evidence in finding.evidence)
    assert find(LossSpikes, tmp_path / "b", loss=spiky((70,))) == []


def test_spikes_without_effect_are_none(tmp_path):
    calm = lambda rank, step: 2 + 1e-6 * NOISE[0, step] + 1e-3 * (step in SPIKES)  # noqa: E731
    assert find(LossSpikes, tmp_path, loss=calm) == []


def test_gradients_that_explode_vanish_or_overflow(tmp_path):
    up = lambda rank, step: norm(rank, step) * (30 if step >= 170 else 1)  # noqa: E731
    (finding,) = find(GradientNorm, tmp_path / "a", grad_norm=up)
    assert (finding.code, finding.severity, finding.first_step) == ("CV005", Severity.HIGH, 170)
    flat = lambda rank, step: 2.0  # noqa: E731
    down = lambda rank, step: norm(rank, step) * (1e-4 if step >= 150 else 1)  # noqa: E731
    (finding,) = find(GradientNorm, tmp_path / "b", grad_norm=down, loss=flat)
    assert (finding.severity, finding.first_step) == (Severity.MEDIUM, 150)
    over = lambda rank, step: math.inf if step == 90 else norm(rank, step)  # noqa: E731
    (finding,) = find(GradientNorm, tmp_path / "c", grad_norm=over)
    assert finding.title == "the gradient norm is +Inf in step 90"


def test_small_gradients_of_a_model_that_fits_and_overflows_of_a_scaler_are_none(tmp_path):
    down = lambda rank, step: norm(rank, step) * (1e-4 if step >= 150 else 1)  # noqa: E731
    assert find(GradientNorm, tmp_path / "a", grad_norm=down) == []  # the loss has halved
    over = lambda rank, step: math.inf if step == 3 else norm(rank, step)  # noqa: E731
    scaled = find(GradientNorm, tmp_path / "b", grad_norm=over, skipped=lambda step: step == 3)
    assert scaled == []


def test_signals_that_are_disturbed_together_are_told(tmp_path):
    both = lambda rank, step: norm(rank, step) * (8 if step in SPIKES else 1)  # noqa: E731
    (finding,) = find(JointDisturbances, tmp_path / "a", loss=spiky(SPIKES), grad_norm=both)
    assert (finding.code, finding.severity) == ("CV006", Severity.MEDIUM)
    assert "30, 70, 110, 150" in finding.summary
    apart = lambda rank, step: norm(rank, step) * (8 if step + 9 in SPIKES else 1)  # noqa: E731
    assert find(JointDisturbances, tmp_path / "b", loss=spiky(SPIKES), grad_norm=apart) == []


def test_a_loss_that_spikes_in_slow_steps_is_low(tmp_path):
    slow = lambda rank, step: (150 if step in SPIKES else 50 + NOISE[1, step]) * MS  # noqa: E731
    (finding,) = find(JointDisturbances, tmp_path, loss=spiky(SPIKES), step_ns=slow)
    assert finding.severity is Severity.LOW
    assert finding.title.startswith("loss and step time")


def test_skipped_updates_cost_their_share_of_the_time(tmp_path):
    (finding,) = find(SkippedSteps, tmp_path, skipped=lambda step: step >= 20 and step % 9 == 0)
    assert (finding.code, finding.severity) == ("CV007", Severity.HIGH)
    assert finding.gain.saved_ratio == pytest.approx(20 / 180)


def test_a_scaler_that_looks_for_its_scale_is_silent(tmp_path):
    assert find(SkippedSteps, tmp_path, skipped=lambda step: step < 12 or step == 100) == []


def bump(rank, step):
    """Four times as high for 20 steps."""
    return healthy(rank, step) * (4 if 80 <= step < 100 else 1)


def raised(rank, step):
    return 1e-2 if step >= 80 else 1e-3


def warming(rank, step):
    return 1e-5 * 1.5 ** min(step, 60)


def test_a_rise_of_the_loss_is_tied_to_the_rate_that_was_raised_before_it(tmp_path):
    (found,) = find(LossRises, tmp_path, loss=bump, rate=raised)
    assert (found.first_step, found.last_step, found.severity) == (80, 99, Severity.MEDIUM)
    assert found.title == "the loss rises in steps 80 to 99 after the learning rate was raised"
    assert "went from 0.001 to 0.01 in step 80" in found.summary
    assert find(LossSpikes, tmp_path / "again", loss=bump, rate=raised) == []


@pytest.mark.parametrize("rate", [constant_rate, warming])
def test_a_rise_without_a_change_of_the_rate_is_low(tmp_path, rate):
    (found,) = find(LossRises, tmp_path, loss=bump, rate=rate)
    assert found.severity is Severity.LOW
    assert "learning rate" not in found.title


@pytest.mark.parametrize(
    "loss",
    [healthy, spiky(SPIKES), lambda rank, step: healthy(rank, step) * (1.1 if step >= 80 else 1)],
)
def test_a_raised_rate_that_the_loss_survives_is_none(tmp_path, loss):
    assert find(LossRises, tmp_path, loss=loss, rate=raised) == []


def test_a_nan_that_began_between_two_samples_says_so(tmp_path):
    def sampled(rank, step):
        return math.nan if step >= 90 else healthy(rank, step)

    (found,) = find(LossNotFinite, tmp_path, loss=sampled)
    assert "known before it" not in found.summary
    thin = tmp_path / "thin"
    (found,) = find(LossNotFinite, thin, loss=sampled, is_logged=lambda step: step % 8 == 4)
    assert "(the last one known before it is that of step 84)" in found.summary
