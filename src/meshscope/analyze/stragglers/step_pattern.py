"""Patterns in the job's step times: drift, slow steps at a fixed interval, single slow steps.

A step's period runs from the end of the previous step to its own end, with the gap before it,
because checkpoints and evaluation happen there; the job's is the median over some ranks spread over
the job. Slow steps are those far above the median of their neighbours, so a drift does not make
steps slow; drift compares medians of blocks, so slow steps do not make a drift.

Slow steps recur if they share a remainder of the step number modulo some interval more often than
by chance, corrected for all intervals tried. Wrong if every second step is slow: the median of the
neighbours is then neither.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.rank.phases import order_steps
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.chance import binomial_tail
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.numerics.rise import rise_chance
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.run import Attempt
from meshscope.store.read.trace_windows import disturbing_windows, mark_profiled

MAX_RANKS = 8
"""Ranks read for the job's periods: ranks wait for each other, so a few show the pace of all."""
_HALF_WINDOW = 12
"""Steps on either side that a step is compared with."""
MIN_SLOW_RATIO = 0.25
"""Least excess of a slow step over its neighbours."""
_MIN_SLOW_DEVIATIONS = 8.0
"""Least excess, in robust standard deviations of the neighbours."""
MIN_STEPS = 24
"""Fewest steps after warm-up that can show a pattern."""
_MIN_RECURRENCES = 3
MAX_CHANCE = 0.01
"""Chance, over all intervals tried, below which slow steps recur."""
_MIN_RECURRING_RATIO = 0.8
"""Least share of slow steps at the interval."""
_MAX_INTERVALS = 3
_NUM_BLOCKS = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPeriods:
    """The job's periods after warm-up."""

    step: Int64s
    period_ns: Floats
    usual_ns: Floats
    """Per step: the median of its neighbours."""
    is_slow: Bools

    def __len__(self) -> int:
        return len(self.step)

    @property
    def excess_ns(self) -> Floats:
        """Excess of slow steps over their neighbours' median; 0 for other steps."""
        return np.where(self.is_slow, self.period_ns - self.usual_ns, 0.0)

    def share_of(self, rows: Bools) -> float:
        """The excess of slow steps among `rows` as a share of all time."""
        return float(self.excess_ns[rows].sum() / self.period_ns.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recurrence:
    """Slow steps at a fixed interval."""

    interval: int
    """In steps."""
    rows: Bools
    """The slow steps among them, by index in `StepPeriods`."""
    num_expected: int
    """Steps at that interval."""
    chance: float
    """That so many are slow by chance, over all intervals tried."""

    @property
    def num_slow(self) -> int:
        return int(np.count_nonzero(self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drift:
    """Steps that become longer over the run."""

    change_ratio: float
    """Last against first quarter, by their medians."""
    p_value: float
    """That noise makes them longer: of two chances the larger, that of Mann and Kendall's test over
    medians of blocks, and that of noise with memory (`numerics.rise`)."""
    first_ns: float
    """Median period in the first quarter."""
    last_ns: float
    """Median period in the last quarter."""
    mean_ns: float
    onset_step: int | Unavailable
    """Where the change happened, if it is a jump rather than a slope."""


def pick_ranks(attempt: Attempt) -> list[int]:
    """A few ranks, spread over the job."""
    ranks = sorted(attempt.ranks)
    return ranks[:: max(1, math.ceil(len(ranks) / MAX_RANKS))]


def read_periods(
    attempt: Attempt, *, num_warmup: int, rank: int | None = None
) -> StepPeriods | Unavailable:
    """The job's periods, or a rank's own."""
    picked = pick_ranks(attempt) if rank is None else [rank]
    series = [_rank_periods(attempt, rank, num_warmup) for rank in picked]
    steps = series[0][0] if series else np.empty(0, dtype=np.int64)
    for step, _ in series[1:]:
        steps = np.intersect1d(steps, step, assume_unique=True)
    steps = steps[~mark_profiled(steps, disturbing_windows(attempt))]
    if len(steps) < MIN_STEPS:
        return Unavailable(f"{len(steps)} steps after warm-up, {MIN_STEPS} are needed")
    table = np.stack([period[np.searchsorted(step, steps)] for step, period in series])
    return find_slow_steps(steps, np.median(table, axis=0))


def _rank_periods(attempt: Attempt, rank: int, num_warmup: int) -> tuple[Int64s, Floats]:
    steps = order_steps(attempt.ranks[rank].read("steps"))
    is_next = np.diff(steps.step) == 1
    rows = np.flatnonzero(is_next) + 1
    rows = rows[rows >= max(1, num_warmup)]
    number, first = np.unique(steps.step[rows], return_index=True)
    return number, (steps.end_ns[rows] - steps.end_ns[rows - 1]).astype(np.float64)[first]


def find_slow_steps(step: Int64s, period_ns: Floats) -> StepPeriods:
    window = 2 * _HALF_WINDOW + 1
    padded = np.pad(period_ns, _HALF_WINDOW, mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(padded, window)
    usual = np.median(views, axis=1)
    deviation = MAD_TO_DEVIATION * np.median(np.abs(views - usual[:, None]), axis=1)
    excess = period_ns - usual
    is_slow = (excess > MIN_SLOW_RATIO * usual) & (excess > _MIN_SLOW_DEVIATIONS * deviation)
    found = StepPeriods(step=step, period_ns=period_ns, usual_ns=usual, is_slow=is_slow)
    return _add_shorter_intervals(found)


def _add_shorter_intervals(periods: StepPeriods) -> StepPeriods:
    """Also counts as slow what comes between slow steps that recur, if it is half as long and clear
    of other steps: of a thing every 8 steps, noise may hide every other one."""
    is_slow, excess = periods.is_slow.copy(), periods.period_ns - periods.usual_ns
    for found in find_recurrences(periods):
        at = int(periods.step[found.rows][0])
        least = float(np.median(excess[found.rows])) / 2
        for interval in range(2, found.interval):
            if found.interval % interval:
                continue
            own = periods.step % interval == at % interval
            more = own & ~found.rows
            hits, count = int(np.count_nonzero(excess[more] >= least)), int(np.count_nonzero(more))
            others = excess[~own] >= least
            rate = (np.count_nonzero(others) + 1) / (len(others) + 1)
            is_usual = hits >= max(2, _MIN_RECURRING_RATIO * count)
            if is_usual and binomial_tail(hits, count, min(0.5, rate)) < MAX_CHANCE:
                is_slow |= more & (excess >= least)
                break
    return replace(periods, is_slow=is_slow)


def find_recurrences(periods: StepPeriods) -> tuple[Recurrence, ...]:
    """Intervals at which slow steps recur, the most certain first; each slow step counts once."""
    left = periods.is_slow.copy()
    found: list[Recurrence] = []
    while len(found) < _MAX_INTERVALS and int(np.count_nonzero(left)) >= _MIN_RECURRENCES:
        best = _find_recurrence(periods, left)
        if best is None:
            break
        found.append(best)
        left = left & ~best.rows
    return tuple(found)


def _find_recurrence(periods: StepPeriods, is_slow: Bools) -> Recurrence | None:
    """The interval least explained by chance, among those between two slow steps."""
    slow = periods.step[is_slow]
    longest = int(periods.step[-1] - periods.step[0]) // _MIN_RECURRENCES
    num_tried = max(1, longest * (longest + 1) // 2)
    rate = min(0.5, len(slow) / len(periods))
    best: Recurrence | None = None
    for interval in np.unique(np.diff(slow)).tolist():
        if not 2 <= interval <= longest:
            continue
        classes = np.bincount(slow % interval, minlength=interval)
        at_interval = periods.step % interval == int(np.argmax(classes))
        rows = at_interval & is_slow
        hits, expected = int(np.count_nonzero(rows)), int(np.count_nonzero(at_interval))
        if hits < _MIN_RECURRENCES or hits < _MIN_RECURRING_RATIO * expected:
            continue
        chance = min(1.0, num_tried * binomial_tail(hits, expected, rate))
        if chance < MAX_CHANCE and (best is None or chance < best.chance):
            best = Recurrence(interval=interval, rows=rows, num_expected=expected, chance=chance)
    return best


def measure_drift(periods: StepPeriods) -> _Drift:
    """Compares medians of blocks of steps from the first to the last."""
    blocks = np.array_split(periods.period_ns, _NUM_BLOCKS)
    level = np.array([np.median(block) for block in blocks])
    index = np.arange(_NUM_BLOCKS)
    above, below = np.triu_indices(_NUM_BLOCKS, 1)
    slopes = (level[below] - level[above]) / (index[below] - index[above])
    slope = float(np.median(slopes))
    quarter = len(periods) // 4
    steady_ns = np.where(periods.is_slow, periods.usual_ns, periods.period_ns)
    first_ns = float(np.median(periods.period_ns[:quarter]))
    last_ns = float(np.median(periods.period_ns[-quarter:]))
    return _Drift(
        change_ratio=last_ns / first_ns - 1 if first_ns > 0 else 0.0,
        p_value=max(_mann_kendall(level), rise_chance(steady_ns)),
        first_ns=first_ns,
        last_ns=last_ns,
        mean_ns=float(periods.period_ns.mean()),
        onset_step=_find_onset(periods, level, slope),
    )


def _mann_kendall(values: Floats) -> float:
    """Two-sided p value of a trend, normal approximation with correction for continuity."""
    n = len(values)
    above, below = np.triu_indices(n, 1)
    score = float(np.sign(values[below] - values[above]).sum())
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return math.erfc(max(0.0, abs(score) - 1) / deviation / math.sqrt(2))


def _find_onset(periods: StepPeriods, level: Floats, slope: float) -> int | Unavailable:
    """The first step of the second level, if two levels fit the blocks better than a line."""
    index = np.arange(len(level))
    line = level - slope * index
    line_error = float(np.abs(line - np.median(line)).sum())
    errors = [
        float(np.abs(part - np.median(part)).sum() + np.abs(rest - np.median(rest)).sum())
        for part, rest in ((level[:cut], level[cut:]) for cut in range(2, len(level) - 1))
    ]
    cut = int(np.argmin(errors)) + 2
    if errors[cut - 2] >= 0.5 * line_error:
        return Unavailable("the change is gradual")
    rows = np.array_split(np.arange(len(periods)), len(level))[cut]
    return int(periods.step[rows[0]])
