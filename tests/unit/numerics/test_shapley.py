from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.numerics.shapley import MAX_EXACT, share_out


def prices(value):
    return lambda coalitions: [value(one) for one in coalitions]


def shapley(value, count):
    """By the definition: the mean over all orders of what each adds."""
    found = np.zeros(count)
    orders = list(permutations(range(count)))
    for order in orders:
        for index, one in enumerate(order):
            before = frozenset(order[:index])
            found[one] += value(before | {one}) - value(before)
    return found / len(orders)


def test_the_glove_game():
    """Two left gloves and a right one: 1/6, 1/6, 4/6 (Shapley 1953, as in every textbook)."""

    def pairs(owners):
        return float(2 in owners and bool(owners & {0, 1}))

    shares = share_out(prices(pairs), 3, tolerance=1e-9)
    assert shares.share == pytest.approx([1 / 6, 1 / 6, 4 / 6])
    assert shares.alone.tolist() == [0, 0, 0]
    assert shares.last.tolist() == [0, 0, 1]


def test_the_airport_game():
    """A runway of the longest plane's length: each part is paid by those that need it."""
    lengths = [1.0, 3.0, 6.0]

    def runway(planes):
        return max((lengths[one] for one in planes), default=0.0)

    shares = share_out(prices(runway), 3, tolerance=1e-9)
    assert shares.share == pytest.approx([1 / 3, 1 / 3 + 1, 1 / 3 + 1 + 3])


def test_what_does_not_interact_is_priced_once():
    asked = []

    def price(coalitions):
        asked.extend(coalitions)
        return [float(sum(one)) for one in coalitions]

    shares = share_out(price, 9, tolerance=1e-9)
    assert shares.share == pytest.approx(range(9))
    assert len(asked) == 1 + 9 + 9


def test_nothing_to_share():
    shares = share_out(prices(lambda one: 0.0), 0, tolerance=0.1)
    assert (shares.total, len(shares.share)) == (0.0, 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=8, max_size=8), st.integers(2, MAX_EXACT))
def test_shares_are_the_mean_over_all_orders(values, count):
    table = {
        frozenset(one): values[index % 8] * len(one)
        for index, one in enumerate(
            chosen for n in range(1, count + 1) for chosen in combinations(range(count), n)
        )
    }
    table[frozenset()] = 0.0
    shares = share_out(prices(table.__getitem__), count, tolerance=0.0)
    assert shares.share.sum() == pytest.approx(shares.total, abs=1e-9)
    mixed = np.abs(shares.alone - shares.last) > 0
    if mixed.all():
        assert shares.share == pytest.approx(shapley(table.__getitem__, count), abs=1e-9)


def test_many_that_hide_each_other_share_alike():
    """Only all nine together save anything: a ninth each, whatever orders are drawn."""
    shares = share_out(prices(lambda one: 9.0 * (len(one) == 9)), 9, tolerance=1e-9)
    assert shares.share.sum() == pytest.approx(9.0)
    assert shares.share.min() >= 0
