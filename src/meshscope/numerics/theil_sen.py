"""Straight lines through points with outliers (Theil and Sen), and robust spreads.

The slope is the median of the slopes of pairs of points, the height the median of what remains:
up to 29 % of the points can be anywhere. With many points only pairs a half and a third of the
points apart are taken: they say most about a slope.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.store.read.arrays import Floats

_MAX_ALL_PAIRS = 400
"""Points up to which every pair is taken."""
_NORMAL_MAD = 1.4826
"""Standard deviation over median absolute deviation, for normal noise."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""
_NUM_SIGMAS = 3.0
_INEFFICIENCY = 1.3
"""Standard error of the median slope over that of least squares, for normal noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """y = intercept + slope · x."""

    intercept: float
    slope: float
    spread: float
    """Of the points about the line: 1.4826 times the median absolute deviation."""
    slope_error: float
    """Three standard errors."""
    num_points: int


def scaled_mad(values: Floats) -> float:
    """Spread about the median, as a standard deviation; `values` is not empty."""
    return float(scaled_mads(values[None, :])[0])


def scaled_mads(values: Floats) -> Floats:
    """[row]: `scaled_mad` of each row."""
    middle = np.median(values, axis=1, keepdims=True)
    return np.asarray(_NORMAL_MAD * np.median(np.abs(values - middle), axis=1))


def pair_slopes(x: Floats, y: Floats) -> Floats:
    """Slopes of pairs of points with different x, in no order."""
    count = len(x)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if count <= _MAX_ALL_PAIRS:
        first, second = np.triu_indices(count, 1)
    else:
        lags = (count // 2, count // 3, 2 * count // 3)
        first = np.concatenate([np.arange(count - lag) for lag in lags])
        second = np.concatenate([np.arange(lag, count) for lag in lags])
    run = x[second] - x[first]
    rise = y[second] - y[first]
    apart = run > 0
    return np.asarray(rise[apart] / run[apart], dtype=np.float64)


def fit_line(x: Floats, y: Floats) -> Line | None:
    """The line through the points; None unless two of them have different x."""
    if len(x) < 2:
        return None
    slopes = pair_slopes(x, y)
    if not len(slopes):
        return None
    slope = float(np.median(slopes))
    rest = y - slope * x
    spread = scaled_mad(rest)
    width = float(np.std(x)) * float(np.sqrt(len(x)))
    return Line(
        intercept=float(np.median(rest)),
        slope=slope,
        spread=spread,
        slope_error=_NUM_SIGMAS * _INEFFICIENCY * spread / width if width > 0 else np.inf,
        num_points=len(x),
    )
