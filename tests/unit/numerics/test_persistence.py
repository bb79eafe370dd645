import math

import numpy as np
import pytest

from late_runs import make_noise
from meshscope.numerics.chance import MIN_STEPS, binomial_tail
from meshscope.numerics.persistence import correct_holm, find_candidates, find_persistent


def find(work):
    return [found.index for found in find_persistent(work)]


def make_work(seed, *, num_steps=50, num_peers=8, sigma=0.03, slow=(), by=0.10):
    random = np.random.default_rng(seed)
    work = 1e8 * make_noise("normal", random, (num_steps, num_peers), sigma=sigma)
    work[:, list(slow)] *= 1 + by
    return work


def test_holm_gives_the_adjusted_values_of_the_textbook_example():
    """Four p-values whose step-down is worked out in Holm's procedure everywhere."""
    assert correct_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_counts_tests_that_are_not_passed_on():
    assert correct_holm([0.001, 0.01], num_tests=10) == pytest.approx([0.01, 0.09])
    assert correct_holm([]) == []
    assert correct_holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize("num_peers", [2, 3, 4, 8, 64])
def test_one_slow_rank_is_named_and_nobody_else(num_peers):
    assert find(make_work(1, num_peers=num_peers, slow=[1])) == [1]


@pytest.mark.parametrize("slow", [[2, 5], [0, 1, 6], [4, 5, 6, 7]])
def test_several_slow_ranks_of_eight_do_not_hide_each_other(slow):
    assert find(make_work(2, slow=slow, by=0.2)) == slow


def test_of_two_peers_the_one_that_works_more_is_named():
    assert find(make_work(3, num_peers=2, slow=[0], by=0.3)) == [0]


def test_the_tail_is_the_exact_binomial_one():
    """A rank slower than all 7 others in 30 of 50 steps, at an effect beyond the floor."""
    random = np.random.default_rng(4)
    work = 1e8 * (1 + 0.01 * random.standard_normal((50, 8)))
    late = random.permutation(50)[:30]
    work[late, 3] *= 1.2
    (found,) = find_candidates(work)
    assert (found.index, found.num_peers) == (3, 7)
    assert found.num_steps_last >= 30
    scaled = found.num_steps_last * found.num_effective_steps // 50
    exact = sum(
        math.comb(found.num_effective_steps, k)
        * (1 / 8) ** k
        * (7 / 8) ** (found.num_effective_steps - k)
        for k in range(scaled, found.num_effective_steps + 1)
    )
    # Slower than all, than all but one, and than all but three: the first is the least likely.
    assert found.p_value == pytest.approx(3 * exact * math.pi**2 / 6, rel=1e-9)
    assert binomial_tail(3, 10, 0.25) == pytest.approx(0.474407196044921875)


def test_the_effect_is_the_median_ratio_with_an_interval_around_it():
    (found,) = find_persistent(make_work(5, num_steps=200, slow=[6], by=0.25))
    assert found.effect.ratio == pytest.approx(0.25, abs=0.01)
    assert found.effect.low_ratio < 0.25 < found.effect.high_ratio
    assert found.excess_ns == pytest.approx(0.25e8, rel=0.05)


def test_a_sure_but_small_effect_is_not_called_slow():
    assert find(make_work(6, num_steps=2000, sigma=0.01, slow=[2], by=0.03)) == []


@pytest.mark.parametrize("num_steps", [0, 1, 5, MIN_STEPS - 1])
def test_nothing_is_said_below_the_least_number_of_steps(num_steps):
    assert find(make_work(7, num_steps=num_steps, slow=[1], by=3.0)) == []


def test_equal_work_zero_work_and_values_that_are_none_say_nothing():
    assert find(np.ones((50, 4))) == []
    assert find(np.zeros((50, 4))) == []
    assert find(np.ones((50, 1))) == []
    broken = make_work(8, num_peers=4, slow=[1], by=0.3)
    broken[::3, 0] = np.nan
    broken[1::9, 2] = np.inf
    assert find(broken) == [1]


def test_peers_that_take_turns_are_not_slow():
    work = make_work(9, num_peers=4)
    for step in range(50):
        work[step, step % 4] *= 1.5
    assert find(work) == []


NOISES = [
    ("normal", 0.03, 0.0),
    ("normal", 0.1, 0.0),
    ("lognormal", 0.3, 0.0),
    ("ar", 0.1, 0.5),
    ("ar", 0.1, 0.9),
    ("ar", 0.1, 0.95),
    ("drift", 0.03, 0.0),
]


@pytest.mark.parametrize(("kind", "sigma", "rho"), NOISES)
def test_noise_alone_hardly_ever_names_a_rank(kind, sigma, rho):
    """The fast version of `benchmarks/straggler_errors.py`: 1 % of 96 runs is at most one."""
    random = np.random.default_rng([int(100 * sigma), int(100 * rho), len(kind)])
    num_alarms = 0
    for num_peers, num_steps in ((2, 10), (2, 25), (3, 15), (4, 40), (8, 20), (64, 12)) * 16:
        noise = make_noise(kind, random, (num_steps, num_peers), sigma=sigma, rho=rho)
        num_alarms += bool(find(noise))
    assert num_alarms <= 1


@pytest.mark.parametrize("num_peers", [2, 8, 64])
def test_a_rank_ten_percent_slow_is_found_in_fifty_steps(num_peers):
    found = [find(make_work([10, trial], num_peers=num_peers, slow=[1])) for trial in range(40)]
    assert found.count([1]) >= 38


@pytest.mark.parametrize("kind", ["pauses", "pareto"])
def test_somebody_who_always_pauses_hides_nobody(kind):
    """At 256 ranks one of them pauses in nearly every step; a rank 10 % slower is named anyway."""
    random = np.random.default_rng(11)
    work = 1e8 * make_noise(kind, random, (60, 256), sigma=0.03)
    assert find_persistent(work) == []
    work[:, 17] *= 1.1
    assert [found.index for found in find_persistent(work)] == [17]


@pytest.mark.parametrize("most", [0.3, 1.0])
def test_a_rank_that_drifts_is_named_however_steep(most):
    random = np.random.default_rng(12)
    work = 1e8 * make_noise("normal", random, (60, 8), sigma=0.03)
    work[:, 5] *= 1 + np.linspace(0, most, 60)
    assert [found.index for found in find_persistent(work)] == [5]


@pytest.mark.parametrize("most", [0.3, 0.6, 1.0])
def test_of_two_peers_the_one_that_drifts_is_named(most):
    """Nobody else tells how far steps repeat each other: those around the rise do."""
    random = np.random.default_rng(13)
    work = 1e8 * make_noise("normal", random, (60, 2), sigma=0.02)
    work[:, 1] *= 1 + np.linspace(0, most, 60)
    assert [found.index for found in find_persistent(work)] == [1]


def test_noise_that_wanders_is_no_rise():
    random = np.random.default_rng(14)
    for _ in range(100):
        work = 1e8 * make_noise("ar", random, (60, 2), sigma=0.03, rho=0.95)
        assert find_persistent(work) == []
