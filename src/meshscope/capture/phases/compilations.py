"""torch.compile at work: a phase `compile`, and a line in the journal with its reason.

torch calls back when it begins and ends to compile, whatever made it necessary: a new frame, a
guard that failed, a backward that was put off, a graph that is recorded. The callbacks are
registered once the program has imported torch._dynamo, never by importing it, and again after
`torch._dynamo.reset()`, which drops them. What torch measured (which function, which guard failed)
is complete only after the callback; it is read at the end of the step.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.stacks.frames import FrameTexts, Owner, shorten_path
from meshscope.capture.steps.hooks import BACKWARD
from meshscope.capture.steps.timeline import PhaseStack, Timeline
from meshscope.store.schema import BUILTIN_NAMES

COMPILE = BUILTIN_NAMES["compile"]
_MAX_LINES = 200
"""Journal lines of one attempt; further compilations are phases only."""
_MAX_TEXT = 300
_SHOWN_FRAMES = 2


@dataclass(slots=True, kw_only=True)
class _Compilation:
    """One that is under way, or whose reason is not known yet."""

    compile_id: str
    trigger: str
    step: int
    start_ns: int
    end_ns: int
    stack: PhaseStack
    where: str


class Compilations:
    """Listens to torch.compile for one recorder."""

    def __init__(
        self,
        timeline: Timeline,
        guard: Guard,
        clock: Callable[[], int],
        journal: Callable[..., None],
    ) -> None:
        self._timeline = timeline
        self._clock = clock
        self._journal = journal
        self._begins = guard.protect("compile begin", self._compile_begins)
        self._ends = guard.protect("compile end", self._compile_ends)
        self._texts: FrameTexts | None = None
        self.on_begin: Callable[[], None] | None = None
        """Called before torch traces anything."""
        self.on_end: Callable[[], None] | None = None
        """Called after each compilation: `settle` is due."""
        self.begin_attempt()

    @property
    def has_seen_any(self) -> bool:
        """Whether something was compiled in this attempt."""
        return bool(self._num_lines or self._pending)

    def begin_attempt(self) -> None:
        self._open: _Compilation | None = None
        self._pending: list[_Compilation] = []
        self._num_lines = 0

    def find(self) -> None:
        """Registers with torch, if the program has loaded its compiler. Cheap: call it often."""
        handler = _handler()
        if handler is None or self._begins in handler.start_callbacks:
            return
        handler.register_start_callback(self._begins)
        handler.register_end_callback(self._ends)

    def remove(self) -> None:
        handler = _handler()
        if handler is not None and self._begins in handler.start_callbacks:
            handler.remove_start_callback(self._begins)
            handler.remove_end_callback(self._ends)

    def _compile_begins(self, *args: Any) -> None:
        if self.on_begin is not None:
            self.on_begin()
        start_ns = self._clock()
        timeline = self._timeline
        # A backward that was put off is compiled by a thread of autograd, for which the training
        # thread waits inside its phase: the time is the training thread's.
        is_waited_for = timeline.is_inside(BACKWARD)
        stack = timeline.stack if is_waited_for else timeline.stack_here()
        timeline.enter(stack, COMPILE, start_ns)
        self._open = _Compilation(
            compile_id=str(getattr(args[0], "compile_id", "")) if args else "",
            trigger=_name_trigger(args[0]) if args else "",
            step=timeline.step,
            start_ns=start_ns,
            end_ns=0,
            stack=stack,
            where=self._find_where(),
        )

    def _find_where(self) -> str:
        """Which line of the program called what is compiled; empty in a thread of autograd."""
        if self._texts is None:
            self._texts = FrameTexts()
        spots = self._texts.find_spots(sys._getframe(1))
        if self._texts.find_owner(spots[0][0].co_filename) is Owner.NOBODY:
            return ""
        return self._texts.write(spots[:_SHOWN_FRAMES])

    def _compile_ends(self, *args: Any) -> None:
        found, self._open = self._open, None
        if found is None:
            return
        found.end_ns = self._clock()
        self._timeline.leave(found.stack, COMPILE, found.end_ns)
        if self._num_lines + len(self._pending) < _MAX_LINES:
            self._pending.append(found)
            if self.on_end is not None:
                self.on_end()

    def settle(self) -> None:
        """Writes down what has been compiled since the last time, and why."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        measured = _read_measured()
        for found in pending:
            self._num_lines += 1
            known = measured.get(found.compile_id)
            self._journal(
                "update",
                compilation={
                    "compile_id": found.compile_id[:_MAX_TEXT],
                    "trigger": found.trigger,
                    "step": found.step,
                    "start_host_mono_ns": found.start_ns,
                    "duration_ns": found.end_ns - found.start_ns,
                    "where": found.where[:_MAX_TEXT],
                    "function": _name_function(known),
                    "reason": _find_reason(known),
                },
            )


def _handler() -> Any:
    """torch's list of callbacks, if the program has imported it to its end."""
    module = sys.modules.get("torch._dynamo.callback")
    return getattr(module, "callback_handler", None)


def _name_trigger(args: Any) -> str:
    """`dynamo`, `lazy_backward` or `cudagraph_recording`."""
    return str(getattr(getattr(args, "callback_trigger", None), "name", "")).lower()


def _read_measured() -> dict[str, Any]:
    """What torch measured of its last compilations, by id; of forward and backward the forward."""
    utils = sys.modules.get("torch._dynamo.utils")
    read = getattr(utils, "get_compilation_metrics", None)
    found: dict[str, Any] = {}
    for measured in read() if read is not None else ():
        if getattr(measured, "co_name", None):
            found[str(measured.compile_id)] = measured
    return found


def _name_function(measured: Any) -> str:
    if measured is None:
        return ""
    path, line = measured.co_filename or "", measured.co_firstlineno or 0
    return f"{shorten_path(path)}:{line} {measured.co_name}"[:_MAX_TEXT]


def _find_reason(measured: Any) -> str:
    """Which guard failed; empty when it was compiled for the first time."""
    text = str(getattr(measured, "recompile_reason", None) or "")
    head, separator, rest = text.partition(": ")
    is_id = bool(separator) and head.replace("/", "").replace("_", "").isdigit()
    return " ".join((rest if is_id else text).split())[:_MAX_TEXT]
