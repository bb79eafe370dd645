"""Steps in which two signals stand out at once, compared with how often chance does that.

Signals mark steps: a spike of the loss, of the gradient norm, of the step time. If two signals mark
steps independently with shares p and q, a marked step of one lies within `reach` steps of one of
the other with probability p·q·(2·reach + 1) per step; the number of such meetings is compared with
that by the Poisson tail. Neighbouring steps are one meeting: a long disturbance counts once.

A joint rate beyond chance says that two signals share a cause, not which one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from meshscope.store.read.arrays import Int64s

_REACH_STEPS = 1
"""A gradient norm may be logged a step after the loss it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEvents:
    """Two signals that stand out in the same steps."""

    first: str
    second: str
    steps: tuple[int, ...]
    """The first signal's step of each meeting."""
    expected: float
    """Meetings by chance."""
    p_value: float
    """How likely at least as many are by chance, times the pairs of signals tested."""
    num_first: int
    num_second: int
    num_steps: int


def find_joint_events(
    marks: Mapping[str, Int64s], num_steps: int, *, reach: int = _REACH_STEPS
) -> tuple[JointEvents, ...]:
    """Every pair of signals that meet at least once, the least likely first.

    `marks` are the steps each signal marks, ascending; `num_steps` those in which both were seen.
    """
    pairs = [(a, b) for a, b in combinations(marks, 2) if len(marks[a]) and len(marks[b])]
    found = [_meet(a, b, marks, num_steps, reach, len(pairs)) for a, b in pairs]
    return tuple(sorted((pair for pair in found if pair.steps), key=lambda pair: pair.p_value))


def _meet(
    first: str, second: str, marks: Mapping[str, Int64s], num_steps: int, reach: int, num_pairs: int
) -> JointEvents:
    one, other = _join_neighbours(marks[first], reach), _join_neighbours(marks[second], reach)
    distance = np.abs(one[:, None] - other[None, :]).min(axis=1)
    expected = len(one) * len(other) * (2 * reach + 1) / max(num_steps, 1)
    met = one[distance <= reach]
    return JointEvents(
        first=first,
        second=second,
        steps=tuple(met.tolist()),
        expected=expected,
        p_value=min(1.0, poisson_tail(len(met), expected) * num_pairs),
        num_first=len(one),
        num_second=len(other),
        num_steps=num_steps,
    )


def _join_neighbours(steps: Int64s, reach: int) -> Int64s:
    """The first step of every run of steps that are no further apart than `reach` plus one."""
    ordered = np.sort(steps)
    is_first = np.concatenate([[True], np.diff(ordered) > reach + 1])
    return np.asarray(ordered[is_first], dtype=np.int64)


def poisson_tail(count: int, expected: float) -> float:
    """The chance of at least `count` where `expected` are expected."""
    if count <= 0:
        return 1.0
    if expected <= 0:
        return 0.0
    below = 0.0
    for k in range(count):
        below += math.exp(k * math.log(expected) - expected - math.lgamma(k + 1))
    if below < 0.999999:
        return max(0.0, 1.0 - below)
    # The rest of a small tail by its own terms: 1 − below would be rounding.
    term = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    return min(1.0, term / (1 - expected / (count + 1))) if expected < count + 1 else 1.0
