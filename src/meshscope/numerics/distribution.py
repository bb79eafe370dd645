"""How a set of durations is spread: mean, percentiles, coefficient of variation.

Percentiles interpolate linearly between the two nearest ranks (numpy's default, Hyndman and Fan
type 7). Below about twenty values p95 is close to the maximum and below a hundred p99 is: `count`
stands next to them for that reason.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    count: int
    """How many durations, at least 1."""
    mean_ns: float
    median_ns: float
    p95_ns: float
    p99_ns: float
    min_ns: int
    max_ns: int
    cv_ratio: float | Unavailable
    """Standard deviation (of the population) over the mean."""


def measure_distribution(values_ns: Int64s, *, reason: str) -> Distribution | Unavailable:
    """The distribution of `values_ns`; `reason` says why there is none when it is empty."""
    count = len(values_ns)
    if not count:
        return Unavailable(reason)
    ordered = np.sort(values_ns)
    mean_ns = float(ordered.sum(dtype=np.float64)) / count
    return Distribution(
        count=count,
        mean_ns=mean_ns,
        median_ns=interpolate_percentile(ordered, 0.5),
        p95_ns=interpolate_percentile(ordered, 0.95),
        p99_ns=interpolate_percentile(ordered, 0.99),
        min_ns=int(ordered[0]),
        max_ns=int(ordered[-1]),
        cv_ratio=_variation(ordered, mean_ns),
    )


def interpolate_percentile(ordered: npt.NDArray[np.generic], ratio: float) -> float:
    """The value below which `ratio` (0..1) of the sorted, non-empty `ordered` lies."""
    position = ratio * (len(ordered) - 1)
    below = math.floor(position)
    low = float(ordered[below])
    if below + 1 == len(ordered):
        return low
    high = float(ordered[below + 1])
    return low + (high - low) * (position - below)


def _variation(values_ns: Int64s, mean_ns: float) -> float | Unavailable:
    if len(values_ns) < 2:
        return Unavailable("one value has no variation")
    if mean_ns <= 0:
        return Unavailable("the mean is not positive")
    deviation = values_ns - mean_ns
    return math.sqrt(float(deviation @ deviation) / len(values_ns)) / mean_ns
