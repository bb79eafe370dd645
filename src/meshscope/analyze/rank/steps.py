"""Step times of a rank and of the job.

The job's step k takes the median over ranks of their own durations of step k. Not the maximum:
ranks that wait for each other share a step's wall clock, and a rank that starts late in one step
gains that in the next, so the maximum exceeds the job's pace by the jitter. It is reported beside
the median. Durations are compared, not times, because hosts' clocks differ. The interval of a step
is from its start to the next start on the same rank, gaps included; the job's is the median over
ranks.

Wrong as the job's pace where ranks do not wait for each other in every step: then the slowest rank,
whose steps per second are reported, is slower than these medians.

The first step warms up (allocations, compilation, communicators). It stays in all sums and is left
out of statistics. Steps that a trace window disturbed are left out of statistics too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.chance import is_beyond_chance
from meshscope.numerics.distribution import Distribution, measure_distribution
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.trace_windows import TraceWindow, mark_profiled

_MIN_STEPS_FOR_WARMUP = 4
"""With fewer steps, none is left out by default."""
NO_STEP = "no step finished"
ALL_PROFILED = "all steps after warm-up were profiled"
_TIED = -1
"""Stands for the slowest rank where several share the maximum."""
_MAX_SERIES_BINS = 240
"""Longer runs are binned to this many points."""
_MAX_SLOWEST = 3
"""The most ranks named as slowest more often than by chance."""
_MAX_SPARSENESS = 4
"""Cells per value of a table of steps and ranks; a sparser one is sorted instead."""


def count_warmup(num_steps: int, asked: int | None) -> int:
    """How many first steps statistics leave out: as asked, else 1 if there are more than 3."""
    if asked is not None:
        return min(asked, num_steps)
    return 1 if num_steps >= _MIN_STEPS_FOR_WARMUP else 0


def explain_no_steady_step(num_steps: int) -> str:
    if not num_steps:
        return NO_STEP
    count = "the only step counts" if num_steps == 1 else f"all {num_steps} steps count"
    return f"{count} as warm-up"


class JobSteps:
    """Collects one duration per step and rank, four bytes each where they fit."""

    def __init__(self) -> None:
        empty = np.empty(0, dtype=np.int64)
        self.step: Int64s = empty
        """Step numbers seen on any rank, ascending."""
        self.max_ns: Int64s = empty
        self.max_rank: Int64s = empty
        """The rank that was slowest, or _TIED."""
        self.num_ranks: Int64s = empty
        """Ranks that recorded the step."""
        self._rows: list[tuple[Int64s, npt.NDArray[np.integer]]] = []
        """Step numbers and durations of each rank."""

    def add(self, rank: int, step: Int64s, duration_ns: Int64s) -> None:
        """Adds a rank; ranks come in ascending order."""
        if not len(step):
            return
        if not bool((step[1:] > step[:-1]).all()):  # a repeated number counts once
            step, first = np.unique(step, return_index=True)
            duration_ns = duration_ns[first]
        if not np.array_equal(step, self.step):
            self._widen(step)
        is_whole = len(step) == len(self.step)
        rows = slice(None) if is_whole else np.searchsorted(self.step, step)
        self._raise_rows(rank, rows, duration_ns)
        # One array of numbers for ranks alike, and never a view of a rank's whole table.
        self._rows.append((self.step if is_whole else step.copy(), _narrow(duration_ns)))

    def _raise_rows(
        self, rank: int, rows: npt.NDArray[np.int64] | slice, duration_ns: Int64s
    ) -> None:
        highest = self.max_ns[rows]
        slowest = np.where(duration_ns == highest, _TIED, self.max_rank[rows])
        is_larger = (duration_ns > highest) | (self.num_ranks[rows] == 0)
        self.max_rank[rows] = np.where(is_larger, rank, slowest)
        self.max_ns[rows] = np.where(is_larger, duration_ns, highest)
        self.num_ranks[rows] += 1

    def _widen(self, step: Int64s) -> None:
        """Makes room for steps not seen before."""
        union = np.union1d(self.step, step)
        if len(union) == len(self.step):
            return
        rows = np.searchsorted(union, self.step)
        for name in ("max_ns", "max_rank", "num_ranks"):
            wider = np.zeros(len(union), dtype=np.int64)
            wider[rows] = getattr(self, name)
            setattr(self, name, wider)
        self.step = union

    def median_ns(self) -> Int64s:
        """Per step the median over the ranks that recorded it, halves rounded down."""
        num_values = sum(len(step) for step, _ in self._rows)
        if len(self.step) * len(self._rows) > _MAX_SPARSENESS * num_values:
            return self._median_of_sorted()
        is_narrow = all(values.dtype == np.int32 for _, values in self._rows)
        kind: type[np.integer] = np.int32 if is_narrow else np.int64
        # Steps not recorded are larger than all that are, so they come last in a sorted row.
        table = np.full((len(self._rows), len(self.step)), np.iinfo(kind).max, dtype=kind)
        for row, (step, values) in zip(table, self._rows, strict=True):
            row[np.searchsorted(self.step, step) if len(step) < len(row) else slice(None)] = values
        ordered = np.sort(np.ascontiguousarray(table.T), axis=1)
        at = np.arange(len(self.step))
        low: Int64s = ordered[at, (self.num_ranks - 1) // 2].astype(np.int64)
        high: Int64s = ordered[at, self.num_ranks // 2].astype(np.int64)
        return low + (high - low) // 2

    def _median_of_sorted(self) -> Int64s:
        """The same where ranks share few step numbers: a table would be mostly empty."""
        step = np.concatenate([step for step, _ in self._rows])
        values = np.concatenate([values.astype(np.int64) for _, values in self._rows])
        ordered = values[np.lexsort((values, step))]
        first = np.cumsum(self.num_ranks) - self.num_ranks
        low: Int64s = ordered[first + (self.num_ranks - 1) // 2]
        high: Int64s = ordered[first + self.num_ranks // 2]
        return low + (high - low) // 2


def _narrow(values: Int64s) -> npt.NDArray[np.integer]:
    limit = np.iinfo(np.int32).max  # ns: 2.1 s
    fits = -limit < int(values.min()) and int(values.max()) < limit
    return values.astype(np.int32) if fits else values.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestCount:
    """How often a rank was the slowest, beyond chance."""

    rank: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBin:
    """Some consecutive steps of the job."""

    first_step: int
    num_steps: int
    median_ns: float
    max_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobStepSummary:
    """Step times of the job, as the module's docstring defines them."""

    num_steps: int
    """Steps that at least one rank finished."""
    num_partial: int
    """Steps that some recording rank did not finish."""
    num_warmup: int
    """First steps left out of the statistics."""
    warmup_ns: tuple[int, ...]
    """How long the warm-up steps took, at most the first ten."""
    time: Distribution | Unavailable
    """The median over ranks of each step."""
    interval: Distribution | Unavailable
    """Start to start on one rank, the median over ranks; the last step has none."""
    slowest_rank_time: Distribution | Unavailable
    """The maximum over ranks of each step; longer than the job's pace if ranks wait for others."""
    slowest: tuple[SlowestCount, ...]
    """Ranks slowest more often than by chance after warm-up; at most three."""
    num_compared: int
    """Steps behind `slowest`: after warm-up, finished by every recording rank."""
    step: Int64s
    """Step numbers."""
    duration_ns: Int64s
    """Step times, one per entry of `step`, warm-up included."""
    is_profiled: npt.NDArray[np.bool_]
    """Per entry of `step`: disturbed by a trace window, and left out of the statistics."""

    @property
    def num_profiled(self) -> int:
        return int(np.count_nonzero(self.is_profiled))

    @property
    def series(self) -> tuple[StepBin, ...]:
        """All steps, warm-up included; those of a long run are binned."""
        num_bins = min(_MAX_SERIES_BINS, self.num_steps)
        if not num_bins:
            return ()
        bins = zip(
            np.array_split(self.step, num_bins),
            np.array_split(self.duration_ns, num_bins),
            strict=True,
        )
        return tuple(
            StepBin(
                first_step=int(step[0]),
                num_steps=len(step),
                median_ns=float(np.median(duration_ns)),
                max_ns=int(duration_ns.max()),
            )
            for step, duration_ns in bins
        )

    @property
    def is_steady(self) -> npt.NDArray[np.bool_]:
        """Per entry of `step`: in the statistics."""
        steady = ~self.is_profiled
        steady[: self.num_warmup] = False
        return steady


def summarize_job_steps(
    durations: JobSteps,
    intervals: JobSteps,
    *,
    num_ranks: int,
    asked_warmup: int | None,
    windows: Sequence[TraceWindow] = (),
) -> JobStepSummary:
    num_steps = len(durations.step)
    num_warmup = count_warmup(num_steps, asked_warmup)
    reason = explain_no_steady_step(num_steps)
    step_ns = durations.median_ns()
    is_profiled = mark_profiled(durations.step, windows)
    is_steady = ~is_profiled
    is_steady[:num_warmup] = False
    if num_steps > num_warmup and not is_steady.any():
        reason = ALL_PROFILED
    # Starting the profiler falls between the step before a window and its first one.
    is_apart = ~mark_profiled(intervals.step, windows) & ~mark_profiled(intervals.step + 1, windows)
    is_whole = is_steady & (durations.num_ranks == num_ranks)
    slowest_ranks = durations.max_rank[is_whole]
    return JobStepSummary(
        num_steps=num_steps,
        num_partial=int(np.count_nonzero(durations.num_ranks < num_ranks)),
        num_warmup=num_warmup,
        warmup_ns=tuple(step_ns[: min(num_warmup, 10)].tolist()),
        time=measure_distribution(step_ns[is_steady], reason=reason),
        interval=measure_distribution(
            intervals.median_ns()[num_warmup:][is_apart[num_warmup:]],
            reason=reason if not is_steady.any() else "it takes two steps",
        ),
        slowest_rank_time=measure_distribution(durations.max_ns[is_steady], reason=reason),
        slowest=_count_slowest(slowest_ranks, num_ranks),
        num_compared=len(slowest_ranks),
        step=durations.step,
        duration_ns=step_ns,
        is_profiled=is_profiled,
    )


def _count_slowest(ranks: Int64s, num_ranks: int) -> tuple[SlowestCount, ...]:
    found, counts = np.unique(ranks[ranks != _TIED], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MAX_SLOWEST].tolist()
    ranked = [SlowestCount(rank=int(found[row]), num_steps=int(counts[row])) for row in order]
    return tuple(
        entry
        for entry in ranked
        if is_beyond_chance(
            entry.num_steps, num_steps=len(ranks), num_ranks=num_ranks, num_tests=num_ranks
        )
    )
