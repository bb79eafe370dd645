"""Ranks as ranges: the same as a plain set, however many there are said to be."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshscope.store.read.rank_ranges import RankRanges, abbreviate_ranks

RANKS = st.sets(st.integers(0, 40))


@given(ranks=RANKS, world_size=st.integers(0, 40))
def test_absent_ranks_are_the_complement(ranks: set[int], world_size: int) -> None:
    absent = RankRanges.absent_from(ranks, world_size)
    expected = sorted(set(range(world_size)) - ranks)
    assert list(absent) == expected
    assert len(absent) == len(expected)
    assert [rank for rank in range(-2, 45) if rank in absent] == expected
    assert absent == RankRanges.of(expected)
    assert hash(absent) == hash(RankRanges.of(expected))


@given(ranks=RANKS)
def test_ranges_do_not_touch(ranks: set[int]) -> None:
    ranges = RankRanges.of(ranks).ranges
    assert all(len(part) for part in ranges)
    assert all(a.stop < b.start for a, b in pairwise(ranges))
    assert {rank for part in ranges for rank in part} == ranks


def test_a_million_absent_ranks_are_two_ranges() -> None:
    absent = RankRanges.absent_from([7], 1 << 20)
    assert absent.ranges == (range(7), range(8, 1 << 20))
    assert len(absent) == (1 << 20) - 1
    assert str(absent) == "0-6, 8-1048575"
    assert "7" not in absent


def test_ranks_are_abbreviated() -> None:
    assert abbreviate_ranks([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9-10"
    assert abbreviate_ranks(range(0, 100, 2)).endswith("14 …")
    assert repr(RankRanges.of([3, 4])) == "RankRanges(3-4)"
