"""Times operations that run on an accelerator's streams, with events that are read later.

An operation begins when the current stream reaches it (an event before the call). It ends

- without a handle, when the current stream is past it (an event after the call);
- with a handle, when a stream of our own that waits for the same handle is past it. That wait is
  queued right after the program's own: before, it would let torch release the tensors the
  operation still uses. Where the program waits on another stream than the device's main one, so
  that its kernels may run meanwhile, ours does not wait, and the end is a bound;
- issued by DistributedDataParallel, likewise through its future: its buckets live as long as it.
  Where the operation is over before our stream is made to wait, the end is a bound. Of buffers
  that it broadcasts before a forward pass its own stream waits at once, and so does ours;
- functional (`wait_tensor`), when the program's stream is past the wait: a bound, unless the wait
  held the stream up;
- issued on another stream than the device's main one (FullyShardedDataParallel's), it is not
  timed: events there took 3 to 20 % of a step on four ranks. How long the main stream was held up
  for it is (`sharded_waits`).

Our stream waits for buckets only at the end of a backward pass, when the program's stream
waits for them, too (`queue_waits`). A stream that waits holds its hardware queue,
and there may be few of these (MPS, CUDA_DEVICE_MAX_CONNECTIONS=1): while ours waited for a bucket
from the moment it was issued, the kernels of backward stood still behind it, which took 29 % of a
step on four ranks (`benchmarks/nccl_overhead.py`).

Nothing here waits for the device. Device times are placed on the host clock by the tightest lower
bound seen: the device cannot reach an event before the host has issued it, and reaches a probe
(`clock_probe`) at once.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from meshscope.capture.operations.operation_log import Operation, OperationLog
from meshscope.capture.steps.clock_probe import DeviceOffset
from meshscope.capture.steps.stream_events import StreamEvents
from meshscope.core.operations import EndSource, Outcome
from meshscope.store.schema import MISSING, WaitSource

READ_EVERY_NS = 50_000_000
_MAX_PENDING = 4096
_HELD_UP_NS = 20_000
"""A stream that took longer than this over a wait was held up by the operation."""


class _Pending:
    """An operation whose events the device has not reached yet."""

    __slots__ = ("end", "end_ns", "operations", "source", "start_ns", "wait_begin", "wait_end",
                 "wait_key_ns", "wait_source")  # fmt: skip

    def __init__(self, operations: list[Operation], end: Any, source: int) -> None:
        self.operations = operations
        self.end = end
        self.source = source
        self.wait_begin: Any = None
        self.wait_end: Any = None
        self.wait_source = 0
        self.wait_key_ns = operations[0].c if operations else MISSING
        self.start_ns = self.end_ns = 0

    @property
    def first_event(self) -> Any:
        """What the stream reached first of it."""
        return self.operations[0].start_event if self.operations else self.wait_begin


class DeviceOperations:
    """Operations of one process on one type of accelerator."""

    def __init__(self, backend: Any, log: OperationLog, clock: Callable[[], int]) -> None:
        """`backend` is `torch.cuda` or a module of the same shape."""
        self._log = log
        self._events = StreamEvents(backend)
        self._clock = clock
        self._pending: deque[_Pending] = deque()
        self._put_off: deque[tuple[Operation, Callable[[], Any], Callable[[], bool]]] = deque()
        """Operations our stream will wait for, how, and what says whether they are over."""
        self._lock = threading.Lock()
        self._anchor: Any = None
        self._anchor_device_ns = 0
        self._offset = DeviceOffset(self._tell_offset)
        self.offset_uncertainty_ns = MISSING
        self._next_read_ns = 0
        self.num_given_up = 0

    @property
    def num_events(self) -> int:
        """Recorded so far."""
        return self._events.num_recorded

    def enter(self, operation: Operation, now_ns: int) -> None:
        """Before the call: marks when the stream gets there."""
        if self._events.is_capturing():
            return  # an event, or the question whether one was reached, would break the capture
        if now_ns >= self._next_read_ns:
            self._next_read_ns = now_ns + READ_EVERY_NS
            self.read()
        if self._events.is_on_main_stream():
            operation.start_event = self._events.record()

    def _is_unmarked(self, operation: Operation) -> bool:
        if operation.start_event is not None:
            return False
        # On another stream, or part of a graph that is being captured.
        self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN, MISSING)
        return True

    def issued(self, operation: Operation) -> None:
        """After a call without a handle: it is over when the stream is past it."""
        if not self._is_unmarked(operation):
            self._push(_Pending([operation], self._events.record(), EndSource.DEVICE))

    def issued_by_engine(self, operation: Operation, work: Any, future: Any) -> None:
        """After a reducer's call."""
        if self._is_unmarked(operation):
            return
        if len(self._put_off) >= _MAX_PENDING:
            self._give_up([operation])
            return
        operation.has_future = True  # what becomes of the handle no longer matters
        self._put_off.append((operation, future.wait, work.is_completed))

    def issued_by_helper(self, operation: Operation, future: Any) -> None:
        """After a call whose caller, in C++, lets its stream wait before it returns."""
        if not self._is_unmarked(operation):
            end = self._events.record_beside(future.wait)
            self._push(_Pending([operation], end, EndSource.DEVICE))

    def queue_waits(self) -> None:
        """The program's stream waits for all that was issued: from now on ours may, too."""
        if not self._put_off or self._events.is_capturing():
            return
        while self._put_off:
            operation, wait, is_completed = self._put_off.popleft()
            source = EndSource.DEVICE_LATE if is_completed() else EndSource.DEVICE
            self._push(_Pending([operation], self._events.record_beside(wait), source))

    def begin_wait(self) -> Any:
        """Before the program's wait; None while a graph is captured."""
        return None if self._events.is_capturing() else self._events.record()

    def begin_stream_wait(self) -> Any:
        """Before the main stream is made to wait for another; None on any other stream."""
        if self._events.is_capturing() or not self._events.is_on_main_stream():
            return None
        return self._events.record()

    def end_stream_wait(self, begin: Any, key_ns: int, start_ns: int) -> None:
        """After it; `key_ns` is the operation it waited for."""
        pending = _Pending([], self._events.record(), EndSource.NONE)
        pending.wait_begin, pending.wait_end = begin, pending.end
        pending.wait_key_ns, pending.wait_source = key_ns, WaitSource.STREAM
        pending.start_ns, pending.end_ns = start_ns, self._clock()
        self._push(pending)

    def end_wait(
        self,
        operations: list[Operation],
        begin: Any,
        start_ns: int,
        wait_again: Callable[[], Any] | None,
        wait_source: int,
    ) -> None:
        """After the program's wait, which was queued on its stream; `wait_again` queues another."""
        end_ns = self._clock()
        if begin is None:
            for operation in operations:
                self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN, MISSING)
            return
        operations = [operation for operation in operations if not self._is_unmarked(operation)]
        if not operations:
            return
        past = self._events.record()
        source, end = EndSource.DEVICE_LATE, past
        if wait_again is not None and self._events.is_on_main_stream():
            end = self._events.record_beside(wait_again)
            source = EndSource.DEVICE
        pending = _Pending(operations, end, source)
        pending.wait_begin, pending.wait_end = begin, past
        pending.start_ns, pending.end_ns = start_ns, end_ns
        pending.wait_source = wait_source
        self._push(pending)

    def _give_up(self, operations: list[Operation]) -> None:
        self.num_given_up += 1
        for operation in operations:
            self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN)

    def _push(self, pending: _Pending) -> None:
        if len(self._pending) >= _MAX_PENDING:
            self._give_up(pending.operations)
            return
        for operation in pending.operations:
            operation.has_future = True  # what becomes of the handle no longer matters
        self._pending.append(pending)

    def read(self) -> None:
        """Writes what the device has finished. Several threads may ask, none while capturing."""
        if self._events.is_capturing() or not self._lock.acquire(blocking=False):
            return
        try:
            pending = self._pending
            done = []
            while pending and pending[0].end.query():
                past = pending[0].wait_end
                if past is not None and past is not pending[0].end and not past.query():
                    break
                done.append(pending.popleft())
            if done:
                self._write(done)
        finally:
            self._lock.release()

    def _write(self, done: list[_Pending]) -> None:
        seen_ns = self._clock()
        if self._anchor is None:
            self._anchor = done[0].first_event
        anchor = self._anchor
        for pending in done:
            # Each question to the driver takes 2 µs and more: no event is asked for twice.
            held_ns = past_ns = MISSING
            if pending.wait_begin is not None:
                begin_ns = self._device_ns(anchor, pending.wait_begin)
                held_ns = _elapsed_ns(pending.wait_begin, pending.wait_end)
                past_ns = begin_ns + held_ns
                self._offset.bound_below(pending.start_ns - begin_ns)
            is_past = pending.end is pending.wait_end
            end_ns = past_ns if is_past else self._device_ns(anchor, pending.end)
            starts = [self._device_ns(anchor, one.start_event) for one in pending.operations]
            for operation, start_ns in zip(pending.operations, starts, strict=True):
                self._offset.bound_below(operation.c - start_ns)
            self._offset.bound_above(seen_ns - end_ns)
            offset_ns = self._offset.ns or 0
            self.offset_uncertainty_ns = max(0, seen_ns - end_ns - offset_ns)
            is_held = pending.source == EndSource.DEVICE_LATE and held_ns > _HELD_UP_NS
            for operation, start_ns in zip(pending.operations, starts, strict=True):
                self._log.end(
                    operation,
                    max(end_ns, start_ns) + offset_ns,
                    EndSource.DEVICE if is_held else pending.source,
                    Outcome.OK,
                    start_ns + offset_ns,
                )
            if pending.wait_begin is not None:
                self._log.wait(
                    pending.wait_key_ns,
                    pending.wait_source,
                    pending.start_ns,
                    pending.end_ns,
                    held_ns,
                    past_ns + offset_ns,
                )
        self._recycle(done, anchor)

    def _tell_offset(self, offset_ns: int) -> None:
        """Rows written from now on are placed by it."""
        self._log.tell("device_offset", from_host_mono_ns=self._clock(), offset_ns=offset_ns)

    def _device_ns(self, anchor: Any, event: Any) -> int:
        return self._anchor_device_ns + _elapsed_ns(anchor, event)

    def note_probe(self, event: Any, issued_ns: int) -> None:
        """An event of another stream of this device was reached when it was issued."""
        if self._anchor is not None and self._lock.acquire(blocking=False):
            try:
                self._offset.bound_below(issued_ns - self._device_ns(self._anchor, event))
            finally:
                self._lock.release()

    def _recycle(self, done: list[_Pending], anchor: Any) -> None:
        """Events go back to the pool; the last start becomes the anchor of the next reading.

        Differences are 32-bit floats in milliseconds: fine over seconds, coarse over a day.
        """
        new_anchor = done[-1].first_event
        self._anchor_device_ns = self._device_ns(anchor, new_anchor)
        self._anchor = new_anchor
        used = {id(anchor): anchor}
        for pending in done:
            for event in (pending.end, pending.wait_begin, pending.wait_end):
                used[id(event)] = event
            for operation in pending.operations:
                used[id(operation.start_event)] = operation.start_event
        used.pop(id(new_anchor), None)
        used.pop(id(None), None)
        self._events.free += used.values()

    def drain(self, deadline_ns: int) -> None:
        """Polls at the end of a run, without synchronising, until all is read or time is up."""
        self.queue_waits()
        while self._pending and self._clock() < deadline_ns:
            self.read()


def _elapsed_ns(begin: Any, end: Any) -> int:
    return 0 if begin is end else round(begin.elapsed_time(end) * 1e6)
