import math

import numpy as np
import pytest

from meshscope.numerics.joint_events import find_joint_events, poisson_tail


def marks(**steps):
    return {name: np.array(found, dtype=np.int64) for name, found in steps.items()}


def test_meetings_are_compared_with_what_chance_would_make():
    (event,) = find_joint_events(marks(loss=[10, 50, 90], norm=[11, 50, 90]), 1000)
    assert event.steps == (10, 50, 90)
    assert event.expected == pytest.approx(3 * 3 * 3 / 1000)
    assert event.p_value == pytest.approx(0.027**3 / 6, rel=0.05)


def test_signals_that_never_meet_are_not_told():
    assert find_joint_events(marks(loss=[10], norm=[20]), 100) == ()
    assert find_joint_events(marks(loss=[], norm=[20]), 100) == ()


def test_a_long_disturbance_counts_once():
    (event,) = find_joint_events(marks(loss=range(40, 50), norm=range(41, 49)), 1000)
    assert event.steps == (40,)
    assert (event.num_first, event.num_second) == (1, 1)


def test_independent_signals_meet_no_more_than_expected():
    random = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        a, b = (np.sort(random.choice(1000, 20, replace=False)) for _ in range(2))
        events = find_joint_events({"a": a, "b": b}, 1000)
        alarms += bool(events) and events[0].p_value < 0.05
    assert alarms <= 18


def test_poissons_tail_is_the_textbook_one():
    assert poisson_tail(0, 3) == 1
    assert poisson_tail(1, 0.5) == pytest.approx(1 - math.exp(-0.5))
    assert poisson_tail(2, 1e-6) == pytest.approx(5e-13, rel=1e-3)
    assert poisson_tail(3, 0) == 0
