"""Single values that stand out from their neighbours, up or down.

A value is compared with the median of up to twenty around it, itself left out, and the distance
divided by the spread of all such distances: the robust score 0.6745 · distance / MAD. Series of
positive numbers are compared by their logarithms, so that ratios count and a skewed series has no
spikes. A spike needs a high score *and* an effect: a distance that matters, whatever the noise.
Neighbours are medians, so one spike does not hide or make another. It must also stand out from
those before and from those after it alone: a loss that falls steeply at first has no spikes there.

The first value has nothing before it and is none. Wrong for fewer than 16 values.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Floats, Int64s

MIN_VALUES = 16
_NUM_NEIGHBOURS = 20
"""Half of them on each side, fewer at the ends."""
_MIN_SCORE = 7.0
"""Normal noise passes 7 once in 10^11 values, the noise of skewed series once in 10^4."""
_MAD_TO_SCORE = 0.6745


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    step: int
    value: float
    usual: float
    """The median of its neighbours."""
    score: float
    """Robust, positive upwards; infinite where nothing else varies."""

    @property
    def change_ratio(self) -> float:
        """Distance over the size of what is usual."""
        return (self.value - self.usual) / abs(self.usual) if self.usual else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    found: tuple[Spike, ...]
    num_values: int
    is_logarithmic: bool
    """Compared by logarithms: all values are positive."""

    @property
    def up(self) -> tuple[Spike, ...]:
        """Those above their neighbours."""
        return tuple(spike for spike in self.found if spike.score > 0)


def find_spikes(step: Int64s, value: Floats, *, min_change_ratio: float) -> Spikes | Unavailable:
    """Spikes of finite values in order of step; `min_change_ratio` is of the neighbours' median."""
    if len(value) < MIN_VALUES:
        return Unavailable(f"spikes take {MIN_VALUES} values, here are {len(value)}")
    is_logarithmic = bool((value > 0).all())
    scaled = np.log(value) if is_logarithmic else value
    center = neighbour_medians(scaled)
    distance = scaled - center
    usual = np.exp(center) if is_logarithmic else center
    mad = float(np.median(np.abs(distance - np.median(distance))))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        score = _MAD_TO_SCORE * distance / mad
        change = np.abs(value - usual) / np.abs(usual)
    is_far = np.abs(score) >= _MIN_SCORE  # 0 / 0 is not
    excess = np.abs(_measure_excess(scaled))
    is_far &= (excess > 0) & (_MAD_TO_SCORE * excess >= _MIN_SCORE * mad)
    rows = np.flatnonzero(is_far & (change >= min_change_ratio)).tolist()
    return Spikes(
        found=tuple(
            Spike(
                step=int(step[row]),
                value=float(value[row]),
                usual=float(usual[row]),
                score=float(score[row]),
            )
            for row in rows
        ),
        num_values=len(value),
        is_logarithmic=is_logarithmic,
    )


def neighbour_medians(values: Floats) -> Floats:
    """For each value the median of those around it, itself left out."""
    others = np.delete(_list_around(values), _NUM_NEIGHBOURS // 2, axis=1)
    return np.asarray(np.nanmedian(others, axis=1), dtype=np.float64)


def _list_around(values: Floats) -> Floats:
    """[value, neighbour]: NaN where there is none."""
    count, half = len(values), _NUM_NEIGHBOURS // 2
    padded = np.full(count + 2 * half, np.nan)
    padded[half : half + count] = values
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)


def _measure_excess(values: Floats) -> Floats:
    """How far each value lies outside of what the median before and the median after it span."""
    around, half = _list_around(values), _NUM_NEIGHBOURS // 2
    before = np.nanmedian(around[1:, :half], axis=1)
    after = np.append(np.nanmedian(around[1:-1, half + 1 :], axis=1), before[-1:])
    nearest = np.clip(values[1:], np.fmin(before, after), np.fmax(before, after))
    return np.append(0.0, values[1:] - nearest)
