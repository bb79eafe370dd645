"""Turns enter/leave calls into span records and step boundaries, for one rank.

Phases of the training thread form a stack. When one ends, its duration goes to its parent's
children, so every record carries its self time and the self times of a step's phases, plus what
no phase claimed, sum to the step's wall clock exactly, in integer nanoseconds.

Which step a span belongs to is not stored: it follows from its times and the step table. That
lets a step's start be decided late (was that batch for training or for evaluation?) without
rewriting anything.

The usual course of a step (data, forward, backward, optimizer: once, in this order, not nested)
takes a short cut: each begin and end is one stored stamp, and one record at the step's end holds
them all. Phases that do not fit go through the stack and the span table.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any, ClassVar, Protocol

from meshscope.capture.steps.device_events import DeviceTimeline, Mark
from meshscope.store.schema import MISSING, SpanFlag, StepFlag
from meshscope.store.write.open_step import (
    FIRST_STAMP_WORD,
    NUM_STAMP_WORDS,
    PHASE_IDS,
    STAMP_FACTOR,
    OpenStepWriter,
)

SAMPLE_EVERY_STEPS = 17
"""The recorder's own cost is measured on one step in this many. Odd, because one in 2, 4, 8 … of
short steps is marked on the device, or has its communication recorded: of those measured as many
are as of the others."""
_PHASE_INDICES = {name_id: phase for phase, name_id in enumerate(PHASE_IDS)}
_OPTIMIZER = len(PHASE_IDS) - 1
_NO_SHORT_CUT = len(PHASE_IDS)
_MAX_PACKED_NS = 0xFFFFFFFF
_MAX_GAP_NS = 0x7FFFFFFF
_NO_STAMPS = (0,) * (2 * len(PHASE_IDS))
_MAX_THREAD_NUMBER = 0xFFFF
_MAX_DEPTH = 0xFF


class Sink(Protocol):
    """Takes one record: the seven payload words of its table."""

    @property
    def put(self) -> Callable[[int, int, int, int, int, int, int], None]:
        """Writes one record."""


class NullSink:
    """Swallows records: before a run is open, while it is paused, after it is closed."""

    def put(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None: ...


class PhaseStack:
    """Open phases of one thread. The innermost is kept in fields, the ones around it in a list:
    phases seldom nest, and this runs inside every step."""

    __slots__ = ("children_ns", "mark", "name_id", "outer", "start_ns", "thread_bits")

    def __init__(self, thread_number: int) -> None:
        self.thread_bits = min(thread_number, _MAX_THREAD_NUMBER) << 32
        self.name_id = 0
        """Name id of the innermost open phase; 0 when none is open."""
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
        "_has_stamp_file",
        "_last_flags",
        "_last_samples",
        "_last_tokens",
        "_other_stacks",
        "_own_thread",
        "_sample_every_steps",
        "actions",
        "device",
        "done_phase",
        "epoch_ns",
        "input_samples",
        "input_tokens",
        "is_sampled",
        "last_step",
        "microbatch",
        "microbatch_stride",
        "next_visit_ns",
        "on_visit",
        "open_phase",
        "own_ns",
        "phases",
        "spans",
        "stack",
        "stamps",
        "step",
        "step_flags",
        "step_start_ns",
        "steps",
        "stored",
    )

    is_native: ClassVar[bool] = False
    """Whether its fields and its hot methods are compiled: see `native_steps`."""
    _stack_type: ClassVar[type[PhaseStack]] = PhaseStack
    _new_stamps: ClassVar[Any] = staticmethod(lambda: list(_NO_STAMPS))
    _no_stamps: ClassVar[Any] = _NO_STAMPS

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._sample_every_steps = SAMPLE_EVERY_STEPS
        self.spans: Sink = NullSink()
        self.steps: Sink = NullSink()
        self.phases: Sink = NullSink()
        self.actions: Sink = NullSink()
        self.stored = memoryview(bytearray(8 * NUM_STAMP_WORDS)).cast("q")
        """Where stamps are stored; scratch memory while there is no file for them."""
        self._has_stamp_file = False
        self.epoch_ns = 0
        self.device: DeviceTimeline | None = None
        self.on_visit: Callable[[int, int], None] = _ignore_visit
        """Called with step and time at the end of a step, not before `next_visit_ns`."""
        self.next_visit_ns = 0
        self._own_thread = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the open step and all open phases; step numbering starts again."""
        self.stack = self._stack_type(0)
        self._other_stacks: dict[int, PhaseStack] = {}
        self.step = 0
        self.last_step = MISSING
        self.step_start_ns = 0
        """0 when no step is open."""
        self.step_flags = self._last_flags = 0
        """Of the open step, besides those given where it ends."""
        self.microbatch = 0
        self.microbatch_stride = 1
        """How far a backward pass moves the microbatch index; 0 while the program sets it."""
        self.input_samples = self.input_tokens = self._last_samples = self._last_tokens = 0
        self.own_ns = 0
        self.is_sampled = True
        self.stamps = self._new_stamps()
        """Begin and end of each usual phase of the open step; 0 when it did not occur."""
        self.open_phase = -1
        """Index of the usual phase that is open; -1 when none."""
        self.done_phase = -1 if self._has_stamp_file else _NO_SHORT_CUT
        """Index of the last one that is over; `_NO_SHORT_CUT` sends all through the stack."""

    def store_stamps(self, writer: OpenStepWriter | None) -> None:
        """Keeps stamps of the open step in a file; without one there is no short cut."""
        self.flush_stamps()
        self._has_stamp_file = writer is not None
        if writer is None:
            self.stored = memoryview(bytearray(8 * NUM_STAMP_WORDS)).cast("q")
            self.epoch_ns = 0
        else:
            self.stored = writer.words
            self.epoch_ns = writer.epoch_ns
        self.done_phase = _NO_SHORT_CUT if writer is None else -1

    def mark_device(self, device: DeviceTimeline | None) -> None:
        """Marks phases on `device` from now on; a marked phase cannot take the short cut."""
        self.flush_stamps()
        self.device = device
        self.done_phase = -1 if self._has_stamp_file and device is None else _NO_SHORT_CUT

    @property
    def current_step(self) -> int:
        """The open step, else the last finished one, else -1."""
        return self.step if self.step_start_ns else self.last_step

    def stack_here(self) -> PhaseStack:
        """The calling thread's stack; the first caller is taken for the training thread."""
        ident = get_ident()
        if ident == self._own_thread:
            return self.stack
        if not self._own_thread:
            self._own_thread = ident
            return self.stack
        found = self._other_stacks.get(ident)
        if found is None:
            found = self._other_stacks[ident] = self._stack_type(len(self._other_stacks) + 1)
        return found

    def _become_training_thread(self) -> None:
        """Makes the calling thread the training thread: it starts steps."""
        if self._own_thread:
            self._leave_short_cut()
            own = self._other_stacks.pop(get_ident(), None)
            own = own or self._stack_type(len(self._other_stacks) + 1)
            earlier, self.stack = self.stack, own
            earlier.thread_bits, own.thread_bits = own.thread_bits, 0
            self._other_stacks[self._own_thread] = earlier
        self._own_thread = get_ident()

    def enter(self, stack: PhaseStack, name_id: int, start_ns: int) -> None:
        """Opens a phase."""
        if not stack.name_id and stack is self.stack:
            if self.open_phase < 0:
                phase = _PHASE_INDICES.get(name_id, -1)
                # A packed phase is one of microbatch 0.
                if phase > self.done_phase and (not self.microbatch or phase == _OPTIMIZER):
                    self.open_phase = phase
                    self.stamps[phase + phase] = start_ns
                    self.stored[FIRST_STAMP_WORD + phase + phase] = (
                        start_ns - self.epoch_ns
                    ) * STAMP_FACTOR
                    return
                if phase >= 0:
                    if self.stamps[phase + phase]:  # it came before, and stands nowhere but here
                        done_phase = self.done_phase
                        self._put_usual_phases()
                        self.done_phase = done_phase
                    self._store(phase + phase, start_ns)
            else:
                self._leave_short_cut()
        if stack.name_id:
            stack.outer.append((stack.name_id, stack.start_ns, stack.children_ns, stack.mark))
        stack.name_id = name_id
        stack.start_ns = start_ns
        stack.children_ns = 0
        device = self.device
        stack.mark = None if device is None else device.mark(name_id, start_ns)

    def leave(self, stack: PhaseStack, name_id: int, end_ns: int, flags: int = 0) -> None:
        """Closes the last phase of this name, and phases left open inside it."""
        phase = self.open_phase
        if phase >= 0 and stack is self.stack:
            if PHASE_IDS[phase] == name_id and not flags:
                self.open_phase = -1
                self.done_phase = phase
                self.stamps[phase + phase + 1] = end_ns
                self.stored[FIRST_STAMP_WORD + 1 + phase + phase] = (
                    end_ns - self.epoch_ns
                ) * STAMP_FACTOR
                return
            self._leave_short_cut()
        if stack.name_id != name_id:
            if stack.has(name_id):
                self.leave(stack, stack.name_id, end_ns, SpanFlag.ABORTED)
                self.leave(stack, name_id, end_ns, flags)
            return
        start_ns = stack.start_ns
        duration_ns = end_ns - start_ns
        code = name_id | flags << 24 | stack.thread_bits
        self_ns = duration_ns - stack.children_ns
        mark = stack.mark
        stack.name_id = 0
        if stack.outer:
            code |= min(len(stack.outer), _MAX_DEPTH) << 16
            stack.name_id, stack.start_ns, children_ns, stack.mark = stack.outer.pop()
            stack.children_ns = children_ns + duration_ns
        self.spans.put(code, start_ns, duration_ns, self_ns, self.microbatch, 0, 0)
        if not stack.name_id and name_id in _PHASE_INDICES and stack is self.stack:
            self._store(2 * _PHASE_INDICES[name_id] + 1, end_ns)
        if mark is not None:
            self._close_mark(mark)

    def _store(self, stamp: int, time_ns: int) -> None:
        """Keeps a stamp in the file that a killed process leaves behind, if there is one."""
        if self._has_stamp_file:
            self.stored[FIRST_STAMP_WORD + stamp] = (time_ns - self.epoch_ns) * STAMP_FACTOR

    def _leave_short_cut(self) -> None:
        """Something nests in the phase that is going on: put it on the stack, where it can."""
        phase = self.open_phase
        if phase >= 0:
            self.open_phase = -1
            stack = self.stack
            stack.name_id = PHASE_IDS[phase]
            stack.start_ns = self.stamps[phase + phase]
            stack.children_ns = 0
            stack.mark = None
            self.stamps[phase + phase] = 0

    def flush_stamps(self) -> None:
        """Writes finished phases that belong to no finished step (the end of a run, a pause)."""
        self._leave_short_cut()
        if -1 < self.done_phase < _NO_SHORT_CUT:
            self._put_usual_phases()

    def disarm(self) -> None:
        """In a forked child: nothing of this process may reach the parent's files."""
        self.spans = self.steps = self.phases = self.actions = NullSink()
        self.device = None
        self.open_phase = -1
        self.store_stamps(None)

    def is_inside(self, name_id: int) -> bool:
        """Whether the training thread has a phase of that name open."""
        phase = self.open_phase
        return PHASE_IDS[phase] == name_id if phase >= 0 else self.stack.has(name_id)

    def _put_usual_phases(self) -> None:
        """Writes the stamps taken on the short cut as one record."""
        stamps = self.stamps
        optimizer = 0
        if stamps[6]:
            gap_ns = stamps[6] - stamps[5]
            duration_ns = stamps[7] - stamps[6]
            if stamps[5] and gap_ns <= _MAX_GAP_NS and duration_ns <= _MAX_PACKED_NS:
                optimizer = gap_ns << 32 | duration_ns
            if not optimizer:  # too long, without a backward before it, or nothing at all
                self.spans.put(PHASE_IDS[3], stamps[6], duration_ns, duration_ns, 0, 0, 0)
        if stamps[2] or stamps[0] or stamps[4]:
            a, b, c, d, e, f, _, _ = stamps
            self.phases.put(a, b, c, d, e, f, optimizer)
        stamps[:] = self._no_stamps
        self.done_phase = -1

    def _close_mark(self, mark: Mark) -> None:
        if self.device is not None:
            self.device.close_span(mark, self.microbatch)

    def abort_open(self, name_id: int, end_ns: int) -> None:
        """Closes the training thread's phase of that name if it is open: its end never came."""
        if self.is_inside(name_id):
            self.leave(self.stack, name_id, end_ns, SpanFlag.ABORTED)

    def put_detail(self, name_id: int, start_ns: int, end_ns: int, flags: int) -> None:
        """A named span that is not a phase: it takes nothing from the phases around it."""
        stack = self.stack_here()
        is_inside = stack.name_id or (self.open_phase >= 0 and stack is self.stack)
        depth = min(len(stack.outer) + bool(is_inside), _MAX_DEPTH)
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

    def put_part(
        self, stack: PhaseStack, name_id: int, start_ns: int, end_ns: int, flags: int
    ) -> None:
        """A phase inside the open one, of the past: what it took is no longer that one's."""
        duration_ns = end_ns - start_ns
        depth = min(len(stack.outer) + 1, _MAX_DEPTH)
        code = name_id | depth << 16 | flags << 24 | stack.thread_bits
        stack.children_ns += duration_ns
        self.spans.put(code, start_ns, duration_ns, duration_ns, self.microbatch, 0, 0)

    def put_pause(self, name_id: int, start_ns: int, end_ns: int, ident: int) -> None:
        """A detail span of the past, of the thread of that ident."""
        known = self.stack if ident == self._own_thread else self._other_stacks.get(ident)
        thread_bits = _MAX_THREAD_NUMBER << 32 if known is None else known.thread_bits
        code = name_id | SpanFlag.DETAIL << 24 | thread_bits
        duration_ns = end_ns - start_ns
        self.spans.put(code, start_ns, duration_ns, duration_ns, MISSING, 0, 0)

    def begin_step(self, start_ns: int) -> None:
        """A step begins (at a moment that may lie a little in the past)."""
        if get_ident() != self._own_thread:
            self._become_training_thread()
        self.step_start_ns = start_ns

    def end_step(self, end_ns: int, flags: int = 0) -> None:
        """The open step ends and is written down; everything is set for the next one."""
        start_ns = self.step_start_ns
        if not start_ns:
            return
        step = self.step
        flags |= self.step_flags
        self._last_flags = self.step_flags
        if end_ns >= self.next_visit_ns:
            self.on_visit(step, end_ns)
        if self.open_phase >= 0:
            self._leave_short_cut()
        if -1 < self.done_phase < _NO_SHORT_CUT:
            self._put_usual_phases()
        self.steps.put(
            step,
            start_ns,
            end_ns,
            self.microbatch | flags << 32,
            self.own_ns + self._clock() - end_ns if self.is_sampled else MISSING,
            self.input_tokens or MISSING,
            self.input_samples,
        )
        self.last_step = step
        self.step = step = step + 1
        self.step_start_ns = self.microbatch = self.own_ns = 0
        self._last_tokens, self._last_samples = self.input_tokens, self.input_samples
        self.input_tokens = self.input_samples = 0
        self.is_sampled = not step % self._sample_every_steps

    def set_microbatch(self, index: int, stride: int) -> None:
        """The program labels what follows; `stride` is what a backward pass adds."""
        self.microbatch = max(int(index), 0)
        self.microbatch_stride = stride

    def reopen_step(self, step: int, start_ns: int, microbatch: int) -> None:
        """Goes on with a step that was written as ended; its next end replaces that record."""
        self.step = step
        self.step_start_ns = start_ns
        self.microbatch = microbatch
        self.last_step = step - 1
        self.step_flags |= self._last_flags
        self.input_tokens += self._last_tokens
        self.input_samples += self._last_samples

    def abort_step(self, end_ns: int, flags: int = 0) -> None:
        """Ends the open step after an exception, with everything still open inside it."""
        self._leave_short_cut()
        while self.stack.name_id:
            self.leave(self.stack, self.stack.name_id, end_ns, SpanFlag.ABORTED)
        self.end_step(end_ns, flags | StepFlag.ABORTED)


def _ignore_visit(step: int, end_ns: int) -> None: ...
