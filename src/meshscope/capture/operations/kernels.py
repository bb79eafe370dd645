"""Kernels at the dispatcher's BackendSelect key, which every `c10d` operation passes.

A kernel notes the call, hands it on with `redispatch` (which releases the interpreter lock; calling
a fetched kernel would keep it and can deadlock with gloo's threads), and notes what came back.
"""

import sys
from collections.abc import Callable
from typing import Any

from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.operation_log import Operation, OperationLog
from meshscope.capture.operations.operation_shapes import OperationShape
from meshscope.capture.operations.process_groups import GroupBook
from meshscope.core.operations import Kind
from meshscope.store.schema import MISSING, OperationFlag

_ASYNC = OperationFlag.ASYNC


class Kernels:
    """Makes the kernels of one recorder."""

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
        self.after: Any = None
        """The key set below ours; set once torch is known to have one."""

    def make(self, shape: OperationShape) -> Callable[..., Any]:
        """The kernel of one operation; long, so that the usual call on the host is flat."""
        log, clock, caught, after = self._log, self._clock, self._caught, self.after
        issued, enter_unusual, get_frame, hold_blocking = (
            self._issued, self._enter_unusual, sys._getframe, self._follower.hold_blocking,
        )  # fmt: skip
        strided = self._torch.strided
        dist = self._torch.distributed
        unbox_group, unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox
        timeline, follower = log.timeline, self._follower
        find_device, fail_operation = follower.find_device, follower.fail_operation
        entries, enter, enter_blocking = self._book.entries, log.enter, log.enter_blocking
        handle = getattr(shape.overload, "_handle", None)
        # What `redispatch` does, less one Python call.
        redispatch = getattr(handle, "redispatch_boxed", shape.overload.redispatch)
        group_index, size_index, async_index = (
            shape.group_index,
            shape.size_index,
            shape.async_index,
        )
        dtype_codes, tensor_type = shape.dtype_codes, self._torch.Tensor
        codes = (shape.kind_code, shape.kind_code | _ASYNC << 24)
        device_codes = tuple(code | OperationFlag.DEVICE << 24 for code in codes)
        is_async_by_default = shape.is_async_by_default
        kind_code, is_barrier = shape.kind_code, shape.kind is Kind.BARRIER
        is_plain = shape.peer_index < 0 and not shape.is_size_per_rank and size_index >= 0
        is_plain = (is_plain or is_barrier) and shape.kind is not Kind.CUSTOM
        is_plain = is_plain and shape.tag_index < 0

        def kernel(keyset: Any, *args: Any) -> Any:
            if not log.is_on:
                return redispatch(keyset & after, *args)
            operation = blocking = None
            is_async = is_async_by_default
            now_ns = clock()
            try:
                if async_index < len(args):
                    is_async = args[async_index]
                boxed = unbox_group(args[group_index])
                group = entries.get(boxed.group_name)
                value = args[size_index]
                if type(value) is list and len(value) == 1:
                    value = value[0]
                if not (
                    is_plain
                    and group is not None
                    and group.ref() is boxed
                    and group.is_plain
                    and (is_barrier or (type(value) is tensor_type and value.layout is strided))
                ):
                    operation = enter_unusual(shape, args, is_async, now_ns)
                elif is_async or not group.is_host:
                    detail = size_bytes = 0
                    if is_barrier:
                        value = args[0]
                    else:
                        detail = dtype_codes.get(value.dtype, 0) << 48
                        size_bytes = value.nbytes
                    is_device = not group.is_host and value.is_cuda
                    code = (device_codes if is_device else codes)[is_async]
                    operation = enter(group, group, code, MISSING, detail, size_bytes, now_ns)
                    if is_device:
                        find_device(value).enter(operation, now_ns)
                else:  # a blocking call on the host
                    detail = size_bytes = 0
                    if not is_barrier:
                        size_bytes = value.nbytes
                        detail = dtype_codes.get(value.dtype, 0) << 48
                    blocking = enter_blocking(group, kind_code, detail, size_bytes, now_ns)
                if timeline.is_sampled:
                    timeline.own_ns += clock() - now_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("operation begin", error)
            try:
                result = redispatch(keyset & after, *args)
            except BaseException as error:
                fail_operation(log.adopt(blocking) if blocking is not None else operation, error)
                raise
            now_ns = clock()
            try:
                if blocking is not None:
                    box = result[-1] if type(result) is tuple else result
                    hold_blocking(blocking, None if box is None else unbox_work(box))
                elif operation is not None:
                    issued(operation, shape, args, result, get_frame(0).f_back)
                if timeline.is_sampled:
                    timeline.own_ns += clock() - now_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("operation issued", error)
            return result

        return kernel

    def _enter_unusual(
        self,
        shape: OperationShape,
        args: tuple[Any, ...],
        is_async: bool,  # noqa: FBT001 - positional for speed
        now_ns: int,
    ) -> Operation | None:
        """The first of a group, with a peer or several tensors, or in a batch."""
        if not self._follower.is_ready():
            return None
        group = self._book.find(self._torch.distributed.ProcessGroup.unbox(args[shape.group_index]))
        size_bytes, dtype, tensor = shape.measure(args, group.size)
        peer = group.global_rank(args[shape.peer_index]) if shape.peer_index >= 0 else MISSING
        tag = args[shape.tag_index] if shape.tag_index >= 0 else 0
        if tensor is None and shape.kind is Kind.BARRIER:
            tensor = args[0]
        return self._follower.enter_operation(
            group, shape.kind, shape.op_name, peer, tag, size_bytes, dtype, tensor, now_ns,
            is_async=is_async,
        )  # fmt: skip

    def _issued(
        self,
        operation: Operation,
        shape: OperationShape,
        args: tuple[Any, ...],
        result: Any,
        frame: Any,
    ) -> None:
        """torch has taken the operation, and gave a handle, or none."""
        box = result[-1] if type(result) is tuple else result
        output = args[shape.output_index] if shape.output_index >= 0 else None
        get_work = None if box is None else lambda: self._torch.distributed.Work.unbox(box)
        self._follower.follow(operation, get_work, output, frame)
