"""How far apart two clocks are and how fast they part, from the evidence about them.

Two methods, of which the more certain one counts. *Ends*: the median difference between ends, with
a drift by Theil and Sen. Noise is one-sided on both clocks, and if one notices ends later than the
other the median is off by up to the spread; so the spread, not its standard error, is the
uncertainty, plus the difference between fast and slower operations. *Bounds* (`clock_bounds`): what
no operation contradicts. They assume nothing about noise and are better on a busy machine; an
estimate from ends outside the bounds is not used, one inside is no less certain than they are.

Wrong if one host notices the end of every operation later than another by a constant time that
bounds cannot detect: about the time of the fastest operation.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshscope.analyze.job.clock_bounds import MAX_DRIFT, Bounds, PossibleLines, find_lines
from meshscope.analyze.job.clock_samples import NONE_NS, PairSamples
from meshscope.numerics.theil_sen import MEDIAN_ERROR, fit_line, scaled_mad
from meshscope.store.read.arrays import Floats, Int64s

_MIN_DIFFERENCES = 8
"""With fewer, the spread is not known well enough."""
_MIN_FEW = 3
"""With so few, as in a trace, twice their range is the uncertainty; with fewer, only bounds
count."""
_MIN_FOR_QUICK = 32
_QUICK_SHARES = (1.0, 0.5, 0.2, 0.05)
"""Shares of the fastest operations that are tried."""
_NUM_SPREADS = 1.5
"""With exponential noise on one side only, the median is off by 0.97 spreads."""
FLOOR_NS = 1_000.0
"""The least uncertainty."""
_NUM_WINDOWS = 64
_PER_WINDOW = 32
"""Operations whose bounds are used: the fastest of each window of time."""
_MIN_DRIFT_ERROR = 1e-10


class ClockMethod(StrEnum):
    """What the offset of a clock is based on."""

    REFERENCE = "reference"
    """The clock the others are compared with."""
    OPERATIONS = "operations"
    """Ends of symmetric operations."""
    BOUNDS = "bounds"
    """Nothing ends or arrives before it was started."""
    CALIBRATION = "calibration"
    """The recorder measured it."""
    WALL_CLOCK = "wall-clock"
    """Wall clocks of the hosts: how well these agree is not known."""
    NONE = "none"
    """Nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Evidence about two clocks in float ns, from a common origin; infinite for none."""

    low: int
    high: int
    time: Floats
    difference: Floats
    """NaN where there is none."""
    lower: Floats
    upper: Floats
    duration: Floats
    calibrated_time: Floats
    calibrated: Floats
    calibrated_error: Floats

    @property
    def is_known(self) -> bool:
        return bool(
            len(self.calibrated)
            or np.isfinite(self.difference).any()
            or (np.isfinite(self.lower).any() and np.isfinite(self.upper).any())
        )

    @property
    def num_operations(self) -> int:
        """Operations and messages it comes from."""
        return len(self.time)

    def less(self, model: Floats, calibrated_model: Floats) -> "Evidence":
        """The evidence minus a model's differences at `time` and `calibrated_time`."""
        return replace(
            self,
            difference=self.difference - model,
            lower=self.lower - model,
            upper=self.upper - model,
            calibrated=self.calibrated - calibrated_model,
        )


def make_evidence(pair: PairSamples, base_ns: list[int], origin_ns: int) -> Evidence:
    """Evidence in floats: clocks less `base_ns`, times less `origin_ns`."""
    base = base_ns[pair.high] - base_ns[pair.low]
    start = base_ns[pair.low] + origin_ns
    return Evidence(
        low=pair.low,
        high=pair.high,
        time=(pair.time_ns - start).astype(np.float64),
        difference=_to_floats(pair.difference_ns, base, np.nan),
        lower=_to_floats(pair.lower_ns, base, -np.inf),
        upper=_to_floats(pair.upper_ns, base, np.inf),
        duration=_to_floats(pair.duration_ns, 0, np.inf),
        calibrated_time=(pair.calibrated_time_ns - start).astype(np.float64),
        calibrated=(pair.calibrated_ns - base).astype(np.float64),
        calibrated_error=pair.calibrated_error_ns.astype(np.float64),
    )


def _to_floats(values: Int64s, base: int, missing: float) -> Floats:
    is_there = np.abs(values) < NONE_NS
    return np.where(is_there, (values - base).astype(np.float64), missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLine:
    """The difference of two clocks over time: offset + slope · time."""

    offset: float
    slope: float
    slope_error: float
    error: float
    """How far the line may be off at any recorded time."""
    method: ClockMethod
    gap: float
    """By how much bounds contradict each other, or any line at all."""


def estimate_line(evidence: Evidence, half_ns: float) -> PairLine | None:
    """The line from -half_ns to half_ns; None without evidence."""
    lines = find_lines(_choose_bounds(evidence))
    by_ends = _from_ends(evidence, half_ns)
    if lines is None:
        return by_ends
    gap = lines.gap
    by_bounds = _from_bounds(evidence, lines, half_ns)
    if by_ends is None:
        return by_bounds
    if gap:  # bounds that contradict each other exclude nothing
        return replace(min(by_ends, by_bounds, key=lambda line: line.error), gap=gap)
    reach = 0.0
    for time in (-half_ns, half_ns):
        low, high = lines.range_at(time)
        value = by_ends.offset + by_ends.slope * time
        if not low <= value <= high:
            return by_bounds
        reach = max(reach, value - low, high - value)
    by_ends = replace(by_ends, error=max(min(by_ends.error, reach), FLOOR_NS))
    return min(by_ends, by_bounds, key=lambda line: line.error)


def _choose_bounds(evidence: Evidence) -> Bounds:
    """Bounds of the fastest operations of every window of time, and all calibrations."""
    order = np.argsort(evidence.time, kind="stable")
    kept = []
    for window in np.array_split(order, _NUM_WINDOWS):
        if len(window) > _PER_WINDOW:
            quickest = np.argsort(evidence.duration[window], kind="stable")[:_PER_WINDOW]
            window = window[quickest]
        kept.append(window)
    rows = np.concatenate(kept)
    return Bounds(
        time=np.concatenate([evidence.time[rows], evidence.calibrated_time]),
        lower=np.concatenate(
            [evidence.lower[rows], evidence.calibrated - evidence.calibrated_error]
        ),
        upper=np.concatenate(
            [evidence.upper[rows], evidence.calibrated + evidence.calibrated_error]
        ),
        num_sure=len(evidence.calibrated),
    )


def _from_bounds(evidence: Evidence, lines: PossibleLines, half_ns: float) -> PairLine:
    best = lines.best
    slope = float(lines.slope[best])
    offset = float(lines.lowest[best] + lines.highest[best]) / 2
    error = lines.gap / 2
    for time in (-half_ns, half_ns):
        low, high = lines.range_at(time)
        value = offset + slope * time
        error = max(error, value - low, high - value)
    is_calibrated = len(evidence.calibrated) > 0
    return PairLine(
        offset=offset,
        slope=slope,
        slope_error=max(float(np.ptp(lines.slope)) / 2, _MIN_DRIFT_ERROR),
        error=max(error, FLOOR_NS),
        method=ClockMethod.CALIBRATION if is_calibrated else ClockMethod.BOUNDS,
        gap=lines.gap,
    )


def _from_ends(evidence: Evidence, half_ns: float) -> PairLine | None:
    timed = np.isfinite(evidence.difference)
    time, values = evidence.time[timed], evidence.difference[timed]
    if len(values) < _MIN_DIFFERENCES:
        return _from_few_ends(time, values, half_ns)
    quickest = np.argsort(evidence.duration[timed], kind="stable")
    found: list[PairLine] = []
    for share in _QUICK_SHARES:
        count = int(share * len(values))
        if not found or count >= _MIN_FOR_QUICK:
            kept, rest = quickest[:count], quickest[count : 2 * count]
            found.append(_fit_ends(time, values, kept, rest, half_ns))
    return min(found, key=lambda line: line.error)


def _from_few_ends(time: Floats, values: Floats, half_ns: float) -> PairLine | None:
    """The middle of a few differences, with no drift."""
    if len(values) < _MIN_FEW:
        return None
    reach = half_ns + abs(float(np.mean(time)))
    return PairLine(
        offset=float(np.median(values)),
        slope=0.0,
        slope_error=MAX_DRIFT,
        error=max(2 * float(np.ptp(values)) + MAX_DRIFT * reach, FLOOR_NS),
        method=ClockMethod.OPERATIONS,
        gap=0.0,
    )


def _fit_ends(time: Floats, values: Floats, kept: Int64s, rest: Int64s, half_ns: float) -> PairLine:
    """The line through some differences; its error includes how far slower ones miss it."""
    slope, slope_error, center = 0.0, MAX_DRIFT, float(np.mean(time[kept]))
    line = fit_line(time[kept], values[kept])
    if line is not None and line.slope_error < MAX_DRIFT:
        slope, slope_error = line.slope, max(line.slope_error, _MIN_DRIFT_ERROR)
    level = values - slope * time
    offset, spread = float(np.median(level[kept])), scaled_mad(level[kept])
    systematic = abs(float(np.median(level[rest])) - offset) if len(rest) else 0.0
    error = _NUM_SPREADS * spread + 3 * MEDIAN_ERROR * spread / float(np.sqrt(len(kept)))
    return PairLine(
        offset=offset,
        slope=slope,
        slope_error=slope_error,
        error=max(error + systematic + slope_error * (half_ns + abs(center)), FLOOR_NS),
        method=ClockMethod.OPERATIONS,
        gap=0.0,
    )
