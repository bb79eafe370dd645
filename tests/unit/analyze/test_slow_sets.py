import pytest

from meshscope.analyze.stragglers.slow_sets import find_shared
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable

LAYOUT = Layout(dp=2, tp=2, pp=2)
"""Ranks 0-3 are stage 0; tp neighbours are consecutive."""
HOSTS = {rank: f"node{rank // 4}" for rank in range(8)}
UNKNOWN = Unavailable("no layout")


def names(ranks, layout=LAYOUT, hosts=HOSTS, everyone=range(8)):
    return [(trait.name, trait.is_whole) for trait in find_shared(ranks, everyone, layout, hosts)]


def test_all_ranks_of_a_host_point_to_the_host_and_to_what_it_holds():
    assert names(range(4, 8)) == [("host node1", True), ("stage 1", True)]


def test_a_host_is_named_without_a_layout():
    assert names(range(4, 8), UNKNOWN) == [("host node1", True)]


def test_a_tp_group_is_named_before_the_host_it_is_half_of():
    assert names([2, 3]) == [
        ("tp group of ranks 2-3", True),
        ("host node0", False),
        ("stage 0", False),
        ("dp index 1", False),
    ]


def test_a_replica_over_both_hosts_is_named():
    assert names([2, 3, 6, 7]) == [("dp index 1", True)]


@pytest.mark.parametrize("ranks", [[], [3], [0, 7], range(8)])
def test_one_rank_all_ranks_and_unrelated_ranks_share_nothing(ranks):
    assert names(ranks) == []


def test_few_of_many_on_a_host_are_not_blamed_on_it():
    hosts = {rank: f"node{rank // 8}" for rank in range(16)}
    assert names([0, 5], Layout(dp=16), hosts, range(16)) == []


def test_a_host_that_has_everyone_says_nothing():
    assert names([1, 2], UNKNOWN, dict.fromkeys(range(4), "node0"), range(4)) == []


def test_ranks_beyond_the_layout_are_compared_by_host_alone():
    assert names([8, 9], hosts={8: "b", 9: "b"}, everyone=range(10)) == [("host b", True)]
