"""The blocks of the explicit API: a step, a phase, a detail span. Reusable and re-entrant.

What is open stands on the timeline, not in these objects, so one object per name serves any
nesting and any thread. Flat for the same reason as `hooks`: they run inside every step.
"""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from meshscope.capture.guard import Guard
from meshscope.capture.steps.step_inference import StepInference
from meshscope.capture.steps.timeline import Timeline
from meshscope.store.schema import SpanFlag, StepFlag

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


class StepBlock:
    """A step marked by the program. `number` is that of the next one, if it was given."""

    __slots__ = ("_caught", "_clock", "_steps", "_timeline", "number")

    def __init__(
        self, timeline: Timeline, steps: StepInference, guard: Guard, clock: Callable[[], int]
    ) -> None:
        self._timeline = timeline
        self._steps = steps
        self._caught = guard.caught
        self._clock = clock
        self.number: int | None = None

    def begin(self, step: int | None = None) -> None:
        """Starts a step; an open one ends here."""
        now_ns = self._clock()
        try:
            self._steps.is_explicit = True
            timeline = self._timeline
            timeline.end_step(now_ns, StepFlag.EXPLICIT)
            if step is not None:
                timeline.step = int(step)
            timeline.begin_step(now_ns)
        except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
            self._caught("step begin", error)

    def end(self, *, is_aborted: bool) -> None:
        """Ends the step, also after an exception."""
        now_ns = self._clock()
        try:
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
