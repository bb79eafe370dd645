"""Which of several ranks, or stages, take longer than the others over a run.

The others' usual is the median of those that do not stand out, step by step; at most half may. One
stands out if its mean excess is large and certain: in standard errors between blocks of steps,
because neighbouring steps repeat each other. A rise during the run is no uncertainty: the error is
also taken around two levels, before and after the best step to part them, of the blocks' medians,
if these account for most of the mean: a single long step is no level.
"""

from collections.abc import Callable, Sequence

import numpy as np

from meshscope.store.read.arrays import Bools, Floats

_NUM_BLOCKS = 8
_MIN_LEVEL_BLOCKS = 2
"""Of each of two levels: one block may be a single long step."""
_MIN_LEVEL_RATIO = 0.5
"""Of the mean excess that blocks' medians must have."""
_MAX_ROUNDS = 6

Expect = Callable[[Floats, Bools], Floats]
"""[step, member] and who stands out, to [step, member]: what each would take by the others."""


def expect_median(by_step: Floats, chosen: Bools) -> Floats:
    middle = np.median(by_step[:, ~chosen], axis=1)
    return np.broadcast_to(middle[:, None], by_step.shape)


def expect_by_size(sizes: Sequence[Floats]) -> Expect:
    """In proportion to any of these sizes, or to none: whatever allows a member most."""

    def expect(by_step: Floats, chosen: Bools) -> Floats:
        found = expect_median(by_step, chosen)
        for size in sizes:
            middle = np.median(by_step[:, ~chosen] / size[~chosen], axis=1)
            found = np.maximum(found, middle[:, None] * size)
        return found

    return expect


def expect_by_best_size(sizes: Sequence[Floats]) -> Expect:
    """In proportion to the size, or to none, that the members who do not stand out agree on most.

    With one of these nothing tells; then as `expect_by_size`.
    """

    def expect(by_step: Floats, chosen: Bools) -> Floats:
        if np.count_nonzero(~chosen) < 2:
            return expect_by_size(sizes)(by_step, chosen)
        equal = np.ones(by_step.shape[1])
        size = min((equal, *sizes), key=lambda size: _measure_spread(by_step / size, chosen))
        middle = np.median(by_step[:, ~chosen] / size[~chosen], axis=1)
        return np.asarray(middle[:, None] * size)

    return expect


def _measure_spread(scaled: Floats, chosen: Bools) -> float:
    mean = scaled[:, ~chosen].mean(axis=0)
    return float(mean.std() / mean.mean()) if mean.mean() > 0 else np.inf


def choose_outstanding(
    by_step: Floats,
    expect: Expect,
    *,
    min_mean_ns: float,
    min_errors: float,
    min_ratio: float = 0.0,
) -> Bools:
    """[member]: whether it stands out among the members, at most half of them.

    `min_ratio` is the least mean excess over what is expected of a member.
    """
    num_members = by_step.shape[1]
    # From the median of all: of one fast member the slower half would look slow.
    chosen = np.zeros(num_members, dtype=np.bool_)
    for _ in range(_MAX_ROUNDS):
        expected = expect(by_step, chosen)
        mean_ns = (by_step - expected).mean(axis=0)
        found = mean_ns >= np.maximum(min_mean_ns, min_ratio * expected.mean(axis=0))
        found &= count_errors(by_step - expected) >= min_errors
        order = np.argsort(-np.where(found, mean_ns, -np.inf), kind="stable")
        keep = order[: num_members // 2]
        now = np.zeros_like(chosen)
        now[keep] = found[keep]
        if np.array_equal(now, chosen):
            break
        chosen = now
    return chosen


def count_errors(excess: Floats) -> Floats:
    """[member]: the mean over steps, in standard errors."""
    blocks = np.array_split(excess, min(_NUM_BLOCKS, len(excess)))
    if len(blocks) < 2:
        return np.zeros(excess.shape[1])
    means = np.array([block.mean(axis=0) for block in blocks])
    scatter = ((means - means.mean(axis=0)) ** 2).sum(axis=0) / (len(blocks) - 1)
    found = _divide(means.mean(axis=0), scatter, len(blocks))
    if len(blocks) == _NUM_BLOCKS:
        medians = np.array([np.median(block, axis=0) for block in blocks])
        levelled = _divide(medians.mean(axis=0), _scatter_around_levels(medians), len(blocks))
        is_level = medians.mean(axis=0) >= _MIN_LEVEL_RATIO * means.mean(axis=0)
        found = np.where(is_level, np.maximum(found, levelled), found)
    return found


def _scatter_around_levels(values: Floats) -> Floats:
    """[member]: variance around the best two levels of [block, member]."""
    splits = range(_MIN_LEVEL_BLOCKS, len(values) - _MIN_LEVEL_BLOCKS + 1)
    sums = [
        sum(((part - part.mean(axis=0)) ** 2).sum(axis=0) for part in (values[:at], values[at:]))
        for at in splits
    ]
    # Two levels and where they part.
    return np.asarray(np.min(sums, axis=0) / (len(values) - 3))


def _divide(mean: Floats, variance: Floats, count: int) -> Floats:
    return np.asarray(mean / np.maximum(np.sqrt(variance / count), 1e-9))
