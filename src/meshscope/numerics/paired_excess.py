"""How much more a rank works than its peers in the same step, and how far steps repeat each other.

In each step the work of each rank is divided by the median of reference peers, minus one: what
all ranks share (a longer batch, a hotter room) cancels. The effect of a rank is the median over
steps; its interval comes from a bootstrap over blocks of steps.

Steps are not independent: a disturbance lasts. S steps are worth S over the integrated
autocorrelation time (`measure_correlation_time`). The autocorrelation is that of the excess pooled
over ranks, corrected for the bias of short series (Kendall 1954: E r = rho - (1 + 3 rho)/S) and
raised by its own uncertainty.

Wrong where the reference peers are slow themselves, and where a disturbance lasts longer than the
run: it then looks like a slow rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.store.read.arrays import Floats

Indices = npt.NDArray[np.intp]

_CONFIDENCE_RATIO = 0.95
"""Of the interval of an effect."""
NUM_RESAMPLES = 400
"""Of the bootstrap: the interval's ends are then known to about a tenth of its length."""
_MAX_POOLED = 64
"""Ranks whose autocorrelation is pooled; more do not make it more certain than steps allow."""
_CLIP_DEVIATIONS = 4.0
"""Excess beyond so many robust deviations counts as that: one outlier hides all correlation."""
_MARGIN_DEVIATIONS = 1.645
"""By which the autocorrelation is raised: 95 % of estimates are then not too small."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviations per median absolute one, of normal values."""
_SEED = 20240501


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """How much more than its peers a rank works, as a ratio of their work."""

    ratio: float
    """Median over steps of the rank's work over the median of its peers, minus one."""
    low_ratio: float
    """Lower end of the interval of _CONFIDENCE_RATIO."""
    high_ratio: float


def measure_excess(work_ns: Floats, reference: Indices) -> Floats:
    """Excess [step, rank] over the reference ranks' median of the step, as a ratio of it.

    Steps in which the reference did nothing are left out.
    """
    base = take_median(work_ns[:, reference], axis=1)
    kept = base > 0
    if not bool(kept.all()):
        work_ns, base = work_ns[kept], base[kept]
    return np.asarray(work_ns / base[:, None] - 1.0)


def take_median(values: Floats, *, axis: int) -> Floats:
    """The median along an axis; a single column is not sorted."""
    if values.shape[axis] == 1:
        return np.asarray(values.take(0, axis=axis))
    return np.asarray(np.median(values, axis=axis))


def measure_scatter(excess: Floats) -> Floats:
    """[series]: standard deviation over steps of [step, series], with outliers clipped."""
    return np.asarray(_centre(excess).std(axis=0))


def measure_correlation_time(excess: Floats) -> tuple[float, float]:
    """Steps that are worth one independent step, and the same raised by its uncertainty.

    `excess` is [step, series]; all series are taken to have the same autocorrelation.
    """
    centred = _centre(excess[:, _spread_indices(excess.shape[1])])
    num_steps, num_series = centred.shape
    correlation = _pool_autocorrelation(centred)
    if correlation is None or num_steps < 5:
        return 1.0, float(num_steps)
    windowed = _sum_positive_pairs(correlation)
    first = _correct_bias(float(correlation[1]), num_steps)
    margin = _MARGIN_DEVIATIONS / np.sqrt(max(num_steps - 3, 1) * max(num_series - 1, 1))
    plain = max(_time_of_first(first), windowed, 1.0)
    raised = max(_time_of_first(first + float(margin)), windowed, 1.0)
    return min(plain, num_steps), min(raised, num_steps)


def _spread_indices(num_series: int) -> Indices:
    count = min(num_series, _MAX_POOLED)
    return np.unique(np.linspace(0, num_series - 1, count).astype(np.intp))


def _centre(excess: Floats) -> Floats:
    """Around each series' median, with outliers clipped."""
    centred = excess - np.median(excess, axis=0)
    deviation = MAD_TO_DEVIATION * np.median(np.abs(centred), axis=0)
    limit = np.where(deviation > 0, _CLIP_DEVIATIONS * deviation, np.inf)
    clipped = np.clip(centred, -limit, limit)
    return np.asarray(clipped - clipped.mean(axis=0))


def _pool_autocorrelation(centred: Floats) -> Floats | None:
    """Autocorrelation by lag, mean over the series that vary; None where none does."""
    variance = (centred**2).sum(axis=0)
    moving = variance > 0
    if not bool(moving.any()):
        return None
    scaled = centred[:, moving] / np.sqrt(variance[moving])
    num_steps = len(scaled)
    size = 1 << (2 * num_steps - 1).bit_length()
    power = np.abs(np.fft.rfft(scaled, n=size, axis=0)) ** 2
    return np.asarray(np.fft.irfft(power.mean(axis=1), n=size)[:num_steps])


def _sum_positive_pairs(correlation: Floats) -> float:
    """Integrated time by Geyer's initial positive sequence: noise beyond it adds nothing."""
    even = correlation[: len(correlation) // 2 * 2]
    pairs = even[0::2] + even[1::2]
    below = np.flatnonzero(pairs <= 0)
    end = int(below[0]) if len(below) else len(pairs)
    return float(2 * pairs[:end].sum() - 1)


def _correct_bias(first: float, num_steps: int) -> float:
    return (first + 1 / num_steps) / (1 - 3 / num_steps)


def _time_of_first(correlation: float) -> float:
    if correlation >= 1:
        return float("inf")
    return (1 + correlation) / (1 - correlation)


def measure_effect(excess: Floats, *, block_steps: int) -> Effect:
    """Effect and interval of one rank's excess, by resampling blocks of consecutive steps."""
    num_steps = len(excess)
    block_steps = int(min(max(block_steps, round(num_steps ** (1 / 3)), 1), num_steps))
    random = np.random.default_rng(_SEED)
    num_blocks = -(-num_steps // block_steps)
    start = random.integers(0, num_steps, size=(NUM_RESAMPLES, num_blocks))
    index = (start[:, :, None] + np.arange(block_steps)) % num_steps
    drawn = excess[index.reshape(NUM_RESAMPLES, -1)[:, :num_steps]]
    tail = (1 - _CONFIDENCE_RATIO) / 2
    low, high = np.quantile(np.median(drawn, axis=1), (tail, 1 - tail))
    middle = float(np.median(excess))
    return Effect(ratio=middle, low_ratio=float(low), high_ratio=float(high))
