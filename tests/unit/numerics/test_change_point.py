import numpy as np
import pytest

from late_runs import make_noise
from meshscope.numerics.change_point import MIN_STEPS, clip_spikes, find_changes


def find_change(series, **options):
    return find_changes(series[:, None], **options).get(0)


def make_series(seed, num_steps=100, sigma=0.03):
    return sigma * np.random.default_rng(seed).standard_normal(num_steps)


@pytest.mark.parametrize(
    ("num_steps", "onset", "recovery", "by"),
    [(60, 30, 60, 0.5), (100, 60, 100, 0.2), (100, 40, 60, 0.3), (400, 350, 400, 0.15)],
)
def test_onset_and_recovery_are_found_to_the_step_or_two(num_steps, onset, recovery, by):
    series = make_series(1, num_steps)
    series[onset:recovery] += by
    change = find_change(series)
    assert change is not None
    assert abs(change.onset - onset) <= 2
    assert abs(change.recovery - recovery) <= 2
    assert change.shift_ratio == pytest.approx(by, abs=0.03)
    assert change.p_value < 1e-4


def test_a_series_that_was_slow_first_is_high_from_the_begin():
    series = make_series(2)
    series[:50] += 0.4
    change = find_change(series)
    assert change is not None
    assert (change.onset, change.recovery) == (0, 50)


def test_a_small_shift_is_not_reported():
    series = make_series(3, 400, sigma=0.01)
    series[200:] += 0.06
    assert find_change(series) is None
    assert find_change(series, min_shift_ratio=0.05) is not None


def test_spikes_are_no_change_of_level():
    series = make_series(4)
    series[::10] += 2.0
    assert find_change(series) is None


def test_many_series_ask_for_more_evidence():
    series = make_series(5, 40)
    series[28:] += 0.2
    assert find_change(series) is not None
    assert find_change(series, num_series=10**12) is None


@pytest.mark.parametrize("series", [np.zeros(100), np.full(100, np.nan), np.zeros(0), np.ones(7)])
def test_series_without_a_level_to_change_have_none(series):
    assert find_change(series) is None


def test_an_exact_step_without_noise_is_found():
    series = np.zeros(40)
    series[20:] = 1.0
    change = find_change(series)
    assert change is not None
    assert (change.onset, change.recovery, change.shift_ratio) == (20, 40, 1.0)


def test_short_series_have_no_onset():
    series = make_series(6, MIN_STEPS - 1)
    series[8:] += 5
    assert find_change(series) is None


@pytest.mark.parametrize(("sigma", "rho"), [(0.2, 0.0), (0.1, 0.5), (0.1, 0.9), (0.3, 0.95)])
def test_noise_that_lasts_hardly_ever_looks_like_a_change(sigma, rho):
    """1 % of 120 series is one; three are the limit of what chance would do in a thousand tests."""
    random = np.random.default_rng([7, int(10 * sigma), int(100 * rho)])
    alarms = 0
    for num_steps in (20, 40, 100):
        noise = make_noise("ar", random, (num_steps, 40), sigma=sigma, rho=rho)
        series = noise / np.median(noise, axis=0) - 1
        alarms += sum(find_change(series[:, i]) is not None for i in range(40))
    assert alarms <= 3


def test_spikes_are_drawn_in_and_levels_are_kept():
    series = np.tile([0.0, 0.1], 10)
    series[10:] += 5
    series[4] = 100.0
    drawn = clip_spikes(series)
    assert drawn.max() < 6
    assert drawn[10:].min() >= 4.9
