import itertools
import tracemalloc

import numpy as np
import pytest

from builders import (
    DEFAULT_PHASES,
    GAP_NS,
    MS,
    START_MONO_NS,
    Faults,
    make_run,
    make_writer,
    put_step,
)
from meshscope.analyze.rank.steps import JobSteps, SlowestCount
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.distribution import measure_distribution
from meshscope.store.read.run import open_run

STEP_NS = 100 * MS


def summarize(path, **options):
    return Study(open_run(path).last_attempt, **options)


def test_percentiles_interpolate_linearly_as_numpy_does():
    values = np.random.default_rng(7).integers(1, 10**9, 137)
    found = measure_distribution(values, reason="")
    assert (found.median_ns, found.p95_ns, found.p99_ns) == pytest.approx(
        np.percentile(values, [50, 95, 99]), rel=1e-12
    )
    assert found.cv_ratio == pytest.approx(values.std() / values.mean())
    assert (found.count, found.min_ns, found.max_ns) == (137, values.min(), values.max())


def test_no_values_is_a_reason_and_one_value_has_no_variation():
    assert measure_distribution(np.empty(0, dtype=np.int64), reason="none") == Unavailable("none")
    one = measure_distribution(np.array([5]), reason="")
    assert (one.p99_ns, one.cv_ratio) == (5.0, Unavailable("one value has no variation"))


def test_the_jobs_step_time_is_the_median_over_ranks_and_the_slowest_stands_beside_it(tmp_path):
    make_run(tmp_path, layout=Layout(dp=4), num_steps=12, faults=Faults(slow={2: 1.5}))
    summary = summarize(tmp_path)
    slow_ns = 97 * MS * 1.5 + 3 * MS
    assert summary.steps.time.median_ns == STEP_NS
    assert summary.steps.interval.median_ns == STEP_NS + GAP_NS
    assert summary.steps.slowest_rank_time.median_ns == slow_ns
    assert [rank.step_time.median_ns for rank in summary.ranks] == [
        STEP_NS, STEP_NS, slow_ns, STEP_NS
    ]  # fmt: skip
    assert summary.steps.slowest == (SlowestCount(rank=2, num_steps=11),)
    backward = next(spread for spread in summary.spreads if spread.phase == "backward")
    assert (backward.median_ns, backward.max_ns, backward.max_rank) == (60 * MS, 90 * MS, 2)
    assert (backward.furthest_rank, backward.excess_ns) == (2, 30 * MS)


def test_the_headline_step_agrees_with_the_wall_clock_though_ranks_jitter(tmp_path):
    """Ranks begin each step a little early or late, in lockstep over the run."""
    num_ranks, num_steps, pace_ns = 8, 100, 160 * MS
    jitter = np.random.default_rng(1).uniform(-25 * MS, 25 * MS, (num_ranks, num_steps + 1))
    jitter[:, [0, -1]] = 0
    for rank in range(num_ranks):
        writer = make_writer(tmp_path, rank, num_ranks)
        starts = (START_MONO_NS + pace_ns * np.arange(num_steps + 1) + jitter[rank]).astype(int)
        for step, (start, end) in enumerate(itertools.pairwise(starts)):
            put_step(writer, step, int(start), int(end) - MS)
        writer.close(end_host_mono_ns=int(starts[-1]))
    summary = summarize(tmp_path)
    wall_clock_ns = 1e9 / summary.steps_per_s
    assert wall_clock_ns == pytest.approx(pace_ns, rel=0.001)
    assert summary.steps.time.median_ns == pytest.approx(wall_clock_ns, rel=0.03)
    assert summary.steps.time.mean_ns == pytest.approx(wall_clock_ns, rel=0.03)
    assert summary.steps.interval.median_ns == pytest.approx(wall_clock_ns, rel=0.03)
    assert summary.steps.slowest_rank_time.median_ns > 1.1 * wall_clock_ns
    assert summary.steps.slowest == ()


def test_medians_over_ranks_are_those_of_numpy_whatever_steps_ranks_have():
    random = np.random.default_rng(3)
    for num_steps, top in ((5, 40), (40, 1000), (5, 1 << 40)):
        steps, values = JobSteps(), {}
        for rank in range(6):
            step = np.sort(random.choice(60, num_steps, replace=False))
            duration_ns = random.integers(0, top, num_steps)
            steps.add(rank, step, duration_ns)
            for number, value in zip(step.tolist(), duration_ns.tolist(), strict=True):
                values.setdefault(number, []).append(value)
        assert steps.step.tolist() == sorted(values)
        assert steps.num_ranks.tolist() == [len(values[step]) for step in sorted(values)]
        expected = [int(np.median(values[step])) for step in sorted(values)]
        assert steps.median_ns().tolist() == expected


def test_ranks_that_share_no_step_cost_no_table():
    steps = JobSteps()
    for rank in range(200):
        steps.add(rank, np.arange(50) + 50 * rank, np.full(50, rank))
    tracemalloc.start()
    medians = steps.median_ns()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert medians[::50].tolist() == list(range(200))
    assert peak_bytes < 1 << 20  # of 200 ranks × 10,000 steps it would be 8 MB


def test_ranks_that_tie_or_are_slowest_by_chance_are_not_called_slowest(tmp_path):
    make_run(tmp_path / "alike", layout=Layout(dp=4), num_steps=40)
    assert summarize(tmp_path / "alike").steps.slowest == ()
    make_run(tmp_path / "short", layout=Layout(dp=4), num_steps=10, faults=Faults(slow={1: 2.0}))
    assert summarize(tmp_path / "short").steps.slowest == ()  # nine steps without the first


def test_the_first_step_is_left_out_of_statistics_but_not_of_the_account(tmp_path):
    make_run(tmp_path, num_steps=5, first_step_extra_ns=900 * MS)
    summary = summarize(tmp_path)
    assert summary.steps.num_warmup == 1
    assert summary.steps.warmup_ns == (1000 * MS,)
    assert summary.steps.time.max_ns == STEP_NS
    assert summary.time.steps.wall_ns == 5 * STEP_NS + 900 * MS
    assert summary.time.steady_steps.wall_ns == 4 * STEP_NS


def test_with_three_steps_nothing_is_warm_up_unless_asked_for(tmp_path):
    make_run(tmp_path, num_steps=3)
    assert summarize(tmp_path).steps.num_warmup == 0
    assert summarize(tmp_path, warmup_steps=2).steps.time.count == 1
    assert summarize(tmp_path, warmup_steps=9).steps.time == Unavailable(
        "all 3 steps count as warm-up"
    )


def test_the_interval_of_a_step_includes_the_gap_behind_it(tmp_path):
    make_run(tmp_path, num_steps=5)
    summary = summarize(tmp_path)
    assert summary.ranks[0].step_interval.median_ns == STEP_NS + GAP_NS
    assert summary.steps.interval.count == 3


def test_a_run_without_a_finished_step_has_reasons_not_zeros(tmp_path):
    make_run(tmp_path, num_steps=0)
    summary = summarize(tmp_path)
    none = Unavailable("no step finished")
    assert summary.steps.time == summary.steps_per_s == summary.ranks[0].last_step == none


def test_ranks_with_different_step_numbers_are_merged_by_number():
    steps = JobSteps()
    steps.add(0, np.array([0, 1, 2]), np.array([5, 5, 5]))
    steps.add(1, np.array([2, 3]), np.array([9, 4]))
    steps.add(2, np.array([1]), np.array([7]))
    steps.add(3, np.array([3, 0, 1, 2]), np.array([1, 1, 1, 1]))
    assert steps.step.tolist() == [0, 1, 2, 3]
    assert steps.max_ns.tolist() == [5, 7, 9, 4]
    assert steps.max_rank.tolist() == [0, 2, 1, 1]
    assert steps.num_ranks.tolist() == [2, 3, 3, 2]
    assert steps.median_ns().tolist() == [3, 5, 5, 2]


def test_a_step_number_far_away_costs_nothing(tmp_path):
    writer = make_writer(tmp_path)
    put_step(writer, 0, 10, 20)
    put_step(writer, (1 << 62) + 5, 30, 50)
    writer.close(end_host_mono_ns=60)
    summary = summarize(tmp_path)
    assert summary.steps.num_steps == 2
    assert summary.ranks[0].last_step == (1 << 62) + 5


def test_phases_of_the_builder_add_up(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=5)
    split = summarize(tmp_path).time.steps
    assert split.phase_ns == {name: 10 * duration for name, duration in DEFAULT_PHASES}
    assert split.unattributed_ns == 30 * MS
