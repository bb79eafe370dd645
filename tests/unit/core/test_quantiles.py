"""Quantiles: exact while few, within 1 % afterwards, the same however they were put together."""

import json
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.core.quantiles import MAX_EXACT, RELATIVE_ERROR, QuantileSketch

SLACK = 1e-9
"""Rounding of logarithms, far below the stated error."""

NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12),
    st.floats(1e-3, 1e12),
    st.floats(-1e12, -1e-3),
    st.just(0),
)
SHARES = st.one_of(st.sampled_from([0, 0.01, 0.5, 0.95, 0.99, 1]), st.floats(0, 1))


def sketch_of(values: Sequence[float], **limits: int) -> QuantileSketch:
    sketch = QuantileSketch(**limits)
    for value in values:
        sketch.add(value)
    return sketch


def nearest_rank(values: Sequence[float], q: float) -> float:
    return sorted(values)[max(math.ceil(q * len(values) * (1 - 1e-12)) - 1, 0)]


def is_close(found: float | None, true: float) -> bool:
    assert found is not None
    return abs(found - true) <= (RELATIVE_ERROR + SLACK) * abs(true)


def test_nearest_rank_of_a_hundred():
    sketch = sketch_of(range(100, 0, -1))
    assert [sketch.quantile(q) for q in (0, 0.01, 0.07, 0.5, 0.95, 0.99, 0.991, 1)] == [
        1, 1, 7, 50, 95, 99, 100, 100,
    ]  # fmt: skip
    assert (sketch.count, sketch.sum, sketch.min, sketch.max) == (100, 5050, 1, 100)
    assert sketch.is_exact
    assert sketch.relative_error == 0


def test_every_quantile_of_one_value_is_that_value():
    assert [sketch_of([7]).quantile(q) for q in (0, 0.3, 1)] == [7, 7, 7]


def test_without_values_nothing_is_known():
    sketch = QuantileSketch()
    assert (sketch.quantile(0.5), sketch.min, sketch.max) == (None, None, None)
    assert (sketch.count, sketch.sum, sketch.is_exact) == (0, 0, True)


def test_exact_up_to_the_limit_and_within_one_percent_beyond():
    sketch = sketch_of(range(1, MAX_EXACT + 1))
    assert sketch.is_exact
    sketch.add(MAX_EXACT + 1)
    assert not sketch.is_exact
    assert sketch.relative_error == RELATIVE_ERROR
    assert is_close(sketch.quantile(0.5), 129)
    assert (sketch.quantile(0), sketch.quantile(1)) == (1, MAX_EXACT + 1)
    assert sketch.sum == sum(range(1, MAX_EXACT + 2))


def test_a_weight_counts_a_value_several_times():
    sketch = QuantileSketch()
    sketch.add(10, weight=3)
    sketch.add(20, weight=1)
    assert [sketch.quantile(q) for q in (0.5, 0.75, 0.76)] == [10, 10, 20]
    assert (sketch.count, sketch.sum) == (4, 50)


def test_zeros_and_negative_values_keep_their_place_in_buckets():
    values = [-100] * 3 + [-1] * 2 + [0] * 2 + [5] * 3
    sketch = sketch_of(values, max_exact=0)
    found = [sketch.quantile(q) for q in (0.3, 0.5, 0.7, 0.9)]
    assert all(map(is_close, found, [-100, -1, 0, 5]))
    assert found[2] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_changes_nothing(value):
    sketch = sketch_of([1, 2])
    with pytest.raises(ValueError, match="NaN or infinite"):
        sketch.add_all([3, value])
    assert (sketch.count, sketch.sum, sketch.max) == (2, 3, 2)


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_a_weight_is_finite_and_positive(weight):
    with pytest.raises(ValueError, match="weight"):
        QuantileSketch().add(1, weight)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_share_is_between_0_and_1(q):
    with pytest.raises(ValueError, match="between 0 and 1"):
        sketch_of([1]).quantile(q)


def test_magnitudes_that_had_to_share_a_bucket_are_not_known():
    values = [10.0**power for power in range(10)]
    sketch = sketch_of(values, max_exact=0, max_buckets=4)
    assert [sketch.quantile(q) for q in (0.1, 0.6, 0.7)] == [None, None, None]
    assert is_close(sketch.quantile(0.8), 1e7)
    assert (sketch.quantile(0), sketch.quantile(1), sketch.count) == (1, 1e9, 10)


def test_nanoseconds_from_one_to_ten_years_keep_their_buckets():
    values = [1.01**power for power in range(4_100)]
    assert values[-1] > 10 * 365 * 86_400 * 1e9
    sketch = sketch_of(values)
    assert is_close(sketch.quantile(0.001), nearest_rank(values, 0.001))


def test_the_largest_floats_do_not_overflow():
    sketch = sketch_of([1.79e308, 1.0], max_exact=0)
    assert is_close(sketch.quantile(0.9), 1.79e308)


def test_merging_with_itself_doubles_it():
    for limits in ({}, {"max_exact": 0}):
        sketch = sketch_of([1, 2, 3], **limits)
        sketch.merge(sketch)
        assert (sketch.count, sketch.sum) == (6, 12)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"relative_error": 0.02},
        {**sketch_of([1]).to_dict(), "count": "1"},
        {**sketch_of([1]).to_dict(), "weights": []},
        {**sketch_of([1], max_exact=0).to_dict(), "positive": []},
        {**sketch_of([1], max_exact=0).to_dict(), "zero": True},
    ],
)
def test_what_is_not_a_sketch_is_refused(fields):
    with pytest.raises(ValueError, match="not a quantile sketch"):
        QuantileSketch.from_dict(fields)


@settings(deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=400), q=SHARES)
def test_quantiles_are_exact_or_within_the_stated_error(values, q):
    sketch = sketch_of(values)
    true = nearest_rank(values, q)
    if len(values) <= MAX_EXACT:
        assert sketch.quantile(q) == true
    else:
        assert is_close(sketch.quantile(q), true)


@settings(deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=60), q=SHARES)
def test_buckets_keep_the_stated_error(values, q):
    assert is_close(sketch_of(values, max_exact=0).quantile(q), nearest_rank(values, q))


@settings(deadline=None)
@given(
    parts=st.lists(st.lists(NUMBERS, max_size=40), max_size=5),
    max_exact=st.integers(0, 100),
    max_buckets=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_merging_is_adding_everything_in_any_order(parts, max_exact, max_buckets, seed):
    limits = {"max_exact": max_exact, "max_buckets": max_buckets}
    merged = QuantileSketch(**limits)
    for part in parts:
        merged.merge(sketch_of(part, **limits))
    values = [value for part in parts for value in part]
    random.Random(seed).shuffle(values)
    added = sketch_of(values, **limits)
    assert merged.is_exact == added.is_exact
    assert (merged.count, merged.min, merged.max) == (added.count, added.min, added.max)
    assert math.isclose(merged.sum, added.sum, rel_tol=1e-9, abs_tol=1e-2)
    for q in (0, 0.1, 0.5, 0.9, 0.99, 1):
        assert merged.quantile(q) == added.quantile(q)


@settings(deadline=None)
@given(
    weighted=st.lists(st.tuples(NUMBERS, st.integers(1, 5)), min_size=1, max_size=40),
    max_exact=st.sampled_from([0, 1000]),
    q=SHARES,
)
def test_a_weight_is_as_good_as_repeating_the_value(weighted, max_exact, q):
    repeated = [value for value, weight in weighted for _ in range(weight)]
    sketch = QuantileSketch(max_exact=max_exact)
    for value, weight in weighted:
        sketch.add(value, weight)
    assert sketch.quantile(q) == sketch_of(repeated, max_exact=max_exact).quantile(q)
    assert sketch.count == len(repeated)


@settings(deadline=None)
@given(
    values=st.lists(NUMBERS, max_size=60),
    weight=st.sampled_from([1, 2.5]),
    max_exact=st.sampled_from([0, 1000]),
    max_buckets=st.integers(1, 60),
)
def test_json_and_back_is_the_identity(values, weight, max_exact, max_buckets):
    limits = {"max_exact": max_exact, "max_buckets": max_buckets}
    sketch = QuantileSketch(**limits)
    sketch.add_all(values, weight)
    text = json.dumps(sketch.to_dict(), allow_nan=False)
    again = QuantileSketch.from_dict(json.loads(text), **limits)
    assert again.to_dict() == sketch.to_dict()
    assert again.quantile(0.5) == sketch.quantile(0.5)
