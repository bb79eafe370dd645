import math

import numpy as np
import pytest

from builders import MS
from meshscope.analyze.compare.compare import Metric, Verdict, compare_studies, judge
from meshscope.analyze.compare.compare_loss import Tolerance, agree
from meshscope.analyze.compare.compare_provenance import Subject
from meshscope.analyze.study import Study
from meshscope.capture.recorder import Recorder
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.location_shift import Shift
from meshscope.report.sections.compare import tell_loss
from meshscope.store.read.run import open_run
from signal_builders import MB, make_signal_run

NOISE = np.random.default_rng(0).normal(size=(2, 4, 500))
FACTS = {
    "argv": ["train.py", "--lr", "1e-3"],
    "git": {"revision": "abc", "is_dirty": False},
    "torch": {"version": "2.9.0", "initial_seed": 7},
    "environment": {"RANK": "0", "OMP_NUM_THREADS": "1"},
    "packages": {"numpy": "2.0"},
}


def steps_of(side, factor=1.0, spread=0.03):
    return lambda rank, step: 50 * MS * factor * (1 + spread * NOISE[side, rank, step])


def attempt(path, **options):
    return open_run(make_signal_run(path, **options)).last_attempt


def compare(a, b, tolerance=None):
    return compare_studies(Study(a), Study(b), tolerance=tolerance)


@pytest.fixture
def base(tmp_path):
    return attempt(tmp_path / "a", num_steps=60, step_ns=steps_of(0), provenance=FACTS)


def test_a_run_against_itself_has_no_difference(base):
    found = compare(base, base)
    assert found.period.change_ratio == pytest.approx(0, abs=1e-3)
    assert judge(found.period, 0.03) is Verdict.WITHIN
    assert found.provenance == ()
    assert found.num_steps == (60, 60)
    assert sum(line.change_ns for line in found.budget.lines) == 0


def test_a_run_that_is_five_percent_slower_is_found(base, tmp_path):
    slower = attempt(tmp_path / "b", num_steps=80, step_ns=steps_of(1, 1.05), provenance=FACTS)
    found = compare(base, slower)
    low, high = found.period.interval_ratio
    assert 0 < low < 0.05 < high < 0.08
    assert judge(found.period, 0.0) is Verdict.SLOWER
    assert judge(found.period, 0.05) is Verdict.INCONCLUSIVE
    assert judge(found.period, 0.10) is Verdict.WITHIN
    assert judge(compare(slower, base).period, 0.0) is Verdict.WITHIN


def test_the_lines_of_the_budget_sum_to_the_difference(base, tmp_path):
    slower = attempt(
        tmp_path / "b", num_steps=60, step_ns=steps_of(1, 1.2), gap_ns=5 * MS, provenance=FACTS
    )
    budget = compare(base, slower).budget
    assert sum(line.change_ns for line in budget.lines) == pytest.approx(budget.period.change_ns)
    assert budget.period.change_ns == pytest.approx(14 * MS, rel=0.05)
    (compute,) = [line for line in budget.lines if line.name == "compute"]
    assert compute.low_ns < 10 * MS < compute.high_ns


def test_numbers_without_a_series_have_no_interval(tmp_path):
    a = attempt(tmp_path / "a", rss=lambda rank, step: 300 * MB)
    b = attempt(tmp_path / "b", rss=lambda rank, step: 450 * MB)
    found = {metric.name: metric for metric in compare(a, b).metrics}
    assert found["peak process memory"].change_ratio == pytest.approx(0.5)
    assert isinstance(found["peak process memory"].interval_ratio, Unavailable)
    assert isinstance(found["peak device memory"].a, Unavailable)
    assert isinstance(found["throughput"].change_ratio, Unavailable)


def test_too_few_steps_are_inconclusive(base, tmp_path):
    short = attempt(tmp_path / "b", num_steps=2)
    found = compare(base, short)
    assert judge(found.period, 0.05) is Verdict.INCONCLUSIVE
    assert isinstance(found.budget, Unavailable)


def test_runs_without_a_step_are_compared_all_the_same(base, tmp_path):
    found = compare(base, attempt(tmp_path / "b", num_steps=0))
    assert isinstance(found.period.b, Unavailable)
    assert judge(found.period, 0.05) is Verdict.INCONCLUSIVE


def test_a_verdict_needs_the_whole_interval():
    def metric(low, high):
        shift = Shift(
            shift=(low + high) / 2, low=low, high=high, p_value=0.5, num_a=9, num_b=9, block=1
        )
        return Metric(name="x", unit="ns", a=100.0, b=100.0, shift=shift, is_lower_better=True)

    assert judge(metric(6, 9), 0.05) is Verdict.SLOWER
    assert judge(metric(4, 9), 0.05) is Verdict.INCONCLUSIVE
    assert judge(metric(-3, 5), 0.05) is Verdict.WITHIN
    assert metric(-450, 5).interval_ratio == (-1.0, 0.05), "nothing shrinks by more than itself"


# --- loss ----------------------------------------------------------------------------------


def loss_run(path, loss, **options):
    return attempt(path, num_steps=30, scalars={"loss": loss}, **options)


def compare_losses(tmp_path, a, b, tolerance=None, num_ranks=2):
    one = loss_run(tmp_path / "a", a, num_ranks=num_ranks)
    other = loss_run(tmp_path / "b", b, num_ranks=num_ranks)
    return compare(one, other, tolerance).loss


def falling(rank, step):
    return 4 / (1 + step) + rank


def test_equal_losses_agree_bit_by_bit(tmp_path):
    loss = compare_losses(tmp_path, falling, falling, Tolerance(is_exact=True))
    assert (loss.divergence, loss.num_beyond, loss.largest_difference) == (None, 0, 0.0)
    assert (loss.num_values, loss.num_ranks) == (60, 2)


def test_the_first_difference_is_told_by_step_then_rank(tmp_path):
    def other(rank, step):
        return falling(rank, step) + 0.1 * (step >= (20 if rank == 0 else 17))

    loss = compare_losses(tmp_path, falling, other)
    assert (loss.divergence.step, loss.divergence.rank) == (17, 1)
    assert loss.num_beyond == 10 + 13
    assert loss.largest_difference == pytest.approx(0.1)


def test_a_tolerance_covers_rounding_and_exactness_does_not(tmp_path):
    def other(rank, step):
        return falling(rank, step) * (1 + 1e-9)

    assert compare_losses(tmp_path / "x", falling, other).divergence is None
    exact = compare_losses(tmp_path / "y", falling, other, Tolerance(is_exact=True))
    assert exact.divergence.step == 0


def test_a_nan_on_one_side_is_a_difference_and_on_both_is_none(tmp_path):
    def bad(rank, step):
        return math.nan if step == 12 else falling(rank, step)

    assert compare_losses(tmp_path / "x", falling, bad).divergence.step == 12
    assert compare_losses(tmp_path / "y", bad, bad).divergence is None


def test_tolerance_by_the_formula():
    a = np.array([1.0, 100.0, 0.0, math.inf, math.nan, math.inf, -0.0])
    b = np.array([1.05, 110.0, 0.01, math.inf, math.nan, 1.0, 0.0])
    near = agree(a, b, Tolerance(absolute=0.0, relative=0.05))
    assert near.tolist() == [True, False, False, True, True, False, True]
    exact = agree(a, b, Tolerance(is_exact=True))
    assert exact.tolist() == [False, False, False, True, True, False, False]


def test_losses_are_matched_by_step_not_by_place(tmp_path):
    def late(rank, step):
        return falling(rank, step) if step >= 5 else math.nan

    loss = compare_losses(tmp_path, late, falling)
    assert (loss.divergence.step, loss.num_beyond) == (0, 10)


def test_no_loss_is_not_called_nondeterminism(base):
    assert compare(base, base).loss == Unavailable("A logged no loss or backward_loss")


# --- provenance ----------------------------------------------------------------------------


def test_what_is_different_is_listed_by_subject(base, tmp_path):
    other = {
        **FACTS,
        "argv": ["train.py", "--lr", "2e-3"],
        "git": {"revision": "def", "is_dirty": False},
        "environment": {"RANK": "3", "OMP_NUM_THREADS": "4"},
        "packages": {"numpy": "2.0", "scipy": "1.0"},
    }
    b = attempt(tmp_path / "b", provenance=other, host=lambda rank: "node9")
    found = [(d.subject, d.name, d.a, d.b) for d in compare(base, b).provenance]
    assert found == [
        (Subject.CODE, "git.revision", "abc", "def"),
        (Subject.ARGUMENTS, "--lr", "1e-3", "2e-3"),
        (Subject.ENVIRONMENT, "environment.OMP_NUM_THREADS", "1", "4"),
        (Subject.MACHINES, "hosts", '["node0"]', '["node9"]'),
        (Subject.PACKAGES, "packages.scipy", None, "1.0"),
    ]


def test_a_run_without_provenance_says_so(base, tmp_path):
    bare = attempt(tmp_path / "b")
    assert compare(base, bare).provenance == Unavailable("B: provenance was not recorded")


def settle(path, config, **facts):
    with Recorder(path) as recorder:
        recorder.set_config(config)
        for name, value in facts.items():
            recorder.set_config(value, name, "made here")
        for _ in range(2):
            with recorder.step():
                pass
    return open_run(path).last_attempt


def test_hyper_parameters_are_compared_key_by_key(tmp_path):
    a = settle(tmp_path / "a", {"lr": 1e-3, "model": {"depth": 2}}, Arguments={"x": 1, "y": 2})
    b = settle(tmp_path / "b", {"lr": 2e-3, "model": {"depth": 2}, "seed": 1})
    found = compare(a, b).provenance
    assert [(d.name, d.a, d.b) for d in found if d.subject is Subject.HYPER_PARAMETERS] == [
        ("Arguments", "recorded", None),
        ("config.lr", "0.001", "0.002"),
        ("config.seed", None, "1"),
    ]


def test_a_long_command_line_is_compared_option_by_option(tmp_path):
    shared = ["train.py", *(f"--option-{i}=value" for i in range(300))]
    a, b = (
        attempt(tmp_path / side, provenance={**FACTS, "argv": [*shared, *own]})
        for side, own in (("a", ["--lr", "1", "model.depth=2", "-v"]), ("b", ["model.depth=3"]))
    )
    assert [(d.name, d.a, d.b) for d in compare(a, b).provenance] == [
        ("--lr", "1", None),
        ("-v", "given", None),
        ("model.depth", "2", "3"),
    ]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [((1 << 60, 1 << 61), []), ((1, 1), []), ((1, 1 << 60), [("1", "drawn by torch")])],
)
def test_a_seed_that_nobody_chose_is_no_difference(tmp_path, seeds, expected):
    a, b = (
        attempt(tmp_path / str(i), provenance={**FACTS, "torch": {"initial_seed": seed}})
        for i, seed in enumerate(seeds)
    )
    assert [(d.a, d.b) for d in compare(a, b).provenance] == expected


def test_a_loss_that_is_infinite_on_one_side_differs_by_no_number(tmp_path):
    def explode(rank, step):
        return math.inf if step > 26 else falling(rank, step)

    loss = compare_losses(tmp_path, falling, explode, num_ranks=1)
    assert (loss.num_beyond, loss.num_infinitely_apart) == (3, 3)
    assert loss.largest_difference == 0
    assert tell_loss(loss).endswith(
        "3 of 30 values differ (steps 0 to 29, 1 rank); in all of them one side is not finite, "
        "or both in another way."
    )
    same = compare_losses(tmp_path / "same", explode, explode)
    assert (same.divergence, same.num_infinitely_apart) == (None, 0)
