"""Orders without memory: exact coverage, and no visible rule."""

import numpy as np
import pytest

from meshscope.engine.data.permutation import Permutation
from meshscope.errors import UsageError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_everything_stands_at_exactly_one_place(size: int) -> None:
    found = Permutation(size, "epoch", 3, 0).apply(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_places_can_be_asked_for_in_any_order_and_alone() -> None:
    order = Permutation(1000, 1)
    whole = order.apply(np.arange(1000))
    places = np.array([999, 0, 17, 17])
    assert order.apply(places).tolist() == whole[places].tolist()
    assert order.apply([17]).tolist() == [whole[17]]


def test_keys_give_other_orders_and_the_same_key_the_same() -> None:
    places = np.arange(500)
    first, again, other = (Permutation(500, "epoch", 3, e).apply(places) for e in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).mean() > 0.9


def test_it_mixes() -> None:
    size = 10_000
    found = Permutation(size, 7).apply(np.arange(size))
    # Of a random order: no correlation with the place (sd 1/sqrt(n)) or with the one before, and
    # one fixed point on average (Poisson).
    assert abs(np.corrcoef(found, np.arange(size))[0, 1]) < 5 / size**0.5
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 5 / size**0.5
    assert (found == np.arange(size)).sum() < 10


def test_a_trillion_things_need_no_memory() -> None:
    size = 10**12
    found = Permutation(size, 1).apply(np.array([0, 1, size - 1]))
    assert len(set(found.tolist())) == 3
    assert all(0 <= x < size for x in found.tolist())


def test_places_and_sizes_outside_are_refused() -> None:
    with pytest.raises(UsageError, match="place 5 of a permutation of 5"):
        Permutation(5).apply([5])
    with pytest.raises(UsageError, match="a permutation of 0 things"):
        Permutation(0)
