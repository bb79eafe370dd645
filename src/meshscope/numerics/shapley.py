"""Shares out what several removals save together, when they save another sum one by one.

Two faults that hide each other save nothing when one of them is removed, and much together; two
that are about the same time save it once. The share of each is its Shapley value: what it adds to
those removed before it, averaged over all orders. Shares sum to what all save together.

Where each saves the same alone and after all others, and together they save the sum, nothing has to
be averaged. Otherwise those that interact are tried in all combinations, more than MAX_EXACT of
them in some orders, each with its reverse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np

from meshscope.store.read.arrays import Floats

MAX_EXACT = 5
"""Removals that are tried in all combinations: 32 of them."""
_NUM_ORDERS = 8
"""Orders tried where there are more; each also in reverse."""
_SEED = 20240501

Coalition = frozenset[int]
Price = Callable[[Sequence[Coalition]], Sequence[float]]
"""What each set of removals saves together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    alone: Floats
    """[removal]: what it saves if nothing else is removed."""
    last: Floats
    """[removal]: what it adds if all others are removed already."""
    share: Floats
    """[removal]: its share of `total`; they sum to it."""
    total: float
    """What all save together."""


def share_out(price: Price, count: int, *, tolerance: float) -> Shares:
    """Shares of `count` removals; below `tolerance` a difference is no interaction."""
    everything = frozenset(range(count))
    asked = [everything, *(frozenset((i,)) for i in range(count))]
    asked += [everything - {i} for i in range(count)]
    prices = list(price(asked))
    total = prices[0] if count else 0.0
    alone = np.array(prices[1 : count + 1])
    last = total - np.array(prices[count + 1 :])
    share = (alone + last) / 2
    mixed = [i for i in range(count) if abs(alone[i] - last[i]) > tolerance]
    if mixed or abs(total - alone.sum()) > tolerance:
        mixed = _find_mixed(price, alone, total, mixed, tolerance)
        share[mixed] = _average_orders(price, mixed)
    # Small interactions of many that were not tried in combination.
    weight = np.abs(share) + (abs(total) + 1.0) * 1e-12
    if count:
        share += (total - share.sum()) * weight / weight.sum()
    return Shares(alone=alone, last=last, share=share, total=total)


def _find_mixed(
    price: Price, alone: Floats, total: float, mixed: list[int], tolerance: float
) -> list[int]:
    """Those that interact: `mixed`, if the others save the same before and after them, else all."""
    everybody = list(range(len(alone)))
    others = [i for i in everybody if i not in mixed]
    if not mixed or not others:
        return everybody
    first, then = price([frozenset(others), frozenset(mixed)])
    own = float(alone[others].sum())
    is_apart = abs(first - own) <= tolerance and abs(total - then - own) <= tolerance
    return mixed if is_apart else everybody


def _average_orders(price: Price, players: Sequence[int]) -> Floats:
    """Shapley values of the players among themselves."""
    orders = _choose_orders(len(players))
    if orders is None:
        sets = [frozenset(s) for n in range(len(players) + 1) for s in combinations(players, n)]
    else:
        sets = sorted(
            {frozenset(players[i] for i in o[:n]) for o in orders for n in range(len(o) + 1)},
            key=sorted,
        )
    value = dict(zip(sets, price(sets), strict=True))
    if orders is None:
        return np.array([_weigh(value, player, players) for player in players])
    found = np.zeros(len(players))
    for order in orders:
        for index, player in enumerate(order):
            before = frozenset(players[i] for i in order[:index])
            found[player] += value[before | {players[player]}] - value[before]
    return found / len(orders)


def _choose_orders(count: int) -> list[tuple[int, ...]] | None:
    if count <= MAX_EXACT:
        return None
    random = np.random.default_rng(_SEED)
    drawn = [tuple(random.permutation(count).tolist()) for _ in range(_NUM_ORDERS)]
    return drawn + [order[::-1] for order in drawn]


def _weigh(value: dict[Coalition, float], player: int, players: Sequence[int]) -> float:
    count = len(players)
    return sum(
        (value[before | {player}] - value[before])
        * factorial(len(before))
        * factorial(count - len(before) - 1)
        / factorial(count)
        for before in value
        if player not in before
    )
