"""All that analyses of a job take from one rank alone, in one pass over its tables.

Each table of a rank is read once here, however many analyses use it, and only numbers stay. What
fails in one part is raised where that part is asked for, and costs nothing else.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from meshscope.analyze.job.operations import find_unwatched
from meshscope.analyze.rank.rank_summary import RankResult, summarize_rank
from meshscope.analyze.training.convergence import RankSignal, scan_signals
from meshscope.analyze.training.logged import LoggedScalar, describe_logged
from meshscope.analyze.training.skipped_updates import SkippedUpdates, count_rank_skipped
from meshscope.analyze.training.totals import RankSums, sum_rank
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.recording import Recording
from meshscope.store.read.trace_windows import TraceWindow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """What a function gave, or what it raised."""

    value: T | None
    error: Exception | None = None

    def take(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # there is one without an error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankParts:
    """Of one rank."""

    sums: Part[RankSums]
    skipped: Part[SkippedUpdates | None]
    signals: Part[dict[str, RankSignal]]
    logged: Part[tuple[LoggedScalar, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPass:
    """One rank, until it is merged into the job."""

    result: RankResult
    unwatched: Int64s
    """Steps whose communication was not recorded, or is no longer there."""
    parts: RankParts


def pass_rank(
    recording: Recording,
    layout: Layout | Unavailable,
    *,
    windows: Sequence[TraceWindow],
    warmup_steps: int | None,
) -> RankPass:
    """Without `warmup_steps`, 1 step is warm-up if more than 3 finished."""
    one = recording if recording.kept is not None else replace(recording, kept={})
    result = summarize_rank(one, layout, windows=windows, warmup_steps=warmup_steps)
    return RankPass(
        result=result,
        unwatched=find_unwatched([one]),
        parts=RankParts(
            sums=_try(sum_rank, one),
            skipped=_try(count_rank_skipped, one),
            signals=_try(scan_signals, one),
            logged=_try(describe_logged, one),
        ),
    )


def _try(work: Callable[[Recording], T], recording: Recording) -> Part[T]:
    try:
        return Part(work(recording))
    except Exception as error:  # noqa: BLE001 - raised again by `Part.take`
        return Part(None, error)


def join_unwatched(found: Iterable[Int64s]) -> Int64s:
    """Those of all ranks, ascending."""
    some = [one for one in found if len(one)]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *some]))
