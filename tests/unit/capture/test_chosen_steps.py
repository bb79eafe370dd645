"""Which steps are looked at closely: even, nested, and blind to what comes every so many steps."""

from itertools import pairwise

import numpy as np
import pytest

from meshscope.capture.steps.chosen_steps import is_chosen

STRIDES = [2, 4, 8, 16, 32, 64]


def choose(stride, num_steps=4096):
    return [step for step in range(num_steps) if is_chosen(step, stride)]


def test_a_stride_of_one_has_all_steps():
    assert choose(1, 100) == list(range(100))


@pytest.mark.parametrize("stride", STRIDES)
def test_every_window_of_a_stride_has_one(stride):
    chosen = choose(stride)
    assert [step // stride for step in chosen] == list(range(4096 // stride))


def test_the_steps_of_a_larger_stride_are_among_those_of_a_smaller_one():
    for smaller, larger in pairwise(STRIDES):
        assert set(choose(larger)) < set(choose(smaller))


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 8, 10, 12, 13, 16, 21, 50, 64])
@pytest.mark.parametrize("stride", [4, 16])
def test_what_comes_every_so_many_steps_is_chosen_as_often_as_anything_else(period, stride):
    chosen = np.array(choose(stride, 64_000))
    counts = np.bincount(chosen % period, minlength=period)
    expected = len(chosen) / period
    assert np.abs(counts - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("period", [5, 7, 8, 10, 12])
def test_a_short_run_has_some_of_them_too(period):
    """A hash by the golden ratio had no multiple of 8 among the first 64 steps."""
    chosen = choose(4, 64)
    seen = [sum(step % period == rest for step in chosen) for rest in range(period)]
    assert sum(count > 0 for count in seen) >= 0.7 * period
