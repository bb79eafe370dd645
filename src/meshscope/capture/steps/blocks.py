"""The blocks of the explicit API: a step, a phase, a detail span. Reusable and re-entrant. And what
is no block: a clock that names what was, a timer, a duration measured elsewhere.

What is open stands on the timeline, not in these objects, so one object per name serves any
nesting and any thread. Flat for the same reason as `hooks`: they run inside every step.
"""

import functools
import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from meshscope.capture.guard import Guard
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.errors import CaptureError
from meshscope.store.schema import BUILTIN_NAMES, SpanFlag, StepFlag

_DATA = BUILTIN_NAMES["data"]
_UNNAMED = "unattributed"
_LONGEST_SECONDS = 1e9

F = TypeVar("F", bound=Callable[..., Any])


class Phase:
    """Times a block, or a function when used as a decorator, as a phase."""

    __slots__ = ("_caught", "_clock", "_find_id", "_name", "_timeline")

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        guard: Guard,
        clock: Callable[[], int],
        find_id: Callable[[str], int],
    ) -> None:
        self._name = name
        self._timeline = timeline
        self._caught = guard.caught
        self._clock = clock
        self._find_id = find_id

    def __enter__(self) -> None:
        try:
            name_id = self._find_id(self._name)  # may open the run: before the clock is read
            now_ns = self._clock()
            timeline = self._timeline
            timeline.enter(timeline.stack_here(), name_id, now_ns)
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("phase begin", error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now_ns = self._clock()
        try:
            timeline = self._timeline
            flags = 0 if kind is None else SpanFlag.ABORTED
            timeline.leave(timeline.stack_here(), self._find_id(self._name), now_ns, flags)
            if timeline.is_sampled:
                timeline.own_ns += self._clock() - now_ns
        except Exception as own_error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("phase end", own_error)

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]


class Span(Phase):
    """Like `Phase`, but a detail inside a phase: its time stays the phase's."""

    __slots__ = ("_open",)

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._open = threading.local()

    def __enter__(self) -> None:
        self._open.__dict__.setdefault("starts", []).append(self._clock())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = self._clock()
        try:
            flags = 0 if kind is None else SpanFlag.ABORTED
            name_id = self._find_id(self._name)
            self._timeline.put_detail(name_id, self._open.starts.pop(), end_ns, flags)
        except Exception as own_error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("span end", own_error)


class Timer:
    """Started here and stopped there, in another function or thread: a detail span."""

    __slots__ = ("_caught", "_clock", "_find_id", "_name", "_start_ns", "_timeline")

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        guard: Guard,
        clock: Callable[[], int],
        find_id: Callable[[str], int],
    ) -> None:
        self._name = name
        self._timeline = timeline
        self._caught = guard.caught
        self._clock = clock
        self._find_id = find_id
        self._start_ns: int | None = None

    @property
    def is_running(self) -> bool:
        return self._start_ns is not None

    def start(self) -> "Timer":
        """Starts, or starts again: what ran until then is not recorded."""
        self._start_ns = self._clock()
        return self

    def stop(self) -> float | None:
        """Records the time since `start`, and returns it in seconds; None if it was not started."""
        end_ns = self._clock()
        start_ns, self._start_ns = self._start_ns, None
        try:
            if start_ns is None:
                raise CaptureError(f"the timer {self._name!r} was stopped, but it does not run")
            name_id = self._find_id(self._name)
            if name_id:
                self._timeline.put_detail(name_id, start_ns, end_ns, 0)
        except Exception as error:  # noqa: BLE001 - the guard's: a timer never hurts
            self._caught("timer", error)
        return None if start_ns is None else (end_ns - start_ns) / 1e9


class PhaseClock:
    """Runs through the steps of a program that says afterwards what the time was spent on.

    Time since the last mark is an open phase without a name; `mark` names and closes it, and opens
    the next one. Phases inside take their time from it, as from any phase. What is not named by
    the end of a step is dropped: it is unattributed.
    """

    __slots__ = (
        "_clock", "_find_id", "_steps", "_timeline", "began_ns", "has_company", "is_running",
        "next_start_ns",
    )  # fmt: skip

    def __init__(
        self,
        timeline: Timeline,
        steps: StepInference,
        clock: Callable[[], int],
        find_id: Callable[[str], int],
    ) -> None:
        self._timeline = timeline
        self._steps = steps
        self._clock = clock
        self._find_id = find_id
        self.is_running = False
        """From the first mark on."""
        self.has_company = False
        """Whether phases may have been recorded in the step of the first mark."""
        self.began_ns = 0
        """When the program said that the open step begins."""
        self.next_start_ns = 0
        """When the batch of the next step was asked for, if the program said so."""

    def mark(self, name: str) -> None:
        """The time since the last mark, or since the step began, was the phase `name`."""
        now_ns = self._clock()
        timeline = self._timeline
        if not (self._steps.is_explicit and timeline.step_start_ns):
            raise CaptureError(
                f"mark({name!r}) is outside of the steps that the program marks; call it between "
                "begin_step and end_step, or use phase()"
            )
        name_id, own_id = self._find_id(name), self._find_id(_UNNAMED)
        if not name_id or not own_id:
            return  # nothing is recorded
        stack = timeline.stack_here()
        if stack is not timeline.stack or timeline.open_phase >= 0:
            raise CaptureError(f"mark({name!r}) is inside a phase, or in another thread")
        if not stack.name_id:
            self._open_late(stack, own_id, now_ns)
        if stack.name_id != own_id:
            raise CaptureError(f"mark({name!r}) is inside a phase; call it after the phase")
        stack.name_id = name_id
        if stack.mark is not None:
            stack.mark.name_id = name_id
        timeline.leave(stack, name_id, now_ns)
        # The first mark may have opened the run: that was no phase.
        timeline.enter(stack, own_id, now_ns if self.is_running else self._clock())
        self.is_running = True
        if timeline.is_sampled:
            timeline.own_ns += self._clock() - now_ns

    def _open_late(self, stack: PhaseStack, own_id: int, now_ns: int) -> None:
        """The first mark: the step began before anyone knew that marks would come."""
        timeline = self._timeline
        timeline.enter(stack, own_id, now_ns if self.has_company else self.began_ns)
        self._forget_device_mark(stack)

    def add(self, name: str, seconds: float) -> None:
        """A duration that the program measured itself and that ended now.

        Inside an open phase it is a part of it, as a phase measured there would be. Outside,
        readers take it for a phase where it overlaps none that was measured; data between two
        steps then belong to the next one, which begins with them.
        """
        now_ns, seconds = self._clock(), float(seconds)
        if not (math.isfinite(seconds) and 0 <= seconds <= _LONGEST_SECONDS):
            raise CaptureError(f"a duration of {seconds!r} s; expected 0 to {_LONGEST_SECONDS:g}")
        name_id, timeline = self._find_id(name), self._timeline
        if not name_id:
            return  # nothing is recorded
        duration_ns = round(seconds * 1e9)
        start_ns = now_ns - duration_ns
        stack = timeline.stack_here()
        if timeline.open_phase >= 0 and stack is timeline.stack:
            timeline.flush_stamps()  # puts the open phase on the stack
        if stack.name_id and duration_ns <= now_ns - stack.start_ns - stack.children_ns:
            timeline.put_part(stack, name_id, start_ns, now_ns, SpanFlag.GIVEN)
            return
        timeline.put_detail(name_id, start_ns, now_ns, SpanFlag.GIVEN)
        is_ahead = self._steps.is_explicit or timeline.last_step < 0
        if name_id == _DATA and is_ahead and not timeline.step_start_ns:
            self.next_start_ns = self.next_start_ns or start_ns

    def find_start(self, end_ns: int, now_ns: int) -> int:
        """When the step began that begins now, `end_ns` being the end of the one before."""
        start_ns, self.next_start_ns = self.next_start_ns, 0
        is_first = self._timeline.last_step < 0
        return max(start_ns, end_ns) if end_ns or is_first else now_ns

    def step_begins(self, now_ns: int) -> None:
        """Called after a step has begun."""
        stack, own_id = self._timeline.stack_here(), self._find_id(_UNNAMED)
        if own_id and not stack.name_id:
            self._timeline.enter(stack, own_id, now_ns)

    def step_ends(self) -> None:
        """Called before a step ends: what has no name yet never gets one."""
        stack, own_id = self._timeline.stack, self._find_id(_UNNAMED)
        if own_id and stack.name_id == own_id and not stack.outer:
            self._forget_device_mark(stack)
            stack.name_id = 0

    def _forget_device_mark(self, stack: PhaseStack) -> None:
        mark, stack.mark = stack.mark, None
        if mark is not None and self._timeline.device is not None:
            self._timeline.device.forget(mark)


class StepBlock:
    """A step marked by the program. `number` is that of the next one, if it was given."""

    __slots__ = ("_caught", "_clock", "_end_ns", "_marks", "_steps", "_timeline", "number")

    def __init__(
        self,
        timeline: Timeline,
        steps: StepInference,
        guard: Guard,
        clock: Callable[[], int],
        marks: PhaseClock,
    ) -> None:
        self._timeline = timeline
        self._steps = steps
        self._caught = guard.caught
        self._clock = clock
        self._marks = marks
        self._end_ns = 0
        self.number: int | None = None

    def begin(self, step: int | None = None) -> None:
        """Starts a step; an open one ends here."""
        now_ns = self._clock()
        try:
            self._steps.is_explicit = True
            timeline, marks = self._timeline, self._marks
            if marks.is_running:
                marks.step_ends()
            end_ns = now_ns if timeline.step_start_ns else self._end_ns
            timeline.end_step(now_ns, StepFlag.EXPLICIT)
            if step is not None:
                timeline.step = int(step)
            marks.began_ns = start_ns = now_ns
            if marks.next_start_ns:
                start_ns = marks.find_start(end_ns, now_ns)
            timeline.begin_step(start_ns)
            if marks.is_running:
                marks.step_begins(now_ns)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("step begin", error)

    def end(self, *, is_aborted: bool) -> None:
        """Ends the step, also after an exception."""
        now_ns = self._end_ns = self._clock()
        try:
            if self._marks.is_running:
                self._marks.step_ends()
            if is_aborted:
                self._timeline.abort_step(now_ns, StepFlag.EXPLICIT)
            else:
                self._timeline.end_step(now_ns, StepFlag.EXPLICIT)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("step end", error)

    def __enter__(self) -> None:
        number, self.number = self.number, None
        self.begin(number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(is_aborted=kind is not None)
