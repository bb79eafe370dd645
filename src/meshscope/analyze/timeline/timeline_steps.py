"""The steps of a timeline: finished on every rank, after warm-up, and not too many.

A step's period runs from the end of the step before it on the same rank to its own end: a step
owns the gap before it, because its data is fetched there. The first step a rank recorded has no
gap. Steps that an exception left, a trace window disturbed, or whose communication some rank did
not record, are not kept; the period after an aborted step begins at its end.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.operations import MAX_SPAN_NS, MAX_TIME_NS
from meshscope.analyze.rank.phases import StepTimes, order_steps
from meshscope.analyze.rank.step_choice import StepChoice, choose_windows
from meshscope.analyze.rank.steps import NO_STEP, count_warmup, explain_no_steady_step
from meshscope.analyze.timeline.whole_steps import choose_whole_steps, is_thinned
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import Columns, int64_column, select_rows
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.read.table_window import TimeWindows
from meshscope.store.read.trace_windows import disturbing_windows, mark_profiled
from meshscope.store.retention_tables import DETAIL_TABLES
from meshscope.store.schema import StepFlag

_COUNTED_TABLES = ("phases", "spans", "device_spans", "collectives", "waits", "actions")
"""What a timeline reads besides steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """Times of steps on every rank, each on its host's clock."""

    steps: Int64s
    """Step numbers, ascending."""
    before_ns: Int64s
    """[rank, step]: the end of the rank's previous step, else the step's own start."""
    start_ns: Int64s
    end_ns: Int64s

    def select(self, rows: Bools) -> "StepTable":
        return StepTable(
            steps=self.steps[rows],
            before_ns=self.before_ns[:, rows],
            start_ns=self.start_ns[:, rows],
            end_ns=self.end_ns[:, rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptSteps:
    """The steps of a timeline, and the recordings cut down to them."""

    attempt: Attempt
    """Its ranks read only what belongs to the kept steps."""
    ranks: tuple[int, ...]
    """Ranks that finished a step."""
    table: StepTable
    finished: StepTable
    """With steps that are not kept although every rank finished them."""
    is_profiled: Bools
    """Per finished step: a trace window disturbed it."""
    by_rank: tuple[StepTimes, ...]
    """Per rank: all steps that were read, in order of time, on its own clock."""
    num_left_out: int
    num_profiled: int
    """Steps left out because a trace window disturbed them."""
    unwatched: Int64s
    """Steps left out because some rank did not record their communication."""


def keep_steps(
    attempt: Attempt, *, warmup_steps: int | None, choice: StepChoice
) -> KeptSteps | Unavailable:
    recordings = [recording for recording in attempt if recording.count_rows("steps")]
    if not recordings:
        return Unavailable(NO_STEP)
    warmup_steps = attempt.choose_warmup(warmup_steps)
    num_kept = _count_kept(recordings, choice)
    if num_kept is None and not is_thinned(recordings):
        return _keep_whole(attempt, recordings, warmup_steps)
    return _keep_windows(attempt, recordings, warmup_steps, num_kept, choice)


def keep_range(attempt: Attempt, first: int, last: int) -> KeptSteps | Unavailable:
    """All steps from `first` to `last` that every rank finished, of recordings that the caller has
    narrowed to them and to the step before."""
    recordings = [recording for recording in attempt if recording.count_rows("steps")]
    times = [
        _read_step_times(recording.read_steps([(first - 1, last)])) for recording in recordings
    ]
    if not times:
        return Unavailable(NO_STEP)
    numbers = np.unique(np.concatenate([own.step for own, _, _ in times]))
    return _make(attempt, recordings, times, numbers[numbers >= first], num_steady=0)


def _count_kept(recordings: list[Recording], choice: StepChoice) -> int | None:
    """How many steps may be kept; None for all."""
    num_steps = max(recording.count_rows("steps") for recording in recordings)
    num_rank_steps = num_steps * len(recordings)
    num_rows = _count_rows(recordings, _COUNTED_TABLES)
    if num_rank_steps <= choice.max_rank_steps and num_rows <= choice.max_rows:
        return None
    by_steps = choice.max_rank_steps // len(recordings)
    by_rows = choice.max_rows * num_steps // max(num_rows, 1)
    return max(1, min(by_steps, by_rows))


def _count_rows(recordings: list[Recording], tables: tuple[str, ...]) -> int:
    return sum(recording.count_rows(table) for recording in recordings for table in tables)


def _keep_whole(
    attempt: Attempt, recordings: list[Recording], warmup_steps: int | None
) -> KeptSteps | Unavailable:
    times = [_read_step_times(recording.read("steps")) for recording in recordings]
    numbers = np.unique(np.concatenate([own.step for own, _, _ in times]))
    num_warmup = count_warmup(len(numbers), warmup_steps)
    steady = numbers[num_warmup:]
    if not len(steady):
        return Unavailable(explain_no_steady_step(len(numbers)))
    return _make(attempt, recordings, times, steady, num_steady=0)


def _keep_windows(
    attempt: Attempt,
    recordings: list[Recording],
    warmup_steps: int | None,
    num_kept: int | None,
    choice: StepChoice,
) -> KeptSteps | Unavailable:
    """Reads some windows of steps; assumes that step numbers grow with time."""
    extents = [extent for r in recordings if (extent := r.find_step_extent()) is not None]
    if not extents:
        return Unavailable(NO_STEP)
    first = max(low for low, _ in extents)
    last = min(high for _, high in extents)
    lowest = min(low for low, _ in extents)
    num_warmup = count_warmup(last - lowest + 1, warmup_steps)
    first = max(first, lowest + num_warmup)
    if is_thinned(recordings):
        num_rows = _count_rows(recordings, DETAIL_TABLES)
        windows = choose_whole_steps(recordings, first, last, num_rows, choice)
    else:
        num_kept = num_kept or last - first + 1
        windows = choose_windows(first, last, num_kept, choice.count_windows(num_kept))
    if not windows:
        return Unavailable("no step was finished by every rank")
    # One step more before each window: where it ends, the first period begins.
    wanted = [(start - 1, end) for start, end in windows]
    times = [_read_step_times(recording.read_steps(wanted)) for recording in recordings]
    numbers = np.concatenate([np.arange(start, end + 1) for start, end in windows])
    narrowed = {
        recording.rank: recording.narrow(_time_windows(own, wanted))
        for recording, (own, _, _) in zip(recordings, times, strict=True)
    }
    ranks = {rank: narrowed.get(rank, recording) for rank, recording in attempt.ranks.items()}
    return _make(
        replace(attempt, ranks=ranks), recordings, times, numbers, num_steady=last - first + 1
    )


def _time_windows(times: StepTimes, wanted: list[tuple[int, int]]) -> TimeWindows:
    """When a rank was in the wanted steps, and a while after the last."""
    start, end = [], []
    for low, high in wanted:
        inside = (times.step >= low) & (times.step <= high)
        if inside.any():
            start.append(int(times.start_ns[inside].min()))
            end.append(int(times.end_ns[inside].max()))
    if end:
        # The time after the last common step shows how a job died: ranks that disagree, operations
        # that were not left. It is as long as the last window, so that it stays small.
        end[-1] += end[-1] - start[-1]
    return TimeWindows(
        start_ns=np.array(start, dtype=np.int64), end_ns=np.array(end, dtype=np.int64)
    )


_Times = tuple[StepTimes, Int64s, Int64s]
"""Of one rank: its steps, those left by an exception, those without communication."""


def _read_step_times(columns: Columns) -> _Times:
    """A rank's steps with usable times, and the numbers of those not to be kept."""
    start = int64_column(columns, "start_host_mono_ns")
    end = int64_column(columns, "end_host_mono_ns")
    step = int64_column(columns, "step")
    is_good = (start >= 0) & (end >= start) & (end < MAX_TIME_NS) & (step >= 0)
    is_good &= np.where(is_good, end - start, 0) < MAX_SPAN_NS
    if not is_good.all():
        columns = select_rows(columns, is_good)
    step, flags = int64_column(columns, "step"), columns["flags"].astype(np.int64)
    is_aborted = (flags & StepFlag.ABORTED) != 0
    is_unwatched = (flags & StepFlag.WITHOUT_OPERATIONS) != 0
    return order_steps(columns), step[is_aborted], step[is_unwatched]


def _make(
    attempt: Attempt,
    recordings: list[Recording],
    times: list[_Times],
    wanted: Int64s,
    *,
    num_steady: int,
) -> KeptSteps | Unavailable:
    kept = wanted
    for own, aborted, _ in times:
        kept = kept[np.isin(kept, own.step) & ~np.isin(kept, aborted)]
    if not len(kept):
        return Unavailable("no step was finished by every rank")
    finished = _tabulate(times, kept)
    is_profiled = mark_profiled(kept, disturbing_windows(attempt))
    num_profiled = int(np.count_nonzero(is_profiled))
    kept = kept[~is_profiled]
    if not len(kept):
        return Unavailable(f"all {num_profiled} steps after warm-up were profiled")
    is_unwatched = np.isin(kept, np.concatenate([numbers for _, _, numbers in times]))
    unwatched, kept = kept[is_unwatched], kept[~is_unwatched]
    if not len(kept):
        return Unavailable(f"communication was recorded in none of {len(unwatched)} steps")
    return KeptSteps(
        attempt=attempt,
        ranks=tuple(recording.rank for recording in recordings),
        table=finished.select(np.isin(finished.steps, kept)),
        finished=finished,
        is_profiled=is_profiled,
        by_rank=tuple(own for own, _, _ in times),
        num_left_out=max(num_steady - num_profiled - len(unwatched) - len(kept), 0),
        num_profiled=num_profiled,
        unwatched=unwatched,
    )


def _tabulate(times: list[_Times], kept: Int64s) -> StepTable:
    moments = [_find_moments(own, kept) for own, _, _ in times]
    return StepTable(
        steps=kept,
        before_ns=np.array([found[0] for found in moments]),
        start_ns=np.array([found[1] for found in moments]),
        end_ns=np.array([found[2] for found in moments]),
    )


def _find_moments(times: StepTimes, kept: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    order = np.argsort(times.step, kind="stable")
    row = order[np.searchsorted(times.step[order], kept)]
    before = np.append(times.start_ns[:1], times.end_ns[:-1])
    # Traces have windows of steps: what was between them is not known.
    is_next = np.append(False, times.step[1:] == times.step[:-1] + 1)
    before = np.where(is_next, before, times.start_ns)
    return before[row], times.start_ns[row], times.end_ns[row]
