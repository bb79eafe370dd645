import numpy as np
import pytest

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.spikes import find_spikes, neighbour_medians

STEPS = np.arange(200)


def spikes_of(values, *, min_change_ratio=0.2):
    return find_spikes(
        np.arange(len(values)), np.asarray(values), min_change_ratio=min_change_ratio
    )


def test_a_spike_is_found_with_what_is_usual_there():
    random = np.random.default_rng(0)
    values = 4 - 0.01 * STEPS + 0.02 * random.normal(size=200)
    values[[50, 120]] = (6.0, 0.5)
    found = spikes_of(values)
    assert [spike.step for spike in found.found] == [50, 120]
    assert [spike.step for spike in found.up] == [50]
    assert found.found[0].usual == pytest.approx(3.5, abs=0.05)
    assert found.found[0].change_ratio == pytest.approx(6 / 3.5 - 1, abs=0.03)


def test_a_bump_far_beyond_the_noise_but_without_effect_is_no_spike():
    values = 1 + 1e-9 * np.random.default_rng(1).normal(size=200)
    values[70] += 1e-6
    assert spikes_of(values).found == ()


@pytest.mark.parametrize("kind", ["normal", "lognormal", "exponential"])
def test_noise_of_any_shape_has_hardly_a_spike(kind):
    random = np.random.default_rng(2)
    draws = {
        "normal": lambda: 10 + random.normal(size=500),
        "lognormal": lambda: np.exp(random.normal(size=500)),
        "exponential": lambda: random.exponential(size=500),
    }[kind]
    assert sum(len(spikes_of(draws()).up) for _ in range(20)) <= 2


def test_one_spike_does_not_hide_its_neighbour():
    values = 1 + 0.01 * np.random.default_rng(3).normal(size=100)
    values[[40, 41]] = (5.0, 3.0)
    assert [spike.step for spike in spikes_of(values).found] == [40, 41]


def test_a_series_without_noise_has_its_one_spike():
    values = np.ones(50)
    values[20] = 2
    (spike,) = spikes_of(values).found
    assert (spike.step, spike.score) == (20, float("inf"))
    assert spikes_of(np.ones(50)).found == ()


def test_values_of_both_signs_are_compared_as_they_are():
    values = np.random.default_rng(4).normal(size=100)
    values[30] = 40
    found = spikes_of(values)
    assert not found.is_logarithmic
    assert [spike.step for spike in found.found] == [30]


def test_neighbours_leave_the_value_itself_out():
    assert neighbour_medians(np.array([1.0, 9.0, 1.0]))[1] == 1


def test_too_few_values_tell_nothing():
    assert spikes_of(np.ones(5)) == Unavailable("spikes take 16 values, here are 5")


def test_a_loss_that_falls_steeply_at_first_has_no_spikes_there():
    random = np.random.default_rng(3)
    for num_values in (30, 120, 400):
        values = 0.04 + 1.4 * np.exp(-np.arange(num_values) / 4)
        assert spikes_of(values * np.exp(0.05 * random.normal(size=num_values))).found == ()
    values[40] *= 4
    assert [spike.step for spike in spikes_of(values).found] == [40]
