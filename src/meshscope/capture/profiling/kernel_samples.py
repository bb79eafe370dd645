"""Kernel samples: what the device really did in a few steps, again and again, all through a run.

    step 20: prepared   21, 22: watched   then, when the device is past 22: read

Samples come at the same steps on every rank: the 20th and 44th after the first one recorded, and
then after three times as many each, as long as they cost less than a thousandth of the run. All
work falls where steps end, on the training thread; nothing waits for the device. Steps of a
sample are a little slower: readers leave them out, as those of a trace window. Where the device
waits for the host, the profiler's part below torch is taken out again (`detach`), and no sample
follows: graphs that a program makes later fail where that part comes back a second time.

An error of torch's profiler ends the samples for good on this rank; training goes on.
"""

import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any

from meshscope.capture.profiling.kernel_rows import KernelRows, Row, put_rows
from meshscope.capture.profiling.kernel_window import (
    KernelWindow,
    ProfilerGate,
    detach,
    find_obstacle,
)
from meshscope.capture.session import Session, read_clocks
from meshscope.capture.steps.taps import Tap
from meshscope.store.schema import SampleReason

SITE = "kernel samples"
FIRST_STEPS = (20, 44)
"""After how many steps the first samples begin."""
_FACTOR = 3
_MAX_SHARE = 0.001
"""Of the run's time that samples after the first ones may take."""
_SHORT_STEP_NS = 20_000_000
_LONG_STEP_NS = 1_000_000_000
_TOO_LONG_STEP_NS = 30_000_000_000
"""A step that launches so much for so long would fill the profiler's memory."""
_MAX_EVENTS = 400_000
_MAX_DRAIN_STEPS = 64
_FIRST_READ_NS = 100_000_000
"""For reading where the window ends: that step is disturbed anyway. Enough for 20,000 events."""
_READ_SHARE = 0.01
"""Of a step's time that reading the rest may take, in the steps after."""


class _State(Enum):
    WAITING = 0
    PREPARED = 1
    WATCHING = 2
    DRAINING = 3
    READING = 4


class KernelSamples:
    """The samples of one rank, moved on where steps end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._gate = ProfilerGate(self.give_way)
        self._state = _State.WAITING
        self._is_over = False
        self._window: KernelWindow | None = None
        self._seen: KernelRows | None = None
        self._rows: Iterator[Row | None] = iter(())
        self._first_step: int | None = None
        self._next = FIRST_STEPS[0]
        self._num_samples = 0
        self._graph_tap: Tap | None = None
        self._has_graphs = False
        """The program has captured a CUDA graph."""
        self._num_left = 0
        self._fields: dict[str, object] = {}
        self._offset_ns = 0
        self._num_rows = 0
        self._cost_ns = 0
        """Of all samples so far."""
        self._start_ns = 0
        self._visit_ns = 0
        """When the visit under way began."""
        self._last_step = -1

    @property
    def is_open(self) -> bool:
        """Whether torch's profiler is in use by a sample."""
        return self._window is not None

    @property
    def needs_operations(self) -> bool:
        """Whether the next step is watched, or the one before those that are: kernels are named
        by operations that were issued then."""
        return self._state in (_State.PREPARED, _State.WATCHING)

    def begin_attempt(self) -> None:
        self._first_step = None
        self._next = FIRST_STEPS[0]

    def visit(self, step: int, start_ns: int, end_ns: int, *, may_begin: bool) -> None:
        """Called where a step has ended, on a rank that uses a CUDA device."""
        if self._first_step is None:
            self._first_step, self._start_ns = step, end_ns
            self._session.guard.run(SITE, self._watch_graphs)
        if self._is_over or step == self._last_step:
            return
        self._last_step = step
        was_waiting = self._state is _State.WAITING
        self._visit_ns = self._session.clock()
        self._session.guard.run(SITE, self._move, step, end_ns - start_ns, may_begin)
        if self._session.guard.counts.get(SITE):
            self._drop()
        # A visit that ends a sample, by far the longest, leaves it waiting for the next one.
        if not was_waiting or self._state is not _State.WAITING:
            self._cost_ns += self._session.clock() - self._visit_ns

    def _watch_graphs(self) -> None:
        if self._graph_tap is not None or self._is_over:
            return
        torch: Any = sys.modules["torch"]

        def note(args: Any, kwargs: Any) -> None:
            self._has_graphs = True

        self._graph_tap = Tap(
            torch.cuda.graphs.CUDAGraph, "capture_begin", note, bool, wants_result=False
        )

    def _move(self, step: int, step_ns: int, may_begin: bool) -> None:  # noqa: FBT001 - of one caller
        state, window = self._state, self._window
        if state is _State.WAITING:
            if may_begin and self._is_due(step, step_ns):
                self._begin(step, step_ns)
        elif window is not None and state is _State.PREPARED:
            window.enable()
            self._state = _State.WATCHING
            self._session.stack_sampler.start(
                SampleReason.KERNELS, expected_ns=self._num_left * step_ns
            )
        elif window is not None and state is _State.WATCHING:
            self._num_left -= 1
            if self._num_left <= 0:
                window.mark_end()
                self._session.stack_sampler.stop()
                self._fields["last_step"] = step
                self._state, self._num_left = _State.DRAINING, _MAX_DRAIN_STEPS
        elif window is not None and state is _State.DRAINING:
            self._num_left -= 1
            if window.is_passed or self._num_left <= 0:
                self._end(window, step)
        elif state is _State.READING:
            self._read(int(step_ns * _READ_SHARE))

    def _is_due(self, step: int, step_ns: int) -> bool:
        done = step + 1 - (self._first_step or 0)
        if done < self._next:
            return False
        elapsed_ns = self._session.clock() - self._start_ns
        is_cheap = self._cost_ns / max(self._num_samples, 1) < elapsed_ns * _MAX_SHARE
        self._next = next((one for one in FIRST_STEPS if one > done), done * _FACTOR)
        # Late by more than a few steps: ranks would not sample together.
        is_early = self._num_samples < len(FIRST_STEPS)
        return step_ns < _TOO_LONG_STEP_NS and (is_early or is_cheap)

    def _begin(self, step: int, step_ns: int) -> None:
        torch: Any = sys.modules["torch"]
        obstacle = find_obstacle(torch)
        if obstacle or not self._gate.install(torch):
            self._end_for_good(obstacle or "this torch has no such profiler")
            return
        if self._gate.is_program_profiling or torch.autograd._profiler_enabled():
            return
        self._fields = {
            "number": self._num_samples,
            "reason": "a kernel sample",
            "disturbed_from_step": step + 1,
            "first_step": step + 2,
            "begin_host_mono_ns": self._session.clock(),
        }
        self._num_samples += 1
        self._num_left = 1 if step_ns > _LONG_STEP_NS else 2 if step_ns > _SHORT_STEP_NS else 4
        self._session.journal("update", kernel_window=dict(self._fields))
        self._window = window = KernelWindow(torch)
        self._state = _State.PREPARED
        window.prepare()

    def _end(self, window: KernelWindow, step: int) -> None:
        session = self._session
        is_whole = window.is_passed
        result = window.disable()
        self._window = None
        unix_ns, mono_ns, uncertainty_ns = read_clocks(session.clock)
        self._offset_ns = unix_ns - mono_ns
        self._fields |= {
            "end_host_mono_ns": mono_ns,
            "disturbed_to_step": step + 1,
            "clock_uncertainty_ns": uncertainty_ns,
        }
        rows = KernelRows(result) if is_whole and result is not None else None
        if rows is None or len(rows) > _MAX_EVENTS:
            self._fields["problem"] = "too many events" if rows else "the device did not keep up"
            self._finish()
            return
        self._fields["num_events"] = len(rows)
        self._seen, self._rows, self._num_rows = rows, rows.walk(), 0
        self._state = _State.READING
        self._read(_FIRST_READ_NS)

    def _read(self, allowed_ns: int) -> None:
        session = self._session
        table = session.find_table("kernels")
        if table is None:
            return
        num_rows, is_done = put_rows(
            self._rows,
            put=table.put,
            name_id=session.name_id,
            offset_ns=self._offset_ns,
            sample=int(str(self._fields["number"])),
            clock=session.clock,
            until_ns=session.clock() + allowed_ns,
        )
        self._num_rows += num_rows
        if is_done:
            self._fields |= {"num_rows": self._num_rows, "is_read": True}
            seen = self._seen
            may_detach = not self._gate.has_program_profiled and not self._has_graphs
            if seen is not None and seen.is_host_late and may_detach:
                self._fields["is_detached"] = self._is_over = detach(seen.call_names)
            self._finish()
            if self._is_over:
                self._gate.remove()

    def _finish(self) -> None:
        """Says how the sample ended; frees what torch keeps before another one begins."""
        self._seen, self._rows = None, iter(())
        self._state = _State.WAITING
        cost_ns = self._cost_ns + self._session.clock() - self._visit_ns
        self._session.journal("update", kernel_window={**self._fields, "cost_ns": cost_ns})

    def give_way(self) -> None:
        """The program is about to use torch's profiler itself."""
        window, self._window = self._window, None
        self._visit_ns = self._session.clock()
        if window is not None:
            self._session.stack_sampler.stop()
            self._session.guard.run(SITE, window.disable)
            self._fields |= {"problem": "the program started a profiler of its own"}
            self._fields["disturbed_to_step"] = self._last_step + 2
            self._finish()

    def _drop(self) -> None:
        self._session.stack_sampler.stop()
        first = self._session.guard.first_messages.get(SITE, "unknown")
        window, self._window = self._window, None
        if window is not None:
            self._session.guard.run(SITE, window.disable)
        if self._state is not _State.WAITING:
            self._fields |= {"problem": first, "disturbed_to_step": self._last_step + 2}
            self._finish()
        self._end_for_good(f"torch's profiler failed ({first})")

    def _end_for_good(self, why: str) -> None:
        self._is_over = True
        self._gate.remove()
        self._session.note_gap(SITE, f"no kernel samples: {why}")

    def close(self) -> None:
        """The recording ends: a sample that is complete is read, others are given up."""
        run = self._session.guard.run
        self._visit_ns = self._session.clock()
        window = self._window
        if window is not None:
            if self._state is _State.DRAINING and window.is_passed:
                run(SITE, self._end, window, self._last_step)
            else:
                self._window = None
                run(SITE, window.disable)
                self._fields |= {
                    "problem": "the recording ended",
                    "disturbed_to_step": self._last_step,
                }
                self._finish()
        if self._state is _State.READING:
            run(SITE, self._read, 1_000_000_000)
        self._gate.remove()
        if self._graph_tap is not None:
            self._graph_tap.remove()
        self._is_over = True

    def disarm_after_fork(self) -> None:
        self._is_over = True
        self._window = self._seen = None
        self._rows = iter(())
