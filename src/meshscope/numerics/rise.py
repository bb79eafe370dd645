"""How likely noise alone carries a series up as far as it went, whatever the memory of the noise.

Noise whose values resemble their neighbours wanders, and a test for independent values takes that
for a rise. A series rises if noise with memory does not make one of these, the least likely of
which counts:

- a line: Student's t of its slope, the variance enlarged by the autocorrelation of what is left,
  with as many degrees of freedom as there are independent values. A short series hides its memory,
  so the upper 95 % limit of the autocorrelation is taken;
- a level that was reached at one step and kept (`change_point`);
- a walk: AR(1) noise of any correlation comes no further than a random walk of the same moves from
  one value to the next. No memory has to be estimated, so a smooth curve of any form is seen.

Of 1,000 draws of AR(1) noise of 24, 50 and 200 values a chance below 1 % had, with a correlation up
to 0.8, at most 0.6 %; with 0.95, 2.6, 1.0 and 1.2 %; with 0.99, which is a random walk at these
lengths, 3.7, 3.1 and 2.1 %: ask for an effect as well.
"""

import math

import numpy as np

from meshscope.numerics.chance import student_tail
from meshscope.numerics.change_point import clip_spikes, find_changes
from meshscope.numerics.theil_sen import scaled_mad
from meshscope.numerics.trend import autocorrelation, inflate
from meshscope.store.read.arrays import Floats

_MAX_POINTS = 400
"""Longer series are reduced to medians of this many windows."""
_MAX_AUTOCORRELATION = 0.99
_Z_UPPER_95 = 1.645
_FAR_SPREADS = 4.0
"""Values further from the curve are pauses, not noise."""
_WALK_SHARE = 2 / 3
"""Variance of the difference of the last and the first quarter's means of a random walk, over that
of its whole way."""


def rise_chance(values: Floats) -> float:
    """Of positive values in order of time, of which there are 20 or more."""
    windows = np.array_split(values, min(len(values), _MAX_POINTS))
    level = np.array([np.median(window) for window in windows])
    level = clip_spikes(level[:, None])[:, 0]
    return min(_line_chance(level), _walk_chance(level), _jump_chance(values))


def _line_chance(values: Floats) -> float:
    count = len(values)
    x: Floats = np.arange(count, dtype=np.float64) - (count - 1) / 2
    width = float(x @ x)
    slope, rest = _fit_curve(x, values)
    is_far = np.abs(rest) > _FAR_SPREADS * scaled_mad(rest)
    slope, rest = _fit_curve(x, np.where(is_far, values - rest, values))
    power = float(rest @ rest)
    if power <= 0 or slope <= 0:
        return 0.0 if slope > 0 else 1.0
    rho = autocorrelation(rest, num_fitted=3)
    rho = min(rho + _Z_UPPER_95 * math.sqrt((1 - rho * rho) / count), _MAX_AUTOCORRELATION)
    inflation = inflate(rho, count)
    # The curve takes up three of the independent values, and three times their share of variance.
    variance = power / max(count - 3 * inflation, count / 8)
    freedom = max(int(count / inflation) - 3, 1)
    return student_tail(slope / math.sqrt(variance * inflation / width), freedom)


def _fit_curve(x: Floats, values: Floats) -> tuple[float, Floats]:
    """The slope, and what a parabola leaves: a rise that bends is no memory of the noise."""
    width = float(x @ x)
    slope = float(x @ values) / width
    bend = x * x - width / len(x)
    rest = values - values.mean() - slope * x
    return slope, rest - float(bend @ rest) / float(bend @ bend) * bend


def _walk_chance(values: Floats) -> float:
    quarter = len(values) // 4
    rise = float(values[-quarter:].mean() - values[:quarter].mean())
    move = float(np.sqrt(np.mean(np.diff(values) ** 2)))
    if move <= 0 or rise <= 0:
        return 0.0 if rise > 0 else 1.0
    way = move * math.sqrt(_WALK_SHARE * len(values))
    return student_tail(rise / way, len(values) - 1)


def _jump_chance(values: Floats) -> float:
    change = find_changes((values / np.median(values) - 1)[:, None]).get(0)
    return 1.0 if change is None or change.recovery < len(values) else change.p_value
