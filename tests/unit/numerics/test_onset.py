import numpy as np
import pytest

from meshscope.numerics.onset import Occurrence, find_occurrence

RANDOM = np.random.default_rng(3)


def noise(num, size=1.0):
    return RANDOM.normal(0, size, num)


@pytest.mark.parametrize("num", [9, 40, 1000])
def test_what_every_step_loses_is_there_from_the_first(num):
    assert find_occurrence(10 + noise(num, 2)) == Occurrence(onset=0, recovery=num)


@pytest.mark.parametrize(("before", "after"), [(4, 13), (15, 14), (500, 500)])
def test_a_loss_is_dated_by_its_first_step(before, after):
    cost = np.concatenate([noise(before), 20 + noise(after)])
    assert find_occurrence(cost) == Occurrence(onset=before, recovery=before + after)


def test_a_loss_that_is_over_says_when():
    cost = np.concatenate([noise(20), 20 + noise(30), noise(20)])
    assert find_occurrence(cost) == Occurrence(onset=20, recovery=50)


def test_one_huge_step_does_not_hide_the_others():
    cost = np.concatenate([noise(6), 20 + noise(14)])
    cost[11] = 400
    assert find_occurrence(cost).onset == 6


def test_a_loss_now_and_then_is_called_so():
    cost = np.abs(noise(60, 0.1))
    cost[[7, 20, 33, 50]] = 100
    assert find_occurrence(cost) == Occurrence(onset=7, recovery=51, is_at_times=True)


def test_noise_as_large_as_the_loss_needs_many_steps():
    cost = np.concatenate([noise(500, 10), 10 + noise(500, 10)])
    assert abs(find_occurrence(cost).onset - 500) < 30
    assert find_occurrence(10 + noise(300, 10)) == Occurrence(onset=0, recovery=300)


def test_too_few_steps_tell_nothing():
    assert find_occurrence(np.array([0.1, 0.1, 0.1, 80, 80, 80, 80, 80, 80])) is None
    assert find_occurrence(np.zeros(20)) is None
    assert find_occurrence(np.empty(0)) is None


def test_a_slow_growth_is_dated_near_half_its_size():
    assert 25 <= find_occurrence(np.linspace(0, 10, 100) + noise(100, 0.5)).onset <= 50
