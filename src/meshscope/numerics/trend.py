"""Whether a series rises or falls: Theil–Sen slope, Mann–Kendall test, both for series with memory.

The test counts pairs that go up less pairs that go down. Neighbours in a series of measurements
resemble each other, so the count varies more than for independent values: its variance is
multiplied by a factor from the autocorrelation of the detrended ranks (an AR(1) form of Hamed and
Rao's correction; a negative autocorrelation is ignored). The interval of the slope is Sen's, from
the same variance.

Wrong for fewer than about ten values, whose autocorrelation cannot be known, and for a random walk,
where a third of the correction is missing: ask for an effect as well as for a small p.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.theil_sen import pair_slopes
from meshscope.store.read.arrays import Floats

_MIN_POINTS = 8
"""Fewer values have no trend."""
MAX_POINTS = 400
"""Longer series are reduced to the medians of this many windows: the count is of all pairs."""
_MAX_AUTOCORRELATION = 0.95
_Z_95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A straight line through a series, and how sure its direction is."""

    slope: float
    """Units of y per unit of x."""
    slope_low: float
    """Lower end of the 95 % interval."""
    slope_high: float
    p_rising: float
    """How likely so many rising pairs are where nothing rises (one-sided)."""
    p_falling: float
    num_points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KendallCount:
    """Rising less falling pairs, and the variance of that for independent values."""

    score: float
    variance: float

    def z(self, inflation: float = 1.0) -> float:
        """Standard score, with the correction for continuity."""
        if self.variance <= 0 or self.score == 0:
            return 0.0
        return (self.score - math.copysign(1.0, self.score)) / math.sqrt(self.variance * inflation)


def normal_tail(z: float) -> float:
    """How likely a standard normal number is at least `z`."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def count_pairs(y: Floats) -> KendallCount:
    """Counts all pairs of one series; ties are neither, and lower the variance."""
    count = len(y)
    if count < 2:
        return KendallCount(score=0.0, variance=0.0)
    signs = np.sign(y[None, :] - y[:, None])
    score = float(np.triu(signs, 1).sum())
    _, ties = np.unique(y, return_counts=True)
    tied = float((ties * (ties - 1.0) * (2.0 * ties + 5.0)).sum())
    variance = (count * (count - 1.0) * (2.0 * count + 5.0) - tied) / 18
    return KendallCount(score=score, variance=variance)


def add_counts(counts: Sequence[KendallCount]) -> KendallCount:
    """The count over several series, each compared within itself."""
    return KendallCount(
        score=sum(c.score for c in counts), variance=sum(c.variance for c in counts)
    )


def autocorrelation(values: Floats, *, num_fitted: int = 2) -> float:
    """Of neighbours, 0 where it is negative; corrected for the bias of a short series from which a
    line was taken, or a polynomial with `num_fitted` coefficients.

    It is that of the values' ranks, so that outliers do not hide it.
    """
    count = len(values)
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)
    ranks -= ranks.mean()
    rho = float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    unbiased = (count * rho + num_fitted) / (count - num_fitted - 2)
    return min(max(unbiased, 0.0), _MAX_AUTOCORRELATION)


def measure_inflation(residual: Floats) -> float:
    """By how much the variance of a sum exceeds that of independent values, from lag 1."""
    count = len(residual)
    if count < _MIN_POINTS:
        return 1.0
    rho = autocorrelation(residual)
    # Independent values show this much by accident.
    if rho <= 1.645 / math.sqrt(count):
        return 1.0
    return inflate(rho, count)


def inflate(rho: float, count: int) -> float:
    """The same for an autocorrelation that is known: the variance of a mean of AR(1) values."""
    lags = np.arange(1, count)
    return float(1 + 2 * ((1 - lags / count) * rho**lags).sum())


def measure_trend(x: Floats, y: Floats) -> Trend | Unavailable:
    """The trend of finite `y` over ascending `x`."""
    if len(y) < _MIN_POINTS:
        return Unavailable(f"a trend takes {_MIN_POINTS} values, here are {len(y)}")
    x, y = _condense(x, y)
    slopes = np.sort(pair_slopes(x, y))
    if not len(slopes):
        return Unavailable("all values are of one step")
    slope = float(np.median(slopes))
    inflation = measure_inflation(y - slope * x)
    pairs = count_pairs(y)
    low, high = sen_interval(slopes, pairs.variance * inflation, len(y) * (len(y) - 1) / 2)
    z = pairs.z(inflation)
    return Trend(
        slope=slope,
        slope_low=low,
        slope_high=high,
        p_rising=normal_tail(z),
        p_falling=normal_tail(-z),
        num_points=len(y),
    )


def _condense(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most `MAX_POINTS` points: medians over neighbours where there are more."""
    if len(y) <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(y), MAX_POINTS + 1).astype(np.int64)
    parts = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    condensed_x = np.array([np.mean(x[start:end]) for start, end in parts])
    return condensed_x, np.array([np.median(y[start:end]) for start, end in parts])


def sen_interval(slopes: Floats, variance: float, num_pairs: float) -> tuple[float, float]:
    """95 % interval from the ordered slopes of all `num_pairs` pairs, or of some of them."""
    reach = _Z_95 * math.sqrt(variance) / num_pairs
    low = math.floor(len(slopes) * (1 - reach) / 2) - 1
    high = math.ceil(len(slopes) * (1 + reach) / 2)
    last = len(slopes) - 1
    return float(slopes[min(max(low, 0), last)]), float(slopes[max(min(high, last), 0)])
