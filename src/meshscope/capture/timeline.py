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
    """Open phases of one thread. The innermost is kept in fields, the ones around it in a list:
    phases seldom nest, and this runs inside every step."""

    __slots__ = ("children_ns", "mark", "name_id", "outer", "start_ns", "thread_bits")

    def __init__(self, thread_number: int) -> None:
        self.thread_bits = min(thread_number, _MAX_THREAD_NUMBER) << 32
        self.name_id = 0
        """Of the innermost open phase; 0 when none is open."""
        self.start_ns = 0
        self.children_ns = 0
        self.mark: Mark | None = None
        self.outer: list[tuple[int, int, int, Mark | None]] = []

    def has(self, name_id: int) -> bool:
        """Whether a phase of that name is open."""
        return self.name_id == name_id or any(frame[0] == name_id for frame in self.outer)


class Timeline:
    """The phase stacks and the step counter of one rank."""

    __slots__ = (
        "_clock",
        "_other_stacks",
        "_own_thread",
        "device",
        "input_tokens",
        "is_sampled",
        "last_step",
        "microbatch",
        "next_visit_ns",
        "on_visit",
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
        self.on_visit: Callable[[int, int], None] = _ignore_visit
        """Called with step and time at the end of a step, not before `next_visit_ns`."""
        self.next_visit_ns = 0
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
        self.input_tokens = MISSING
        self.own_ns = 0
        self.is_sampled = True

    @property
    def current_step(self) -> int:
        """The open step, else the last finished one, else -1."""
        return self.step if self.step_start_ns else self.last_step

    def enter(self, name_id: int, start_ns: int) -> None:
        """A phase begins."""
        stack = self.stack if get_ident() == self._own_thread else self._stack_elsewhere()
        if stack.name_id:
            stack.outer.append((stack.name_id, stack.start_ns, stack.children_ns, stack.mark))
        stack.name_id = name_id
        stack.start_ns = start_ns
        stack.children_ns = 0
        device = self.device
        stack.mark = None if device is None else device.mark(name_id, start_ns)

    def leave(self, name_id: int, end_ns: int, flags: int = 0) -> None:
        """The phase entered last under this name ends; phases left open inside it are closed."""
        stack = self.stack if get_ident() == self._own_thread else self._stack_elsewhere()
        if stack.name_id != name_id:
            if stack.has(name_id):
                self.leave(stack.name_id, end_ns, SpanFlag.ABORTED)
                self.leave(name_id, end_ns, flags)
            return
        start_ns = stack.start_ns
        duration_ns = end_ns - start_ns
        self_ns = duration_ns - stack.children_ns
        mark = stack.mark
        outer = stack.outer
        depth = 0
        if outer:
            depth = min(len(outer), _MAX_DEPTH)
            stack.name_id, stack.start_ns, children_ns, stack.mark = outer.pop()
            stack.children_ns = children_ns + duration_ns
        else:
            stack.name_id = 0
        self.spans.put(
            name_id | depth << 16 | flags << 24 | stack.thread_bits,
            start_ns,
            duration_ns,
            self_ns,
            self.microbatch,
            0,
            0,
        )
        if mark is not None and self.device is not None:
            self.device.close_span(mark, self.microbatch)

    def abort_open(self, name_id: int, end_ns: int) -> None:
        """Closes the phase of that name if it is still open: its end never came."""
        if self.stack.has(name_id):
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
        depth = min(len(stack.outer) + bool(stack.name_id), _MAX_DEPTH)
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
        self.input_tokens = MISSING
        self.own_ns = 0
        self.is_sampled = self.step % SAMPLE_EVERY_STEPS == 0

    def end_step(self, end_ns: int, flags: int = 0) -> None:
        """The open step ends and is written down."""
        start_ns = self.step_start_ns
        if not start_ns:
            return
        step = self.step
        if end_ns >= self.next_visit_ns:
            self.on_visit(step, end_ns)
        own_ns = MISSING
        if self.is_sampled:
            own_ns = self.own_ns + self._clock() - end_ns
        self.steps.put(
            step, start_ns, end_ns, self.microbatch | flags << 32, own_ns, self.input_tokens, 0
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
        while self.stack.name_id:
            self.leave(self.stack.name_id, end_ns, SpanFlag.ABORTED)
        self.end_step(end_ns, flags | StepFlag.ABORTED)


def _ignore_visit(step: int, end_ns: int) -> None:
    """Until a recorder listens."""
