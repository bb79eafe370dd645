"""One line per run, from what is cheap to read; the rest from its last report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.core.unit_text import duration, plural
from meshscope.errors import MeshscopeError
from meshscope.ingest.kineto.trace_files import list_own_traces
from meshscope.live.moment import OVER, Moment
from meshscope.page.run_state import StateKind, describe_state
from meshscope.report.run.report import find_device
from meshscope.serve.documents import RunRow, RunSummary
from meshscope.serve.run_files import find_way_out, sign_run
from meshscope.serve.runs import ServedRun
from meshscope.store.read.columns import int64_column
from meshscope.store.read.files import change_time_ns
from meshscope.store.read.run import Attempt, open_run

UNREADABLE = "unreadable"
NOT_ANALYSED = Unavailable("not analysed yet")
_NUM_BUCKETS = 40
_OPEN_S = 2.0
"""A run without an end is read again after this."""
_QUIET_S = 60.0
"""Or after this, where its last step is older than an hour: it was killed."""
_QUIET_AGE_NS = 3600 * 10**9
_MAX_ROWS = 4096
_LIVE_S, _LIVE_PACES = 10.0, 5
"""A run that made a step within this, or within so many of its steps, goes on."""
_SOON = Unavailable("it is analysed when somebody opens it, and after its end")


@dataclass(slots=True, kw_only=True)
class _Kept:
    row: RunRow
    signature: object
    next_read: float


class Rows:
    """Keeps the lines of runs, and reads those again that may have changed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._kept: dict[str, _Kept] = {}
        self._summaries: dict[str, RunSummary] = {}
        self._moments: dict[str, Moment] = {}
        self._lock = Lock()

    def note_summary(self, run_id: str, summary: RunSummary) -> None:
        with self._lock:
            self._summaries[run_id] = summary

    def note_moment(self, run_id: str, moment: Moment | None) -> None:
        """Of a run that is followed; None when it no longer is."""
        with self._lock:
            if moment is None:
                self._moments.pop(run_id, None)
            else:
                self._moments[run_id] = moment

    def list_unknown(self) -> list[str]:
        """Ids of runs that ended and have no summary yet, the newest first."""
        with self._lock:
            rows = [kept.row for kept in self._kept.values()]
            known = set(self._summaries)
        # Traces, whose steps are not known unread, are read when somebody asks for them.
        ended = [
            row
            for row in rows
            if row.id not in known and row.state in _ENDED and row.num_steps is not None
        ]
        return [row.id for row in sorted(ended, key=_sort_key)]

    def read(self, runs: Sequence[ServedRun]) -> tuple[RunRow, ...]:
        """All lines, the newest first."""
        wanted = runs[:_MAX_ROWS]
        rows = [self.read_one(run) for run in wanted]
        with self._lock:
            ids = {run.id for run in wanted}
            for kept in (self._kept, self._summaries, self._moments):
                for gone in kept.keys() - ids:
                    kept.pop(gone)
        return tuple(sorted(rows, key=_sort_key))

    def read_one(self, run: ServedRun) -> RunRow:
        """The line of one run."""
        now = time.monotonic()
        with self._lock:
            kept = self._kept.get(run.id)
            summary = self._summaries.get(run.id)
            moment = self._moments.get(run.id)
            is_due = kept is None or now >= kept.next_read
            if kept is not None and is_due:
                kept.next_read = now + _OPEN_S  # others go on with what is kept
        if kept is None or is_due:
            signature = sign_run(run.path)
            if kept is None or kept.signature != signature or kept.row.state == StateKind.OPEN:
                kept = _Kept(row=self._describe(run), signature=signature, next_read=0.0)
            kept.next_read = now + _pause(kept.row)
            with self._lock:
                self._kept[run.id] = kept
        row = kept.row if summary is None else replace(kept.row, summary=summary)
        return judge_open(row) if moment is None else _apply(row, moment)

    def _describe(self, run: ServedRun) -> RunRow:
        way_out = find_way_out(run.path, self._roots)
        if way_out is not None:
            text = f"{way_out.name} is a link that leads out of the served folders"
            return _refuse(run, text)
        try:
            return describe_traces(run) if run.is_traces else describe_row(run)
        except MeshscopeError as error:
            return _refuse(run, str(error))
        except (OSError, ValueError) as error:
            return _refuse(run, f"it cannot be read: {error}")


_ENDED: Mapping[str, None] = dict.fromkeys(map(str, OVER))


def describe_row(run: ServedRun) -> RunRow:
    """By journals and the first rank's steps. MeshscopeError where it cannot be read."""
    opened = open_run(run.path)
    attempt = opened.last_attempt
    first = next(iter(attempt))
    steps = first.read("steps")
    start, end = (int64_column(steps, f"{name}_host_mono_ns") for name in ("start", "end"))
    offset = first.unix_offset_ns
    state = describe_state(attempt, None)
    layout = attempt.layout
    return RunRow(
        id=run.id,
        name=run.name,
        folder=run.folder,
        state=str(state.kind),
        state_text=f"{state.text}: {state.note}",
        problem=None,
        started_unix_ns=_find_start(attempt),
        num_attempts=len(opened.attempts),
        num_ranks=len(attempt.ranks),
        world_size=attempt.world_size,
        layout=layout if isinstance(layout, Unavailable) else layout.describe(),
        device=find_device(attempt),
        num_steps=len(end),
        last_step_unix_ns=int(end[-1]) + offset if len(end) else None,
        spark_ns=_draw_spark(np.diff(start) if len(start) > 1 else end - start),
        summary=_SOON if state.kind is StateKind.OPEN else NOT_ANALYSED,
    )


def describe_traces(run: ServedRun) -> RunRow:
    """By names alone: traces are large."""
    files = list_own_traces(run.path)
    blank = _refuse(run, "")
    return replace(
        blank,
        state=str(StateKind.TRACES),
        state_text=f"Traces: {plural(len(files), 'file')}",
        problem=None,
        started_unix_ns=max(map(change_time_ns, files), default=None),
        num_ranks=len(files),
        summary=Unavailable("traces are read when they are opened"),
    )


def _find_start(attempt: Attempt) -> int | None:
    return min((start for rank in attempt if (start := rank.start_unix_ns)), default=None)


def _draw_spark(
    duration_ns: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
) -> tuple[float, ...]:
    """From one start to the next, as a report's step time."""
    if not len(duration_ns):
        return ()
    parts = np.array_split(duration_ns, min(_NUM_BUCKETS, len(duration_ns)))
    return tuple(float(np.median(part)) for part in parts)


def _refuse(run: ServedRun, problem: str) -> RunRow:
    return RunRow(
        id=run.id,
        name=run.name,
        folder=run.folder,
        state=UNREADABLE,
        state_text="Cannot be read",
        problem=problem,
        started_unix_ns=None,
        num_attempts=None,
        num_ranks=None,
        world_size=None,
        layout=None,
        device=None,
        num_steps=None,
        last_step_unix_ns=None,
        spark_ns=(),
        summary=Unavailable("it cannot be read"),
    )


def _pause(row: RunRow) -> float:
    if row.state != StateKind.OPEN:
        return _OPEN_S
    age = time.time_ns() - (row.last_step_unix_ns or row.started_unix_ns or 0)
    return _QUIET_S if age > _QUIET_AGE_NS else _OPEN_S


def judge_open(row: RunRow) -> RunRow:
    """A run without an end that made a step just now is live, though nobody follows it."""
    if row.state != StateKind.OPEN or row.last_step_unix_ns is None:
        return row
    age_ns = max(0, time.time_ns() - row.last_step_unix_ns)
    paces_ns = _LIVE_PACES * float(np.median(row.spark_ns)) if row.spark_ns else 0.0
    if age_ns > max(_LIVE_S * 1e9, paces_ns):
        return row
    text = f"Moving: its last step ended {duration(age_ns)} ago"
    return replace(row, state=str(StateKind.LIVE), state_text=text)


def _apply(row: RunRow, moment: Moment) -> RunRow:
    """As a follower saw it last."""
    return replace(
        row,
        state=str(moment.state.kind),
        state_text=f"{moment.state.text}: {moment.state.note}",
        num_steps=row.num_steps if moment.step is None else moment.step + 1,
        last_step_unix_ns=row.last_step_unix_ns
        if moment.age_ns is None
        else moment.read_unix_ns - moment.age_ns,
    )


def _sort_key(row: RunRow) -> tuple[int, str]:
    return (-(row.started_unix_ns or 0), row.folder)
