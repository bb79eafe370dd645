"""Writes communication operations down: entered, ended, failed, waited for.

Whatever finds operations in torch (`collectives`) or is told about them by the program
(`communication`) ends here. An operation stands in a slot of `in_flight.bin` from the moment it is
called and gets its row in `collectives` when its end is known, so a run of any length can say what
a rank was doing when it stopped. Flat for the same reason as `hooks`: it runs inside every
operation.
"""

from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard, safe_text
from meshscope.capture.process_groups import Channel, GroupBook, GroupEntry
from meshscope.capture.timeline import NullSink, Sink, Timeline
from meshscope.core.operations import EndSource, Kind, Outcome
from meshscope.store.in_flight import NO_SLOT, InFlightWriter
from meshscope.store.open_step import PHASE_IDS
from meshscope.store.schema import MISSING, NoteCode, OperationFlag

MAX_MESSAGE_CHARACTERS = 400
MAX_MESSAGES = 200
"""Different texts one rank writes down; the rest is counted as failed without one."""
_POINT_TO_POINT = (int(Kind.SEND), int(Kind.RECV))
_OK = int(Outcome.OK)
_MAX_PHASE_ID = 0x7FFF

Observe = Callable[[int, int, int, int, int, int, int, int, int, int, int], None]


class Operation:
    """One operation of this rank that is not over yet: the words of its record, and its slot."""

    __slots__ = (
        "a", "b", "c", "f", "g", "group", "has_future", "is_over", "slot", "start_event",
    )  # fmt: skip

    a: int
    """Words 1, 2, 3, 6 and 7 of its record, as they were when it was called."""
    b: int
    c: int
    f: int
    g: int
    group: GroupEntry
    slot: int

    def __init__(self) -> None:
        self.is_over = False
        self.has_future = False
        """torch will call back at its end."""
        self.start_event: Any = None


class OperationLog:
    """The operations of one recorder."""

    def __init__(
        self,
        timeline: Timeline,
        guard: Guard,
        clock: Callable[[], int],
        name_id: Callable[[str], int],
        open_run: Callable[[], bool],
    ) -> None:
        self._timeline = timeline
        self.guard = guard
        self._clock = clock
        self._name_id = name_id
        self._open_run = open_run
        self.is_on = True
        """False: operations pass by unseen."""
        self.collectives: Sink = NullSink()
        self.waits: Sink = NullSink()
        self.notes: Sink = NullSink()
        self.in_flight: InFlightWriter | None = None
        self.observe: Observe | None = None
        """Told of every operation that ended: the in-process statistics."""
        self.groups: GroupBook | None = None
        self.under_way: dict[int, Operation] = {}
        """By enqueue time."""
        self.num_entered = 0
        self.num_unrecognised = 0
        self._last_enqueue_ns = 0
        self._messages: set[str] = set()

    def enter(
        self,
        group: GroupEntry,
        kind: int,
        flags: int,
        peer: int,
        tag: int,
        size_bytes: int,
        dtype: int,
        now_ns: int,
    ) -> Operation:
        """The program calls an operation. From here on a dead process leaves it behind."""
        if now_ns <= self._last_enqueue_ns:  # the time is the row's key
            now_ns = self._last_enqueue_ns + 1
        self._last_enqueue_ns = now_ns
        channel: Channel = group
        if kind in _POINT_TO_POINT:
            channel = self.groups.channel(group, kind, peer, tag)  # type: ignore[union-attr]
        sequence = next(channel.numbers)
        timeline = self._timeline
        place = timeline.place_open
        phase_id = PHASE_IDS[place] if place >= 0 else timeline.stack.name_id
        step = timeline.step if timeline.step_start_ns else timeline.last_step
        operation = Operation()
        operation.slot = NO_SLOT
        operation.group = group
        operation.a = a = kind | flags << 24 | group.code
        if phase_id <= _MAX_PHASE_ID:
            operation.a = a = a | phase_id << 48
        operation.b = b = sequence & 0xFFFFFFFF | (peer + 1) << 32
        operation.c = now_ns
        operation.f = size_bytes
        operation.g = g = (
            (step + 1) & 0xFFFFFFFF
            | (timeline.microbatch + 1 & 0xFFFF) << 32
            | dtype << 48
            | (tag if tag < 127 else 127) << 56
        )
        in_flight = self.in_flight
        if in_flight is not None:
            operation.slot = in_flight.take(a, b, now_ns, now_ns, MISSING, size_bytes, g)
            if channel.row:
                in_flight.enter(channel.row, sequence + 1, now_ns, kind)
        self.under_way[now_ns] = operation
        self.num_entered += 1
        return operation

    def end(
        self,
        operation: Operation,
        end_ns: int,
        source: int,
        outcome: int = _OK,
        start_ns: int = 0,
    ) -> None:
        """Its end is known: writes its row and frees its slot. Only the first call counts."""
        if operation.is_over:
            return
        operation.is_over = True
        enqueue_ns = operation.c
        self.under_way.pop(enqueue_ns, None)
        a, b, f, g = operation.a, operation.b, operation.f, operation.g
        start_ns = start_ns or enqueue_ns
        self.collectives.put(a | outcome << 8 | source << 16, b, enqueue_ns, start_ns, end_ns, f, g)
        if self.in_flight is not None:
            self.in_flight.release(operation.slot)
        observe = self.observe
        if observe is not None:
            observe(
                a & 0xFF,
                a >> 32 & 0xFFFF,
                b & 0xFFFFFFFF,
                f,
                start_ns,
                end_ns - start_ns if end_ns >= 0 else MISSING,
                outcome,
                (g & 0xFFFFFFFF) - 1,
                g >> 48 & 0xFF,
                a >> 24 & OperationFlag.ASYNC,
                (b >> 32) - 1,
            )

    def fail(self, operation: Operation, error: BaseException, source: int) -> None:
        """It ended with an exception, which goes on to the program."""
        now_ns = self._clock()
        text = safe_text(error)
        is_timeout = "timed out" in text.lower() or "timeout" in text.lower()
        if not operation.is_over:
            self.note(operation, NoteCode.ERROR, f"{type(error).__name__}: {text}")
        self.end(operation, now_ns, source, Outcome.TIMEOUT if is_timeout else Outcome.ERROR)

    def note(self, operation: Operation, code: int, text: str) -> None:
        """Writes a text beside an operation's row."""
        text = text[:MAX_MESSAGE_CHARACTERS]
        if text not in self._messages:
            if len(self._messages) >= MAX_MESSAGES:
                return
            self._messages.add(text)
        name_id = self._name_id(text)
        self.notes.put(name_id | code << 16, operation.c, self._clock(), 0, 0, 0, 0)

    def wait(
        self,
        operation: Operation | None,
        source: int,
        begin_ns: int,
        end_ns: int,
        device_ns: int = MISSING,
    ) -> None:
        """The program waited for an operation that it had started earlier."""
        timeline = self._timeline
        place = timeline.place_open
        phase_id = PHASE_IDS[place] if place >= 0 else timeline.stack.name_id
        step = timeline.step if timeline.step_start_ns else timeline.last_step
        self.waits.put(
            source | (phase_id if phase_id <= _MAX_PHASE_ID else 0) << 48,
            MISSING if operation is None else operation.c,
            begin_ns,
            end_ns - begin_ns,
            device_ns,
            0,
            (step + 1) & 0xFFFFFFFF | (timeline.microbatch + 1 & 0xFFFF) << 32,
        )

    def open(self) -> bool:
        """Opens the run if it is not open yet: a rank that communicates is worth a recording."""
        return self._open_run()

    def finish(self) -> None:
        """At the end of a recording: what is still under way is written as unfinished."""
        for operation in list(self.under_way.values()):
            self.end(operation, MISSING, EndSource.NONE, Outcome.UNFINISHED)

    def forget(self) -> None:
        """A new attempt begins: groups and sequence numbers start again."""
        self.under_way.clear()
        self._messages.clear()
        self.num_entered = self.num_unrecognised = 0
        if self.groups is not None:
            self.groups.entries.clear()
