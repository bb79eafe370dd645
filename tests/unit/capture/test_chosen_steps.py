"""Which steps are looked at closely: even, nested, and blind to what comes every so many steps."""

from itertools import pairwise

import pytest

from meshscope.capture.steps.chosen_steps import is_chosen

STRIDES = [2, 4, 8, 16, 32, 64]


def choose(stride, num_steps=4096):
    return [step for step in range(num_steps) if is_chosen(step, stride)]


def test_a_stride_of_one_has_all_steps():
    assert choose(1, 100) == list(range(100))


@pytest.mark.parametrize("stride", STRIDES)
def test_one_step_in_a_stride_is_chosen_in_every_window(stride):
    chosen = choose(stride)
    assert len(chosen) == pytest.approx(4096 / stride, abs=2)
    gaps = [later - earlier for earlier, later in pairwise(chosen)]
    assert max(gaps) <= 3 * stride


def test_the_steps_of_a_larger_stride_are_among_those_of_a_smaller_one():
    for smaller, larger in pairwise(STRIDES):
        assert set(choose(larger)) < set(choose(smaller))


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 8, 10, 16, 50])
def test_what_comes_every_so_many_steps_is_chosen_as_often_as_anything_else(period):
    chosen = choose(4, 8000)
    share = sum(step % period == 0 for step in chosen) / len(chosen)
    assert share == pytest.approx(1 / period, rel=0.15)
