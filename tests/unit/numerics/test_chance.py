import math

import pytest

from meshscope.numerics.chance import binomial_tail, is_beyond_chance


@pytest.mark.parametrize("probability", [0.5, 0.125, 1 / 1024])
def test_the_tail_is_the_sum_of_its_terms(probability):
    for num_trials in (1, 10, 149):
        for count in range(num_trials + 2):
            exact = math.fsum(
                math.comb(num_trials, k) * probability**k * (1 - probability) ** (num_trials - k)
                for k in range(count, num_trials + 1)
            )
            assert binomial_tail(count, num_trials, probability) == pytest.approx(exact, rel=1e-9)


def test_the_tail_of_many_trials_neither_overflows_nor_is_lost():
    assert binomial_tail(50_000, 100_000, 0.5) == pytest.approx(0.5, abs=0.002)
    assert binomial_tail(100_000, 100_000, 1 / 1024) == 0
    assert binomial_tail(1, 5, 0.0) == 0
    assert binomial_tail(1, 5, 1.0) == 1


def test_counts_of_a_demo_are_chance_and_a_straggler_is_not():
    assert not is_beyond_chance(22, num_steps=149, num_ranks=8, num_tests=8)
    assert is_beyond_chance(60, num_steps=149, num_ranks=8, num_tests=8)
    assert not is_beyond_chance(9, num_steps=9, num_ranks=8, num_tests=8)
