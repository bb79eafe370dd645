"""Offsets, drifts and unevenness of several clocks, fitted to what is known about pairs of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.clock_pairs import FLOOR_NS, Evidence, PairLine, estimate_line
from meshscope.numerics.clock_graph import Edge, find_islands, solve, walk_best
from meshscope.numerics.theil_sen import MEDIAN_ERROR, scaled_mad
from meshscope.store.read.arrays import Floats, Int64s

MAX_WINDOWS = 24
_PER_WINDOW = 50
"""Operations of a pair of clocks per window of time in which unevenness is looked for."""
_MIN_IN_WINDOW = 20
_UNEVEN_SIGMAS = 4.0
_MIN_UNEVEN_NS = 2_000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClockModel:
    """Each clock minus the reference clock, in float ns beyond `base_ns`."""

    base_ns: list[int]
    origin_ns: int
    """The reference moment, on the reference clock."""
    offset: Floats
    slope: Floats
    knots: Floats
    """Times at which unevenness is known, from the reference moment."""
    uneven: Floats
    """Unevenness by clock and knot."""

    def at(self, clock: int, time: Floats) -> Floats:
        """The clock's value at times since the reference moment, on the reference clock."""
        found: Floats = self.offset[clock] + self.slope[clock] * time
        if len(self.knots) and self.uneven[clock].any():
            found = found + np.interp(time, self.knots, self.uneven[clock])
        return found

    def to_reference(self, clock: int, times: Int64s) -> Int64s:
        if not len(times):
            return times
        own = (times - (self.base_ns[clock] + self.origin_ns)).astype(np.float64)
        time = (own - self.offset[clock]) / (1 + self.slope[clock])
        shown = np.rint(self.at(clock, time)).astype(np.int64)
        found: Int64s = times - self.base_ns[clock] - shown
        return found

    def subtract_from(self, evidence: Evidence) -> Evidence:
        low, high = evidence.low, evidence.high
        return evidence.less(
            self.at(high, evidence.time) - self.at(low, evidence.time),
            self.at(high, evidence.calibrated_time) - self.at(low, evidence.calibrated_time),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClockFit:
    """A model and its evidence."""

    model: ClockModel
    evidence: list[Evidence]
    lines: list[PairLine]
    """One per entry of `evidence`: what the model was fitted to, without unevenness."""

    @property
    def edges(self) -> list[Edge]:
        """Pairs of clocks with the uncertainty between them."""
        return [
            Edge(low=item.low, high=item.high, value=line.offset, error=line.error)
            for item, line in zip(self.evidence, self.lines, strict=True)
        ]

    @property
    def gap(self) -> float:
        """The most that bounds contradict the lines, over all pairs."""
        return max((line.gap for line in self.lines), default=0.0)


def start_model(base_ns: list[int], origin_ns: int) -> ClockModel:
    count = len(base_ns)
    return ClockModel(
        base_ns=base_ns,
        origin_ns=origin_ns,
        offset=np.zeros(count),
        slope=np.zeros(count),
        knots=np.empty(0),
        uneven=np.zeros((count, 0)),
    )


def fit_clocks(
    evidence: list[Evidence], islands: Sequence[int], model: ClockModel, half_ns: float
) -> ClockFit:
    """Offsets and drifts; unevenness only where no straight line is possible without it."""
    fit = _fit_lines(evidence, islands, model, half_ns)
    if fit.gap > FLOOR_NS:
        uneven = _find_unevenness(fit, half_ns)
        if uneven is not None:
            knots, values = uneven
            bent = replace(model, knots=knots, uneven=values)
            better = _fit_lines(evidence, islands, bent, half_ns)
            if better.gap < fit.gap / 2:
                return _with_corners(better)
    return fit


def _with_corners(fit: ClockFit) -> ClockFit:
    """Adds to the errors how far straight lines between knots may miss a bend."""
    bends = np.abs(np.diff(fit.model.uneven, n=2, axis=1)).max(axis=1, initial=0.0) / 2
    lines = [
        replace(line, error=line.error + float(bends[item.low] + bends[item.high]))
        for item, line in zip(fit.evidence, fit.lines, strict=True)
    ]
    return replace(fit, lines=lines)


def _fit_lines(
    evidence: list[Evidence], islands: Sequence[int], model: ClockModel, half_ns: float
) -> ClockFit:
    """Lines for pairs of clocks, and from them lines for all clocks."""
    kept, lines = [], []
    for item in evidence:
        line = estimate_line(model.subtract_from(item), half_ns)
        if line is not None:
            kept.append(item)
            lines.append(line)
    count = len(model.base_ns)
    pairs = list(zip(kept, lines, strict=True))
    slopes = [
        Edge(low=item.low, high=item.high, value=line.slope, error=line.slope_error)
        for item, line in pairs
    ]
    offsets = [
        Edge(low=item.low, high=item.high, value=line.offset, error=line.error)
        for item, line in pairs
    ]
    model = replace(
        model,
        slope=model.slope + solve(count, slopes, islands),
        offset=model.offset + solve(count, offsets, islands),
    )
    return ClockFit(model=model, evidence=kept, lines=lines)


def _find_unevenness(fit: ClockFit, half_ns: float) -> tuple[Floats, Floats] | None:
    """The residual of each clock in windows of time; None if it is only noise."""
    counts = [np.count_nonzero(np.isfinite(item.difference)) for item in fit.evidence]
    num_windows = min(MAX_WINDOWS, max(counts, default=0) // _PER_WINDOW)
    if num_windows < 2 or half_ns <= 0:
        return None
    rests = [fit.model.subtract_from(item) for item in fit.evidence]
    cuts = np.linspace(-half_ns, half_ns, num_windows + 1)
    knots = (cuts[1:] + cuts[:-1]) / 2
    found = np.full((len(fit.model.base_ns), num_windows), np.nan)
    is_uneven = np.zeros(len(found), dtype=np.bool_)
    for window in range(num_windows):
        edges = [
            edge
            for item in rests
            if (edge := _window_edge(item, cuts[window], cuts[window + 1])) is not None
        ]
        islands = find_islands(len(found), edges)
        values = solve(len(found), edges, islands)
        _, errors = walk_best(len(found), edges, islands)
        reached = np.array(islands) == 0
        found[reached, window] = values[reached]
        limit = np.maximum(_UNEVEN_SIGMAS * np.array(errors), _MIN_UNEVEN_NS)
        is_uneven |= reached & (np.abs(values) > limit)
    if not is_uneven.any():
        return None
    uneven = np.zeros((len(found), num_windows + 2))
    for clock in np.flatnonzero(is_uneven).tolist():
        known = np.isfinite(found[clock])
        inside = np.interp(knots, knots[known], found[clock][known])
        # The first and the last half window continue their neighbours.
        first, last = 1.5 * inside[0] - 0.5 * inside[1], 1.5 * inside[-1] - 0.5 * inside[-2]
        uneven[clock] = [first, *inside, last]
    return np.array([cuts[0], *knots, cuts[-1]]), uneven


def _window_edge(rest: Evidence, start: float, end: float) -> Edge | None:
    inside = (rest.time >= start) & (rest.time <= end) & np.isfinite(rest.difference)
    values = rest.difference[inside]
    if len(values) < _MIN_IN_WINDOW:
        return None
    error = MEDIAN_ERROR * scaled_mad(values) / np.sqrt(len(values))
    return Edge(
        low=rest.low, high=rest.high, value=float(np.median(values)), error=max(float(error), 1.0)
    )
