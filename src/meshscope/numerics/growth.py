"""Whether something that should stay level grows all the time, grew once, or is still warming up.

The series is cut into four segments of equal length. What leaks rises *within* every segment; a
one-off jump rises between two of them, or within one, and a warm-up rises in the first ones only.
Growth is steady when

- rising pairs within the segments are more than chance allows (Mann–Kendall counts, added up), and
  the slope is larger than autocorrelated residuals make by accident,
- every segment lies above the one before by what that slope explains, and segments rise even
  without the two that rise most,
- the second half rises at least 0.6 times as fast as the first.

The slope is the median over pairs within a segment (Theil–Sen): jumps have no part in it. 8 to 15
samples are one segment, and no single rise may be more than two fifths of the whole.

Long series are reduced to the minima of 200 neighbouring sets, so that memory that comes and goes,
or waits for a garbage collector, does not count. Wrong where the collector's period is longer than
the run: a saw tooth that was seen once is a ramp. Growth in jumps further apart than a quarter of
the run is called jumps, not a leak.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.theil_sen import pair_slopes, scaled_mad
from meshscope.numerics.trend import (
    KendallCount,
    add_counts,
    count_pairs,
    measure_inflation,
    normal_tail,
    sen_interval,
)
from meshscope.store.read.arrays import Floats

_MIN_SAMPLES = 8
"""Fewer samples after warm-up cannot show growth."""
_MIN_SAMPLES_FOR_SEGMENTS = 16
_MAX_SAMPLES = 200
_NUM_SEGMENTS = 4
_SIGNIFICANCE = 0.01
"""How often a level series may be called growing."""
_FLATTENING_RATIO = 0.6
"""Slope of the second half over that of the first, below which growth is coming to an end."""
_MIN_EXPLAINED_RATIO = 0.25
"""Least rise from a segment to the next, over what the slope makes of it."""
_MIN_LEAST_Z = 0.7
"""Standard score of the rising pairs in the two segments that rise least."""
_MAX_SINGLE_RISE_RATIO = 0.4
"""For few samples: the largest rise from one to the next, over the whole."""
_MIN_RISING_RATIO = 0.7
"""For few samples: share of the steps from one to the next that rise."""
_JUMP_SPREADS = 6.0
"""Least height of a jump over the spread of values around it."""
_WARMUP_RATIO = 0.1
_INEFFICIENCY = 1.3
"""Standard error of the median slope over that of least squares, for normal noise."""


class GrowthKind(StrEnum):
    LEVEL = "level"
    STEADY = "steady growth"
    FLATTENING = "growth that flattens"
    JUMP = "one-off jump"


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A change of level from one sample to the next that stays."""

    step: int
    """The first sampled step on the new level."""
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a series grows over steps, without its warm-up."""

    kind: GrowthKind
    per_step: float
    """Median slope within segments, in units of the series."""
    per_step_low: float
    """Lower end of the 95 % interval."""
    per_step_high: float
    p_value: float
    """How likely so much growth within segments is where nothing grows (one-sided)."""
    late_ratio: float | Unavailable
    """Slope of the second half over that of the first."""
    rise: float
    """Slope times the steps sampled."""
    jump: Jump | Unavailable
    """The largest."""
    first_step: int
    last_step: int
    num_samples: int
    """As recorded, before the reduction."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Series:
    """What is judged, and the segments it is cut into."""

    x: Floats
    y: Floats
    segments: Sequence[slice]
    slopes: Floats
    """Of pairs within a segment, ascending."""
    slope: float
    counts: Sequence[KendallCount]

    @property
    def is_short(self) -> bool:
        return len(self.segments) == 1


def measure_growth(step: Floats, value: Floats, *, num_tests: int = 1) -> Growth | Unavailable:
    """How `value`, finite and in order of `step`, grows; `num_tests` series are tested.

    The first tenth of the samples, and at least one, is warm-up.
    """
    num_warmup = max(1, round(len(value) * _WARMUP_RATIO))
    step, value = step[num_warmup:], value[num_warmup:]
    if len(value) < _MIN_SAMPLES:
        return Unavailable(
            f"growth takes {_MIN_SAMPLES} samples after warm-up, here are {len(value)}"
        )
    series = _cut_series(*_lowest_of_neighbours(step, value))
    if series is None:
        return Unavailable("all samples are of one step")
    inflation = measure_inflation(_residual(series))
    pairs = add_counts(series.counts)
    p_value = max(normal_tail(pairs.z()), _slope_chance(series, inflation))
    late_ratio = _late_ratio(series)
    jump = _find_jump(series)
    low, high = sen_interval(series.slopes, pairs.variance * inflation, len(series.slopes))
    is_growing = p_value * num_tests < _SIGNIFICANCE and series.slope > 0
    return Growth(
        kind=_classify(late_ratio, jump, is_spread=is_growing and _is_spread(series)),
        per_step=series.slope,
        per_step_low=low,
        per_step_high=high,
        p_value=p_value,
        late_ratio=late_ratio,
        rise=series.slope * float(series.x[-1] - series.x[0]),
        jump=jump,
        first_step=int(step[0]),
        last_step=int(step[-1]),
        num_samples=len(value),
    )


def _classify(
    late_ratio: float | Unavailable, jump: Jump | Unavailable, *, is_spread: bool
) -> GrowthKind:
    if is_spread and not isinstance(late_ratio, Unavailable) and late_ratio >= _FLATTENING_RATIO:
        return GrowthKind.STEADY
    if not isinstance(jump, Unavailable):
        return GrowthKind.JUMP
    return GrowthKind.FLATTENING if is_spread else GrowthKind.LEVEL


def _lowest_of_neighbours(step: Floats, value: Floats) -> tuple[Floats, Floats]:
    if len(value) <= _MAX_SAMPLES:
        return step, value
    edges = np.linspace(0, len(value), _MAX_SAMPLES + 1).astype(np.int64)[:-1]
    return step[edges], np.asarray(np.minimum.reduceat(value, edges), dtype=np.float64)


def _cut_series(x: Floats, y: Floats) -> _Series | None:
    segments = _cut(len(y), _NUM_SEGMENTS if len(y) >= _MIN_SAMPLES_FOR_SEGMENTS else 1)
    slopes = np.sort(np.concatenate([pair_slopes(x[cut], y[cut]) for cut in segments]))
    if not len(slopes):
        return None
    return _Series(
        x=x,
        y=y,
        segments=segments,
        slopes=slopes,
        slope=float(np.median(slopes)),
        counts=[count_pairs(y[cut]) for cut in segments],
    )


def _cut(count: int, num_parts: int) -> list[slice]:
    edges = np.linspace(0, count, num_parts + 1).astype(np.int64).tolist()
    return [slice(start, end) for start, end in pairwise(edges)]


def _residual(series: _Series) -> Floats:
    """About the line of each segment: a jump between two of them is no memory of the noise."""
    rest = series.y - series.slope * series.x
    return np.concatenate([rest[cut] - np.median(rest[cut]) for cut in series.segments])


def _slope_chance(series: _Series, inflation: float) -> float:
    """How likely noise with this spread and this memory makes so large a slope."""
    residual = _residual(series)
    spread = scaled_mad(residual)  # 0 where most values lie on the line itself: then it is one
    width = sum(float(((series.x[c] - series.x[c].mean()) ** 2).sum()) for c in series.segments)
    if spread == 0 or width == 0:
        return 0.0 if series.slope > 0 else 1.0
    return normal_tail(series.slope / (_INEFFICIENCY * spread) * (width / inflation) ** 0.5)


def _late_ratio(series: _Series) -> float | Unavailable:
    num_parts = len(series.segments)
    parts = _cut(len(series.y), 2) if num_parts == 1 else list(series.segments)
    half = len(parts) // 2
    early, late = (
        float(np.median(np.concatenate([pair_slopes(series.x[c], series.y[c]) for c in side])))
        for side in (parts[:half], parts[half:])
    )
    if early <= 0:
        # Growth that starts late is not coming to an end.
        return float("inf") if late > 0 else Unavailable("neither half grows")
    return late / early


def _is_spread(series: _Series) -> bool:
    """Whether the growth is spread over the run rather than in a few jumps."""
    if series.is_short:
        rises = np.diff(series.y)
        is_even = float(rises.max()) <= _MAX_SINGLE_RISE_RATIO * float(rises.sum())
        return is_even and float(np.mean(rises > 0)) >= _MIN_RISING_RATIO
    least = sorted(series.counts, key=lambda count: count.z())[: _NUM_SEGMENTS // 2]
    return _segments_follow(series) and add_counts(least).z() >= _MIN_LEAST_Z


def _segments_follow(series: _Series) -> bool:
    """Whether every segment lies above the one before, by a share of what the slope says."""
    levels = [float(np.median(series.y[cut])) for cut in series.segments]
    middles = [float(np.mean(series.x[cut])) for cut in series.segments]
    return all(
        later - earlier >= _MIN_EXPLAINED_RATIO * series.slope * (end - start)
        for earlier, later, start, end in zip(
            levels, levels[1:], middles, middles[1:], strict=False
        )
    )


def _find_jump(series: _Series) -> Jump | Unavailable:
    """The one change of level that explains most of what the slope does not."""
    rest = series.y - (0.0 if series.is_short else max(series.slope, 0.0)) * series.x
    count = len(rest)
    before = np.arange(1, count)
    sums = np.cumsum(rest - rest.mean())
    # Between two means, weighed by how well both are known.
    gain = np.abs(sums[:-1]) * np.sqrt(count / (before * (count - before)))
    at = int(np.argmax(gain)) + 1
    levels = float(np.median(rest[:at])), float(np.median(rest[at:]))
    spread = scaled_mad(np.concatenate([rest[:at] - levels[0], rest[at:] - levels[1]]))
    height = levels[1] - levels[0]
    if at < 2 or count - at < 2 or height <= _JUMP_SPREADS * spread:
        return Unavailable("no change of level stands out")
    return Jump(step=int(series.x[at]), height=height)
