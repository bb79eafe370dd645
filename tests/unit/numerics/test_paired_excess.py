import numpy as np
import pytest

from late_runs import make_noise
from meshscope.numerics.paired_excess import (
    measure_correlation_time,
    measure_effect,
    measure_excess,
    measure_scatter,
    take_median,
)


def test_excess_is_work_over_the_reference_of_the_same_step():
    work = np.array([[10.0, 20.0, 15.0], [100.0, 200.0, 300.0]])
    found = measure_excess(work, np.array([0, 1]))
    assert found == pytest.approx(np.array([[-1 / 3, 1 / 3, 0.0], [-1 / 3, 1 / 3, 1.0]]))


def test_what_all_share_cancels():
    random = np.random.default_rng(1)
    work = make_noise("normal", random, (60, 4), sigma=0.02)
    common = np.linspace(1, 5, 60)[:, None]
    assert measure_excess(work * common, np.array([0, 1])) == pytest.approx(
        measure_excess(work, np.array([0, 1]))
    )


def test_steps_without_any_reference_work_are_left_out():
    work = np.array([[0.0, 5.0], [2.0, 5.0]])
    assert measure_excess(work, np.array([0])).tolist() == [[0.0, 1.5]]


def test_the_median_of_one_column_is_that_column():
    values = np.array([[3.0], [1.0]])
    assert take_median(values, axis=1).tolist() == [3.0, 1.0]
    assert take_median(values, axis=0).tolist() == [2.0]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8, 0.9])
def test_the_correlation_time_of_ar1_noise_is_the_known_one(rho):
    """(1 + rho) / (1 - rho), from many series of 400 steps."""
    random = np.random.default_rng(2)
    noise = np.log(make_noise("ar", random, (400, 64), sigma=0.05, rho=rho))
    plain, raised = measure_correlation_time(noise)
    assert plain == pytest.approx((1 + rho) / (1 - rho), rel=0.15, abs=0.1)
    assert plain <= raised <= 1.3 * plain + 0.1


def test_a_short_series_is_given_little_credit():
    random = np.random.default_rng(3)
    times = [measure_correlation_time(random.standard_normal((12, 1))) for _ in range(30)]
    assert all(1 <= plain <= raised <= 12 for plain, raised in times)
    assert np.median([raised for _, raised in times]) > 2
    assert measure_correlation_time(np.zeros((3, 1))) == (1.0, 3.0)
    assert measure_correlation_time(np.ones((50, 2))) == (1.0, 50.0)


def test_the_interval_of_an_effect_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(4)
    covered = 0
    for _ in range(60):
        effect = measure_effect(0.2 + 0.05 * random.standard_normal(80), block_steps=2)
        covered += effect.low_ratio <= 0.2 <= effect.high_ratio
    assert covered >= 51


def test_the_same_steps_give_the_same_interval():
    excess = np.random.default_rng(5).standard_normal(40)
    assert measure_effect(excess, block_steps=3) == measure_effect(excess, block_steps=3)
    one = measure_effect(np.array([0.3]), block_steps=5)
    assert (one.low_ratio, one.ratio, one.high_ratio) == (0.3, 0.3, 0.3)


def test_scatter_draws_outliers_in():
    values = np.random.default_rng(6).normal(0, 0.01, 100)
    plain = measure_scatter(values[:, None])[0]
    values[::25] += 10
    assert measure_scatter(values[:, None])[0] < 2 * plain
