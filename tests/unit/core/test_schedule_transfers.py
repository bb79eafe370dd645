"""Which messages a pipeline rank holds."""

import pytest

from meshscope.core.schedule_builders import build_schedule
from meshscope.core.schedule_transfers import count_kept_messages, order_transfers


def count(name, num_ranks, num_microbatches, num_chunks=None):
    schedule = build_schedule(name, num_ranks, num_microbatches, num_chunks)
    return [count_kept_messages(schedule, rank, max_ahead=2) for rank in range(num_ranks)]


def test_one_rank_sends_nothing():
    assert count("1f1b", 1, 4) == [0]


def test_the_first_rank_keeps_what_it_sent_until_a_gradient_comes_back():
    """Seven activations while it computes the eighth; later ranks hear from the next one sooner."""
    assert count("1f1b", 8, 16) == [7, 7, 6, 5, 4, 3, 2, 2]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_no_more_than_all_that_a_rank_sends_and_may_await(name):
    schedule = build_schedule(name, 4, 6)
    for rank in range(4):
        sent = sum(one.source == rank for one in order_transfers(schedule))
        assert 0 < count_kept_messages(schedule, rank, max_ahead=2) <= sent + 2
