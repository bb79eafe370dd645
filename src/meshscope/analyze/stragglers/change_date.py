"""The step at which something changed, where it lies between two windows that were looked at.

Of a long run only windows of steps are read in full. A change that a window shows against the one
before may have come at any step between them. But the length of every step is known (and of steps
that were thinned, that of all of them together), and what slows a job down makes its steps longer:
so the change is dated by the lengths alone, as the place that splits them best into two levels.
All places that split them nearly as well are its bounds.

Says only the two windows where lengths do not change there (what was slow held nobody up), and is
wrong where something else changed the job's steps between the same windows.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.recording import Recording

_NEAR_STEPS = 3
"""How far from the border of a window a change in its first step may seem to be."""
_MARGIN_STEPS = 128
"""Read beyond the border of each window: levels to compare with."""
_MIN_T = 6.0
"""Of the difference of the two levels, from which it is believed."""
_DOUBT = 9.0
"""By how many variances the second-best place may be worse and still be a bound: 3 deviations."""
_MAX_RATIO = 1.5
"""Of a single step's length to the usual: what is longer is a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dated:
    """When something changed."""

    step: int
    """The first step after the change."""
    low_step: int
    """It is not before this one,"""
    high_step: int
    """nor after this one."""

    @property
    def is_between_windows(self) -> bool:
        """Whether it is less certain than a step that was looked at."""
        return self.low_step < self.high_step


def date_change(recording: Recording, timeline: Timeline, index: int) -> Dated:
    """When the change came that shows first in the step with this index of the timeline; dated by
    the steps of one rank."""
    step = int(timeline.steps[index])
    border = _find_border(timeline.steps, index)
    if border is None:
        return Dated(step=step, low_step=step, high_step=step)
    low, step = int(timeline.steps[border - 1]) + 1, int(timeline.steps[border])
    times = order_steps(recording.read_steps([(low - 1 - _MARGIN_STEPS, step + _MARGIN_STEPS)]))
    bounds = Dated(step=step, low_step=low, high_step=step)
    if len(times) < 4:
        return bounds
    count = np.diff(times.step)
    if bool((count < 1).any()):
        return bounds
    mean_ns = _cut_pauses(np.diff(times.end_ns) / count, count)
    return _split(times.step, mean_ns, count, bounds)


def _find_border(steps: Int64s, index: int) -> int | None:
    """The first step of a window, where that is the one with this index or, but for noise, may be;
    None: the change is inside of a window. The first window has nothing before it."""
    near = np.arange(max(index - _NEAR_STEPS, 1), min(index + _NEAR_STEPS + 1, len(steps)))
    near = near[steps[near] - steps[near - 1] > 1] if index else near[:0]
    return int(near[np.abs(near - index).argmin()]) if len(near) else None


def _cut_pauses(mean_ns: Floats, count: Int64s) -> Floats:
    """Single steps that are far longer than usual, at the usual length."""
    usual = float(np.median(mean_ns))
    return np.where((count == 1) & (mean_ns > _MAX_RATIO * usual), usual, mean_ns)


def _split(steps: Int64s, mean_ns: Floats, count: Int64s, bounds: Dated) -> Dated:
    """The best place within the bounds. Piece n is from `steps[n]` (not included) to
    `steps[n + 1]`: `count` steps of `mean_ns` each, most often one."""
    total, weight = np.cumsum(mean_ns * count)[:-1], np.cumsum(count)[:-1].astype(np.float64)
    whole, all_steps = float((mean_ns * count).sum()), float(count.sum())
    gained = (total - weight * whole / all_steps) ** 2 * all_steps / (weight * (all_steps - weight))
    # The first step after a cut behind piece n has the number steps[n + 1] + 1.
    first = steps[1:-1] + 1
    gained = np.where((first >= bounds.low_step) & (first <= bounds.high_step), gained, -1.0)
    best = int(gained.argmax())
    before_ns = total[best] / weight[best]
    after_ns = (whole - total[best]) / (all_steps - weight[best])
    left = np.where(np.arange(len(mean_ns)) <= best, mean_ns - before_ns, mean_ns - after_ns)
    single = left[count == 1]
    noise_ns = MAD_TO_DEVIATION * float(np.median(np.abs(single))) if len(single) else 0.0
    # Steps that repeat each other tell less than as many that do not.
    noise_ns = max(noise_ns * _measure_repetition(single), 1e-9 * whole / all_steps)
    if gained[best] < (_MIN_T * noise_ns) ** 2:
        return bounds
    near = np.flatnonzero(gained >= gained[best] - _DOUBT * noise_ns**2)
    low, high, step = int(first[near[0]]), int(first[near[-1]]), int(first[best])
    for piece in (best, best + 1):
        if count[piece] > 1:  # thinned: it may have come inside of it
            begin, end = int(steps[piece]) + 1, int(steps[piece + 1]) + 1
            share = np.clip((after_ns - mean_ns[piece]) / (after_ns - before_ns), 0.0, 1.0)
            low, high = min(low, begin), max(high, end)
            if 0.0 < share < 1.0:
                step = begin + round(float(share) * int(count[piece]))
    low, high = max(low, bounds.low_step), min(high, bounds.high_step)
    return Dated(step=min(max(step, low), high), low_step=low, high_step=high)


def _measure_repetition(values: Floats) -> float:
    """By how much errors of means are larger than those of independent values."""
    if len(values) < 8 or not float(values.std()):
        return 1.0
    centred = values - values.mean()
    lag = float((centred[1:] * centred[:-1]).sum() / (centred**2).sum())
    lag = min(max(lag, 0.0), 0.95)
    return float(np.sqrt((1 + lag) / (1 - lag)))
