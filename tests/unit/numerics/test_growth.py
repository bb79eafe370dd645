import numpy as np
import pytest

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.growth import GrowthKind, Jump, measure_growth


def grow(values, **options):
    return measure_growth(np.arange(len(values), dtype=float), np.asarray(values), **options)


def share_of(make, kind, *, num_steps, num_runs=100, seed=0):
    random = np.random.default_rng(seed)
    kinds = [grow(make(random, np.arange(num_steps))).kind for _ in range(num_runs)]
    return sum(found is kind for found in kinds) / num_runs


def noise(random, step):
    return random.normal(size=len(step))


@pytest.mark.parametrize("num_steps", [12, 20, 40, 1000])
def test_a_clean_ramp_grows_by_its_slope(num_steps):
    growth = grow(5.0 * np.arange(num_steps) + 100)
    assert growth.kind is GrowthKind.STEADY
    assert growth.per_step == pytest.approx(5)
    assert growth.per_step_low <= 5 <= growth.per_step_high
    assert growth.rise == pytest.approx(5 * (growth.last_step - growth.first_step), rel=0.01)


@pytest.mark.parametrize("num_steps", [20, 30, 40])
def test_a_ramp_with_a_fifth_of_its_slope_as_noise_is_found(num_steps):
    found = share_of(lambda r, t: t + 0.2 * noise(r, t), GrowthKind.STEADY, num_steps=num_steps)
    assert found >= 0.97


def test_a_ramp_with_noise_twice_its_slope_is_found_in_forty_steps():
    found = share_of(lambda r, t: t + 2 * noise(r, t), GrowthKind.STEADY, num_steps=40)
    assert found >= 0.85


@pytest.mark.parametrize("num_steps", [9, 20, 40, 400])
@pytest.mark.parametrize("name", ["noise", "jump", "two jumps", "warm-up", "slow noise"])
def test_what_is_no_leak_is_not_called_one(name, num_steps):
    def one_jump(random, step):
        return 100 * (step >= random.integers(2, len(step) - 1))

    def slow_noise(random, step):
        values = noise(random, step)
        for i in range(1, len(values)):
            values[i] += 0.8 * values[i - 1]
        return values

    make = {
        "noise": noise,
        "jump": lambda r, t: noise(r, t) + one_jump(r, t),
        "two jumps": lambda r, t: noise(r, t) + one_jump(r, t) + one_jump(r, t),
        "warm-up": lambda r, t: noise(r, t) + 100 * (1 - np.exp(-t / (len(t) / 5))),
        "slow noise": slow_noise,
    }[name]
    assert share_of(make, GrowthKind.STEADY, num_steps=num_steps, num_runs=60) <= 0.05


def test_a_jump_is_told_with_its_step_and_height():
    growth = grow(np.where(np.arange(100) >= 60, 500.0, 300.0))
    assert growth.kind is GrowthKind.JUMP
    assert growth.jump == Jump(step=60, height=200.0)
    assert growth.per_step == 0


def test_a_leak_beside_a_jump_is_a_leak_with_its_own_slope():
    step = np.arange(60)
    growth = grow(2.0 * step + 1000 * (step >= 25))
    assert growth.kind is GrowthKind.STEADY
    assert growth.per_step == pytest.approx(2)


def test_a_leak_in_stairs_is_a_leak():
    assert grow(8.0 * (np.arange(80) // 4)).kind is GrowthKind.STEADY


def test_growth_that_comes_to_an_end_is_not_steady():
    assert grow(10 * np.log1p(np.arange(80.0))).kind is GrowthKind.FLATTENING


def test_memory_that_is_freed_at_an_interval_is_level():
    assert grow(np.arange(4000) % 50 * 1.0).kind is GrowthKind.LEVEL


def test_what_shrinks_does_not_grow():
    assert grow(-3.0 * np.arange(40)).kind is GrowthKind.LEVEL


def test_a_value_that_never_changes_is_level():
    growth = grow(np.full(30, 7.0))
    assert (growth.kind, growth.per_step, growth.p_value) == (GrowthKind.LEVEL, 0.0, 1.0)


def test_few_samples_and_one_step_tell_nothing():
    assert grow(np.arange(6.0)) == Unavailable("growth takes 8 samples after warm-up, here are 5")
    assert isinstance(measure_growth(np.zeros(20), np.arange(20.0)), Unavailable)


def test_more_series_ask_for_more_certainty():
    random = np.random.default_rng(5)
    values = np.arange(20) + 1.0 * random.normal(size=20)
    assert grow(values).kind is GrowthKind.STEADY
    assert grow(values, num_tests=10**12).kind is not GrowthKind.STEADY
