"""Step times of a rank and of the job.

The job's step k takes as long as the slowest rank took for it: the maximum over ranks of the
rank's own duration of step k. Durations, not moments, because hosts' clocks differ; a rank that
begins late is not seen here. The interval of a step is from its start to the next one's start on
the same rank, gaps included, and the job's is again the maximum over ranks.

The first step warms up (allocations, compilation, communicators). It stays in every account that
has to add up and is left out of statistics, which say so.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.distribution import Distribution, measure_distribution
from meshscope.analyze.phases import Int64s
from meshscope.core.unavailable import Unavailable

MIN_STEPS_FOR_WARMUP = 4
"""With fewer steps, none is left out by default: too little would remain."""
NO_STEP = "no step finished"


def count_warmup(num_steps: int, asked: int | None) -> int:
    """How many first steps statistics leave out: what was asked for, else 1 of more than 3."""
    if asked is not None:
        return min(asked, num_steps)
    return 1 if num_steps >= MIN_STEPS_FOR_WARMUP else 0


def explain_no_steady_step(num_steps: int) -> str:
    """Why there is nothing to take statistics of, once warm-up steps are left out."""
    if not num_steps:
        return NO_STEP
    count = "the only step counts" if num_steps == 1 else f"all {num_steps} steps count"
    return f"{count} as warm-up"


class JobSteps:
    """Collects one duration per step and rank; keeps the largest of each step."""

    def __init__(self) -> None:
        empty = np.empty(0, dtype=np.int64)
        self.step: Int64s = empty
        """Step numbers seen on any rank, ascending."""
        self.max_ns: Int64s = empty
        self.max_rank: Int64s = empty
        """The rank that was slowest; the lowest of several."""
        self.num_ranks: Int64s = empty
        """Ranks that recorded the step."""

    def add(self, rank: int, step: Int64s, duration_ns: Int64s) -> None:
        """Takes in one rank; ranks come in ascending order."""
        if len(step) > 1 and not bool((step[1:] > step[:-1]).all()):
            order = np.argsort(step, kind="stable")
            step, duration_ns = step[order], duration_ns[order]
        if not np.array_equal(step, self.step):
            self._widen(step)
            if len(step) < len(self.step):
                rows = np.searchsorted(self.step, step)
                self._raise_rows(rank, rows, duration_ns)
                return
        is_larger = duration_ns > self.max_ns
        np.maximum(self.max_ns, duration_ns, out=self.max_ns)
        self.max_rank[is_larger] = rank
        self.num_ranks += 1

    def _raise_rows(self, rank: int, rows: npt.NDArray[np.int64], duration_ns: Int64s) -> None:
        is_larger = duration_ns > self.max_ns[rows]
        self.max_ns[rows[is_larger]] = duration_ns[is_larger]
        self.max_rank[rows[is_larger]] = rank
        self.num_ranks[rows] += 1

    def _widen(self, step: Int64s) -> None:
        """Makes room for steps not seen before."""
        union = np.union1d(self.step, step)
        if len(union) == len(self.step):
            return
        rows = np.searchsorted(union, self.step)
        for name, fill in (("max_ns", np.iinfo(np.int64).min), ("max_rank", -1), ("num_ranks", 0)):
            wider = np.full(len(union), fill, dtype=np.int64)
            wider[rows] = getattr(self, name)
            setattr(self, name, wider)
        self.step = union


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowestCount:
    """How often a rank was the slowest of all."""

    rank: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobStepSummary:
    """Step times of the job; see the module's docstring for what a job's step time is."""

    num_steps: int
    """Steps that at least one rank finished."""
    num_partial: int
    """Of these, steps that not every recording rank finished."""
    num_warmup: int
    """First steps left out of the statistics."""
    warmup_ns: tuple[int, ...]
    """How long the warm-up steps took, at most the first ten."""
    time: Distribution | Unavailable
    interval: Distribution | Unavailable
    """Start to start on one rank; the last step has none."""
    slowest: tuple[SlowestCount, ...]
    """Ranks most often slowest, without warm-up; at most three. Empty with one rank."""
    step: Int64s
    """Step numbers."""
    duration_ns: Int64s
    """Step times, one per entry of `step`, warm-up included."""


def summarize_job_steps(
    durations: JobSteps, intervals: JobSteps, *, num_ranks: int, asked_warmup: int | None
) -> JobStepSummary:
    """Statistics over the job's steps."""
    num_steps = len(durations.step)
    num_warmup = count_warmup(num_steps, asked_warmup)
    reason = explain_no_steady_step(num_steps)
    return JobStepSummary(
        num_steps=num_steps,
        num_partial=int(np.count_nonzero(durations.num_ranks < num_ranks)),
        num_warmup=num_warmup,
        warmup_ns=tuple(durations.max_ns[: min(num_warmup, 10)].tolist()),
        time=measure_distribution(durations.max_ns[num_warmup:], reason=reason),
        interval=measure_distribution(
            intervals.max_ns[num_warmup:],
            reason=reason if num_steps == num_warmup else "it takes two steps",
        ),
        slowest=_count_slowest(durations.max_rank[num_warmup:]) if num_ranks > 1 else (),
        step=durations.step,
        duration_ns=durations.max_ns,
    )


def _count_slowest(ranks: Int64s) -> tuple[SlowestCount, ...]:
    found, counts = np.unique(ranks, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:3]
    return tuple(
        SlowestCount(rank=int(found[row]), num_steps=int(counts[row])) for row in order.tolist()
    )
