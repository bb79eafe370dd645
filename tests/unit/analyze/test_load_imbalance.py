import numpy as np
import pytest

from builders import MS
from late_runs import make_peer_work
from meshscope.analyze.stragglers.load_imbalance import measure_load_imbalance
from meshscope.core.layout import Layout


def measure(forward, layout):
    return measure_load_imbalance(make_peer_work(forward, np.zeros_like(forward), layout))


def test_the_loss_is_the_largest_less_the_mean_of_each_step():
    forward = np.full((40, 4), 20.0 * MS)
    for step in range(40):
        forward[step, step % 4] = 40.0 * MS
    found = measure(forward, Layout(dp=4))
    assert found.lost_ns == pytest.approx(15 * MS)
    assert found.lost_ratio == pytest.approx(15 / 40)
    assert found.variation_ratio == pytest.approx(np.std([40, 20, 20, 20]) / 25)
    assert (found.leader_ratio, found.takes_turns) == (0.25, True)


def test_a_rank_that_leads_often_is_not_said_to_take_turns():
    forward = np.full((40, 4), 20.0 * MS)
    for step in range(40):
        forward[step, 2 if step % 2 else step % 4] = 40.0 * MS
    found = measure(forward, Layout(dp=4))
    assert (found.leader, found.takes_turns) == (2, False)
    assert found.leader_ratio == pytest.approx(0.75)


def test_groups_are_compared_within():
    """Stages differ, peers do not."""
    forward = np.full((20, 4), 10.0 * MS)
    forward[:, 2:] *= 3
    found = measure(forward, Layout(dp=2, pp=2))
    assert (found.lost_ns, found.variation_ratio) == (0.0, 0.0)


def test_ranks_without_peers_have_no_imbalance():
    assert measure(np.ones((20, 4)), Layout(pp=4)) is None
    assert measure(np.ones((0, 4)), Layout(dp=4)) is None
