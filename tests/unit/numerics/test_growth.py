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


STEPS = np.arange(60)


def random_teeth(random):
    """Grows by 64 a step and is freed one step in ten."""
    rises = np.where(random.random(60) < 0.1, -1e9, 64)
    level = [0.0]
    for rise in rises.tolist():
        level.append(max(level[-1] + rise, 0.0))
    return np.array(level[1:])


def teeth(period):
    return lambda r: 64.0 * ((STEPS + r.integers(period)) % period) + noise(r, STEPS)


SIXTY_STEPS = {
    # MiB at the ends of 60 steps, and the least and the most of 40 draws that are called a leak.
    "leak": (lambda r: 64.0 * STEPS, 1, 1),
    "leak in noise of its size": (lambda r: 64 * STEPS + 64 * noise(r, STEPS), 0.99, 1),
    "leak beside random lengths": (lambda r: 64 * STEPS + 500 * r.random(60), 0.85, 1),
    "leak after warm-up": (lambda r: 64 * STEPS + 3000 * (1 - np.exp(-STEPS / 3)), 1, 1),
    "leak beside evaluation": (lambda r: 64 * STEPS + 500 * (STEPS % 10 == 9), 1, 1),
    "leak every other step": (lambda r: 128.0 * (STEPS // 2), 1, 1),
    "healthy": (lambda r: 2 * noise(r, STEPS), 0, 0),
    "optimizer state and caches": (lambda r: 3000 * (STEPS > 0) - 500 * np.exp(-STEPS / 5), 0, 0),
    "warm-up of twenty steps": (lambda r: 100.0 * np.minimum(STEPS, 20) + noise(r, STEPS), 0, 0),
    "random lengths": (lambda r: 500 * r.random(60), 0, 0),
    "largest length so far": (lambda r: np.maximum.accumulate(500 * r.random(60)), 0, 0),
    "evaluation": (lambda r: 500 * (STEPS % 10 == 9) + noise(r, STEPS), 0, 0),
    "evaluation that keeps a cache": (lambda r: 200 * (STEPS > 9) + noise(r, STEPS), 0, 0),
    "saves that keep a copy, twice": (lambda r: 300.0 * (STEPS > 9) + 300 * (STEPS > 19), 0, 0),
    "freed every ten steps": (teeth(10), 0, 0),
    "freed every twenty steps": (teeth(20), 0, 0),
    "freed now and then": (random_teeth, 0, 0.1),
    "random walk": (lambda r: np.cumsum(20 * noise(r, STEPS)), 0, 0.05),
}


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("name", SIXTY_STEPS)
def test_sixty_steps_tell_a_leak_from_what_training_does(name, stride):
    make, least, most = SIXTY_STEPS[name]
    random, num_found = np.random.default_rng(1), 0
    for _ in range(40):
        first = random.integers(stride)
        step, value = STEPS[first::stride].astype(float), make(random)[first::stride] * 1.0
        num_found += measure_growth(step, value, num_tests=2).kind is GrowthKind.STEADY
    assert least <= num_found / 40 <= most
