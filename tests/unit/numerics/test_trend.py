import numpy as np
import pytest

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.trend import (
    KendallCount,
    count_pairs,
    measure_inflation,
    measure_trend,
    normal_tail,
)


def test_rising_and_falling_pairs_are_counted_with_their_variance():
    # 4 values in order: 6 pairs rise; n(n-1)(2n+5)/18 = 4*3*13/18.
    assert count_pairs(np.array([1.0, 2.0, 3.0, 4.0])) == KendallCount(
        score=6.0, variance=pytest.approx(156 / 18)
    )
    # A tie of two takes 2*1*9/18 off.
    tied = count_pairs(np.array([1.0, 2.0, 2.0, 4.0]))
    assert tied.score == 5
    assert tied.variance == pytest.approx((156 - 18) / 18)


def test_the_normal_tail_is_the_textbook_one():
    assert normal_tail(0) == 0.5
    assert normal_tail(1.959964) == pytest.approx(0.025, rel=1e-5)
    assert normal_tail(6) == pytest.approx(9.8659e-10, rel=1e-4)


def test_a_line_has_its_slope_and_an_interval_around_it():
    random = np.random.default_rng(1)
    x = np.arange(100.0)
    trend = measure_trend(x, 3 - 0.5 * x + random.normal(size=100))
    assert trend.slope == pytest.approx(-0.5, abs=0.02)
    assert trend.slope_low < -0.5 < trend.slope_high
    assert trend.p_falling < 1e-9
    assert trend.p_rising == pytest.approx(1)


def test_the_interval_covers_the_slope_and_noise_is_no_trend():
    random = np.random.default_rng(2)
    x = np.arange(40.0)
    covered = alarms = 0
    for _ in range(200):
        trend = measure_trend(x, 0.1 * x + random.normal(size=40))
        covered += trend.slope_low <= 0.1 <= trend.slope_high
        alarms += measure_trend(x, random.normal(size=40)).p_rising < 0.05
    assert covered >= 180
    assert alarms <= 18


def test_values_that_resemble_their_neighbours_make_the_test_more_careful():
    random = np.random.default_rng(3)
    slow = np.zeros(200)
    for i in range(1, 200):
        slow[i] = 0.8 * slow[i - 1] + random.normal()
    assert measure_inflation(random.normal(size=200)) == pytest.approx(1, abs=0.5)
    assert 4 < measure_inflation(slow) < 18  # (1 + 0.8) / (1 - 0.8) = 9


def test_many_points_keep_their_slope():
    x = np.arange(50_000.0)
    assert measure_trend(x, 2 * x).slope == pytest.approx(2)


def test_too_few_values_have_no_trend():
    assert measure_trend(np.arange(5.0), np.arange(5.0)) == Unavailable(
        "a trend takes 8 values, here are 5"
    )
