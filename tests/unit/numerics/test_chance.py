import math

import numpy as np
import pytest

from meshscope.numerics.chance import (
    LEAD_FLOOR,
    binomial_tail,
    bound_share,
    is_beyond_chance,
    lead_chance,
)


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


def test_a_lead_is_as_likely_as_among_exponential_values():
    random = np.random.default_rng(1)
    values = np.sort(random.exponential(size=(200_000, 4)), axis=1)
    lead = values[:, 3] - values[:, 2]
    spread = values[:, 2] - values[:, 0]
    for factor in (0.0, 0.5, 1.0, 2.0):
        share = float(np.mean(lead >= factor * spread))
        assert lead_chance(factor, 1.0, 4) == pytest.approx(share, abs=0.005)
    assert lead_chance(1.0, 0.0, 4) == LEAD_FLOOR
    assert lead_chance(5.0, 1.0, 2) == 1.0


def test_the_interval_of_a_share_is_wilsons():
    """Of 81 in 263: 0.2553 to 0.3662 (Newcombe 1998, table I)."""
    assert bound_share(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert bound_share(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
