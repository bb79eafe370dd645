"""Follows an operation from its call until its end is known.

Which source will tell the end depends on who called, the frame above the kernel or method: a handle
the program waits for, torch's callback, the tensor of a functional collective, or an event on the
device.
"""

import sys
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.device_operations import DeviceOperations
from meshscope.capture.operations.operation_log import Blocking, Operation, OperationLog
from meshscope.capture.operations.process_groups import Channel, GroupBook, GroupEntry
from meshscope.core.operations import POINT_TO_POINT, EndSource, Kind, Outcome
from meshscope.store.schema import MISSING, NoteCode, OperationFlag, WaitSource

_FUTURE_STRIDE = 8
"""Of operations whose handle the program holds, every this many-th (by its sequence number, so the
same ones on every rank) also gets a callback: its exact end is known without a wait."""
SLOW_CALL_NS = 100_000
"""A call that gives a handle and takes longer than this held the program up."""
DRAIN_SECONDS = 0.2
"""How long the end of a recording waits for callbacks that are due."""

PROGRAM, ENGINE, FUNCTIONAL, HELPER = 0, 1, 2, 3
"""Who called: Python code that gets a handle, torch's backward engine, a functional collective, or
a function of torch in C++ that waits itself (broadcasting buffers, comparing parameters)."""
_PYTHON = (PROGRAM, FUNCTIONAL)
_HELPER_FILES = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
_ASYNC = OperationFlag.ASYNC
_OWN_REFERENCES = 6


class _HandleRef(weakref.ref):  # type: ignore[type-arg]
    """Knows which operation a `Work` stands for without keeping it, or its tensors, alive."""

    __slots__ = ("key", "operations")

    key: int
    operations: list[Operation]


class Follower:
    """The operations of one rank that are under way, and their handles."""

    def __init__(
        self,
        torch: Any,
        log: OperationLog,
        book: GroupBook,
        guard: Guard,
        clock: Callable[[], int],
    ) -> None:
        self._torch = torch
        self._log = log
        self._book = book
        self._guard = guard
        self._clock = clock
        self.is_completed: Any = None
        """`Work.is_completed` and `Work.get_future` as torch has them: they will be tapped."""
        self.get_future: Any = None
        self.blocked: dict[int, tuple[Any, Blocking]] = {}
        """Per thread the blocking operation it is in, between its call and torch's own wait."""
        self._held: dict[int, tuple[Any, list[Operation]]] = {}
        """Per thread the last handle: kept until it has reached the caller, or the next one."""
        self.refs: dict[int, _HandleRef] = {}
        self.by_pointer: dict[int, Operation] = {}
        """Operations by the memory of their result: functional collectives have no handle."""
        self.batches: dict[int, list[Operation]] = {}
        """Per thread, operations of a batch that is being put together."""
        self._callers: dict[Any, int] = {}
        self._no_future: set[tuple[int, int]] = set()
        """Groups and kinds whose handles have no future."""
        self.device: DeviceOperations | None = None
        self.sees_all = False
        """The dispatcher's kernels are in place; `ProcessGroup` methods are no longer patched."""
        self.trigger_code: Any = None
        """Lies between a helper in C++ and torch's Python function that calls it."""
        self.functional_codes: set[Any] = set()
        """Lie between a functional collective in C++ and Python that calls it."""
        self.is_testing = False
        """An operation is counted in `num_seen`, and not recorded."""
        self.num_seen = 0

    def is_ready(self) -> bool:
        """Whether operations can be recorded; opens the run at the first."""
        if self.is_testing:
            self.num_seen += 1
            return False
        return self._log.in_flight is not None or self._log.open()

    def enter_operation(
        self, group: GroupEntry, kind: Kind, name: str, peer: int, tag: int, size_bytes: int,
        dtype: int, tensor: Any, now_ns: int, *, is_async: bool,
    ) -> Operation | None:  # fmt: skip
        """An operation of any kind is called."""
        log = self._log
        code = int(kind) | (_ASYNC << 24 if is_async else 0)
        channel: Channel = group
        tag = min(max(tag, 0), 127)  # as it is recorded: larger ones share a channel
        if kind in POINT_TO_POINT:
            channel = self._book.channel(group, int(kind), peer, tag)
        is_device = tensor is not None and not group.is_host and tensor.device.type != "cpu"
        if is_device:
            code |= OperationFlag.DEVICE << 24
        batch = self.batches.get(get_ident())
        if batch is not None:
            code |= OperationFlag.COALESCED << 24
        detail = dtype << 48 | tag << 56
        operation = log.enter(group, channel, code, peer, detail, size_bytes, now_ns)
        if kind is Kind.CUSTOM:
            log.num_unrecognised += 1
            log.note(operation, NoteCode.NAME, name)
        if batch is not None:
            batch.append(operation)
        if is_device:
            self.find_device(tensor).enter(operation, now_ns)
        return operation

    def find_device(self, tensor: Any) -> DeviceOperations:
        """Who times operations on the device of a tensor."""
        if self.device is None:
            backend = getattr(self._torch, tensor.device.type)
            self.device = DeviceOperations(backend, self._log, self._clock)
        return self.device

    def follow(
        self, operation: Operation, get_work: Callable[[], Any] | None, output: Any, frame: Any
    ) -> None:
        """Chooses the source of an operation's end. `frame` is the caller's."""
        flags = operation.a >> 24
        if flags & _ASYNC:
            now_ns = self._clock()
            if now_ns - operation.c > SLOW_CALL_NS and self._caller_of(frame) in _PYTHON:
                self.note_slow_call(operation, now_ns)
        if flags & OperationFlag.COALESCED:
            return  # the batch will have a handle
        is_device = flags & OperationFlag.DEVICE
        if get_work is None or (is_device and not flags & _ASYNC):
            if is_device and self.device is not None:
                self.device.issued(operation)
            else:
                self._log.end(operation, self._clock(), EndSource.CALL)
            return
        if not flags & _ASYNC:
            self._hold(get_work(), [operation])
            return
        caller = self._caller_of(frame)
        if caller == PROGRAM:
            work = get_work()
            self._hold(work, [operation])
            self.watch_handle(work, [operation])
            if not is_device and not (operation.b & 0xFFFFFFFF) % _FUTURE_STRIDE:
                self._call_back(operation, work)
            return
        if caller == HELPER:
            operation.a &= ~(_ASYNC << 24)  # its caller gets no handle: it blocks
            work = get_work()
            if is_device and self.device is not None:
                self.device.issued_by_helper(operation, self.get_future(work))
                return
            self._call_back(operation, work)
            if not operation.has_future:
                self._hold(work, [operation])
            return
        if output is not None:
            self.remember_result(operation, output)
        if caller == ENGINE:
            operation.a |= OperationFlag.ENGINE << 24
            work = get_work()
            if is_device and self.device is not None:
                self.device.issued_by_engine(operation, work, self.get_future(work))
            else:
                self._call_back(operation, work)
        elif not is_device and not (operation.b & 0xFFFFFFFF) % _FUTURE_STRIDE:
            self._call_back(operation, get_work())

    def note_slow_call(self, operation: Operation, now_ns: int) -> None:
        """A call that should return at once and did not held the program up. Not the first of a
        channel: it sets things up, ours among them."""
        a, b, tag = operation.a, operation.b, operation.g >> 56 & 0x7F
        if not self._book.is_first(a >> 32 & 0xFFFF, a & 0xFF, (b >> 32) - 1, tag, b & 0xFFFFFFFF):
            self._log.wait(operation.c, WaitSource.CALL, operation.c, now_ns)

    def _caller_of(self, frame: Any) -> int:
        """Who called the operation, by the code of the frame above the kernel."""
        if frame is None:
            return ENGINE  # a thread of torch's own
        code = frame.f_code
        found = self._callers.get(code)
        if found is None:
            file_name = code.co_filename.replace("\\", "/")
            found = PROGRAM
            if file_name.endswith("torch/_ops.py") or code in self.functional_codes:
                found = FUNCTIONAL
            elif code.co_name == "_engine_run_backward":
                found = ENGINE
            elif file_name.endswith(_HELPER_FILES) or code is self.trigger_code:
                found = HELPER
            self._callers[code] = found
        return found

    def hold_blocking(self, blocking: Blocking, work: Any) -> None:
        """torch has taken a blocking call: its caller waits for the handle at once."""
        thread = get_ident()
        if work is not None and thread not in self.blocked and thread not in self._held:
            self.blocked[thread] = (work, blocking)
            return
        operation = self._log.adopt(blocking)
        if work is None:
            self._log.end(operation, self._clock(), EndSource.CALL)
            return
        self._let_go_of_blocked(thread)
        self._hold(work, [operation])

    def _let_go_of_blocked(self, thread: int) -> None:
        entry = self.blocked.pop(thread, None)
        if entry is not None:
            self.watch_handle(entry[0], [self._log.adopt(entry[1])])

    def _hold(self, work: Any, operations: list[Operation]) -> None:
        thread = get_ident()
        earlier = self._held.get(thread)
        if earlier is not None and not earlier[1][0].is_over:
            self._let_go(*earlier)
        self._held[thread] = (work, operations)

    def _let_go(self, work: Any, operations: list[Operation]) -> None:
        """The next operation comes, and this one's handle was not waited for yet."""
        if id(work) in self.refs:
            return  # the program has it, or drops it now: only that tells how it ends
        # Ours are: the argument, the caller's tuple, `getrefcount`'s own and the frame's.
        is_ours_alone = sys.getrefcount(work) <= _OWN_REFERENCES
        if is_ours_alone and not operations[0].has_future and self.is_completed(work):
            for operation in operations:  # the wait was below Python
                self._log.end(operation, self._clock(), EndSource.WAIT_LATE)
        else:
            self.watch_handle(work, operations)  # its caller may still wait for it

    def watch_handle(self, work: Any, operations: list[Operation]) -> None:
        """Called when the program gets a handle, which it may wait for or drop."""
        ref = _HandleRef(work, self._handle_dropped)
        ref.key = id(work)
        ref.operations = operations
        self.refs[ref.key] = ref

    def _handle_dropped(self, ref: _HandleRef) -> None:
        """The program dropped a handle: if it never waited, the end stays unknown."""
        if self.refs.get(ref.key) is ref:
            del self.refs[ref.key]
        try:
            for operation in ref.operations:
                if not operation.is_over and not operation.has_future:
                    self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN)
        except Exception as error:  # noqa: BLE001 - called by the garbage collector
            self._guard.caught("handle dropped", error)

    def remember_result(self, operation: Operation, result: Any) -> None:
        """The wait for this tensor, or the first of these, will be the operation's end."""
        while type(result) is list:
            if not result:
                return
            result = result[0]
        pointer = result.data_ptr() or result.untyped_storage()._cdata  # empty ones have no data
        earlier = self.by_pointer.get(pointer)
        if earlier is not None and not (earlier.is_over or earlier.has_future):
            # Its memory is used again, so the result has been read.
            self._log.end(earlier, MISSING, EndSource.NONE, Outcome.UNSEEN)
        self.by_pointer[pointer] = operation

    def _call_back(self, operation: Operation, work: Any) -> None:
        """Registers torch's callback for the operation's end, where there is one."""
        kind = operation.a & 0xFF
        if (operation.group_id, kind) in self._no_future:
            return
        try:
            self.add_callback([operation], self.get_future(work))
        except RuntimeError:  # not every back end has one for every kind
            self._no_future.add((operation.group_id, kind))

    def add_callback(self, operations: list[Operation], future: Any) -> None:
        """Registers a future's callback for the end of operations."""
        log, clock, caught = self._log, self._clock, self._guard.caught

        def over(future: Any) -> None:
            now_ns = clock()
            try:
                try:
                    future.value()
                except RuntimeError as error:
                    for operation in operations:
                        log.fail(operation, error, EndSource.FUTURE)
                    return
                for operation in operations:
                    log.end(operation, now_ns, EndSource.FUTURE)
            except Exception as error:  # noqa: BLE001 - in a thread of torch's: no caller of ours
                caught("operation end", error)

        for operation in operations:
            operation.has_future = True
        future.add_done_callback(over)

    def fail_operation(self, operation: Operation | None, error: BaseException) -> None:
        """Ends an operation whose call raised."""
        if operation is None:
            return
        try:
            batch = self.batches.get(get_ident())
            if batch is not None and operation in batch:
                batch.remove(operation)
            self._log.fail(operation, error, EndSource.CALL)
        except Exception as own_error:  # noqa: BLE001 - the guard's
            self._guard.caught("operation failed", own_error)

    def find(self, work: Any) -> list[Operation] | None:
        """The operations of a handle; None for an unknown handle."""
        thread = get_ident()
        blocked = self.blocked.get(thread)
        if blocked is not None and blocked[0] is work:
            del self.blocked[thread]
            return [self._log.adopt(blocked[1])]
        held = self._held.get(thread)
        if held is not None and held[0] is work:
            del self._held[thread]
            return held[1]
        ref = self.refs.get(id(work))
        return ref.operations if ref is not None and ref() is work else None

    def drain(self, deadline_ns: int) -> None:
        """Waits a moment for callbacks and the device at the end of a recording."""
        self._held.clear()
        for thread in list(self.blocked):  # a thread that is held up right now
            entry = self.blocked.pop(thread, None)
            if entry is not None:
                self._log.adopt(entry[1])
        if self.device is not None:
            self.device.drain(deadline_ns)
        give_up_ns = min(deadline_ns, self._clock() + int(DRAIN_SECONDS * 1e9))
        while self._clock() < give_up_ns and any(
            operation.has_future for operation in self._log.under_way()
        ):
            time.sleep(0.001)
        for operation in list(self.by_pointer.values()):
            if not (operation.has_future or operation.a >> 24 & OperationFlag.ENGINE):
                # Functional, and the result was never used.
                self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN)
