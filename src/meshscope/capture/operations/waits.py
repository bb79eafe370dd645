"""Taps on what a program waits with: handles, futures, batches, tensors of functional collectives.

Each calls torch's own function and tells the follower what it learned. Flat for the same reason as
a kernel: a wait stands inside every blocking operation.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.operation_log import (
    HAND_OVER_EVERY,
    Blocking,
    Operation,
    OperationLog,
)
from meshscope.capture.operations.process_groups import GroupBook
from meshscope.core.operations import EndSource, Outcome
from meshscope.store.schema import BUILTIN_NAMES, MISSING, OperationFlag, WaitSource

_NOTED_WAIT_NS = 50_000
"""A wait for something unknown is written down when it took longer than this."""
_ASYNC = OperationFlag.ASYNC
_BACKWARD = BUILTIN_NAMES["backward"]
_OK_BY_WAIT = int(Outcome.OK) << 8 | int(EndSource.WAIT) << 16


class WaitTaps:
    """Makes the replacements; `collectives` installs them."""

    def __init__(
        self,
        torch: Any,
        log: OperationLog,
        book: GroupBook,
        follower: Follower,
        guard: Guard,
        clock: Callable[[], int],
    ) -> None:
        self._torch = torch
        self._log = log
        self._book = book
        self._follower = follower
        self._guard = guard
        self._clock = clock

    def make_wait(self, original: Any) -> Callable[..., Any]:
        """`Work.wait`: the end of what it waits for, and the wait itself."""
        log, clock, caught, follower = self._log, self._clock, self._guard.caught, self._follower
        find, is_completed = follower.find, follower.is_completed
        blocked, timeline = follower.blocked, log.timeline

        def end_blocking(blocking: Blocking, work: Any, args: Any, kwargs: Any) -> Any:
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                self._wait_failed([log.adopt(blocking)], error)
                raise
            try:  # what `OperationLog.end` does, flat
                end_ns = clock()
                a, b, c, f, g, group = blocking
                log.collectives.put(a | _OK_BY_WAIT, b, c, c, end_ns, f, g)
                log.in_flight.words[group.open_word] = 0  # type: ignore[union-attr]
                observed = log.observed
                observed.append((a, b, f, g, c, end_ns, 1))
                if len(observed) >= HAND_OVER_EVERY:
                    log.hand_over()
                if timeline.is_sampled:
                    timeline.own_ns += clock() - end_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("wait end", error)
            return result

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not log.is_on:
                return original(work, *args, **kwargs)
            entry = blocked.pop(get_ident(), None)
            if entry is not None:
                if entry[0] is work:  # a blocking call: torch waits for its own handle
                    return end_blocking(entry[1], work, args, kwargs)
                blocked[get_ident()] = entry
            start_ns = clock()
            operations, was_over, mark = None, False, None
            try:
                operations = find(work)
                if operations is not None:
                    flags = operations[0].a >> 24
                    if flags & OperationFlag.DEVICE:
                        mark = self._begin_device_wait(operations[0])
                    elif flags & _ASYNC:
                        was_over = is_completed(work)
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("wait begin", error)
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                self._wait_failed(operations, error)
                raise
            try:
                self._waited(work, operations, start_ns, was_over, mark, original)
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("wait end", error)
            return result

        return wait

    def _begin_device_wait(self, operation: Operation) -> Any:
        if self._follower.device is None or operation.start_event is None or operation.has_future:
            return None
        return self._follower.device.begin_wait()

    def _waited(
        self,
        work: Any,
        operations: list[Operation] | None,
        start_ns: int,
        was_over: bool,  # noqa: FBT001 - positional for speed
        mark: Any,
        original: Any,
    ) -> None:
        log = self._log
        end_ns = self._clock()
        if operations is None:
            if end_ns - start_ns > _NOTED_WAIT_NS:
                log.wait(MISSING, WaitSource.WORK, start_ns, end_ns)
            return
        first = operations[0]
        flags = first.a >> 24
        if flags & OperationFlag.DEVICE and self._follower.device is not None:
            if not first.is_over and not first.has_future:
                self._follower.device.end_wait(
                    operations, mark, start_ns, lambda: original(work), WaitSource.WORK
                )
            return
        if flags & _ASYNC:
            log.wait(first.c, WaitSource.WORK, start_ns, end_ns)
        source = EndSource.WAIT_LATE if was_over else EndSource.WAIT
        for operation in operations:
            if not operation.has_future:
                log.end(operation, end_ns, source)

    def _wait_failed(self, operations: list[Operation] | None, error: BaseException) -> None:
        try:
            for operation in operations or ():
                self._log.fail(operation, error, EndSource.WAIT)
        except Exception as own_error:  # noqa: BLE001 - the guard's
            self._guard.caught("wait failed", own_error)

    def make_synchronize(self, original: Any) -> Callable[..., Any]:
        """On a device a wait by another name; on the host it does not wait for anything."""
        wait = self.make_wait(original)

        def synchronize(work: Any, *args: Any, **kwargs: Any) -> Any:
            ref = self._follower.refs.get(id(work))
            is_device = ref is not None and ref.operations[0].a >> 24 & OperationFlag.DEVICE
            return (wait if is_device else original)(work, *args, **kwargs)

        return synchronize

    def make_is_completed(self, original: Any) -> Callable[..., Any]:
        """A program that polls: the first yes is a bound on the end."""

        def is_completed(work: Any) -> Any:
            answer = original(work)
            if answer and self._log.is_on:
                try:
                    for operation in self._follower.find(work) or ():
                        is_device = operation.a >> 24 & OperationFlag.DEVICE
                        if not (operation.has_future or operation.is_over or is_device):
                            self._log.end(operation, self._clock(), EndSource.WAIT_LATE)
                except Exception as error:  # noqa: BLE001 - the guard's
                    self._guard.caught("completion query", error)
            return answer

        return is_completed

    def make_get_future(self, original: Any) -> Callable[..., Any]:
        """A program that goes on with the future (a communication hook) will drop the handle."""

        def get_future(work: Any) -> Any:
            future = original(work)
            if self._log.is_on:
                try:
                    operations = self._follower.find(work)
                    if operations is not None:
                        self._future_taken(operations, work, future)
                except Exception as error:  # noqa: BLE001 - the guard's
                    self._guard.caught("future", error)
            return future

        return get_future

    def _future_taken(self, operations: list[Operation], work: Any, future: Any) -> None:
        first = operations[0]
        is_device = first.a >> 24 & OperationFlag.DEVICE
        if first.a >> 48 == _BACKWARD:  # a communication hook: the reducer waits, not the program
            for operation in operations:
                operation.a |= OperationFlag.ENGINE << 24
        if first.has_future:
            return  # its end will be told already
        if not is_device:
            self._follower.add_callback(operations, future)
        elif first.a >> 24 & OperationFlag.ENGINE and self._follower.device is not None:
            self._follower.device.issued_by_engine(first, work, future)

    def make_start_batch(self, original: Any) -> Callable[..., Any]:
        """What begins a batch of operations."""

        def start_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(group, *args, **kwargs)
            if not self._log.is_on:
                return result
            self._follower.batches[get_ident()] = []
            self._book.set_batching(is_batching=True)
            return result

        return start_coalescing

    def make_end_batch(self, original: Any) -> Callable[..., Any]:
        """What ends it, and gives one handle for all of them, or none."""

        def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            batch = self._follower.batches.pop(get_ident(), None)
            if batch is None:  # it began while nothing was recorded
                return original(group, *args, **kwargs)
            if not self._follower.batches:
                self._book.set_batching(is_batching=False)
            work = original(group, *args, **kwargs)
            if batch:
                try:
                    self._batch_issued(batch, work)
                except Exception as error:  # noqa: BLE001 - the guard's
                    self._guard.caught("batch", error)
            return work

        return end_coalescing

    def _batch_issued(self, batch: list[Operation], work: Any) -> None:
        if work is None:
            for operation in batch:
                if operation.a >> 24 & OperationFlag.DEVICE and self._follower.device is not None:
                    self._follower.device.issued(operation)
                else:
                    self._log.end(operation, self._clock(), EndSource.CALL)
            return
        for operation in batch:
            operation.a |= _ASYNC << 24
        self._follower.watch_handle(work, batch)

    def make_wait_for_tensor(self, original: Any) -> Any:
        """`wait_tensor`, of functional collectives."""
        log, clock, caught = self._log, self._clock, self._guard.caught
        by_pointer, plain = self._follower.by_pointer, self._torch.Tensor

        def waited(*args: Any, **kwargs: Any) -> Any:
            if not log.is_on or not by_pointer or kwargs or type(args[0]) is not plain:
                return original(*args, **kwargs)
            tensor = args[0]
            start_ns = clock()
            operation, mark = None, None
            try:
                try:
                    pointer = tensor.data_ptr() or tensor.untyped_storage()._cdata
                except RuntimeError:  # a tensor without data: the program is being traced
                    pointer = MISSING
                operation = by_pointer.pop(pointer, None)
                if operation is not None and operation.a >> 24 & OperationFlag.DEVICE:
                    mark = self._begin_device_wait(operation)
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("wait begin", error)
            try:
                result = original(tensor)
            except BaseException as error:
                self._wait_failed([operation] if operation is not None else None, error)
                raise
            if operation is not None:
                try:
                    self._tensor_waited(operation, start_ns, mark)
                except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                    caught("wait end", error)
            return result

        return waited

    def _tensor_waited(self, operation: Operation, start_ns: int, mark: Any) -> None:
        log = self._log
        if operation.a >> 24 & OperationFlag.DEVICE and self._follower.device is not None:
            if not operation.is_over and not operation.has_future:
                self._follower.device.end_wait([operation], mark, start_ns, None, WaitSource.TENSOR)
            return
        end_ns = self._clock()
        log.wait(operation.c, WaitSource.TENSOR, start_ns, end_ns)
        if not operation.has_future:
            is_late = end_ns - start_ns < _NOTED_WAIT_NS
            log.end(operation, end_ns, EndSource.WAIT_LATE if is_late else EndSource.WAIT)
