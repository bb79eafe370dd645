import numpy as np
import pytest

from builders import MS
from late_runs import make_noise, make_peer_work
from meshscope.analyze.stragglers.pauses import find_pauses
from meshscope.analyze.stragglers.stragglers import find_stragglers
from meshscope.analyze.stragglers.suspects import list_suspects
from meshscope.core.layout import Layout

LAYOUT = Layout(dp=4)


def list_of(change, *, num_steps=60):
    random = np.random.default_rng(1)
    forward, backward = (
        size * MS * make_noise("normal", random, (num_steps, 4), sigma=0.02) for size in (10, 20)
    )
    change(forward, backward)
    work = make_peer_work(forward, backward, LAYOUT)
    stragglers = find_stragglers(work, LAYOUT, {})
    return list_suspects(work, stragglers, find_pauses(work, without=stragglers.ranks))


def test_a_slow_rank_explains_the_waits_it_causes():
    def slow(forward, backward):
        forward[:, 2] += 10 * MS

    suspects = list_of(slow)
    assert suspects.ranks == {2}
    assert np.median(suspects.excess_ns[:, 2]) == pytest.approx(10 * MS, rel=0.1)
    assert not suspects.excess_ns[:, [0, 1, 3]].any()
    assert suspects.lost_ratio == pytest.approx(0.25, rel=0.1)
    assert suspects.explain(np.full(60, 10.0 * MS)) == pytest.approx(1, abs=0.1)
    assert suspects.explain(np.full(60, 40.0 * MS)) == pytest.approx(0.25, rel=0.1)


def test_a_rank_that_failed_slow_explains_waits_since_then_only():
    def fail(forward, backward):
        backward[30:, 1] += 15 * MS

    suspects = list_of(fail)
    assert suspects.ranks == {1}
    assert not suspects.excess_ns[:30].any()
    assert np.median(suspects.excess_ns[30:, 1]) == pytest.approx(15 * MS, rel=0.1)


def test_pauses_explain_the_waits_of_their_steps():
    def pause(forward, backward):
        forward[::10, 3] += 60 * MS

    suspects = list_of(pause)
    assert suspects.ranks == {3}
    assert np.flatnonzero(suspects.excess_ns.any(axis=1)).tolist() == list(range(0, 60, 10))


def test_a_healthy_run_has_none():
    suspects = list_of(lambda forward, backward: None)
    assert (suspects.ranks, suspects.lost_ratio) == (frozenset(), 0.0)
    assert suspects.explain(np.ones(60)) == 0.0
    assert suspects.explain(np.zeros(60)) == 0.0
