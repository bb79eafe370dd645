"""The end of an attempt that is being recorded: steps that all ranks finished, and their signals.

A step is told once every rank has finished it that keeps up: one that ended, or that is many steps
behind, is not waited for. Its time is the median over ranks and its signals are those of the
report, made by the same functions from the rows of the new steps alone. Signals come one step
later: a program may log a step's loss after the step.
"""

import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from meshscope.analyze.rank.steps import JobSteps
from meshscope.analyze.training.convergence import (
    LEARNING_RATE,
    MAX_RANKS,
    JobSeries,
    analyze_convergence,
)
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError
from meshscope.live.moment import NewPoints
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import (
    Columns,
    concatenate_columns,
    empty_columns,
    int64_column,
    select_rows,
)
from meshscope.store.read.files import file_size
from meshscope.store.read.memory import MemoryRecording
from meshscope.store.read.recording import Recording, open_recording
from meshscope.store.read.run import Attempt
from meshscope.store.read.table_files import live_file
from meshscope.store.read.table_tail import TableTail
from meshscope.store.schema import SCALARS, STEPS
from meshscope.store.write.journal import JOURNAL_NAME

_MAX_LAG_STEPS = 64
"""A rank that is further behind is not waited for."""
_PACE_STEPS = 16
_NO_STEPS: Int64s = np.empty(0, dtype=np.int64)
_MAX_HELD_ROWS = 100_000
"""Of one rank's scalars that belong to no finished step yet."""


@dataclass(slots=True, kw_only=True)
class _RankTail:
    """Where one rank's tables were read to, and rows that were not told yet."""

    recording: Recording
    journal_bytes: int
    steps: TableTail
    scalars: TableTail | None
    held_steps: Columns = field(default_factory=lambda: empty_columns(STEPS))
    held_scalars: Columns = field(default_factory=lambda: empty_columns(SCALARS))
    last_step: int = -1
    last_end_unix_ns: int = 0

    def read(self) -> bool:
        """Reads on; whether a step is new."""
        steps = self.steps.read()
        number = int64_column(steps, "step")
        is_good = number > self.last_step
        if is_good.any():
            self.last_step = int(number.max())
            ends = int64_column(steps, "end_host_mono_ns")
            self.last_end_unix_ns = int(ends.max()) + self.recording.unix_offset_ns
        if len(number):
            self.held_steps = concatenate_columns(STEPS, [self.held_steps, steps])
        # What is logged comes with steps; the last of it with the rank's end.
        if self.scalars is not None and (is_good.any() or self.recording.closing is not None):
            scalars = self.scalars.read()
            if len(scalars["step"]):
                held = concatenate_columns(SCALARS, [self.held_scalars, scalars])
                first = max(len(held["step"]) - _MAX_HELD_ROWS, 0)
                self.held_scalars = {name: column[first:] for name, column in held.items()}
        return bool(is_good.any())

    def take_steps(self, first: int, last: int) -> Columns:
        """The last row of each of these steps; they are no longer held."""
        steps, self.held_steps = _split(self.held_steps, first, last)
        _, from_end = np.unique(int64_column(steps, "step")[::-1], return_index=True)
        return select_rows(steps, len(steps["step"]) - 1 - from_end)

    def take_scalars(self, first: int, last: int) -> Columns:
        """Rows of these steps; they are no longer held."""
        scalars, self.held_scalars = _split(self.held_scalars, first, last)
        return scalars


def _split(held: Columns, first: int, last: int) -> tuple[Columns, Columns]:
    """Rows of these steps, and of later ones."""
    number = int64_column(held, "step")
    is_wanted = (number >= first) & (number <= last)
    return select_rows(held, is_wanted), select_rows(held, number > last)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewRows:
    """What `AttemptTail.take` gives."""

    steps: Int64s
    job_ns: Int64s
    series: tuple[NewPoints, ...]


class AttemptTail:
    """Follows one attempt of a run."""

    def __init__(self, attempt: Attempt, *, max_ranks: int | None = None) -> None:
        """With `max_ranks` the steps of the first ones are read; of all others only journals."""
        self.attempt = attempt
        self.moved_mono_s = time.monotonic()
        """When a step was last seen to be new, or when following began."""
        self.has_moved = False
        """A step was new after the first look."""
        self._told = -1
        """Last step that was told."""
        self._told_series = -1
        """Last step whose signals were told."""
        self._num_looks = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_PACE_STEPS + 1)
        """Step and end of the last steps of the first rank."""
        self._tokens = -1
        self._ranks = {
            rank: _RankTail(
                recording=recording,
                journal_bytes=_journal_size(recording),
                steps=TableTail(live_file(recording.directory, STEPS.name), STEPS),
                scalars=TableTail(live_file(recording.directory, SCALARS.name), SCALARS)
                if index < MAX_RANKS
                else None,
            )
            for index, (rank, recording) in enumerate(attempt.ranks.items())
        }
        self._read_ranks = dict(list(self._ranks.items())[:max_ranks])

    def look(self) -> NewRows:
        """Reads what is new in all ranks' files; `attempt` is then as the journals say."""
        self._reopen_journals()
        has_new = [tail.read() for tail in self._read_ranks.values()]
        if any(has_new):
            self.moved_mono_s = time.monotonic()
            self.has_moved = self.has_moved or self._num_looks > 0
        self._num_looks += 1
        return self._take()

    def _reopen_journals(self) -> None:
        """Names, layouts and ends are told by journals, which seldom grow."""
        for rank, tail in self._ranks.items():
            size = _journal_size(tail.recording)
            if size == tail.journal_bytes:
                continue
            old = tail.recording
            try:
                tail.recording = open_recording(rank, old.attempt, old.directory, None)
            except MeshscopeError:
                continue
            tail.journal_bytes = size
        ranks = {rank: tail.recording for rank, tail in self._ranks.items()}
        if any(ranks[rank] is not one for rank, one in self.attempt.ranks.items()):
            self.attempt = replace(self.attempt, ranks=ranks)

    @property
    def last_step(self) -> int:
        """The last step that was told; -1 before the first."""
        return self._told

    @property
    def last_end_unix_ns(self) -> int:
        """When a rank last finished a step; 0 before that."""
        return max((tail.last_end_unix_ns for tail in self._read_ranks.values()), default=0)

    @property
    def pace_ns(self) -> int | None:
        if len(self._recent) < 2:
            return None
        (first, begin), (last, end) = self._recent[0], self._recent[-1]
        return (end - begin) // (last - first) if last > first and end > begin else None

    @property
    def tokens_per_s(self) -> float | None:
        pace_ns = self.pace_ns
        return self._tokens * 1e9 / pace_ns if pace_ns and self._tokens >= 0 else None

    @property
    def _is_over(self) -> bool:
        return all(tail.recording.closing is not None for tail in self._ranks.values())

    def _find_complete(self) -> int:
        """The last step that every rank finished that keeps up."""
        tails = list(self._read_ranks.values())
        highest = max((tail.last_step for tail in tails), default=-1)
        going = (
            tail.last_step
            for tail in tails
            if tail.last_step >= highest - _MAX_LAG_STEPS and tail.recording.closing is None
        )
        return min(going, default=highest)

    def _take(self) -> NewRows:
        complete = self._find_complete()
        with_signals = complete if self._is_over else complete - 1
        if complete <= self._told and with_signals <= self._told_series:
            return NewRows(steps=_NO_STEPS, job_ns=_NO_STEPS, series=())
        durations = JobSteps()
        recordings: dict[int, Recording] = {}
        for rank, tail in self._read_ranks.items():
            steps = tail.take_steps(self._told + 1, complete)
            scalars = tail.take_scalars(self._told_series + 1, with_signals)
            number, end = int64_column(steps, "step"), int64_column(steps, "end_host_mono_ns")
            durations.add(rank, number, end - int64_column(steps, "start_host_mono_ns"))
            if not recordings and len(number):
                self._recent.extend(zip(number.tolist(), end.tolist(), strict=True))
                self._tokens = int(int64_column(steps, "input_tokens")[-1])
            if len(number) or len(scalars["step"]):
                columns = {STEPS.name: steps, SCALARS.name: scalars}
                recordings[rank] = _make_recording(tail.recording, columns)
        self._told = max(complete, self._told)
        self._told_series = max(with_signals, self._told_series)
        return NewRows(
            steps=durations.step,
            job_ns=durations.median_ns() if len(durations.step) else durations.step,
            series=_draw_series(replace(self.attempt, ranks=recordings)),
        )


def _make_recording(recording: Recording, columns: dict[str, Columns]) -> MemoryRecording:
    return MemoryRecording(
        rank=recording.rank,
        attempt=recording.attempt,
        directory=recording.directory,
        header=recording.header,
        names=recording.names,
        closing=recording.closing,
        columns=columns,
    )


def _draw_series(attempt: Attempt) -> tuple[NewPoints, ...]:
    """The signals of the rows that an attempt has."""
    if not any(recording.count_rows(SCALARS.name) for recording in attempt):
        return ()
    found = analyze_convergence(attempt)
    usual = {"loss": found.loss, "grad_norm": found.grad_norm, LEARNING_RATE: found.learning_rate}
    series: dict[str, JobSeries | Unavailable] = {**usual, **found.further}
    return tuple(
        NewPoints(key=key, step=one.step, value=one.value)
        for key, one in series.items()
        if not isinstance(one, Unavailable) and len(one)
    )


def _journal_size(recording: Recording) -> int:
    try:
        return file_size(recording.directory / JOURNAL_NAME)
    except OSError:
        return -1
