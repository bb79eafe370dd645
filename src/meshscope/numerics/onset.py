"""In which steps a loss occurs that is known to be there: in all, from one on, up to one, at times.

A step has the loss if it costs more than half of what such steps usually do: of the value that half
of the whole cost is above. The run of steps that has most of those inside and fewest outside is the
answer if it holds _CLEAN_RATIO of its own and hardly any of the others, and as many in a row are
rare among the same steps in any order. Where noise is as large as the loss, levels are compared
instead (`change_point`). A loss that grows slowly is dated where it has about half its size.
"""

import math
from dataclasses import dataclass

import numpy as np

from meshscope.numerics.change_point import find_changes
from meshscope.store.read.arrays import Bools, Floats

_CLEAN_RATIO = 0.8
"""Share of the steps inside that have the loss, and of those outside that have not."""
_LEAST_RUN = 3
"""Steps with, or without, the loss that make a run of them."""
_LEAST_OVER = 5
"""Last steps without the loss, for it to be over."""
_MAX_CHANCE = 0.05
_SPARSE_RATIO = 0.1
"""Of the usual loss: what the other steps of one that comes at times cost at most."""
_HIDDEN_RATIO = 0.25
"""Of all cost: from here on, what is beside one or two huge steps is the loss, and not these."""
_LEAST_EARLY = 5
"""First steps that are compared with the rest where noise is large; a quarter if that is more."""
_MIN_SHIFT = 0.5
"""Of the mean loss, between two levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """Indices of steps."""

    onset: int
    """The first step with the loss."""
    recovery: int
    """The first step after the last one with it; the number of steps if it is still there."""
    is_at_times: bool = False
    """Few steps between these two have it."""


def find_occurrence(cost: Floats) -> Occurrence | None:
    """Of what each step loses, in order; None where these steps do not tell."""
    num = len(cost)
    level = _find_usual(cost)
    if not num or level <= 0:
        return None
    is_lost = np.asarray(cost > level / 2)
    rest = np.maximum(cost[~is_lost], 0.0)
    if int(is_lost.sum()) < _LEAST_RUN and float(rest.sum()) > _HIDDEN_RATIO * float(cost.sum()):
        return find_occurrence(np.minimum(cost, float(rest.max())))
    start, end = _find_run(is_lost)
    if _is_clean(is_lost, start, end):
        return Occurrence(onset=start, recovery=end)
    if float(is_lost.mean()) >= _CLEAN_RATIO:
        return Occurrence(onset=0, recovery=num)
    rest = cost[~is_lost]
    if float(np.median(np.abs(rest))) < _SPARSE_RATIO * level and 2 * int(is_lost.sum()) < num:
        rows = np.flatnonzero(is_lost)
        return Occurrence(onset=int(rows[0]), recovery=int(rows[-1]) + 1, is_at_times=True)
    return _compare_levels(cost)


def _find_usual(cost: Floats) -> float:
    """Half of all that is lost is lost in steps that cost this, or more."""
    ordered = np.sort(np.maximum(cost, 0.0))
    sums = np.cumsum(ordered)
    if not len(sums) or sums[-1] <= 0:
        return 0.0
    return float(ordered[int(np.searchsorted(sums, sums[-1] / 2))])


def _find_run(is_lost: Bools) -> tuple[int, int]:
    """The range with the most steps that have the loss, less those that have not; to an end of the
    series that is only a few steps away."""
    sums = np.concatenate([[0], np.cumsum(np.where(is_lost, 1, -1))])
    lowest = np.minimum.accumulate(sums)
    end = int(np.argmax(sums - lowest))
    start, num = int(np.argmin(sums[: end + 1])), len(is_lost)
    return start if start >= _LEAST_RUN else 0, end if num - end >= _LEAST_OVER else num


def _is_clean(is_lost: Bools, start: int, end: int) -> bool:
    num, inside = len(is_lost), is_lost[start:end]
    outside = np.concatenate([is_lost[:start], is_lost[end:]])
    if min(len(inside), len(outside)) < _LEAST_RUN:
        return False
    if float(inside.mean()) < _CLEAN_RATIO or float(outside.mean()) > 1 - _CLEAN_RATIO:
        return False
    # So many ranges could have been the one; those that reach an end are fewer.
    num_ranges = 2 * num if start == 0 or end == num else num * num / 2
    chance = _chance_inside(num, int(is_lost.sum()), len(inside), int(inside.sum()))
    return chance * num_ranges < _MAX_CHANCE


def _chance_inside(num: int, num_lost: int, num_inside: int, count: int) -> float:
    """That at least `count` of the `num_lost` steps fall into a range, in any order of steps."""
    whole = _log_choose(num, num_inside)
    most = min(num_lost, num_inside)
    terms = (
        _log_choose(num_lost, k) + _log_choose(num - num_lost, num_inside - k) - whole
        for k in range(count, most + 1)
        if num_inside - k <= num - num_lost
    )
    return min(1.0, sum(math.exp(term) for term in terms))


def _log_choose(num: int, count: int) -> float:
    return math.lgamma(num + 1) - math.lgamma(count + 1) - math.lgamma(num - count + 1)


def _compare_levels(cost: Floats) -> Occurrence | None:
    """Where single steps do not tell."""
    mean = float(cost.mean())
    early = max(_LEAST_EARLY, len(cost) // 4)
    if mean <= 0 or len(cost) < 2 * early:
        return None
    change = find_changes((cost / mean)[:, None], min_shift_ratio=_MIN_SHIFT).get(0)
    if change is not None:
        return Occurrence(onset=change.onset, recovery=change.recovery)
    if 2 * float(cost[:early].mean()) >= float(cost[early:].mean()):
        return Occurrence(onset=0, recovery=len(cost))
    return None
