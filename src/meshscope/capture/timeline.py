"""Turns enter/leave calls into span records and step boundaries, for one rank.

Phases of the training thread form a stack. When one ends, its duration goes to its parent's
children, so every record carries its self time and the self times of a step's phases, plus what
no phase claimed, sum to the step's wall clock exactly, in integer nanoseconds.

Which step a span belongs to is not stored: it follows from its times and the step table. That
lets a step's start be decided late (was that batch for training or for evaluation?) without
rewriting anything.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Protocol

from meshscope.capture.device_events import DeviceTimeline, Mark
from meshscope.store.schema import MISSING, SpanFlag, StepFlag

SAMPLE_EVERY_STEPS = 16
"""The recorder's own cost is measured on one step in this many."""
_MAX_THREAD_NUMBER = 0xFFFF
_MAX_DEPTH = 0xFF


class Sink(Protocol):
    """Takes one record: the seven payload words of its table."""

    @property
    def put(self) -> Callable[[int, int, int, int, int, int, int], None]:
        """Writes one record."""


class NullSink:
    """Swallows records: before a run is open, while it is paused, after it is closed."""

    def put(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        """Does nothing."""


class PhaseStack:
    """Open phases of one thread, as parallel lists: cheaper than an object per phase."""

    __slots__ = ("children_ns", "marks", "names", "starts_ns", "thread_bits")

    def __init__(self, thread_number: int) -> None:
        self.thread_bits = min(thread_number, _MAX_THREAD_NUMBER) << 32
        self.names: list[int] = []
        self.starts_ns: list[int] = []
        self.children_ns: list[int] = []
        self.marks: list[Mark | None] = []


class Timeline:
    """The phase stacks and the step counter of one rank."""

    __slots__ = (
        "_clock",
        "_other_stacks",
        "_own_thread",
        "device",
        "is_sampled",
        "last_step",
        "microbatch",
        "num_spans",
        "on_step_end",
        "own_ns",
        "spans",
        "stack",
        "step",
        "step_start_ns",
        "steps",
    )

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.spans: Sink = NullSink()
        self.steps: Sink = NullSink()
        self.device: DeviceTimeline | None = None
        self.on_step_end: Callable[[int, int], None] = _ignore_step_end
        self._own_thread = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the open step and all open phases; step numbering starts again."""
        self.stack = PhaseStack(0)
        self._other_stacks: dict[int, PhaseStack] = {}
        self.step = 0
        self.last_step = MISSING
        self.step_start_ns = 0
        """0 when no step is open."""
        self.microbatch = 0
        self.num_spans = 0
        self.own_ns = 0
        self.is_sampled = True

    @property
    def current_step(self) -> int:
        """The open step, else the last finished one, else -1."""
        return self.step if self.step_start_ns else self.last_step

    def enter(self, name_id: int, start_ns: int) -> None:
        """A phase begins."""
        stack = self.stack if get_ident() == self._own_thread else self._stack_elsewhere()
        stack.names.append(name_id)
        stack.starts_ns.append(start_ns)
        stack.children_ns.append(0)
        device = self.device
        stack.marks.append(None if device is None else device.mark(name_id, start_ns))

    def leave(self, name_id: int, end_ns: int, flags: int = 0) -> None:
        """The phase entered last under this name ends; phases left open inside it are closed."""
        stack = self.stack if get_ident() == self._own_thread else self._stack_elsewhere()
        names = stack.names
        if not names:
            return
        if names[-1] != name_id:
            if name_id not in names:
                return
            self.leave(names[-1], end_ns, SpanFlag.ABORTED)
            self.leave(name_id, end_ns, flags)
            return
        names.pop()
        start_ns = stack.starts_ns.pop()
        duration_ns = end_ns - start_ns
        self_ns = duration_ns - stack.children_ns.pop()
        depth = len(names)
        if depth:
            stack.children_ns[-1] += duration_ns
        self.num_spans += 1
        self.spans.put(
            name_id | depth << 16 | flags << 24 | stack.thread_bits,
            start_ns,
            duration_ns,
            self_ns,
            self.microbatch,
            0,
            0,
        )
        mark = stack.marks.pop()
        if mark is not None and self.device is not None:
            self.device.close_span(mark, self.microbatch)

    def abort_open(self, name_id: int, end_ns: int) -> None:
        """Closes the phase of that name if it is still open: its end never came."""
        if name_id in self.stack.names:
            self.leave(name_id, end_ns, SpanFlag.ABORTED)

    def _stack_elsewhere(self) -> PhaseStack:
        """The stack of a thread other than the training thread, which is whoever comes first."""
        ident = get_ident()
        if not self._own_thread:
            self._own_thread = ident
            return self.stack
        found = self._other_stacks.get(ident)
        if found is None:
            found = self._other_stacks[ident] = PhaseStack(len(self._other_stacks) + 1)
        return found

    def put_detail(self, name_id: int, start_ns: int, end_ns: int, flags: int) -> None:
        """A named span that is not a phase: it takes nothing from the phases around it."""
        stack = self.stack if get_ident() == self._own_thread else self._stack_elsewhere()
        depth = min(len(stack.names), _MAX_DEPTH)
        duration_ns = end_ns - start_ns
        self.spans.put(
            name_id | depth << 16 | (flags | SpanFlag.DETAIL) << 24 | stack.thread_bits,
            start_ns,
            duration_ns,
            duration_ns,
            self.microbatch,
            0,
            0,
        )

    def begin_step(self, start_ns: int) -> None:
        """A step begins (at a moment that may lie a little in the past)."""
        self.step_start_ns = start_ns
        self.microbatch = 0
        self.num_spans = 0
        self.own_ns = 0
        self.is_sampled = self.step % SAMPLE_EVERY_STEPS == 0

    def end_step(self, end_ns: int, flags: int = 0) -> None:
        """The open step ends and is written down."""
        if not self.step_start_ns:
            return
        step = self.step
        self.on_step_end(step, end_ns)
        if self.is_sampled:
            self.own_ns += self._clock() - end_ns
        self.steps.put(
            step,
            self.step_start_ns,
            end_ns,
            self.microbatch | flags << 32,
            self.own_ns if self.is_sampled else MISSING,
            self.num_spans,
            0,
        )
        self.last_step = step
        self.step = step + 1
        self.step_start_ns = 0

    def reopen_step(self, step: int, start_ns: int, microbatch: int) -> None:
        """Goes on with a step that was written as ended; its next end replaces that record."""
        self.step = step
        self.step_start_ns = start_ns
        self.microbatch = microbatch
        self.last_step = step - 1

    def abort_step(self, end_ns: int, flags: int = 0) -> None:
        """Ends the open step after an exception, with everything still open inside it."""
        while self.stack.names:
            self.leave(self.stack.names[-1], end_ns, SpanFlag.ABORTED)
        self.end_step(end_ns, flags | StepFlag.ABORTED)


def _ignore_step_end(step: int, end_ns: int) -> None:
    """Until a recorder listens."""
