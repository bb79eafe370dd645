import numpy as np
import pytest

from builders import MS, Faults, make_run
from meshscope.analyze.stragglers.step_pattern import (
    StepPeriods,
    find_recurrences,
    find_slow_steps,
    measure_drift,
    read_periods,
)
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run


def series(num_steps, *, seed=0, noise=0.03, first=0) -> StepPeriods:
    periods = 100 * MS * np.random.default_rng(seed).lognormal(0, noise, num_steps)
    return find_slow_steps(np.arange(first, first + num_steps), periods)


def with_extra(periods, rows, extra_ns) -> StepPeriods:
    changed = periods.period_ns.copy()
    changed[rows] += extra_ns
    return find_slow_steps(periods.step, changed)


def test_periods_include_the_gap_before_a_step(tmp_path):
    make_run(tmp_path, layout=Layout(dp=3), num_steps=40, faults=Faults(slow={1: 1.1}))
    periods = read_periods(open_run(tmp_path).last_attempt, num_warmup=1)
    assert periods.step.tolist() == list(range(1, 40))
    assert set(periods.period_ns) == {101 * MS}, "the median over ranks"
    assert not periods.is_slow.any()


def test_few_steps_have_no_pattern(tmp_path):
    make_run(tmp_path, num_steps=20)
    assert isinstance(read_periods(open_run(tmp_path).last_attempt, num_warmup=1), Unavailable)


def test_a_slow_step_is_found_and_its_neighbours_are_not():
    periods = with_extra(series(100), [50], 80 * MS)
    assert np.flatnonzero(periods.is_slow).tolist() == [50]
    assert periods.excess_ns[50] == pytest.approx(80 * MS, rel=0.15)
    assert periods.share_of(periods.is_slow) == pytest.approx(0.8 / 100.8, rel=0.15)


def test_a_level_that_changes_is_no_slow_step():
    periods = with_extra(series(200), slice(100, 200), 100 * MS)
    assert np.count_nonzero(periods.is_slow) == 0


@pytest.mark.parametrize("first", [0, 7])
def test_slow_steps_at_an_interval_are_found_with_it(first):
    periods = with_extra(series(200, first=first), np.arange(9, 200, 10), 60 * MS)
    (found,) = find_recurrences(periods)
    assert (found.interval, found.num_slow, found.num_expected) == (10, 20, 20)
    assert found.chance < 1e-12


def test_two_intervals_are_told_apart():
    periods = series(600)
    rows = np.zeros(600, dtype=bool)
    rows[np.arange(0, 600, 50)] = True
    rows[np.arange(7, 600, 100)] = True
    found = find_recurrences(with_extra(periods, np.flatnonzero(rows), 90 * MS))
    assert [one.interval for one in found] == [50, 100]


def test_slow_steps_here_and_there_recur_at_no_interval():
    num_false = 0
    for seed in range(200):
        rows = np.random.default_rng(seed).choice(300, 12, replace=False)
        num_false += bool(find_recurrences(with_extra(series(300, seed=seed), rows, 90 * MS)))
    assert num_false <= 2


def test_steady_noise_has_neither_slow_steps_nor_drift():
    drifts = [measure_drift(series(200, seed=seed)) for seed in range(100)]
    assert max(abs(drift.change_ratio) for drift in drifts) < 0.05
    assert sum(series(300, seed=seed).is_slow.sum() for seed in range(50)) == 0


def test_a_pace_that_wanders_is_no_drift():
    alarms = wanders = 0
    for seed in range(150):
        random, level = np.random.default_rng(seed), np.zeros(50)
        for step in range(50):
            before = level[step - 1] if step else random.normal() / np.sqrt(1 - 0.95**2)
            level[step] = 0.95 * before + random.normal()
        periods = 100 * MS * np.exp(0.1 * np.sqrt(1 - 0.95**2) * level)
        drift = measure_drift(find_slow_steps(np.arange(50), periods))
        wanders += drift.change_ratio >= 0.15
        alarms += drift.change_ratio >= 0.15 and drift.p_value <= 0.01
    assert wanders >= 15, "it comes that far"
    assert alarms <= 5


def test_a_slope_is_measured():
    periods = series(240)
    rising = find_slow_steps(periods.step, periods.period_ns * np.linspace(1, 1.5, 240))
    drift = measure_drift(rising)
    assert drift.change_ratio == pytest.approx(1.4375 / 1.0625 - 1, abs=0.04)
    assert drift.p_value < 1e-4
    assert isinstance(drift.onset_step, Unavailable)


def test_a_jump_has_its_step():
    periods = with_extra(series(240), slice(120, 240), 40 * MS)
    drift = measure_drift(periods)
    assert drift.onset_step == 120
    assert drift.last_ns / drift.first_ns == pytest.approx(1.4, abs=0.05)


def test_a_multiple_of_the_interval_does_not_hide_it():
    """A rollout before every eighth step of a noisy program: only every other one is 8 deviations
    long by itself."""
    recorded_ms = [
        86, 67, 79, 32, 44, 32, 73, 239, 106, 70, 89, 85, 86, 64, 73, 188, 71, 81, 64, 64, 77, 62,
        66, 222, 66, 57, 53, 66, 54, 60, 56, 171, 84, 76, 79, 90, 74, 74, 88, 263, 96, 90, 43, 48,
        76, 70, 56, 182, 59, 68, 80, 73, 100, 69, 73, 211, 66, 64, 74, 71, 58, 83, 83,
    ]  # fmt: skip
    step = np.arange(1, len(recorded_ms) + 1)
    (found,) = find_recurrences(find_slow_steps(step, np.array(recorded_ms) * float(MS)))
    assert (found.interval, found.num_slow, found.num_expected) == (8, 7, 7)


def test_an_interval_between_steps_that_are_as_usual_stays():
    periods = with_extra(series(200), np.arange(9, 200, 10), 60 * MS)
    assert np.flatnonzero(periods.is_slow).tolist() == np.arange(9, 200, 10).tolist()
