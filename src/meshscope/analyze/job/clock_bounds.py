"""Offsets and drifts that no operation contradicts.

Every operation bounds the difference of two clocks at its time from below and above, whatever the
noise. A line between all bounds is a possible offset and drift; all such lines together give the
range of the difference at any time. More and faster operations make it narrower.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.store.read.arrays import Bools, Floats

MAX_DRIFT = 200e-6
"""Quartz clocks keep time to 100 ppm, so two differ by at most twice that."""
_WILD_RATIO = 0.001
_MIN_FOR_WILD = 50
"""From this many bounds, a share of them, and at least one, may be damaged records."""
_NUM_SLOPES = 41
_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PossibleLines:
    """Lines between bounds: for each slope the least and the greatest height at time 0."""

    slope: Floats
    lowest: Floats
    highest: Floats

    @property
    def best(self) -> int:
        """The slope that leaves most room."""
        return int(np.argmax(self.highest - self.lowest))

    @property
    def gap(self) -> float:
        """How far all lines miss the bounds; 0 if one fits."""
        return max(float(np.min(self.lowest - self.highest)), 0.0)

    def range_at(self, time: float) -> tuple[float, float]:
        """The range of values at a time over all lines that fit, or nearly do."""
        room = self.highest - self.lowest
        fits = room >= min(0.0, float(room.max()))
        middle = (self.lowest + self.highest) / 2
        low = np.minimum(self.lowest, middle) + self.slope * time
        high = np.maximum(self.highest, middle) + self.slope * time
        return float(low[fits].min()), float(high[fits].max())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Bounds of a difference, each at its time; infinite for none."""

    time: Floats
    lower: Floats
    upper: Floats
    num_sure: int = 0
    """This many of the last bounds are never wrong."""


def find_lines(bounds: Bounds) -> PossibleLines | None:
    """The lines between the bounds; None unless there are bounds on both sides."""
    if not (np.isfinite(bounds.lower).any() and np.isfinite(bounds.upper).any()):
        return None
    slopes = np.linspace(-MAX_DRIFT, MAX_DRIFT, _NUM_SLOPES)
    lines = _measure(bounds, slopes)
    for _ in range(_NUM_ROUNDS):
        step = slopes[1] - slopes[0]
        fitting = np.flatnonzero(lines.highest >= lines.lowest)
        first, last = (fitting[0], fitting[-1]) if len(fitting) else (lines.best, lines.best)
        low = max(float(slopes[first]) - step, -MAX_DRIFT)
        high = min(float(slopes[last]) + step, MAX_DRIFT)
        slopes = np.linspace(low, high, _NUM_SLOPES)
        lines = _measure(bounds, slopes)
    return lines


def _measure(bounds: Bounds, slopes: Floats) -> PossibleLines:
    return PossibleLines(
        slope=slopes,
        lowest=-_find_least(-bounds.lower, bounds.time, slopes, bounds.num_sure),
        highest=_find_least(bounds.upper, bounds.time, -slopes, bounds.num_sure),
    )


def _find_least(values: Floats, time: Floats, slopes: Floats, num_sure: int) -> Floats:
    """[slope]: the least of value + slope · time without the few that may be wrong."""
    count = len(values) - num_sure
    is_there = np.isfinite(values)
    num_doubtful = int(np.count_nonzero(is_there[:count]))
    num_wild = max(1, int(_WILD_RATIO * num_doubtful)) if num_doubtful >= _MIN_FOR_WILD else 0
    is_doubtful = np.arange(len(values)) < count
    least = np.full(len(slopes), np.inf)
    for kept, place in ((is_there & ~is_doubtful, 0), (is_there & is_doubtful, num_wild)):
        if not kept.any():
            continue
        rows = _choose_near(values[kept], time[kept], slopes, place)
        shifted = values[kept][rows] + slopes[:, None] * time[kept][rows]
        least = np.minimum(least, np.partition(shifted, place, axis=1)[:, place])
    return least


def _choose_near(values: Floats, time: Floats, slopes: Floats, place: int) -> Bools:
    """Those that can be among the `place` + 1 least at any of the slopes.

    Each is a line over slopes, so it is nowhere below the lower of its two ends; the `place` + 1
    that are least at one end are nowhere above the higher of theirs.
    """
    first, last = (values + slope * time for slope in (slopes[0], slopes[-1]))
    some = np.argpartition(first, place)[: place + 1]
    highest = np.maximum(first[some], last[some]).max()
    return np.asarray(np.minimum(first, last) <= highest)
