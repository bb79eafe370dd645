import numpy as np
import pytest

from builders import MS
from late_runs import make_noise, make_peer_work
from meshscope.analyze.stragglers.pauses import find_pauses
from meshscope.core.layout import Layout

LAYOUT = Layout(dp=4)


def make_phases(seed, *, num_steps=60, sigma=0.03):
    random = np.random.default_rng(seed)
    noise = [make_noise("normal", random, (num_steps, 4), sigma=sigma) for _ in range(2)]
    return 10.0 * MS * noise[0], 20.0 * MS * noise[1]


def find(forward, backward, **options):
    return find_pauses(make_peer_work(forward, backward, LAYOUT), **options)


def test_pauses_of_one_rank_are_found_with_their_steps_and_phase():
    forward, backward = make_phases(1)
    forward[5::10, 2] += 50 * MS
    found = find(forward, backward)
    (paused,) = found.ranks
    assert (paused.rank, paused.step_indices) == (2, (5, 15, 25, 35, 45, 55))
    assert paused.typical_ns == pytest.approx(50 * MS, rel=0.05)
    assert paused.share_of["forward"] == pytest.approx(1, abs=0.05)
    assert paused.share_of["backward"] == pytest.approx(0, abs=0.05)
    assert found.cost_ns == pytest.approx(5 * MS, rel=0.05)
    assert found.cost_ratio == pytest.approx(5 / 40, rel=0.05)


def test_pauses_of_several_ranks_in_one_step_cost_the_longest():
    forward, backward = make_phases(2, sigma=0.0001)
    forward[::10, 0] += 30 * MS
    forward[::10, 1] += 20 * MS
    found = find(forward, backward)
    assert [one.rank for one in found.ranks] == [0, 1]
    assert found.cost_ns == pytest.approx(3 * MS, rel=0.02)


@pytest.mark.parametrize("every", [1, 2])
def test_what_happens_in_many_steps_is_no_pause(every):
    forward, backward = make_phases(3)
    forward[::every, 1] += 50 * MS
    assert find(forward, backward).ranks == ()


def test_two_long_steps_are_no_pattern_and_small_ones_no_pause():
    forward, backward = make_phases(4)
    forward[10, 1] += 90 * MS
    forward[40, 1] += 90 * MS
    backward[::10, 2] += 4 * MS
    found = find(forward, backward)
    assert (found.ranks, found.cost_ns) == ((), 0.0)


@pytest.mark.parametrize(("later", "ranks"), [((), ()), ((20, 33, 41), (0,))])
def test_a_start_up_alone_is_no_pattern(later, ranks):
    forward, backward = make_phases(6)
    backward[:5] += np.array([65, 60, 42, 22, 15])[:, np.newaxis] * MS
    forward[list(later), 0] += 60 * MS
    assert tuple(one.rank for one in find(forward, backward).ranks) == ranks


def test_ranks_with_another_name_are_left_out():
    forward, backward = make_phases(5)
    forward[::10, 1] += 50 * MS
    assert find(forward, backward, without=frozenset({1})).ranks == ()


def test_noise_alone_is_no_pause():
    for seed in range(10):
        assert find(*make_phases([6, seed], sigma=0.1)).ranks == ()
