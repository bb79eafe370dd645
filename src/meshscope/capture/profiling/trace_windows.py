"""Trace windows of one rank, moved on where steps end: the schedule, requests, and their files.

    RUN/traces/rank3_dp1_tp1_pp0/HOST_PID.TIME.pt.trace.json.gz

Every window is written into the journal twice, as `trace_window`: when it begins, so that a rank
that dies in it still tells which steps were disturbed, and when it ends, with its file or with what
went wrong. Profiled steps are slower, and writing the trace falls into the gap after them: readers
leave out a window's steps, its warm-up and the step after it.

An error of torch's profiler ends it for good on this rank; training goes on.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.capture.profiling.rank_choice import NO_MESH
from meshscope.capture.profiling.settings import ProfilingSettings
from meshscope.capture.profiling.torch_window import (
    TorchWindow,
    find_other_profiler,
    trace_file_name,
)
from meshscope.capture.profiling.triggers import AnomalyTrigger, FileTrigger, SignalTrigger
from meshscope.capture.profiling.window_marks import WindowMarks
from meshscope.capture.profiling.window_request import TRIGGER_NAME, WindowRequest
from meshscope.capture.profiling.window_schedule import WindowSchedule
from meshscope.capture.session import Session
from meshscope.core.trace_names import rank_folder_name
from meshscope.errors import UsageError
from meshscope.store.write.access import make_folder

SITE = "profiling"
_TRACES_DIR = "traces"
_SCHEDULED = "the schedule"


@dataclass(slots=True, kw_only=True)
class _OpenWindow:
    number: int
    reason: str
    profiler: TorchWindow
    start_ns: int
    disturbed_from_step: int
    """The first step that is profiled, warm-up or not."""
    num_warmup_left: int
    num_active_left: int
    first_step: int = -1
    """The first step in the trace."""
    last_step: int = -1
    path: Path | None = None
    """Where its trace goes."""

    def to_fields(self) -> dict[str, object]:
        """Fields of the window's journal line."""
        return {
            "number": self.number,
            "reason": self.reason,
            "disturbed_from_step": self.disturbed_from_step,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "begin_host_mono_ns": self.start_ns,
        }


class TraceWindows:
    """The windows of one attempt of one rank."""

    def __init__(self, settings: ProfilingSettings, session: Session) -> None:
        self.settings = settings
        self._session = session
        self._schedule = settings.schedule
        self._cycle = settings.schedule or WindowSchedule()
        self._window: _OpenWindow | None = None
        self._pending: WindowRequest | None = None
        self._file: FileTrigger | None = None
        self._signal: SignalTrigger | None = None
        self._anomalies: AnomalyTrigger | None = None
        self._marks: WindowMarks | None = None
        self._has_begun = False
        self._is_over = False
        self._num_finished = 0
        self._num_windows = 0
        self._last_step: int | None = None
        self._disturbed_to_step = -1
        self._num_bytes = 0
        self._said: set[str] = set()
        self.make_room: Callable[[], None] = _do_nothing
        """Ends what else of ours uses torch's profiler."""

    @property
    def wants_every_step(self) -> bool:
        """Whether `visit` must be called at the end of every step, rather than once a second."""
        if self._is_over:
            return False
        if self._window is not None or self._pending is not None or not self._has_begun:
            return True
        schedule, anomalies = self._schedule, self._anomalies
        is_watching = anomalies is not None and not anomalies.is_spent
        return is_watching or not (schedule is None or schedule.is_over(self._num_finished))

    @property
    def is_profiling(self) -> bool:
        return self._window is not None

    def ask(self, request: WindowRequest) -> None:
        """The program wants a window; it begins where the open step ends."""
        self._pending = request

    def note_number(self, name: str, value: float) -> None:
        """Called when a number is logged; only losses are checked."""
        if self._anomalies is not None and "loss" in name:
            self._anomalies.note_loss(name, value)

    def note_disturbed(self, step: int) -> None:
        """Something else of ours makes this step slow: that is no anomaly."""
        self._disturbed_to_step = max(self._disturbed_to_step, step)

    # --- where a step ends ----------------------------------------------------------------

    def visit(self, step: int, start_ns: int, end_ns: int) -> None:
        """Called after each step."""
        if self._is_over or step == self._last_step:  # a further optimizer extends a step
            return
        if not self._has_begun and not self._begin_watching():
            return
        self._last_step = step
        self._num_finished += 1
        window = self._window
        if window is not None:
            if window.profiler.is_here:
                self._advance(window, step)
            if self._window is not None or self._is_over:
                return
        request = self._find_request(step, start_ns, end_ns)
        if request is not None:
            self._begin(request, step)

    def _begin_watching(self) -> bool:
        run_dir = self._session.open_run_dir()
        if run_dir is None:
            self._is_over = True
            return False
        self._has_begun = True
        settings = self.settings
        self._session.journal("update", profiling=settings.to_text())
        self._file = FileTrigger(run_dir / TRIGGER_NAME)
        self._marks = WindowMarks(run_dir, self._session.rank)
        if settings.anomaly:
            self._anomalies = AnomalyTrigger(
                cooldown_steps=settings.cooldown_steps,
                cooldown_ns=settings.cooldown_s * 1_000_000_000,
                limit=settings.max_anomalies,
            )
        if settings.signal:
            self._signal = SignalTrigger()
            problem = self._signal.install()
            if problem:
                self._say(f"no window will be asked for by a signal: {problem}")
        return True

    def _find_request(self, step: int, start_ns: int, end_ns: int) -> WindowRequest | None:
        """What is due after this step, if anything is."""
        asked = self._take_asked(end_ns)
        if asked is not None:
            self._pending = asked
        anomaly = None
        if self._anomalies is not None and step > self._disturbed_to_step:
            duration_ns = end_ns - start_ns
            marks, age_ns = self._marks, self._session.clock() - start_ns
            anomaly = self._anomalies.take(
                step,
                end_ns,
                duration_ns,
                is_disturbed=lambda: marks is not None and marks.is_any_near(age_ns, duration_ns),
            )
        pending = self._pending
        if pending is not None:
            first_step = pending.first_step
            if first_step is None or step + 1 + self._cycle.warmup >= first_step:
                self._pending = None
                return pending
        schedule = self._schedule
        if schedule is not None and schedule.is_begin(self._num_finished):
            return WindowRequest(reason=_SCHEDULED)
        return anomaly

    def _take_asked(self, now_ns: int) -> WindowRequest | None:
        try:
            found = None if self._file is None else self._file.take(now_ns)
        except (UsageError, OSError) as error:
            self._say(f"a trigger file is not followed: {error}")
            found = None
        return found or (None if self._signal is None else self._signal.take())

    # --- a window -------------------------------------------------------------------------

    def _begin(self, request: WindowRequest, step: int) -> None:
        run_dir = self._session.open_run_dir()
        torch: Any = sys.modules.get("torch")
        if run_dir is None or torch is None or not self._is_chosen(request):
            return
        if self._marks is not None:  # at once: the first look for a profiler takes its time, too
            self._marks.begin()
        self.make_room()
        other = self._run(lambda: find_other_profiler(torch))
        if other is None:
            self._end_for_good("torch's profiler cannot be used")
            return
        if other:
            self._say(f"no trace after step {step}, asked for by {request.reason}: {other}")
            return
        window = _OpenWindow(
            number=self._num_windows,
            reason=request.reason,
            profiler=TorchWindow(torch, self.settings),
            start_ns=self._session.clock(),
            disturbed_from_step=step + 1,
            num_warmup_left=self._cycle.warmup,
            num_active_left=request.num_steps or self._cycle.active,
        )
        self._num_windows += 1
        self._window = window
        self._session.journal("update", trace_window={**window.to_fields(), "is_open": True})
        if self._run(lambda: self._start(window, step)) is None:
            self._drop(window)

    def _start(self, window: _OpenWindow, step: int) -> bool:
        window.first_step = step + 1 + window.num_warmup_left
        window.profiler.start(
            step + 1, num_warmup=window.num_warmup_left, num_active=window.num_active_left
        )
        return True

    def _advance(self, window: _OpenWindow, step: int) -> None:
        """One step of an open window has ended."""
        if self._run(lambda: self._move_on(window, step)) is None:
            self._drop(window)
        elif not window.num_active_left:
            self._finish(window)

    def _move_on(self, window: _OpenWindow, step: int) -> bool:
        if self._marks is not None:
            self._marks.move()
        if window.num_warmup_left:
            window.num_warmup_left -= 1
        else:
            window.last_step = step
            window.num_active_left -= 1
        if not window.num_active_left:
            window.path = self._make_path()
            window.profiler.prepare(window.path)
        window.profiler.end_step()
        return True

    def _make_path(self) -> Path:
        run_dir = self._session.open_run_dir()
        if run_dir is None:
            raise UsageError("the recording has ended")
        folder = run_dir / _TRACES_DIR / rank_folder_name(self._session.rank, self._session.layout)
        make_folder(folder.parent)
        make_folder(folder)
        return folder / trace_file_name(
            socket.gethostname(),
            os.getpid(),
            time.time_ns(),
            is_compressed=self.settings.compresses,
        )

    def _finish(self, window: _OpenWindow) -> None:
        """Stops the profiler and writes what it saw."""
        fields = self._run(lambda: self._stop_and_write(window))
        if fields is None:
            self._drop(window)
            return
        self._window = None
        self._session.journal("update", trace_window={**window.to_fields(), **fields})
        now_ns = self._session.clock()
        self.note_disturbed(window.last_step + 1)
        if self._anomalies is not None:
            self._anomalies.keep_quiet_after(self._disturbed_to_step, now_ns)
        if self._num_bytes > self.settings.max_bytes:
            self._end_for_good(
                f"the traces of this rank are {self._num_bytes} bytes, more than the cap of "
                f"{self.settings.max_bytes}"
            )

    def _stop_and_write(self, window: _OpenWindow) -> dict[str, object]:
        run_dir = self._session.open_run_dir()
        if run_dir is None:
            raise UsageError("the recording has ended")
        if window.path is None:  # cut short: torch makes the trace when it is stopped
            window.path = self._make_path()
            window.profiler.prepare(window.path)
        clock = self._session.clock
        window.profiler.stop()
        stopped_ns = clock()
        num_bytes, json_bytes = window.profiler.write(window.path)
        self._num_bytes += num_bytes
        return {
            "path": window.path.relative_to(run_dir).as_posix(),
            "disturbed_to_step": window.last_step + 1,
            "bytes": num_bytes,
            "json_bytes": json_bytes,
            "end_host_mono_ns": stopped_ns,
            "write_ns": clock() - stopped_ns,
        }

    def _is_chosen(self, request: WindowRequest) -> bool:
        choice, session = request.ranks or self.settings.ranks, self._session
        if choice.needs_mesh and session.layout is None and session.world_size > 1:
            meant = "rank 0" if choice.has(0, None) else "no rank"
            self._say(f"{NO_MESH}, so that ranks={choice} is {meant}: give it with --layout")
        return choice.has(session.rank, session.layout)

    # --- when it goes wrong, and at the end -----------------------------------------------

    def _run(self, function: Callable[[], Any]) -> Any:
        return self._session.guard.run(SITE, function)

    def _say(self, text: str) -> None:
        """Notes each text once."""
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            self._session.note_gap(SITE, text)

    def _drop(self, window: _OpenWindow) -> None:
        """Torch's profiler failed: nothing of this window is kept, and no further one is taken."""
        self._window = None
        first = self._session.guard.first_messages.get(SITE, "unknown")
        self._session.journal(
            "update",
            trace_window={
                **window.to_fields(),
                "problem": first,
                "disturbed_to_step": (self._last_step or 0) + 1,
                "end_host_mono_ns": self._session.clock(),
            },
        )
        if window.profiler.is_here:
            self._run(window.profiler.stop)
        self._end_for_good(f"the profiler failed ({first})")

    def _end_for_good(self, why: str) -> None:
        self._is_over = True
        self._say(f"no further trace windows: {why}")

    def close(self) -> None:
        """The recording ends: a window under way is written as far as it got."""
        window = self._window
        if window is not None and window.profiler.is_here:
            if window.last_step >= 0:
                window.reason += ", cut short by the end"
                self._finish(window)
            else:
                self._run(window.profiler.stop)
        self._window = None
        self._is_over = True
        if self._signal is not None:
            self._signal.remove()


def _do_nothing() -> None: ...
