"""Turns what a follower sees into events, in threads of the process that analyses.

One thread looks at the ends of tables, another makes what takes longer, so that the first is never
late. `tell` is called with the kind of an event and its content, from both.
"""

import base64
import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Any

from meshscope.errors import MeshscopeError
from meshscope.live.follower import Analysis
from meshscope.live.moment import Moment
from meshscope.page.heat.cells import Cells
from meshscope.page.heat.matrix import LEVELS, Window, draw_matrix, pack_matrix
from meshscope.report.encode import as_plain
from meshscope.report.sections.hang_words import make_sentence
from meshscope.serve.analyst import Analyst
from meshscope.store.read.run import forget_tables

POLL_S, _SLOW_POLL_S, _POLL_CPU_RATIO = 0.5, 1.0, 100.0
"""Ends of tables are looked at this often; less often, though once a second, where it would take
more than 1 % of a core."""
_STATUS_S = 1.0
_SERIES_S = 1.0
_QUIET_POLL_S = 2.0
"""Where no step was new for long."""
_QUIET_AFTER_S = 60.0
MAX_STEPS_TOLD = 2000
"""New steps of one event; of more only the last, and the page asks for all."""

Tell = Callable[[str, Mapping[str, Any]], None]


class Following:
    """Follows one run until it is over or `stop` is called."""

    def __init__(
        self,
        analyst: Analyst,
        path: str,
        tell: Tell,
        *,
        note: Callable[[Moment], None] = lambda moment: None,
        note_report: Callable[[Analysis], None] = lambda analysis: None,
    ) -> None:
        self._analyst, self._path, self._tell = analyst, path, tell
        self._note, self._note_report = note, note_report
        self._follower = analyst.follow(path)
        self._is_stopped = Event()
        self._is_over = Event()
        self._is_seen = Event()
        self._was_stuck = False
        self._threads = [
            Thread(target=self._watch, name="meshscope-watch", daemon=True),
            Thread(target=self._analyse, name="meshscope-analyse", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._is_seen.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    # --- the ends of tables -----------------------------------------------------------------------

    def _watch(self) -> None:
        next_status = next_series = 0.0
        points: dict[str, tuple[list[int], list[Any]]] = {}
        told_state, moved = "", time.monotonic()
        is_first = True
        while not self._is_stopped.is_set():
            begun = time.thread_time()
            try:
                moment = self._follower.poll()
            except (MeshscopeError, OSError) as error:
                self._tell("status", {"state": "unreadable", "text": str(error)})
                self._is_stopped.wait(_QUIET_POLL_S)
                continue
            now = time.monotonic()
            self._note(moment)
            if moment.is_other_attempt:
                self._tell("reset", {"reason": "the job was launched again"})
                points.clear()
            if len(moment.steps):
                moved = now
            if len(moment.steps) and not is_first:
                self._tell("steps", _describe_steps(moment))
            if not is_first:  # the page has the earlier ones
                _gather(points, moment)
            if points and (now >= next_series or moment.is_over):
                next_series = now + _SERIES_S
                self._tell("series", _describe_points(points))
                points.clear()
            if now >= next_status or str(moment.state.kind) != told_state:
                next_status, told_state = now + _STATUS_S * 0.9, str(moment.state.kind)
                self._tell("status", describe_status(moment))
            is_quiet = now - moved > _QUIET_AFTER_S
            if moment.is_over:
                self._is_over.set()
            self._is_seen.set()
            if moment.is_over:
                if is_first:
                    self._tell("end", {"state": str(moment.state.kind)})
                    self._is_stopped.set()
                return
            is_first = False
            pause = min(max(POLL_S, _POLL_CPU_RATIO * (time.thread_time() - begun)), _SLOW_POLL_S)
            self._is_stopped.wait(_QUIET_POLL_S if is_quiet else pause)

    # --- what takes longer ------------------------------------------------------------------------

    def _analyse(self) -> None:
        self._is_seen.wait()
        while not self._is_stopped.is_set():
            is_over = self._is_over.is_set()
            try:
                excess = None if is_over else self._follower.excess()
                if excess is not None and len(excess.steps):
                    self._tell("steps", {"steps": [], "job_ns": [], "matrix": pack_cells(excess)})
                analysis = self._analyst.analyse_followed(self._path)
                if analysis is not None:
                    self._tell_report(analysis)
            except (MeshscopeError, OSError, ValueError, KeyError) as error:
                self._tell("status", {"state": "unreadable", "text": str(error)})
            if is_over:
                self._tell("end", {"state": str(self._follower.poll().state.kind)})
                return
            self._is_over.wait(POLL_S)

    def _tell_report(self, analysis: Analysis) -> None:
        begun = time.thread_time()
        answer = self._analyst.page(self._path)
        free_memory(analysis)
        self._follower.note_use(time.thread_time() - begun)
        self._note_report(analysis)
        self._tell("report", {"etag": answer.etag, "number": analysis.number})
        hang = analysis.report.hang
        is_stuck = hang is not None and hang.is_stuck
        if hang is not None and is_stuck != self._was_stuck:
            text = make_sentence(hang) if is_stuck else "moves again"
            self._tell("hang", {"is_stuck": is_stuck, "text": text})
        self._was_stuck = is_stuck
        for change in () if analysis.is_first else analysis.changes:
            self._tell("finding", {"change": str(change.kind), **as_plain(change.found)})


def free_memory(analysis: Analysis) -> None:
    """What the report before held goes back to the system, and tables that this one has read:
    studies refer to themselves, and the C library keeps what it was given."""
    forget_tables(analysis.report.study.attempt)
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another C library


def describe_status(moment: Moment) -> dict[str, Any]:
    return {
        "state": str(moment.state.kind),
        "text": moment.state.text,
        "note": moment.state.note,
        "attempt": moment.attempt,
        "step": moment.step,
        "age_ns": moment.age_ns,
        "read_unix_ns": moment.read_unix_ns,
        "num_ranks": moment.num_ranks,
        "world_size": moment.world_size,
        "pace_ns": moment.pace_ns,
        "tokens_per_s": moment.tokens_per_s,
    }


def _describe_steps(moment: Moment) -> dict[str, Any]:
    steps, job_ns = moment.steps[-MAX_STEPS_TOLD:], moment.job_ns[-MAX_STEPS_TOLD:]
    return {
        "from": int(moment.steps[0]),
        "to": int(moment.steps[-1]),
        "steps": steps.tolist(),
        "job_ns": job_ns.tolist(),
        "matrix": None,
    }


def _gather(points: dict[str, tuple[list[int], list[Any]]], moment: Moment) -> None:
    for one in moment.series:
        step, value = points.setdefault(one.key, ([], []))
        step += one.step.tolist()
        value += as_plain(one.value)


def _describe_points(points: Mapping[str, tuple[list[int], list[Any]]]) -> dict[str, Any]:
    return {
        "points": [
            {"key": key, "step": step[-MAX_STEPS_TOLD:], "value": value[-MAX_STEPS_TOLD:]}
            for key, (step, value) in points.items()
        ]
    }


def pack_cells(cells: Cells) -> dict[str, Any]:
    """New columns of the heat map: codes as in a matrix, [rank, step]."""
    window = Window(num_rows=len(cells.ranks), num_columns=len(cells.steps) + 1)
    picture = draw_matrix(cells, cells.steps, window)
    head = pack_matrix(picture, with_layers=False)
    return {
        "metric": cells.metric.key,
        "ranks": list(cells.ranks),
        "step_edges": list(head.step_edges),
        "lo": head.lo,
        "hi": head.hi,
        "levels": LEVELS,
        "codes": base64.b64encode(picture.largest.astype("<u2").tobytes()).decode("ascii"),
    }
