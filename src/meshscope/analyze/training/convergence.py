"""What the logged loss, gradient norm and learning rate do over the run.

A step's loss is the median over ranks (the first 64 that logged one) of each rank's mean over its
microbatches: the job's loss if ranks log that, a robust middle if each logs its own. NaN and Inf
are searched on every rank and left out of everything else.

- Trend: Theil–Sen slope of the last half with a 95 % interval, and its change over the half.
- Plateau: the interval of that change lies within ±`_PLATEAU_RATIO` of the level, although the loss
  fell before by more.
- Divergence: the last values lie above the best level reached before, by an effect and beyond the
  noise, and stay there. A spike that returns is none.
- Gradient norm: the level of the last tenth over the level of the middle of the run.

If the program went on with another model (a fold, the next of a sweep), all of these but NaN and
Inf are of its last one: a new model's loss begins high, and that is no divergence.

Wrong where the loss is not a loss (a reward, a difference of two), where tasks change during a run,
and while a learning rate warms up: few steps say little about where a loss will go.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from meshscope.analyze.rank.signals import (
    BACKWARD_LOSS,
    OWN_LOSS,
    SIGNAL_NAMES,
    ScalarSeries,
    choose_scalars,
    read_scalars,
)
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.numerics.spikes import Spikes, find_spikes
from meshscope.numerics.theil_sen import scaled_mad
from meshscope.numerics.trend import Trend, measure_trend
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt

_LOSS = "loss"
_GRAD_NORM = "grad_norm"
LEARNING_RATE = "lr"
_WANTED = frozenset(name for names in SIGNAL_NAMES.values() for name in names)
_OWN = frozenset((OWN_LOSS, BACKWARD_LOSS))

MAX_POINTS = 80
"""Of a drawn series."""
MAX_RANKS = 64
"""Ranks in the median."""
_ENOUGH_WHOLE = 8
"""Steps with a value of every rank, from which on others are left out of a curve."""
MIN_STEPS = 20
"""Fewest finite values for a divergence or a plateau."""
_MIN_PLATEAU_STEPS = 50
_PLATEAU_RATIO = 0.01
"""Largest change of a plateau over half a run, relative to the level."""
_MIN_FALL_RATIO = 0.05
"""Least fall before a plateau, relative to the first level."""
_DIVERGENCE_RATIO = 0.1
"""Least excess of the last level, relative to the best."""
_DIVERGENCE_SPREADS = 6.0
"""Least excess, in spreads of the noise about a running median."""
_LOSS_SPIKE_RATIO = 0.2
_NORM_SPIKE_RATIO = 1.0
_WINDOW = 9
"""Steps of the running median behind the best level."""


class LossCourse(StrEnum):
    """Where the loss goes."""

    FALLING = "falling"
    PLATEAU = "plateau"
    RISING = "rising"
    DIVERGED = "diverged"
    UNCLEAR = "unclear"
    """The interval of its trend includes up and down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    """One value and its step; for a bin the median and the first step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobSeries:
    """One signal, one value per step: see the module's docstring."""

    name: str
    """The scalar it was read from."""
    step: Int64s
    """Ascending; only steps with a finite value."""
    value: Floats
    low: Floats
    """Per step the lowest of the ranks' values."""
    high: Floats
    num_ranks: int
    """Ranks in the median."""
    bad_steps: Int64s
    """Steps in which any rank logged NaN or Inf."""

    def __len__(self) -> int:
        return len(self.step)

    def since(self, step: int) -> "JobSeries | Unavailable":
        """What it was from this step on."""
        at = int(np.searchsorted(self.step, step))
        if at == len(self):
            return Unavailable(f"no value of {self.name} since another model began in step {step}")
        return replace(
            self, step=self.step[at:], value=self.value[at:], low=self.low[at:], high=self.high[at:]
        )

    @property
    def first(self) -> SeriesPoint:
        return self._at(0)

    @property
    def last(self) -> SeriesPoint:
        return self._at(len(self) - 1)

    @property
    def lowest(self) -> SeriesPoint:
        """The lowest value, at the first step that has it."""
        return self._at(int(np.argmin(self.value)))

    @property
    def highest(self) -> SeriesPoint:
        """The highest value, at the first step that has it."""
        return self._at(int(np.argmax(self.value)))

    @property
    def points(self) -> tuple[SeriesPoint, ...]:
        """All values in order, binned to at most `MAX_POINTS` medians."""
        num_bins = min(MAX_POINTS, len(self))
        steps, values = np.array_split(self.step, num_bins), np.array_split(self.value, num_bins)
        return tuple(
            SeriesPoint(step=int(step[0]), value=float(np.median(value)))
            for step, value in zip(steps, values, strict=True)
        )

    def _at(self, index: int) -> SeriesPoint:
        return SeriesPoint(step=int(self.step[index]), value=float(self.value[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Values of a signal that are NaN or infinite."""

    first_step: int
    last_finite_step: int | None
    """The last step before it with a value of every rank that has one in it; None without any.
    Losses may be sampled: if steps lie between the two, it may have begun in one of them."""
    first_ranks: tuple[int, ...]
    """Ranks with one in that step."""
    first_kind: str
    """`NaN`, `+Inf` or `-Inf`."""
    ranks: tuple[int, ...]
    """Ranks that ever had one."""
    num_values: int
    num_steps: int
    last_step: int
    is_lasting: bool
    """Whether the last logged step has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A loss that left its best level for good."""

    since_step: int
    """The last step at the best level, plus one."""
    best: float
    best_step: int
    last: float
    """Median of the last tenth, at least five values."""
    noise: float
    """Spread about the running median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChange:
    """The level of a signal at the end, compared with its middle."""

    usual: float
    """Median of the second to fifth tenth."""
    last: float
    """Median of the last tenth, at least three values."""
    since_step: int
    """First step from which all values are beyond the limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Convergence:
    """What one attempt's signals do."""

    loss: JobSeries | Unavailable
    grad_norm: JobSeries | Unavailable
    learning_rate: JobSeries | Unavailable
    latest_loss: JobSeries | Unavailable
    """Of the model that was trained last: all of the loss, where there was but one."""
    further: Mapping[str, JobSeries]
    """Of the second optimizer and those after it: `loss 2`, `lr 2`."""
    loss_nonfinite: NonFinite | None
    loss_origin: tuple[int, ...]
    """Ranks whose own part of the job's loss is not finite in the first step in which that is not.
    Empty where ranks did not tell their own, or all of those that did have it: then the weights, or
    what all ranks share, were no numbers any more."""
    norm_nonfinite: NonFinite | None
    course: LossCourse | Unavailable
    trend: Trend | Unavailable
    """Of the last half of the loss."""
    change_ratio: tuple[float, float, float] | Unavailable
    """The trend's change over the last half, relative to the level: low end, middle, high end."""
    divergence: Divergence | None
    loss_spikes: Spikes | Unavailable
    norm_spikes: Spikes | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSignal:
    """What is kept of a signal of every rank."""

    name: str
    last_step: int
    bad_step: Int64s
    """Where the value is not finite."""
    bad_value: Floats


def scan_signals(recording: Recording) -> dict[str, RankSignal]:
    """One rank's signals."""
    scalars = read_scalars(recording, _WANTED)
    return {signal: _scan(name, scalars[name]) for signal, name in choose_scalars(scalars).items()}


def _scan(name: str, series: ScalarSeries) -> RankSignal:
    is_bad = ~np.isfinite(series.value)
    return RankSignal(
        name=name,
        last_step=int(series.step.max()),
        bad_step=series.step[is_bad],
        bad_value=series.value[is_bad],
    )


def analyze_convergence(
    attempt: Attempt, ranks: Sequence[Mapping[str, RankSignal]] | None = None
) -> Convergence:
    """`ranks`: what `scan_signals` found on each, where that is known."""
    # A loss of 1e308 is a number; its differences need not be.
    with np.errstate(over="ignore", invalid="ignore"):
        return _analyze(attempt, [scan_signals(one) for one in attempt] if ranks is None else ranks)


def _analyze(attempt: Attempt, ranks: Sequence[Mapping[str, RankSignal]]) -> Convergence:
    signals = {signal: _RankSignals(signal=signal) for signal in SIGNAL_NAMES}
    for recording, scanned in zip(attempt, ranks, strict=True):
        scalars: dict[str, ScalarSeries] | None = None
        for signal, own in scanned.items():
            found = signals.setdefault(signal, _RankSignals(signal=signal))
            found.add(recording.rank, own)
            if len(found.means) < MAX_RANKS:
                scalars = read_scalars(recording, _WANTED) if scalars is None else scalars
                found.means.append(_mean_per_step(scalars[own.name]))
    job = {signal: ranks.merge() for signal, ranks in signals.items()}
    began = _find_last_model(attempt)
    loss, norm = (_begin_at(job[signal], began) for signal in (_LOSS, _GRAD_NORM))
    trend = _trend_of_last_half(loss)
    change = _change(loss, trend)
    divergence = None if isinstance(loss, Unavailable) else _find_divergence(loss)
    bad = signals[_LOSS].find_nonfinite()
    return Convergence(
        loss=job[_LOSS],
        grad_norm=job[_GRAD_NORM],
        latest_loss=loss,
        learning_rate=job[LEARNING_RATE],
        further={
            signal: series
            for signal, series in sorted(job.items())
            if signal not in SIGNAL_NAMES and not isinstance(series, Unavailable)
        },
        loss_nonfinite=bad,
        loss_origin=() if bad is None else _find_origin(attempt, bad.first_step),
        norm_nonfinite=signals[_GRAD_NORM].find_nonfinite(),
        course=_name_course(loss, change, divergence),
        trend=trend,
        change_ratio=change,
        divergence=divergence,
        loss_spikes=_spikes(loss, _LOSS_SPIKE_RATIO),
        norm_spikes=_spikes(norm, _NORM_SPIKE_RATIO),
    )


def _find_last_model(attempt: Attempt) -> int:
    """The first step of the model that was trained last."""
    began = 0
    for recording in attempt:
        steps: list[int] = []
        for update in recording.updates:
            step = update.get("new_model_step")
            if isinstance(step, int) and step >= 0:
                steps.append(step)
            elif step is not None:  # the model before it went on: it trains beside it
                del steps[-1:]
        began = max([began, *steps])
    return began


def _begin_at(series: JobSeries | Unavailable, step: int) -> JobSeries | Unavailable:
    return series if isinstance(series, Unavailable) or not step else series.since(step)


def _find_origin(attempt: Attempt, step: int) -> tuple[int, ...]:
    """See `Convergence.loss_origin`."""
    is_bad: dict[int, bool] = {}
    for recording in attempt:
        for own in read_scalars(recording, _OWN).values():
            here = own.value[own.step == step]
            if len(here):
                is_bad[recording.rank] = not np.isfinite(here).all()
    found = tuple(sorted(rank for rank, bad in is_bad.items() if bad))
    return found if len(found) < len(is_bad) else ()


@dataclass(slots=True, kw_only=True)
class _RankSignals:
    """One signal of all ranks, reduced rank by rank to save memory."""

    signal: str
    name: str = ""
    means: list[tuple[Int64s, Floats]] = field(default_factory=list)
    """Steps and means of the first ranks."""
    bad: dict[int, tuple[Int64s, Floats]] = field(default_factory=dict)
    """Rank to the steps and values that are not finite."""
    last_step: int = -1

    def add(self, rank: int, own: RankSignal) -> None:
        self.name = self.name or own.name
        self.last_step = max(self.last_step, own.last_step)
        if len(own.bad_step):
            self.bad[rank] = (own.bad_step, own.bad_value)

    def merge(self) -> JobSeries | Unavailable:
        """The median over ranks of each step.

        Ranks that sample their loss may do so in other steps; a step that some of them left out
        would show which ranks they are, not how the loss goes.
        """
        if not self.means:
            return Unavailable(
                f"no rank logged {' or '.join(SIGNAL_NAMES[self.signal.split()[0]])}"
            )
        step = np.concatenate([part[0] for part in self.means])
        value = np.concatenate([part[1] for part in self.means])
        if not len(step):
            return Unavailable(f"no value of {self.name} is finite")
        order = np.lexsort((value, step))
        step, value = step[order], value[order]
        numbers, first, counts = np.unique(step, return_index=True, return_counts=True)
        is_whole = counts == self._count_ranks(numbers)
        if np.count_nonzero(is_whole) >= min(len(numbers) / 2, _ENOUGH_WHOLE):
            numbers, first, counts = numbers[is_whole], first[is_whole], counts[is_whole]
        low, high = value[first + (counts - 1) // 2], value[first + counts // 2]
        bad = [steps for steps, _ in self.bad.values()]
        return JobSeries(
            name=self.name,
            step=numbers,
            value=low / 2 + high / 2,  # not (low + high) / 2, which may be too large for a number
            low=value[first],
            high=value[first + counts - 1],
            num_ranks=len(self.means),
            bad_steps=np.unique(np.concatenate([np.empty(0, np.int64), *bad])),
        )

    def _count_ranks(self, numbers: Int64s) -> Int64s:
        """Per step the ranks that have a value in it, or both before and after it."""
        found = np.zeros(len(numbers), np.int64)
        for steps, _ in self.means:
            if len(steps):
                found += (numbers >= steps[0]) & (numbers <= steps[-1])
        return found

    def find_nonfinite(self) -> NonFinite | None:
        """Where NaN and Inf were logged, over all ranks; None for nowhere."""
        if not self.bad:
            return None
        first_step = min(int(steps.min()) for steps, _ in self.bad.values())
        first = tuple(rank for rank, (steps, _) in sorted(self.bad.items()) if first_step in steps)
        before = [steps[steps < first_step] for steps, _ in self.means]
        known = set.intersection(*(set(one.tolist()) for one in before)) if before else set()
        steps, values = self.bad[first[0]]
        value = float(values[steps == first_step][0])
        everywhere = np.unique(np.concatenate([steps for steps, _ in self.bad.values()]))
        return NonFinite(
            first_step=first_step,
            last_finite_step=max(known, default=None),
            first_ranks=first,
            first_kind="NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf"),
            ranks=tuple(sorted(self.bad)),
            num_values=sum(len(steps) for steps, _ in self.bad.values()),
            num_steps=len(everywhere),
            last_step=int(everywhere[-1]),
            is_lasting=int(everywhere[-1]) == self.last_step,
        )


def _mean_per_step(series: ScalarSeries) -> tuple[Int64s, Floats]:
    """Steps whose values are all finite, and the mean of each."""
    numbers, index = np.unique(series.step, return_inverse=True)
    counts = np.bincount(index, minlength=len(numbers))
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.bincount(index, weights=series.value, minlength=len(numbers)) / counts
    is_finite = np.isfinite(means)
    return numbers[is_finite], means[is_finite]


@or_unavailable
def _trend_of_last_half(loss: JobSeries | Unavailable) -> Trend:
    half = len(need(loss)) // 2
    return need(measure_trend(need(loss).step[half:].astype(np.float64), need(loss).value[half:]))


@or_unavailable
def _change(
    maybe_loss: JobSeries | Unavailable, maybe_trend: Trend | Unavailable
) -> tuple[float, float, float]:
    loss, trend = need(maybe_loss), need(maybe_trend)
    half = len(loss) // 2
    level = abs(float(np.median(loss.value[half:])))
    if level == 0:
        raise Missing("the loss is 0")
    span = float(loss.step[-1] - loss.step[half])
    return (
        trend.slope_low * span / level,
        trend.slope * span / level,
        trend.slope_high * span / level,
    )


@or_unavailable
def _name_course(
    loss: JobSeries | Unavailable,
    change: tuple[float, float, float] | Unavailable,
    divergence: Divergence | None,
) -> LossCourse:
    need(loss)
    if divergence is not None:
        return LossCourse.DIVERGED
    low, _, high = need(change)
    if _is_plateau(need(loss), low, high):
        return LossCourse.PLATEAU
    if high < 0:
        return LossCourse.FALLING
    return LossCourse.RISING if low > 0 else LossCourse.UNCLEAR


def _is_plateau(loss: JobSeries, low: float, high: float) -> bool:
    if len(loss) < _MIN_PLATEAU_STEPS or max(abs(low), abs(high)) > _PLATEAU_RATIO:
        return False
    first = float(np.median(loss.value[: max(3, len(loss) // 20)]))
    level = float(np.median(loss.value[len(loss) // 2 :]))
    return first - level > _MIN_FALL_RATIO * abs(first)


def _find_divergence(loss: JobSeries) -> Divergence | None:
    """Whether the loss ends above its best level, beyond noise and for good."""
    count = len(loss)
    if count < MIN_STEPS:
        return None
    smooth = _running_median(loss.value)
    noise = scaled_mad(loss.value - smooth)
    num_last = max(5, count // 10)
    last = float(np.median(loss.value[-num_last:]))
    at = int(np.argmin(smooth[: count - num_last // 2]))
    best = float(smooth[at])
    limit = best + max(_DIVERGENCE_RATIO * abs(best), _DIVERGENCE_SPREADS * noise)
    # All of the last values: one back at the level means a spike, not a course.
    if not last > limit or float(loss.value[-num_last:].min()) <= best + (limit - best) / 2:
        return None
    near = np.flatnonzero(loss.value <= best + (limit - best) / 2)
    since = int(near[-1]) + 1 if len(near) else 0
    return Divergence(
        since_step=int(loss.step[min(since, count - 1)]),
        best=best,
        best_step=int(loss.step[at]),
        last=last,
        noise=noise,
    )


def _running_median(values: Floats) -> Floats:
    half = _WINDOW // 2
    padded = np.pad(values, half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)
    return np.asarray(np.median(windows, axis=1), dtype=np.float64)


def find_level_change(series: JobSeries, *, factor: float) -> LevelChange | None:
    """Whether a positive signal ends `factor` times above (or, below 1, under) its middle."""
    count = len(series)
    if count < MIN_STEPS:
        return None
    usual = float(np.median(series.value[count // 10 : max(count // 2, count // 10 + 3)]))
    tail = series.value[-max(3, count // 10) :]
    limit = usual * factor
    is_beyond = series.value >= limit if factor > 1 else series.value <= limit
    if usual <= 0 or not bool(is_beyond[-len(tail) :].all()):
        return None
    inside = np.flatnonzero(~is_beyond)
    since = int(inside[-1]) + 1 if len(inside) else 0
    return LevelChange(usual=usual, last=float(np.median(tail)), since_step=int(series.step[since]))


@or_unavailable
def _spikes(series: JobSeries | Unavailable, min_change_ratio: float) -> Spikes:
    found = need(series)
    return need(find_spikes(found.step, found.value, min_change_ratio=min_change_ratio))
