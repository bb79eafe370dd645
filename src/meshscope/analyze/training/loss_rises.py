"""Times in which the loss was above the level it had just before, and what the rate did then.

A rise begins where three values in a row are beyond the median of the values before, by an effect
and by the noise, and ends where three of four are back. A single step is a spike, and a rise that
lasts to the end is a divergence: neither is one here. A learning rate that was raised at once, not
step by step, belongs to a rise that begins within a few steps after it. Losses and rates may be
sampled: then both are known to lie between two samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.training.convergence import Convergence, JobSeries
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.theil_sen import scaled_mads
from meshscope.store.read.arrays import Bools, Floats

_NUM_BEFORE = 8
"""Values whose median is the level before."""
_MIN_RUN = 3
_MIN_RISE_RATIO = 0.2
_MIN_RISE_SPREADS = 6.0
_MIN_RATE_RATIO = 1.3
"""Between two values of the rate: more than a schedule changes it from step to step."""
_MAX_LAG_STEPS = 5
"""After a higher rate, until the loss shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChange:
    """A learning rate that was raised at once."""

    before: float
    after: float
    last_step: int
    """With the rate before."""
    first_step: int
    """In which the rate after was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRise:
    first_step: int
    last_step: int
    """The last one above the level."""
    before: float
    """Median of the values before it."""
    during: float
    """Median of its own."""
    rate: RateChange | None
    """That came just before it."""


def find_rises(found: Convergence) -> tuple[LossRise, ...]:
    loss = found.latest_loss
    if isinstance(loss, Unavailable) or len(loss) < _NUM_BEFORE + 2 * _MIN_RUN:
        return ()
    changes = list_rate_changes(found.learning_rate)
    levels, limits = _find_limits(loss.value)
    runs = np.lib.stride_tricks.sliding_window_view(loss.value[_NUM_BEFORE:], _MIN_RUN)
    is_begin = (runs > limits[: len(runs), None]).all(axis=1)
    rises: list[LossRise] = []
    after = 0
    for at in (np.flatnonzero(is_begin) + _NUM_BEFORE).tolist():
        if at < after:
            continue
        level, limit = float(levels[at - _NUM_BEFORE]), float(limits[at - _NUM_BEFORE])
        end = _find_end(loss.value[at:] > (level + limit) / 2) + at
        if end >= len(loss):  # it lasts
            break
        rises.append(_describe(loss, at, end, level, changes))
        after = end + _NUM_BEFORE
    return tuple(rises)


def _find_limits(values: Floats) -> tuple[Floats, Floats]:
    """For each value from _NUM_BEFORE on: the level before it, and what it must be above.

    A fall over the values before is no noise.
    """
    before = np.lib.stride_tricks.sliding_window_view(values[:-1], _NUM_BEFORE)
    level = np.median(before, axis=1)
    noise = scaled_mads(np.diff(before, axis=1)) / np.sqrt(2.0)
    return level, level + np.maximum(_MIN_RISE_RATIO * np.abs(level), _MIN_RISE_SPREADS * noise)


def _find_end(is_high: Bools) -> int:
    """The first of four values of which three are back; their number if none is."""
    for index in range(_MIN_RUN, len(is_high)):
        following = is_high[index : index + _MIN_RUN + 1]
        if not is_high[index] and np.count_nonzero(~following) >= min(_MIN_RUN, len(following)):
            return index
    return len(is_high)


def _describe(
    loss: JobSeries, start: int, end: int, level: float, changes: Sequence[RateChange]
) -> LossRise:
    first_step, known_step = int(loss.step[start]), int(loss.step[start - 1])
    rates = [
        one
        for one in changes
        if one.last_step < first_step and one.first_step >= known_step - _MAX_LAG_STEPS
    ]
    return LossRise(
        first_step=first_step,
        last_step=int(loss.step[end - 1]),
        before=level,
        during=float(np.median(loss.value[start:end])),
        rate=rates[-1] if rates else None,
    )


def list_rate_changes(rate: JobSeries | Unavailable) -> tuple[RateChange, ...]:
    """Where the rate was raised at once."""
    if isinstance(rate, Unavailable):
        return ()
    return tuple(
        RateChange(
            before=float(rate.value[index]),
            after=float(rate.value[index + 1]),
            last_step=int(rate.step[index]),
            first_step=int(rate.step[index + 1]),
        )
        for index in range(len(rate) - 1)
        if 0 < _MIN_RATE_RATIO * rate.value[index] <= rate.value[index + 1]
        and not _is_warming(rate, index)
    )


def _is_warming(rate: JobSeries, index: int) -> bool:
    """Whether the rate also rises before or after: a schedule, seen in samples."""
    before = index > 0 and rate.value[index - 1] < rate.value[index]
    after = index + 2 < len(rate) and rate.value[index + 2] > rate.value[index + 1]
    return bool(before or after)
