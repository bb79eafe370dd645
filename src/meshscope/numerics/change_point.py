"""When a series changed its level: the segment of steps in which it was high.

Every segment [onset, recovery) is tried: the series is regressed on its own previous value and on
"is inside the segment", and the segment with the largest t of the latter is taken. The previous
value makes the statistic nearly independent of how far steps repeat each other: in simulations one
healthy series in a hundred reaches 4.2 to 5.9 (more with fewer steps) for independent, lognormal
and AR(1) noise up to 0.99. `_chance_of` is a curve above those values. The size must also reach
_MIN_SHIFT_RATIO, and shuffled blocks of the same steps must hardly ever wander as far.

Single spikes are clipped first: a pause is no change of level. The clearest of several segments is
reported. Wrong for slow changes and for changes shorter than _MIN_SEGMENT steps.
"""

import math
from dataclasses import dataclass

import numpy as np

from meshscope.numerics.chance import SIGNIFICANCE_RATIO, binomial_tail
from meshscope.numerics.paired_excess import Indices, measure_correlation_time
from meshscope.store.read.arrays import Bools, Floats

MIN_STEPS = 20
"""The shortest series in which a change is looked for."""
_MIN_SEGMENT = 5
"""Steps a level must last."""
_MIN_SHIFT_RATIO = 0.10
"""Of work, between two levels, from which a change is reported."""
_NUM_SHUFFLES = 199
"""The smallest chance they can state is 0.5 %."""
_GRID_POINTS = 100
"""Segments start and end on this many grid points; then the best one is refined."""
_T_OF_ONE_PERCENT = 5.7
_T_MORE_AT_STEPS = 25.0
"""Over the number of steps: short series reach more by chance."""
_T_PER_DECADE = 0.9
_T_PER_DECADE_AT_STEPS = 25.0
"""Likewise: the tail of t is longer with few steps."""
_SCAN_VALUES = 200_000
"""Segments times series that are looked at together: what a core's cache holds."""
_LEAST_BLOCKS = 16
_LEAST_RATIO = -0.99
_SEED = 20240502


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """A series that was on a high level for some consecutive steps."""

    onset: int
    """Index of the first step on the high level; 0 if the series starts there."""
    recovery: int
    """Index of the first step back on the low level; the number of steps if it never came back."""
    low_ratio: float
    """Median of the steps outside."""
    high_ratio: float
    """Median of the steps inside."""
    p_value: float
    """Not corrected for how many series were looked at."""

    @property
    def shift_ratio(self) -> float:
        return self.high_ratio - self.low_ratio


def measure_step_noise(values: Floats) -> Floats:
    """How far each series [step, series] moves from one step to the next, as a deviation.

    A change of level is one move among many and does not show here.
    """
    moves = np.diff(np.log1p(np.maximum(values, _LEAST_RATIO)), axis=0)
    if not len(moves):
        return np.zeros(moves.shape[1:])
    return np.asarray(1.4826 / math.sqrt(2) * np.median(np.abs(moves), axis=0))


def find_changes(
    values: Floats,
    *,
    num_series: int = 1,
    least_noise: float = 0.0,
    min_shift_ratio: float = _MIN_SHIFT_RATIO,
) -> dict[int, LevelChange]:
    """The high segment of each series [step, series] that has one, by its index.

    `num_series` were tested in all; `least_noise` is the smallest deviation from step to step that
    is believed.
    """
    num_steps = len(values)
    indices = np.flatnonzero(np.isfinite(values).all(axis=0))
    if num_steps < MIN_STEPS or not len(indices):
        return {}
    # Noise of work is a factor rather than a term: its logarithm is nearer to the normal.
    drawn = clip_spikes(np.log1p(np.maximum(values[:, indices], _LEAST_RATIO)))
    points = np.unique(np.linspace(0, num_steps, min(_GRID_POINTS, num_steps) + 1).astype(np.intp))
    onsets, recoveries, t_values = _find_segments(drawn, points, points, least_noise)
    found = {}
    for i in range(len(indices)):
        if _chance_of(float(t_values[i]), num_steps) * num_series < SIGNIFICANCE_RATIO:
            segment = int(onsets[i]), int(recoveries[i]), float(t_values[i])
            if len(points) <= num_steps:
                segment = _refine(drawn[:, i], segment[0], segment[1], least_noise)
            change, inside = _describe(values[:, indices[i]], *segment)
            if change.shift_ratio >= min_shift_ratio and _is_confirmed(drawn[:, i], inside):
                found[int(indices[i])] = change
    return found


def _describe(
    values: Floats, onset: int, recovery: int, t_value: float
) -> tuple[LevelChange, Bools]:
    inside = np.zeros(len(values), dtype=np.bool_)
    inside[onset:recovery] = True
    change = LevelChange(
        onset=onset,
        recovery=recovery,
        low_ratio=float(np.median(values[~inside])),
        high_ratio=float(np.median(values[inside])),
        p_value=_chance_of(t_value, len(values)),
    )
    return change, inside


def chance_of_pauses(values: Floats, others: Floats, change: LevelChange) -> float:
    """The chance that pauses alone make so many long steps in a row, in any segment of a series.

    `values` is the series, `others` [step, series] what is like it: how often a step there is above
    the middle between the two levels is how often noise alone is. Heavy tails count as they are.
    """
    middle = (change.low_ratio + change.high_ratio) / 2
    is_long = others > middle
    rate = (int(np.count_nonzero(is_long)) + 1) / (others.size + 2)
    # Long steps of noise may come in bursts; a base that moves with the change is no burst.
    time, _ = measure_correlation_time(is_long.astype(np.float64))
    inside = values[change.onset : change.recovery]
    num_effective = max(1, int(len(inside) / time))
    count = int(np.count_nonzero(inside > middle)) * num_effective // max(1, len(inside))
    return min(1.0, binomial_tail(count, num_effective, rate) * len(values))


def clip_spikes(values: Floats) -> Floats:
    """Replaces steps of series [step, series] far from their neighbours by these' median."""
    padded = np.concatenate([values[2:0:-1], values, values[-2:-4:-1]])
    middle = _take_middle(*(padded[i : i + len(values)] for i in range(5)))
    distance = np.abs(values - middle)
    limit = 5 * 1.4826 * np.median(distance, axis=0)
    return np.asarray(np.where(distance > limit, middle, values))


def _take_middle(a: Floats, b: Floats, c: Floats, d: Floats, e: Floats) -> Floats:
    """The median of five, by comparisons: far cheaper than sorting each five."""
    low = np.maximum(np.minimum(a, b), np.minimum(c, d))
    high = np.minimum(np.maximum(a, b), np.maximum(c, d))
    # Of the first four the lowest and the highest are out; of the rest the middle is left.
    return np.asarray(np.maximum(np.minimum(low, high), np.minimum(np.maximum(low, high), e)))


def _find_segments(
    values: Floats, starts: Indices, ends: Indices, least_noise: float
) -> tuple[Indices, Indices, Floats]:
    """Of each series [step, series] the segment that is highest above the rest, and its t."""
    num_steps, num_series = values.shape
    start, end = (grid.ravel() for grid in np.meshgrid(starts, ends, indexing="ij"))
    length = end - start
    allowed = (length >= _MIN_SEGMENT) & (num_steps - length >= _MIN_SEGMENT)
    start, end = start[allowed], end[allowed]
    if not len(start):
        nothing = np.zeros(num_series, dtype=np.intp)
        return nothing, nothing, np.zeros(num_series)
    chunk = max(1, _SCAN_VALUES // len(start))
    parts = [
        _scan_segments(values[:, first : first + chunk].T, start, end, least_noise)
        for first in range(0, num_series, chunk)
    ]
    best, t_values = (np.concatenate(part) for part in zip(*parts, strict=True))
    return start[best], end[best], t_values


def _scan_segments(
    values: Floats, start: Indices, end: Indices, least_noise: float
) -> tuple[Indices, Floats]:
    """Index of the best segment of each series [series, step], and its t."""
    now, before = values[:, 1:], values[:, :-1]
    num = now.shape[1]
    now, before = (part - part.mean(axis=1, keepdims=True) for part in (now, before))
    power, cross, lag_power = (
        (first * second).sum(axis=1, keepdims=True)
        for first, second in ((now, now), (now, before), (before, before))
    )
    lag_power = np.where(lag_power > 0, lag_power, np.inf)
    slope = cross / lag_power
    # The first step has no previous value: a segment from it has one step less inside.
    first, last = np.maximum(start, 1) - 1, end - 1
    own = (last - first) * (num - (last - first)) / num
    height = _sum_inside(now - slope * before, first, last)
    free = own - _sum_inside(before / np.sqrt(lag_power), first, last) ** 2
    # A segment that the previous values predict exactly leaves nothing to estimate.
    free = np.sqrt(np.maximum(free, 1e-9 * own))
    # What is left as noise falls with the height, so the highest has the largest t.
    height /= free
    best = height.argmax(axis=1)
    most = np.take_along_axis(height, best[:, None], axis=1)[:, 0]
    power, slope, cross = power[:, 0], slope[:, 0], cross[:, 0]
    least = 1e-12 * np.maximum(power, 1e-300)
    rest = np.maximum(power - slope * cross - most**2, least)
    return best, most / np.maximum(np.sqrt(rest / max(num - 3, 1)), least_noise)


def _sum_inside(series: Floats, first: Indices, last: Indices) -> Floats:
    sums = np.zeros((series.shape[0], series.shape[1] + 1))
    np.cumsum(series, axis=1, out=sums[:, 1:])
    return np.asarray(sums.take(last, axis=1) - sums.take(first, axis=1))


def _refine(
    values: Floats, onset: int, recovery: int, least_noise: float
) -> tuple[int, int, float]:
    """The best segment whose ends are within a grid step of these."""
    width = -(-len(values) // _GRID_POINTS)
    near = np.arange(-width, width + 1)
    starts = np.unique(np.clip(onset + near, 0, len(values))) if onset else np.array([0])
    is_open = recovery == len(values)
    ends = np.array([recovery]) if is_open else np.clip(recovery + near, 0, len(values))
    best = _find_segments(values[:, None], starts, np.unique(ends), least_noise)
    return int(best[0][0]), int(best[1][0]), float(best[2][0])


def _chance_of(t_value: float, num_steps: int) -> float:
    beyond = t_value - _T_OF_ONE_PERCENT - _T_MORE_AT_STEPS / num_steps
    decades = beyond / (_T_PER_DECADE + _T_PER_DECADE_AT_STEPS / num_steps)
    return float(min(1.0, 0.01 * 10.0 ** -min(decades, 200.0)))


def _is_confirmed(values: Floats, inside: Bools) -> bool:
    """Whether shuffled blocks of the same steps hardly ever wander as far."""
    level = np.where(inside, values[inside].mean(), values[~inside].mean())
    time, _ = measure_correlation_time((values - level)[:, None])
    # With fewer blocks than that, too few orders exist for any of them to be rare.
    block = max(min(math.ceil(2 * time), len(values) // _LEAST_BLOCKS), 1)
    blocks = values[: len(values) // block * block].reshape(-1, block)
    random = np.random.default_rng(_SEED)
    order = np.argsort(random.random((_NUM_SHUFFLES, len(blocks))), axis=1)
    shuffled = blocks[order].reshape(_NUM_SHUFFLES, -1)
    sums = np.cumsum(shuffled - shuffled.mean(axis=1, keepdims=True), axis=1)
    # The range of the bridge sees a segment in the middle as well as one to the end.
    wander = np.ptp(sums, axis=1)
    measured = float(np.ptp(np.cumsum(values - values.mean())))
    return (1 + int(np.count_nonzero(wander >= measured))) / (1 + _NUM_SHUFFLES) <= 0.02
