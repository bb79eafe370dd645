import numpy as np
import pytest

from builders import MS
from late_runs import make_noise, make_peer_work
from meshscope.analyze.stragglers.stragglers import find_stragglers
from meshscope.core.layout import Layout


def make_phases(seed, layout, *, num_steps=60, sigma=0.03):
    random = np.random.default_rng(seed)
    shape = (num_steps, layout.world_size)
    noise = [make_noise("normal", random, shape, sigma=sigma) for _ in range(2)]
    return 10.0 * MS * noise[0], 20.0 * MS * noise[1]


def find(forward, backward, layout, hosts=None):
    return find_stragglers(make_peer_work(forward, backward, layout), layout, hosts or {})


def test_the_phase_with_the_excess_is_named():
    layout = Layout(dp=8)
    forward, backward = make_phases(1, layout)
    backward[:, 3] += 6 * MS
    (slow_set,) = find(forward, backward, layout).slow_sets
    (slow,) = slow_set.slow
    assert (slow.rank, slow.main_phases, slow.axis) == (3, ("backward",), "dp")
    assert slow.excess_ns == pytest.approx(6 * MS, rel=0.1)
    assert slow.reference == (0, 1, 2, 4, 5, 6, 7)
    assert slow.adjusted_p < 1e-6


def test_a_rank_slow_in_both_phases_names_both():
    layout = Layout(dp=4)
    forward, backward = make_phases(2, layout)
    forward[:, 2] *= 1.5
    backward[:, 2] *= 1.3
    (slow_set,) = find(forward, backward, layout).slow_sets
    assert slow_set.slow[0].main_phases == ("backward", "forward")


def test_a_rank_that_is_early_in_one_phase_and_so_long_in_the_next_is_not_slow():
    layout = Layout(dp=4)
    forward, backward = make_phases(2, layout)
    forward[:, [1, 3]] += 6 * MS
    backward[:, [0, 2]] += 4 * MS
    (slow_set,) = find(forward, backward, layout).slow_sets
    assert slow_set.ranks == (1, 3)
    assert slow_set.slow[0].main_phases == ("forward",)


def test_only_true_peers_are_compared():
    """Stage 1 works twice as long as stage 0; within it rank 3 is slow."""
    layout = Layout(dp=2, pp=2)
    forward, backward = make_phases(3, layout)
    forward[:, 2:] *= 2
    backward[:, 2:] *= 2
    assert find(forward, backward, layout).slow_sets == ()
    forward[:, 3] *= 1.4
    found = find(forward, backward, layout)
    assert [one.ranks for one in found.slow_sets] == [(3,)]
    assert found.slow_sets[0].slow[0].reference == (2,)


def test_tp_neighbours_are_compared_where_there_is_no_data_parallelism():
    layout = Layout(tp=4, pp=2)
    forward, backward = make_phases(4, layout)
    forward[:, 4:] *= 3
    backward[:, 6] *= 1.3
    found = find(forward, backward, layout)
    assert [(one.ranks, one.slow[0].axis) for one in found.slow_sets] == [((6,), "tp")]


def test_a_slow_host_is_one_set():
    layout = Layout(dp=8, tp=2)
    forward, backward = make_phases(5, layout)
    forward[:, 8:] *= 1.4
    hosts = {rank: f"node{rank // 8}" for rank in range(16)}
    (slow_set,) = find(forward, backward, layout, hosts).slow_sets
    assert slow_set.ranks == tuple(range(8, 16))
    assert [(trait.name, trait.is_whole) for trait in slow_set.shared] == [("host node1", True)]


def test_a_rank_that_loses_far_less_is_a_set_of_its_own():
    layout = Layout(dp=8)
    forward, backward = make_phases(6, layout)
    backward[:, 1] += 12 * MS
    backward[:, 5] += 12 * MS
    forward[:, 7] += 3 * MS
    assert [one.ranks for one in find(forward, backward, layout).slow_sets] == [(1, 5), (7,)]


def test_a_rank_that_became_slow_has_an_onset_and_is_not_persistently_slow():
    layout = Layout(dp=4)
    forward, backward = make_phases(7, layout)
    forward[25:, 2] += 8 * MS
    found = find(forward, backward, layout)
    assert found.slow_sets == ()
    (failed,) = found.fail_slow_sets[0].slow
    assert (failed.rank, failed.change.onset, failed.change.recovery) == (2, 25, 60)
    assert failed.main_phases == ("forward",)
    assert failed.excess_ns == pytest.approx(8 * MS, rel=0.1)
    assert found.ranks == {2}


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=4), Layout(dp=8)])
def test_a_rank_that_recovers_is_found_with_and_without_peers(layout):
    forward, backward = make_phases(8, layout, num_steps=90)
    backward[30:60, 1] *= 1.5
    found = find(forward, backward, layout)
    assert [one.ranks for one in found.fail_slow_sets] == [(1,)]
    change = found.fail_slow_sets[0].slow[0].change
    assert abs(change.onset - 30) <= 1
    assert abs(change.recovery - 60) <= 1


def test_a_host_that_fails_slow_is_one_set():
    layout = Layout(dp=8)
    forward, backward = make_phases(9, layout)
    backward[30:, 4:] *= 1.5
    hosts = {rank: f"node{rank // 4}" for rank in range(8)}
    (fail_set,) = find(forward, backward, layout, hosts).fail_slow_sets
    assert fail_set.ranks == (4, 5, 6, 7)
    assert fail_set.shared[0].name == "host node1"


def test_a_change_on_all_ranks_is_nobodys():
    for layout in (Layout(dp=4), Layout(pp=4)):
        forward, backward = make_phases(10, layout)
        forward[30:] *= 2
        backward[30:] *= 2
        found = find(forward, backward, layout)
        assert (found.slow_sets, found.fail_slow_sets) == ((), ())


def test_little_time_is_not_worth_a_line_however_sure():
    layout = Layout(dp=4)
    forward, backward = make_phases(11, layout, sigma=0.001)
    forward[:, 1] = 0.3 * MS
    assert find(forward, backward, layout).slow_sets == ()


def test_work_that_is_zero_or_no_number_raises_nothing():
    layout = Layout(dp=3)
    forward = np.zeros((30, 3))
    assert find(forward, forward, layout).ranks == frozenset()
    forward = np.full((30, 3), np.nan)
    assert find(forward, forward, layout).ranks == frozenset()


def test_noise_alone_names_nobody():
    for seed in range(20):
        for layout in (Layout(dp=2), Layout(dp=8), Layout(dp=2, tp=2, pp=2)):
            forward, backward = make_phases([12, seed], layout, num_steps=30)
            assert find(forward, backward, layout).ranks == frozenset()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_a_run_of_few_steps_names_nobody(num_steps):
    layout = Layout(dp=4)
    forward, backward = make_phases(13, layout, num_steps=num_steps)
    forward[:, 1] *= 3
    assert find(forward, backward, layout).ranks == frozenset()
