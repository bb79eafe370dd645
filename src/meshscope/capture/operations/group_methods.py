"""The short way to see operations of Python callers: the methods of `ProcessGroup`.

Every function of torch.distributed ends in one of them, and replacing them costs a tenth of a
kernel in the dispatcher. What C++ does by itself (DistributedDataParallel's reducer, functional
collectives, compiled graphs) does not pass here: `collectives` notices before it happens and puts
the dispatcher's kernels in the place of these methods, for the rest of the recording.
"""

import sys
from collections.abc import Callable
from typing import Any

from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.operation_log import Blocking, Operation, OperationLog
from meshscope.capture.operations.operation_shapes import Method, add_up, dtype_codes_of
from meshscope.capture.operations.process_groups import GroupBook
from meshscope.core.operations import Kind
from meshscope.store.schema import MISSING, OperationFlag


class GroupMethods:
    """Replacements for the methods of `ProcessGroup`."""

    def __init__(
        self,
        torch: Any,
        log: OperationLog,
        book: GroupBook,
        follower: Follower,
        clock: Callable[[], int],
        caught: Callable[[str, BaseException], None],
    ) -> None:
        self._torch = torch
        self._log = log
        self._book = book
        self._follower = follower
        self._clock = clock
        self._caught = caught
        self._codes = dtype_codes_of(torch)

    def make(self, name: str, method: Method, original: Any) -> Callable[..., Any]:
        """A method that notes the call and passes it on; flat for the same reason as a kernel."""
        log, clock, caught, follower = self._log, self._clock, self._caught, self._follower
        entries, timeline, codes = self._book.entries, log.timeline, self._codes
        enter_unusual, tensor_type = self._enter_unusual, self._torch.Tensor
        strided, kind_code = self._torch.strided, int(method.kind)
        is_barrier, size_index = method.kind is Kind.BARRIER, method.size_index
        is_plain = method.peer_index < 0 and method.tag_index < 0 and not method.is_size_per_rank
        is_plain = is_plain and method.kind not in (Kind.BROADCAST, Kind.REDUCE)
        is_plain = is_plain and name != "monitored_barrier"
        num_needed = size_index + 2
        async_code = kind_code | OperationFlag.ASYNC << 24
        codes_by_async = (kind_code, async_code)
        device_codes = tuple(code | OperationFlag.DEVICE << 24 for code in codes_by_async)
        enter, find_device = log.enter, follower.find_device

        def tapped(group: Any, *args: Any, **kwargs: Any) -> Any:
            # Once kernels see it all, a method that someone has wrapped since only passes on.
            if not log.is_on or follower.sees_all:
                return original(group, *args, **kwargs)
            operation: Operation | None = None
            blocking: Blocking | None = None
            now_ns = clock()
            try:
                entry = entries.get(group.group_name)
                value = options = None
                is_usual = False
                if is_barrier:
                    options = kwargs.get("opts") if kwargs else args[0] if args else None
                    is_usual = options is not None and is_plain
                elif is_plain and len(args) == num_needed and not kwargs:
                    options = args[-1]
                    value = args[size_index]
                    if type(value) is list and len(value) == 1:
                        value = value[0]
                    is_usual = type(value) is tensor_type and value.layout is strided
                if (
                    is_usual
                    and entry is not None
                    and entry.is_plain
                    and (entry.is_host or value is not None)
                    and entry.ref() is group
                ):
                    size_bytes = detail = 0
                    if value is not None:
                        size_bytes = value.nbytes
                        detail = codes.get(value.dtype, 0) << 48
                    is_async = getattr(options, "asyncOp", True)
                    if not entry.is_host:
                        is_device = value.is_cuda  # type: ignore[union-attr]
                        code = (device_codes if is_device else codes_by_async)[is_async]
                        operation = enter(entry, entry, code, MISSING, detail, size_bytes, now_ns)
                        if is_device:
                            find_device(value).enter(operation, now_ns)
                    elif is_async:
                        operation = enter(
                            entry, entry, async_code, MISSING, detail, size_bytes, now_ns
                        )
                    else:
                        blocking = log.enter_blocking(entry, kind_code, detail, size_bytes, now_ns)
                else:
                    operation = enter_unusual(name, method, group, args, kwargs, now_ns)
                if timeline.is_sampled:
                    timeline.own_ns += clock() - now_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("operation begin", error)
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                follower.fail_operation(
                    log.adopt(blocking) if blocking is not None else operation, error
                )
                raise
            now_ns = clock()
            try:
                if blocking is not None:
                    follower.hold_blocking(blocking, work)
                elif operation is not None:
                    output = args[0] if args and method.size_index >= 0 else None
                    get_work = None if work is None else lambda: work
                    follower.follow(operation, get_work, output, sys._getframe(0).f_back)
                if timeline.is_sampled:
                    timeline.own_ns += clock() - now_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("operation issued", error)
            return work

        return tapped

    def _enter_unusual(
        self, name: str, method: Method, group: Any, args: Any, kwargs: Any, now_ns: int
    ) -> Operation | None:
        """The first of a group, a message, with a root, asynchronous, in a batch or on a device."""
        if not self._follower.is_ready():
            return None
        entry = self._book.find(group)
        given = [
            args[index] if index < len(args) else kwargs.get(argument)
            for index, argument in enumerate(method.names)
        ]
        options = kwargs.get("opts", args[-1] if args else None)
        size_bytes, dtype, tensor = 0, 0, None
        if method.size_index >= 0:
            size_bytes, dtype, tensor = add_up(given[method.size_index], self._codes)
            size_bytes *= entry.size if method.is_size_per_rank else 1
        peer = self._find_peer(method, given, options, args, kwargs)
        return self._follower.enter_operation(
            entry,
            method.kind,
            name,
            entry.global_rank(peer) if peer >= 0 else MISSING,
            int(given[method.tag_index]) if method.tag_index >= 0 else 0,
            size_bytes,
            dtype,
            tensor,
            now_ns,
            is_async=name != "monitored_barrier" and bool(getattr(options, "asyncOp", True)),
        )

    def _find_peer(
        self, method: Method, given: list[Any], options: Any, args: Any, kwargs: Any
    ) -> int:
        """Rank within the group of the other side, or of the root; -1 when there is none."""
        if method.peer_index >= 0:
            return int(given[method.peer_index])
        if method.kind not in (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER):
            return MISSING
        root = getattr(options, "rootRank", None)
        if root is None:  # the forms that name it as an argument, after the tensors
            index = len(method.names)
            root = kwargs.get("root", args[index] if len(args) > index else MISSING)
        return int(root)
