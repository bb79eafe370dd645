"""Writes communication operations down: entered, ended, failed, waited for.

Operations found in torch (`collectives`) and operations timed by the program
(`communication`) end here. An operation stands in a slot of `now.bin` from the moment it is
called and gets its row in `collectives` when its end is known, so a run of any length can say what
a rank was doing when it stopped. Flat for the same reason as `hooks`: it runs inside every
operation.
"""

import json
from collections.abc import Callable
from typing import Any

from meshscope.capture.communication.events import Details
from meshscope.capture.guard import Guard, safe_text
from meshscope.capture.operations.process_groups import Channel, GroupBook, GroupEntry
from meshscope.capture.steps.timeline import NullSink, Sink, Timeline
from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.store.schema import MISSING, NoteCode, OperationFlag, StepFlag
from meshscope.store.write.in_flight import NO_SLOT, NUM_SLOTS, InFlightWriter, pack_row
from meshscope.store.write.open_step import PHASE_IDS
from meshscope.store.write.table_file import CHECK_MASK

_MAX_MESSAGE_CHARACTERS = 400
HAND_OVER_EVERY = 128
_MAX_MESSAGES = 200
"""Different texts one rank writes down; the rest is counted as failed without one."""
_OK = int(Outcome.OK)
_MAX_PHASE_ID = 0x7FFF

_Observe = Callable[[int, int, int, int, int, int, int, int, int, int, int], None]


Blocking = tuple[int, int, int, int, int, GroupEntry]
"""Words 1, 2, 3, 6 and 7 of a blocking operation's record, and its group."""


class Operation:
    """One operation of this rank that is not over yet: the words of its record, and its slot.

    Fields that are seldom set have their usual value in the class: one is made per operation.
    """

    a: int
    """Words 1, 2, 3, 6 and 7 of its record, as they were when it was called."""
    b: int
    c: int
    f: int
    g: int
    slot: int
    is_over = False
    has_future = False
    """Its end will be reported by torch's callback or by a device's event."""
    start_event: Any = None
    open_word = 0
    """In its channel's row, for a blocking one that stands there."""

    @property
    def group_id(self) -> int:
        """Id of its process group, as the rank numbers them."""
        return self.a >> 32 & 0xFFFF


class OperationLog:
    def __init__(
        self,
        timeline: Timeline,
        guard: Guard,
        clock: Callable[[], int],
        name_id: Callable[[str], int],
        open_run: Callable[[], bool],
        journal: Callable[..., None],
    ) -> None:
        self._journal = journal
        self.timeline = timeline
        self.guard = guard
        self._clock = clock
        self._name_id = name_id
        self._open_run = open_run
        self.is_on = True
        """False: operations are not recorded."""
        self.is_resting = False
        """They are not in this step, and will be in a later one (`operation_stride`)."""
        self.on_rest: Callable[..., None] | None = None
        """Called with `is_resting` when a rest begins or ends."""
        self.num_calls = 0
        """Operations that gave a handle or ran on a device."""
        self.collectives: Sink = NullSink()
        self.waits: Sink = NullSink()
        self.notes: Sink = NullSink()
        self.in_flight: InFlightWriter | None = None
        self.observe: _Observe | None = None
        """Called with every operation that ended: the in-process statistics."""
        self.groups: GroupBook | None = None
        self._by_slot: list[Operation | None] = [None] * NUM_SLOTS
        self._without_slot: dict[int, Operation] = {}
        """More are under way than there are slots; by enqueue time."""
        self._num_handed_over = 0
        self.num_unrecognised = 0
        self.last_enqueue_ns = 0
        self.observed: list[tuple[int, ...]] = []
        self._messages: set[str] = set()

    def enter(
        self, group: GroupEntry, channel: Channel, code: int, peer: int, detail: int,
        size_bytes: int, now_ns: int,
    ) -> Operation:  # fmt: skip
        """The program calls an operation. From here on a dead process leaves it behind.

        `code` is kind and flags as they stand in word 1, `detail` dtype and tag as in word 7.
        """
        if now_ns <= self.last_enqueue_ns:  # the time is the row's key
            now_ns = self.last_enqueue_ns + 1
        self.last_enqueue_ns = now_ns
        timeline = self.timeline
        phase = timeline.open_phase
        phase_id = PHASE_IDS[phase] if phase >= 0 else timeline.stack.name_id
        if phase_id > _MAX_PHASE_ID:
            phase_id = 0
        step = timeline.step if timeline.step_start_ns else timeline.last_step
        self.num_calls += 1
        sequence = next(channel.numbers) & 0xFFFFFFFF
        operation = Operation()
        operation.a = a = code | group.code | phase_id << 48
        operation.b = b = sequence | peer + 1 << 32
        operation.c = now_ns
        operation.f = size_bytes
        operation.g = g = step + 1 & 0xFFFFFFFF | (timeline.microbatch + 1 & 0xFFFF) << 32 | detail
        in_flight = self.in_flight
        if in_flight is None:
            operation.slot = NO_SLOT
            return operation
        operation.slot = slot = in_flight.enter(
            channel.row, sequence + 1, a, b, now_ns, size_bytes, g
        )
        if slot >= 0:
            self._by_slot[slot] = operation
        else:
            self._without_slot[now_ns] = operation
        return operation

    def enter_blocking(
        self, group: GroupEntry, code: int, detail: int, size_bytes: int, now_ns: int
    ) -> Blocking:
        """Like `enter`, for a call that holds its thread up: it stands in its channel's row."""
        if now_ns <= self.last_enqueue_ns:
            now_ns = self.last_enqueue_ns + 1
        self.last_enqueue_ns = now_ns
        timeline = self.timeline
        phase = timeline.open_phase
        phase_id = PHASE_IDS[phase] if phase >= 0 else timeline.stack.name_id
        step = timeline.step if timeline.step_start_ns else timeline.last_step
        a = code | group.code | (phase_id if phase_id <= _MAX_PHASE_ID else 0) << 48
        b = next(group.numbers) & 0xFFFFFFFF
        g = step + 1 & 0xFFFFFFFF | (timeline.microbatch + 1 & 0xFFFF) << 32 | detail
        in_flight: Any = self.in_flight
        pack_row(
            in_flight.buffer,
            group.row_offset,
            (b + 1 << 8 | code & 0xFF) * 257,
            (now_ns - in_flight.epoch_ns) * 257,
            a,
            b,
            size_bytes,
            g,
            (a + b + now_ns + size_bytes + g + group.row_salt) & CHECK_MASK,
        )
        in_flight.is_dirty = True
        return (a, b, now_ns, size_bytes, g, group)

    def adopt(self, blocking: Blocking) -> Operation:
        """A blocking operation that stands in its channel's row and takes an unusual course."""
        operation = Operation()
        operation.a, operation.b, operation.c, operation.f, operation.g, group = blocking
        operation.slot = NO_SLOT
        operation.open_word = group.open_word
        self._without_slot[operation.c] = operation
        return operation

    def under_way(self) -> list[Operation]:
        """Lists operations that have not ended."""
        found = [operation for operation in self._by_slot if operation is not None]
        return [*found, *self._without_slot.values()]

    @property
    def num_entered(self) -> int:
        return self._num_handed_over + len(self.observed) + len(self.under_way())

    def end(
        self,
        operation: Operation,
        end_ns: int,
        source: int,
        outcome: int = _OK,
        start_ns: int = 0,
        *,
        is_observed: bool = True,
    ) -> None:
        """Its end is known: writes its row and frees its slot. Only the first call counts."""
        if operation.is_over:
            return
        operation.is_over = True
        enqueue_ns = operation.c
        a, b, f, g = operation.a, operation.b, operation.f, operation.g
        start_ns = start_ns or enqueue_ns
        self.collectives.put(a | outcome << 8 | source << 16, b, enqueue_ns, start_ns, end_ns, f, g)
        slot = operation.slot
        if slot >= 0:
            self._by_slot[slot] = None
            if self.in_flight is not None:
                self.in_flight.release(slot)
        else:
            self._without_slot.pop(enqueue_ns, None)
            if operation.open_word and self.in_flight is not None:
                self.in_flight.words[operation.open_word] = 0
        if not is_observed:  # it comes from there
            self._num_handed_over += 1
            return
        observed = self.observed
        observed.append((a, b, f, g, start_ns, end_ns, outcome))
        if len(observed) >= HAND_OVER_EVERY:
            self.hand_over()

    def hand_over(self) -> None:
        """Gives the in-process statistics what has ended since the last time."""
        observed, observe = self.observed, self.observe
        num_taken = len(observed)  # other threads go on appending: cut off the front
        batch = observed[:num_taken]
        del observed[:num_taken]
        self._num_handed_over += num_taken
        if observe is None:
            return
        for a, b, f, g, start_ns, end_ns, outcome in batch:
            observe(
                a & 0xFF,
                a >> 32 & 0xFFFF,
                b & 0xFFFFFFFF,
                f,
                start_ns,
                end_ns - start_ns if end_ns >= 0 and start_ns >= 0 else MISSING,
                outcome,
                (g & 0xFFFFFFFF) - 1,
                g >> 48 & 0xFF,
                a >> 24 & OperationFlag.ASYNC,
                (b >> 32) - 1,
            )

    def fail(self, operation: Operation, error: BaseException, source: int) -> None:
        """Ends an operation with an exception, which goes on to the program."""
        now_ns = self._clock()
        text = safe_text(error)
        is_timeout = "timed out" in text.lower() or "timeout" in text.lower()
        if not operation.is_over:
            self.note(operation, NoteCode.ERROR, f"{type(error).__name__}: {text}")
        self.end(operation, now_ns, source, Outcome.TIMEOUT if is_timeout else Outcome.ERROR)

    def note(self, operation: Operation, code: int, text: str) -> None:
        """Writes a text beside an operation's row."""
        text = text[:_MAX_MESSAGE_CHARACTERS]
        if text not in self._messages:
            if len(self._messages) >= _MAX_MESSAGES:
                return
            self._messages.add(text)
        name_id = self._name_id(text)
        self.notes.put(name_id | code << 16, operation.c, self._clock(), 0, 0, 0, 0)

    def wait(
        self,
        key_ns: int,
        source: int,
        start_ns: int,
        end_ns: int,
        device_ns: int = MISSING,
        device_end_ns: int = MISSING,
    ) -> None:
        """Writes a wait for an operation that was started earlier; `key_ns` is its key."""
        timeline = self.timeline
        phase = timeline.open_phase
        phase_id = PHASE_IDS[phase] if phase >= 0 else timeline.stack.name_id
        step = timeline.step if timeline.step_start_ns else timeline.last_step
        self.waits.put(
            source | (phase_id if phase_id <= _MAX_PHASE_ID else 0) << 48,
            key_ns,
            start_ns,
            end_ns - start_ns,
            device_ns,
            device_end_ns + 1,
            (step + 1) & 0xFFFFFFFF | (timeline.microbatch + 1 & 0xFFFF) << 32,
        )

    def tell(self, what: str, **fields: object) -> None:
        """Writes a line into the rank's journal."""
        self._journal("update", **{what: fields})

    def put_timed(
        self, details: Details, start_ns: int, duration_ns: int, outcome: Outcome
    ) -> None:
        """An operation the program timed itself; it is over."""
        if not self.is_on or not self.open():
            return
        if self.groups is None:  # a program without torch.distributed
            self.groups = GroupBook(None, self._journal)
            self.groups.in_flight = self.in_flight
        group = self.groups.named(details.group, details.axis, details.group_size or 0)
        dtype = str(details.dtype).removeprefix("torch.")
        kind = details.kind if isinstance(details.kind, Kind) else Kind.CUSTOM
        code = int(kind) | OperationFlag.MANUAL << 24
        if details.is_async:
            code |= OperationFlag.ASYNC << 24
        peer = MISSING if details.peer is None else details.peer
        dtype_code = DTYPES.index(dtype) if dtype in DTYPES else DTYPES.index("(other)")
        last_ns, self.last_enqueue_ns = self.last_enqueue_ns, 0  # it began in the past
        operation = self.enter(
            group, group, code, peer, dtype_code << 48, details.size_bytes, start_ns
        )
        self.last_enqueue_ns = max(last_ns, operation.c)
        if details.name:
            self.note(operation, NoteCode.NAME, details.name)
        if details.metadata:
            self.note(
                operation, NoteCode.METADATA, json.dumps(dict(details.metadata), default=repr)
            )
        if details.message:
            self.note(operation, NoteCode.ERROR, details.message)
        end_ns = operation.c + duration_ns if duration_ns >= 0 else MISSING
        self.end(operation, end_ns, EndSource.CALL, outcome, is_observed=False)

    def switch(self, *, is_on: bool) -> None:
        """Records operations from now on, or no more."""
        self.go_on()
        self.is_on = is_on

    def rest(self, step: int) -> None:
        """Records nothing in this step, which comes next."""
        self.is_on, self.is_resting = False, True
        self.timeline.step_flags = StepFlag.UNWATCHED
        for operation in self.under_way():
            if not operation.has_future:  # its wait will not be seen
                self.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN)
        if self.in_flight is not None:
            self.in_flight.rest(step)
        if self.on_rest is not None:
            self.on_rest(is_resting=True)

    def go_on(self) -> None:
        """Ends a rest."""
        if not self.is_resting:
            return
        self.is_on, self.is_resting = True, False
        self.timeline.step_flags = 0
        if self.in_flight is not None:
            self.in_flight.rest(None)
        if self.on_rest is not None:
            self.on_rest(is_resting=False)

    def open(self) -> bool:
        """Opens the run if it is not open yet: a rank that communicates is worth a recording."""
        return self._open_run()

    def finish(self) -> None:
        """Writes what is still under way as unfinished, at the end of a recording."""
        for operation in self.under_way():
            self.end(operation, MISSING, EndSource.NONE, Outcome.UNFINISHED)

    def forget(self) -> None:
        """Resets groups and sequence numbers for a new attempt."""
        self.go_on()
        self._by_slot = [None] * NUM_SLOTS
        self._without_slot.clear()
        self.observed.clear()
        self._messages.clear()
        self._num_handed_over = self.num_unrecognised = 0
        if self.groups is not None:
            self.groups.forget()
