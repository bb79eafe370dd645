"""Sets of intervals against sets of whole numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshscope.numerics.intervals import (
    Intervals,
    complement,
    intersect,
    join,
    subtract,
    unite,
)

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(-2, 8)), max_size=8)


def make(pairs: list[tuple[int, int]]) -> Intervals:
    start = np.array([start for start, _ in pairs], dtype=np.int64)
    return unite(start, start + np.array([size for _, size in pairs], dtype=np.int64))


def moments(one: Intervals) -> set[int]:
    found: set[int] = set()
    for start, end in zip(one.start_ns.tolist(), one.end_ns.tolist(), strict=True):
        assert start < end
        assert not found & set(range(start - 1, end))
        found |= set(range(start, end))
    return found


def truth(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for start, size in pairs for moment in range(start, start + size)}


@given(PAIRS, PAIRS)
def test_they_do_as_sets_do(first, second) -> None:
    one, other = make(first), make(second)
    assert moments(one) == truth(first)
    assert moments(join(one, other)) == truth(first) | truth(second)
    assert moments(intersect(one, other)) == truth(first) & truth(second)
    assert moments(subtract(one, other)) == truth(first) - truth(second)
    assert moments(complement(one, 3, 20)) == set(range(3, 20)) - truth(first)
    assert one.total_ns == len(truth(first))


@given(PAIRS, st.integers(-5, 45), st.integers(0, 20))
def test_a_part_of_a_set_is_measured(pairs, start, size) -> None:
    found = make(pairs).within(np.array([start]), np.array([start + size]))
    assert found.tolist() == [len(truth(pairs) & set(range(start, start + size)))]
