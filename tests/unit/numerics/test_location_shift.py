import math

import numpy as np
import pytest

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.location_shift import (
    block_length,
    draw_blocks,
    hodges_lehmann,
    measure_shift,
    student_quantile,
)
from meshscope.numerics.trend import autocorrelation


def remember(random, count, rho, spread=0.03):
    """AR(1) around 1 with the given standard deviation."""
    noise = random.normal(size=count + 50) * spread * np.sqrt(1 - rho**2)
    values = np.zeros(count + 50)
    for i in range(1, count + 50):
        values[i] = rho * values[i - 1] + noise[i]
    return 1 + values[50:]


def test_the_shift_is_the_median_of_all_differences():
    random = np.random.default_rng(0)
    for count_a, count_b in ((9, 14), (60, 80)):
        a, b = random.normal(size=count_a), random.normal(size=count_b) + 2
        expected = np.median((b[:, None] - a[None, :]).ravel())
        assert hodges_lehmann(a, b) == pytest.approx(expected, abs=0.02)


def test_a_run_against_itself_is_no_change():
    values = remember(np.random.default_rng(1), 50, 0.5)
    shift = measure_shift(values, values)
    assert shift.shift == pytest.approx(0, abs=1e-3)
    assert shift.low < 0 < shift.high
    assert shift.p_value > 0.9


def test_steps_that_never_vary_give_an_interval_of_no_width():
    shift = measure_shift(np.full(20, 100.0), np.full(20, 110.0))
    assert (shift.low, shift.high) == pytest.approx((10, 10))
    assert measure_shift(np.full(20, 100.0), np.full(20, 100.0)).p_value == 1


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_five_percent_are_found_and_the_interval_covers_them(rho):
    random = np.random.default_rng(2)
    covered = found = alarms = 0
    for _ in range(50):
        a, b, same = (remember(random, 40, rho) for _ in range(3))
        slower = measure_shift(a, b + 0.05)
        covered += slower.low <= 0.05 <= slower.high
        found += slower.low > 0
        alarms += measure_shift(a, same).is_certain
    assert covered >= 46
    assert found >= (49 if rho == 0 else 38)
    assert alarms <= 3


def test_the_same_recordings_give_the_same_answer():
    random = np.random.default_rng(3)
    a, b = random.normal(size=40), random.normal(size=40)
    assert measure_shift(a, b) == measure_shift(a, b)


def test_long_runs_are_thinned_and_keep_their_shift():
    random = np.random.default_rng(4)
    a, b = random.normal(size=5000), random.normal(size=4000) + 1
    shift = measure_shift(a, b)
    assert (shift.num_a, shift.num_b) == (5000, 4000)
    assert shift.low < 1 < shift.high


def test_slow_memory_is_drawn_in_longer_blocks():
    random = np.random.default_rng(5)
    assert autocorrelation(random.normal(size=500)) < 0.15
    assert autocorrelation(remember(random, 500, 0.8)) == pytest.approx(0.8, abs=0.1)
    assert block_length(0.0, 100) == 1
    assert block_length(0.8, 100) > block_length(0.3, 100) > 1
    assert block_length(0.95, 20) == 5


def test_blocks_are_neighbours():
    rows = draw_blocks(np.random.default_rng(6), 12, 4, 50)
    assert rows.shape == (50, 12)
    assert rows.min() >= 0
    assert rows.max() <= 11
    assert (np.diff(rows.reshape(50, 3, 4), axis=2) == 1).all()


def test_students_quantiles_are_the_tabulated_ones():
    for degrees, value in ((4, 2.776), (10, 2.228), (30, 2.042), (1000, 1.962)):
        assert student_quantile(degrees) == pytest.approx(value, rel=0.01)


def test_too_few_steps_have_no_interval():
    assert measure_shift(np.arange(2.0), np.arange(30.0)) == Unavailable(
        "a comparison takes 3 steps on each side, here are 2 and 30"
    )


def test_few_steps_have_students_interval():
    """t of 2 degrees of freedom is 4.303; neighbours are taken to be correlated by 0.7."""
    a, b = np.array([10.0, 11, 12]), np.array([30.0, 31, 32])
    found = measure_shift(a, b)
    reach = 4.303 * math.sqrt(1.7 / 0.3 * (1 / 3 + 1 / 3))
    assert (found.shift, found.block) == (pytest.approx(20), 0)
    assert found.high - found.shift == pytest.approx(reach, rel=1e-3)
    assert found.is_certain
    assert not measure_shift(a, a + 5).is_certain
    same = measure_shift(np.full(3, 7.0), np.full(4, 7.0))
    assert (same.low, same.high, same.p_value) == (0, 0, 1)


@pytest.mark.parametrize("num_steps", [3, 5, 7])
def test_few_steps_of_like_runs_differ_rarely(num_steps):
    random = np.random.default_rng(3)
    drawn = np.exp(0.1 * random.standard_normal((400, 2, num_steps)))
    certain = sum(measure_shift(a, b).is_certain for a, b in drawn)
    assert certain <= 0.05 * len(drawn)
