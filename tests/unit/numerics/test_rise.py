import numpy as np
import pytest

from meshscope.numerics.rise import rise_chance


def wander(random, count, rho, spread=0.1):
    """AR(1) around 1 with the given standard deviation, from its stationary state on."""
    noise = random.standard_normal(count)
    for i in range(1, count):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return np.exp(spread * noise)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("count", [50, 200])
def test_noise_that_wanders_is_no_rise(count, rho):
    random = np.random.default_rng([count, int(100 * rho)])
    alarms = sum(rise_chance(wander(random, count, rho)) < 0.01 for _ in range(200))
    assert alarms <= 6  # of 1 %, 7 or more come in 5 of 1,000 such tests


def line(time):
    return 1 + 0.3 * time


def curve(time):
    return 1 + 0.5 * (1 - np.exp(-3 * time))


def jump(time):
    return np.where(time > 2 / 3, 1.3, 1.0)


@pytest.mark.parametrize("shape", [line, curve, jump])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_rises_of_every_form_are_seen_beside_noise(shape, rho):
    random = np.random.default_rng(1)
    rise = shape(np.linspace(0, 1, 60))
    found = sum(rise_chance(rise * wander(random, 60, rho, 0.03)) < 0.01 for _ in range(40))
    assert found >= (38 if rho == 0 else 34)


def test_pauses_do_not_hide_a_rise():
    random = np.random.default_rng(2)
    found = 0
    for _ in range(40):
        pauses = np.where(random.random(60) < 0.1, 1.5, 1.0)
        found += (
            rise_chance(line(np.linspace(0, 1, 60)) * pauses * wander(random, 60, 0, 0.03)) < 0.01
        )
    assert found >= 37


def test_without_noise_the_answer_is_clear():
    time = np.linspace(0, 1, 40)
    for shape in (line, curve, jump):
        assert rise_chance(shape(time)) < 1e-4
        assert rise_chance(2 - shape(time)) == 1
    assert rise_chance(np.full(40, 5.0)) == 1


def test_a_level_that_was_left_again_is_no_rise():
    values = np.ones(60)
    values[20:40] = 1.5
    assert rise_chance(values * wander(np.random.default_rng(3), 60, 0, 0.02)) > 0.01


def test_a_long_series_is_cheap_and_keeps_its_rise():
    random = np.random.default_rng(4)
    noise = wander(random, 20_000, 0.5, 0.1)
    assert rise_chance(noise) > 0.01
    assert rise_chance(noise * np.linspace(1, 1.2, 20_000)) < 1e-6
