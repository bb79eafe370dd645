"""Two attempts side by side: differences in setup and in results.

Times are compared over the steps after warm-up, each run with its own number of steps: the job's
period (start to start, gaps included; the median over ranks of each step) and the step's own time.
Tokens per second and memory peaks are one number on each side and have no interval. The verdict
uses only the period: B is slower if the lower end of the shift's interval lies above the limit; if
the limit lies within the interval, the comparison is inconclusive.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from meshscope.analyze.compare.compare_budget import BudgetChange, compare_budgets
from meshscope.analyze.compare.compare_loss import LossComparison, Tolerance, compare_loss
from meshscope.analyze.compare.compare_provenance import Difference, diff_provenance
from meshscope.analyze.rank.not_in_traces import NOT_SAMPLED
from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.rank.signals import read_scalars
from meshscope.analyze.rank.steps import JobSteps, count_warmup
from meshscope.analyze.rank.throughput import RankRates, measure_rates, sum_tokens
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known, need, or_unavailable
from meshscope.numerics.location_shift import Shift, measure_shift
from meshscope.store.read.arrays import Floats
from meshscope.store.read.columns import int64_column
from meshscope.store.read.run import Attempt
from meshscope.store.read.trace_windows import TraceWindow, disturbing_windows, mark_profiled

if TYPE_CHECKING:
    from meshscope.analyze.budget.model_flops import RankFlops

_ONE_NUMBER = Unavailable("one number on each side has no interval")
_PERIOD = "step period"


class Verdict(StrEnum):
    """Whether B is slower than A by more than the limit."""

    SLOWER = "slower"
    """The whole interval lies beyond the limit."""
    WITHIN = "within the limit"
    """The whole interval lies below it."""
    INCONCLUSIVE = "inconclusive"
    """The limit lies within the interval, or there is no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of both runs."""

    name: str
    unit: str
    """`ns`, `tokens/s`, `steps/s`, `bytes`."""
    a: float | Unavailable
    b: float | Unavailable
    shift: Shift | Unavailable
    """Shift of the series behind it, in `unit`."""
    is_lower_better: bool

    @property
    def change_ratio(self) -> float | Unavailable:
        """The shift, else the difference, over A."""
        if isinstance(self.a, Unavailable) or isinstance(self.b, Unavailable):
            return Unavailable("one side does not have it")
        if self.a == 0:
            return Unavailable("A is 0")
        change = self.b - self.a if isinstance(self.shift, Unavailable) else self.shift.shift
        return _finite(change / abs(self.a))

    @property
    def interval_ratio(self) -> tuple[float, float] | Unavailable:
        """95 % interval of the shift over A. Nothing shrinks by more than itself, however far apart
        the steps are that a bound comes from."""
        if isinstance(self.shift, Unavailable):
            return self.shift
        if isinstance(self.a, Unavailable) or self.a == 0:
            return Unavailable("A is 0, or not known")
        return max(-1.0, self.shift.low / self.a), self.shift.high / self.a


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    period_ns: Floats
    """Per step after warm-up."""
    duration_ns: Floats
    num_steps: int
    num_warmup: int
    steps_per_s: float | Unavailable
    tokens_per_s: float | Unavailable
    peak_rss_bytes: float | Unavailable
    """Of the rank with most."""
    peak_device_bytes: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    metrics: tuple[Metric, ...]
    """The period first."""
    provenance: tuple[Difference, ...] | Unavailable
    loss: LossComparison | Unavailable
    budget: BudgetChange | Unavailable
    num_steps: tuple[int, int]
    """Finished steps, warm-up included."""
    num_warmup: tuple[int, int]

    @property
    def period(self) -> Metric:
        """The metric of the verdict."""
        return self.metrics[0]


def compare_studies(a: Study, b: Study, *, tolerance: Tolerance | None = None) -> Comparison:
    one, other = (read_side(study.attempt, study.warmup_steps) for study in (a, b))
    return Comparison(
        metrics=(
            _compare_series(_PERIOD, one.period_ns, other.period_ns),
            _compare_series("step time", one.duration_ns, other.duration_ns),
            _compare_numbers("throughput", "tokens/s", one.tokens_per_s, other.tokens_per_s),
            _compare_numbers("pace", "steps/s", one.steps_per_s, other.steps_per_s),
            _compare_numbers(
                "peak process memory", "bytes", one.peak_rss_bytes, other.peak_rss_bytes
            ),
            _compare_numbers(
                "peak device memory", "bytes", one.peak_device_bytes, other.peak_device_bytes
            ),
        ),
        provenance=diff_provenance(a.attempt, b.attempt),
        loss=compare_loss(a.attempt, b.attempt, tolerance or Tolerance()),
        budget=_compare_budgets(a, b),
        num_steps=(one.num_steps, other.num_steps),
        num_warmup=(one.num_warmup, other.num_warmup),
    )


def judge(metric: Metric, limit_ratio: float) -> Verdict:
    """Whether `metric` (less is better) rose by more than `limit_ratio`."""
    interval = metric.interval_ratio
    if isinstance(interval, Unavailable):
        return Verdict.INCONCLUSIVE
    if interval[0] > limit_ratio:
        return Verdict.SLOWER
    return Verdict.WITHIN if interval[1] <= limit_ratio else Verdict.INCONCLUSIVE


def read_side(attempt: Attempt, warmup_steps: int | None) -> _Side:
    durations, intervals = JobSteps(), JobSteps()
    tokens: dict[int, RankRates] = {}
    longest, peaks = (0, 0), {"rss_bytes": -1, "peak_allocated_bytes": -1}
    for recording in attempt:
        columns = recording.read("steps")
        steps = order_steps(columns)
        durations.add(recording.rank, steps.step, steps.duration_ns)
        follows = steps.is_followed
        intervals.add(recording.rank, steps.step[:-1][follows], np.diff(steps.start_ns)[follows])
        if len(steps):
            longest = max(longest, (len(steps), int(steps.end_ns[-1] - steps.start_ns[0])))
            logged = read_scalars(recording, frozenset(("tokens",)))
            tokens[recording.rank] = measure_rates(steps, columns, logged)
        memory = recording.read("memory")
        for name, highest in peaks.items():
            peaks[name] = max(highest, int(int64_column(memory, name).max(initial=-1)))
    num_steps = len(durations.step)
    num_warmup = count_warmup(num_steps, attempt.choose_warmup(warmup_steps))
    rate = sum_tokens(tokens, attempt.layout, attempt.world_size)
    windows = disturbing_windows(attempt)
    return _Side(
        period_ns=_after(intervals, num_warmup, windows),
        duration_ns=_after(durations, num_warmup, windows),
        num_steps=num_steps,
        num_warmup=num_warmup,
        steps_per_s=longest[0] * 1e9 / longest[1]
        if longest[1] > 0
        else Unavailable("no step finished"),
        tokens_per_s=rate if isinstance(rate, Unavailable) else _finite(rate.tokens_per_s),
        peak_rss_bytes=_or_reason(peaks["rss_bytes"], NOT_SAMPLED),
        peak_device_bytes=_or_reason(peaks["peak_allocated_bytes"], "no accelerator was in use"),
    )


def _after(steps: JobSteps, num_warmup: int, windows: Sequence[TraceWindow]) -> Floats:
    if not len(steps.step):
        return np.empty(0)
    is_apart = ~mark_profiled(steps.step, windows) & ~mark_profiled(steps.step + 1, windows)
    return steps.median_ns()[num_warmup:][is_apart[num_warmup:]].astype(np.float64)


def _finite(value: float) -> float | Unavailable:
    return value if math.isfinite(value) else Unavailable(f"not a finite number ({value})")


def _or_reason(value: int, reason: str) -> float | Unavailable:
    return float(value) if value >= 0 else Unavailable(reason)


def _compare_series(name: str, a: Floats, b: Floats) -> Metric:
    none = Unavailable("no step after warm-up")
    return Metric(
        name=name,
        unit="ns",
        a=float(np.median(a)) if len(a) else none,
        b=float(np.median(b)) if len(b) else none,
        shift=measure_shift(a, b),
        is_lower_better=True,
    )


def _compare_numbers(
    name: str, unit: str, a: float | Unavailable, b: float | Unavailable
) -> Metric:
    return Metric(
        name=name, unit=unit, a=a, b=b, shift=_ONE_NUMBER, is_lower_better=unit == "bytes"
    )


def _compare_budgets(a: Study, b: Study) -> BudgetChange | Unavailable:
    # Imported here: a budget needs most of the analyses.
    from meshscope.analyze.budget.budget import Budget, measure_budget

    flops = [study.flops for study in (a, b)]
    missing = next((found for found in flops if isinstance(found, Unavailable)), None)
    if missing is not None:
        # Compute must be one line in both, or split in both.
        flops = [missing, missing]

    @or_unavailable
    def measure(study: Study, flops: "Mapping[int, RankFlops] | Unavailable") -> Budget:
        return measure_budget(need(study.timeline), flops, known(study.device_parts))

    return compare_budgets(measure(a, flops[0]), measure(b, flops[1]))
