"""Sees every communication operation of torch, whoever calls it.

As long as only Python communicates, by the methods of `ProcessGroup` (`group_methods`). Before
something in C++ can (DistributedDataParallel's reducer, functional collectives, compiled graphs), a
kernel at the dispatcher's BackendSelect key takes their place: every `c10d` operation passes it. It
notes the call, hands it on with `redispatch` (which releases the interpreter lock; calling a
fetched kernel would keep it and can deadlock with gloo's threads), and notes what came back. Ends
come from the handle: `Work.wait` and the like are tapped, and `wait_tensor` for the functional
ones; where no handle reaches the program, from torch's callback.

Which of these applies is told by who called: the frame above the kernel.
"""

import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.device_operations import DeviceOperations
from meshscope.capture.operations.group_methods import METHODS, GroupMethods, covers
from meshscope.capture.operations.operation_log import (
    HAND_OVER_EVERY,
    Blocking,
    Operation,
    OperationLog,
)
from meshscope.capture.operations.operation_shapes import NAMESPACE, OperationShape, find_shapes
from meshscope.capture.operations.process_groups import Channel, GroupBook, GroupEntry
from meshscope.core.operations import POINT_TO_POINT, EndSource, Kind, Outcome
from meshscope.errors import CaptureError
from meshscope.store.schema import BUILTIN_NAMES, MISSING, NoteCode, OperationFlag, WaitSource

FUTURE_STRIDE = 8
"""Of operations whose handle the program holds, every this many-th (by its sequence number, so the
same ones on every rank) also gets a callback: its exact end is known even if nobody waits."""
SLOW_CALL_NS = 100_000
"""A call that gives a handle and takes longer than this held the program up."""
NOTED_WAIT_NS = 50_000
"""A wait for something unknown is written down when it took longer than this."""
DRAIN_SECONDS = 0.2
"""How long the end of a recording waits for callbacks that are due."""

FUNCTIONAL_NAMESPACE = "_c10d_functional"
NUM_FUNCTIONAL_LOOKED_AT = 256
"""Functional collectives whose callers are looked at, to see whether a compiled graph is one."""
MAX_FRAMES = 12

PROGRAM, ENGINE, FUNCTIONAL, HELPER = 0, 1, 2, 3
"""Who called: Python code that gets a handle, torch's backward engine, a functional collective, or
a function of torch in C++ that waits itself (broadcasting buffers, comparing parameters)."""
_HELPER_FILES = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py")
_ASYNC = OperationFlag.ASYNC
_BACKWARD = BUILTIN_NAMES["backward"]
_OWN_REFERENCES = 6
_INHERITED = object()
_OK_BY_WAIT = int(Outcome.OK) << 8 | int(EndSource.WAIT) << 16
_installed: "CollectiveTap | None" = None


class _HandleRef(weakref.ref):  # type: ignore[type-arg]
    """Knows which operation a `Work` stands for without keeping it, or its tensors, alive."""

    __slots__ = ("key", "operations")

    key: int
    operations: list[Operation]


class CollectiveTap:
    """The kernels and taps of one recorder; one at a time in a process."""

    def __init__(
        self,
        torch: Any,
        log: OperationLog,
        guard: Guard,
        clock: Callable[[], int],
        journal: Callable[..., None],
    ) -> None:
        self._torch = torch
        self._dist = torch.distributed
        self._log = log
        self._guard = guard
        self._clock = clock
        self._book = log.groups = GroupBook(self._dist, journal)
        self._libraries: list[Any] = []
        self._originals: list[tuple[Any, str, Any, Any]] = []
        self._blocked: dict[int, tuple[Any, Blocking]] = {}
        """Per thread the blocking operation it is in, between its call and torch's own wait."""
        self._held: dict[int, tuple[Any, list[Operation]]] = {}
        """Per thread the last handle: kept until it has reached the caller, or the next one."""
        self._refs: dict[int, _HandleRef] = {}
        self._by_pointer: dict[int, Operation] = {}
        self._batches: dict[int, list[Operation]] = {}
        """Per thread, operations of a batch that is being put together."""
        self._callers: dict[Any, int] = {}
        self._no_future: set[tuple[int, int]] = set()
        """Groups and kinds whose handles have no future."""
        self._device: DeviceOperations | None = None
        self._tensor = torch.Tensor
        self._after: Any = None
        self._shapes: list[OperationShape] = []
        self._sentinels: Any = None
        self.sees_all = False
        """The dispatcher's kernels are in place; the methods of groups have had their day."""
        self._trigger_code: Any = None
        """Stands between a helper in C++ and torch's Python function that calls it."""
        self._lock = threading.Lock()
        self._has_wait_kernel = False
        self._has_wait_function = False
        self._num_functional = 0
        self.num_seen = 0
        self._is_completed: Any = None
        self._get_future: Any = None

    # --- installing -----------------------------------------------------------------------

    def install(self) -> None:
        """Puts everything in place and tests it. CaptureError when this torch does not allow it."""
        global _installed
        if _installed is not None:
            raise CaptureError("another recorder of this process watches communication already")
        torch = self._torch
        if not self._dist.is_available():
            raise CaptureError("this torch was built without torch.distributed")
        _installed = self
        try:
            self._install_taps()
            self._install_wait_function()
            full_after = getattr(torch._C, "_dispatch_keyset_full_after", None)
            if full_after is None:
                raise CaptureError("this torch has no _dispatch_keyset_full_after")
            self._after = full_after(torch._C.DispatchKey.BackendSelect)
            self._install_short_way()
            self._test()
        except BaseException:
            self.remove()
            raise

    def _install_short_way(self) -> None:
        """Methods of groups for Python callers, and what tells us when they no longer suffice."""
        self._shapes = find_shapes(self._torch)
        if not covers(self._shapes) or self._has_reducer():
            self._install_kernels()
            return
        book, caught = self._book, self._guard.caught
        methods = GroupMethods(self._torch, self._log, book, self, self._clock, caught)
        for name, method in METHODS.items():
            make = functools.partial(methods.make, name, method)
            self._replace(self._dist.ProcessGroup, name, make)
        self._install_sentinels()
        for owner, name in (
            (self._torch.nn.parallel.DistributedDataParallel, "__init__"),
            (self._dist, "_broadcast_coalesced"),
            (self._dist, "_verify_params_across_processes"),
        ):
            self._replace(owner, name, self._make_trigger)

    def _has_reducer(self) -> bool:
        """Whether a DistributedDataParallel model was made before the recorder was started."""
        if not self._dist.is_initialized():
            return False
        wrapper = self._torch.nn.parallel.DistributedDataParallel
        return any(issubclass(kind, wrapper) for kind in set(map(type, gc.get_objects())))

    def _make_trigger(self, original: Any) -> Callable[..., Any]:
        def trigger(*args: Any, **kwargs: Any) -> Any:
            self._guard.run("dispatcher kernels", self.see_all)
            return original(*args, **kwargs)

        self._trigger_code = trigger.__code__
        return functools.update_wrapper(trigger, original)

    def _install_sentinels(self) -> None:
        """Kernels before functional collectives: the first one is the sign to see all."""
        library = self._torch.library.Library(FUNCTIONAL_NAMESPACE, "IMPL")
        self._sentinels = library
        after = self._after
        for schema in self._torch._C._jit_get_all_schemas():
            namespace, _, name = schema.name.partition("::")
            if namespace != FUNCTIONAL_NAMESPACE or name == "wait_tensor":
                continue
            overload = getattr(getattr(self._torch.ops._c10d_functional, name), "default", None)
            if overload is None or schema.overload_name:
                continue

            def kernel(keyset: Any, *args: Any, redispatch: Any = overload.redispatch) -> Any:
                self._guard.run("dispatcher kernels", self.see_all)
                return redispatch(keyset & after, *args)

            library.impl(overload, kernel, "BackendSelect", with_keyset=True)

    def see_all(self) -> None:
        """From now on by the dispatcher's kernels: something in C++ is about to communicate."""
        with self._lock:
            if self._sentinels is None or self.sees_all:
                return
            self.sees_all = True
            self._install_kernels()
            group = self._dist.ProcessGroup
            self._restore(lambda owner, name: owner is group and name in METHODS)

    def _drop_sentinels(self) -> None:
        """Not inside one of them: it would be destroyed while it runs."""
        library, self._sentinels = self._sentinels, None
        if library is not None:
            self._guard.run("tap removal", library._destroy)

    def _install_kernels(self) -> None:
        library = self._torch.library.Library(NAMESPACE, "IMPL")
        self._libraries.append(library)
        for shape in self._shapes:
            kernel = self._make_kernel(shape)
            library.impl(shape.overload, kernel, "BackendSelect", with_keyset=True)

    def _install_wait_kernel(self) -> None:
        """For compiled graphs, which call the operation and not the Python function around it.

        Only once there is one: a second kernel in the way of every functional collective costs
        more than the tap of that function.
        """
        self._has_wait_kernel = True
        overload = self._torch.ops._c10d_functional.wait_tensor.default
        library = self._torch.library.Library(FUNCTIONAL_NAMESPACE, "IMPL")
        self._libraries.append(library)
        redispatch = getattr(overload._handle, "redispatch_boxed", overload.redispatch)
        after = self._after
        waited = self._make_wait_for_tensor(
            lambda keyset, tensor: redispatch(keyset & after, tensor)
        )
        library.impl(overload, waited, "BackendSelect", with_keyset=True)

    def _install_wait_function(self) -> None:
        functional = sys.modules.get("torch.distributed._functional_collectives")
        if functional is None or self._has_wait_function:
            return
        self._has_wait_function = True
        is_compiling = self._torch.compiler.is_dynamo_compiling

        def make(original: Any) -> Callable[..., Any]:
            waited = self._make_wait_for_tensor(lambda keyset, tensor: original(tensor))

            def wait_tensor(tensor: Any) -> Any:
                return original(tensor) if is_compiling() else waited(None, tensor)

            return wait_tensor

        self._replace(functional, "wait_tensor", make)

    def _install_taps(self) -> None:
        work, group = self._dist.Work, self._dist.ProcessGroup
        self._is_completed = work.is_completed
        self._get_future = work.get_future
        self._replace(work, "wait", self._make_wait)
        self._replace(work, "synchronize", self._make_synchronize)
        self._replace(work, "is_completed", self._make_is_completed)
        self._replace(work, "get_future", self._make_get_future)
        self._replace(group, "_start_coalescing", self._make_start_batch)
        self._replace(group, "_end_coalescing", self._make_end_batch)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        # As it stands in the class: asking the class for it would lose how it takes its object.
        stored = vars(owner).get(name, _INHERITED)
        tapped = make(original)
        tapped.__name__, tapped.__doc__ = name, original.__doc__
        setattr(owner, name, tapped)
        self._originals.append((owner, name, stored, tapped))

    def _restore(self, is_wanted: Callable[[Any, str], bool]) -> None:
        """Puts originals back, where nobody has wrapped ours since."""
        kept = []
        for entry in reversed(self._originals):
            owner, name, stored, tapped = entry
            if not is_wanted(owner, name):
                kept.append(entry)
            elif vars(owner).get(name) is not tapped:
                continue
            elif stored is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, stored)
        self._originals = kept[::-1]

    def _test(self) -> None:
        """One barrier of a private group of one must be seen, or nothing will be."""
        c10d = self._torch._C._distributed_c10d
        store = self._dist.HashStore()
        group = self._dist.ProcessGroup(store, 0, 1)
        cpu = self._torch.device("cpu")
        kind = self._dist.ProcessGroup.BackendType.CUSTOM
        fake = c10d.FakeProcessGroup
        backend = getattr(fake, "_create_internal", fake)(0, 1)
        group._register_backend(cpu, kind, backend)
        group._set_default_backend(kind)
        before = self.num_seen
        self._log.is_on, was_on = True, self._log.is_on
        self._is_testing = True
        try:
            group.barrier()
        finally:
            self._is_testing = False
            self._log.is_on = was_on
        if self.num_seen != before + 1:
            raise CaptureError("a test operation went by unseen: communication is not recorded")

    _is_testing = False

    def remove(self) -> None:
        """Takes everything out again."""
        global _installed
        if _installed is self:
            _installed = None
        for library in self._libraries:
            self._guard.run("tap removal", library._destroy)
        self._libraries.clear()
        self._drop_sentinels()
        self._restore(lambda owner, name: True)
        self._log.is_on = False  # a tap that someone else has wrapped passes everything on

    def drain(self, deadline_ns: int) -> None:
        """At the end of a recording: gives callbacks and the device a moment."""
        self._held.clear()
        for thread in list(self._blocked):  # a thread that is held up right now
            entry = self._blocked.pop(thread, None)
            if entry is not None:
                self._log.adopt(entry[1])
        if self._device is not None:
            self._device.drain(deadline_ns)
        give_up_ns = min(deadline_ns, self._clock() + int(DRAIN_SECONDS * 1e9))
        while self._clock() < give_up_ns and any(
            operation.has_future for operation in self._log.under_way()
        ):
            time.sleep(0.001)
        for operation in list(self._by_pointer.values()):
            if not (operation.has_future or operation.a >> 24 & OperationFlag.ENGINE):
                # Functional, and nobody wanted the result.
                self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN)

    @property
    def device_clock_uncertainty_ns(self) -> int:
        """How far device times may be off on the host clock; -1 without a device."""
        return MISSING if self._device is None else self._device.offset_uncertainty_ns

    def visit(self) -> None:
        """Now and then, from the recorder: reads what the device has finished."""
        if self._device is not None:
            self._device.read()

    # --- operations -----------------------------------------------------------------------

    def _make_kernel(self, shape: OperationShape) -> Callable[..., Any]:
        """The kernel of one operation; long, so that the usual call on the host is flat."""
        log, clock, caught, after = self._log, self._clock, self._guard.caught, self._after
        issued, enter_unusual, get_frame, hold_blocking = (
            self._issued, self._enter_unusual, sys._getframe, self.hold_blocking,
        )  # fmt: skip
        strided = self._torch.strided
        unbox_group, unbox_work = self._dist.ProcessGroup.unbox, self._dist.Work.unbox
        timeline = log.timeline
        entries, enter, enter_blocking = self._book.entries, log.enter, log.enter_blocking
        handle = getattr(shape.overload, "_handle", None)
        # What `redispatch` does, less one Python call.
        redispatch = getattr(handle, "redispatch_boxed", shape.overload.redispatch)
        group_index, size_index, async_index = (
            shape.group_index,
            shape.size_index,
            shape.async_index,
        )
        dtype_codes, tensor_type = shape.dtype_codes, self._tensor
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
                        self._on_device(value).enter(operation, now_ns)
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
                self.fail_operation(
                    log.adopt(blocking) if blocking is not None else operation, error
                )
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

    def hold_blocking(self, blocking: Blocking, work: Any) -> None:
        """torch has taken a blocking call: its caller waits for the handle at once."""
        thread = get_ident()
        if work is not None and thread not in self._blocked and thread not in self._held:
            self._blocked[thread] = (work, blocking)
            return
        operation = self._log.adopt(blocking)
        if work is None:
            self._log.end(operation, self._clock(), EndSource.CALL)
            return
        self._let_go_of_blocked(thread)
        self._hold(work, [operation])

    def _let_go_of_blocked(self, thread: int) -> None:
        entry = self._blocked.pop(thread, None)
        if entry is not None:
            self._watch_handle(entry[0], [self._log.adopt(entry[1])])

    def _enter_unusual(
        self,
        shape: OperationShape,
        args: tuple[Any, ...],
        is_async: bool,  # noqa: FBT001 - positional for speed
        now_ns: int,
    ) -> Operation | None:
        """The first of a group, with a peer or several tensors, or in a batch."""
        if not self.is_ready():
            return None
        group = self._book.find(self._dist.ProcessGroup.unbox(args[shape.group_index]))
        size_bytes, dtype, tensor = shape.measure(args, group.size)
        peer = group.global_rank(args[shape.peer_index]) if shape.peer_index >= 0 else MISSING
        tag = args[shape.tag_index] if shape.tag_index >= 0 else 0
        if tensor is None and shape.kind is Kind.BARRIER:
            tensor = args[0]
        return self.enter_operation(
            group, shape.kind, shape.op_name, peer, tag, size_bytes, dtype, tensor, now_ns,
            is_async=is_async,
        )  # fmt: skip

    def is_ready(self) -> bool:
        """Whether operations can be recorded; opens the run at the first."""
        if self._is_testing:
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
        batch = self._batches.get(get_ident())
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
            self._on_device(tensor).enter(operation, now_ns)
        return operation

    def _on_device(self, tensor: Any) -> DeviceOperations:
        if self._device is None:
            backend = getattr(self._torch, tensor.device.type)
            self._device = DeviceOperations(backend, self._log, self._clock)
        return self._device

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
        get_work = None if box is None else lambda: self._dist.Work.unbox(box)
        self.follow(operation, get_work, output, frame)

    def follow(
        self, operation: Operation, get_work: Callable[[], Any] | None, output: Any, frame: Any
    ) -> None:
        """What will tell us about the end of an operation? `frame` is that of whoever called it."""
        flags = operation.a >> 24
        if flags & _ASYNC:
            self._note_slow_call(operation, frame)
        if flags & OperationFlag.COALESCED:
            return  # the batch will have a handle
        is_device = flags & OperationFlag.DEVICE
        if get_work is None or (is_device and not flags & _ASYNC):
            if is_device and self._device is not None:
                self._device.issued(operation)
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
            self._watch_handle(work, [operation])
            if not is_device and not (operation.b & 0xFFFFFFFF) % FUTURE_STRIDE:
                self._call_back(operation, work)
            return
        if caller == HELPER:
            operation.a &= ~(_ASYNC << 24)  # its caller gets no handle: it blocks
            work = get_work()
            if is_device and self._device is not None:
                self._device.issued_by_engine(operation, self._get_future(work))
                return
            self._call_back(operation, work)
            if not operation.has_future:
                self._hold(work, [operation])
            return
        if self._num_functional < NUM_FUNCTIONAL_LOOKED_AT and caller == FUNCTIONAL:
            self._meet_functional(frame)
        if output is not None:
            self._remember_result(operation, output)
        if caller == ENGINE:
            operation.a |= OperationFlag.ENGINE << 24
            work = get_work()
            if is_device and self._device is not None:
                self._device.issued_by_engine(operation, self._get_future(work))
            else:
                self._call_back(operation, work)
        elif not is_device and not (operation.b & 0xFFFFFFFF) % FUTURE_STRIDE:
            self._call_back(operation, get_work())

    def _note_slow_call(self, operation: Operation, frame: Any) -> None:
        """A call that should return at once and did not held the program up. Not the first of a
        channel: it sets things up, ours among them."""
        now_ns = self._clock()
        is_first = not operation.b & 0xFFFFFFFF
        if is_first or now_ns - operation.c <= SLOW_CALL_NS:
            return
        if self._caller_of(frame) in (PROGRAM, FUNCTIONAL):
            self._log.wait(operation, WaitSource.CALL, operation.c, now_ns)

    def _caller_of(self, frame: Any) -> int:
        """Who called the operation, by the code of the frame above the kernel."""
        if frame is None:
            return ENGINE  # a thread of torch's own
        code = frame.f_code
        found = self._callers.get(code)
        if found is None:
            file_name = code.co_filename.replace("\\", "/")
            found = PROGRAM
            if file_name.endswith("torch/_ops.py"):
                found = FUNCTIONAL
            elif code.co_name == "_engine_run_backward":
                found = ENGINE
            elif file_name.endswith(_HELPER_FILES) or code is self._trigger_code:
                found = HELPER
            self._callers[code] = found
        return found

    def _hold(self, work: Any, operations: list[Operation]) -> None:
        thread = get_ident()
        earlier = self._held.get(thread)
        if earlier is not None and not earlier[1][0].is_over:
            self._let_go(*earlier)
        self._held[thread] = (work, operations)

    def _let_go(self, work: Any, operations: list[Operation]) -> None:
        """The next operation comes, and this one's handle was not waited for yet."""
        # Ours are: the argument, the caller's tuple, `getrefcount`'s own and the frame's.
        is_ours_alone = sys.getrefcount(work) <= _OWN_REFERENCES
        if is_ours_alone and not operations[0].has_future and self._is_completed(work):
            for operation in operations:  # whoever waited did so below Python
                self._log.end(operation, self._clock(), EndSource.WAIT_LATE)
        elif id(work) not in self._refs:
            self._watch_handle(work, operations)  # its caller may still wait for it

    def _watch_handle(self, work: Any, operations: list[Operation]) -> None:
        ref = _HandleRef(work, self._handle_dropped)
        ref.key = id(work)
        ref.operations = operations
        self._refs[ref.key] = ref

    def _handle_dropped(self, ref: _HandleRef) -> None:
        """The program let go of a handle: if it never waited, nobody will know the end."""
        if self._refs.get(ref.key) is ref:
            del self._refs[ref.key]
        try:
            for operation in ref.operations:
                if not operation.is_over and not operation.has_future:
                    self._log.end(operation, MISSING, EndSource.NONE, Outcome.UNSEEN)
        except Exception as error:  # noqa: BLE001 - called by the garbage collector
            self._guard.caught("handle dropped", error)

    def _remember_result(self, operation: Operation, result: Any) -> None:
        while type(result) is list:
            if not result:
                return
            result = result[0]
        pointer = result.data_ptr() or result.untyped_storage()._cdata  # empty ones have no data
        earlier = self._by_pointer.get(pointer)
        if earlier is not None and not (earlier.is_over or earlier.has_future):
            # Its memory is used again: whoever wanted the result has seen it.
            self._log.end(earlier, MISSING, EndSource.NONE, Outcome.UNSEEN)
        self._by_pointer[pointer] = operation

    def _call_back(self, operation: Operation, work: Any) -> None:
        """Has torch tell us when the operation is over, where it can."""
        kind = operation.a & 0xFF
        if (operation.group_id, kind) in self._no_future:
            return
        try:
            self._add_callback([operation], self._get_future(work))
        except RuntimeError:  # not every back end has one for every kind
            self._no_future.add((operation.group_id, kind))

    def _add_callback(self, operations: list[Operation], future: Any) -> None:
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
            except Exception as error:  # noqa: BLE001 - in a thread of torch's: nobody above us
                caught("operation end", error)

        for operation in operations:
            operation.has_future = True
        future.add_done_callback(over)

    def fail_operation(self, operation: Operation | None, error: BaseException) -> None:
        """The call itself raised."""
        if operation is None:
            return
        try:
            batch = self._batches.get(get_ident())
            if batch is not None and operation in batch:
                batch.remove(operation)
            self._log.fail(operation, error, EndSource.CALL)
        except Exception as own_error:  # noqa: BLE001 - the guard's
            self._guard.caught("operation failed", own_error)

    # --- handles --------------------------------------------------------------------------

    def _find(self, work: Any) -> list[Operation] | None:
        thread = get_ident()
        blocked = self._blocked.get(thread)
        if blocked is not None and blocked[0] is work:
            del self._blocked[thread]
            return [self._log.adopt(blocked[1])]
        held = self._held.get(thread)
        if held is not None and held[0] is work:
            del self._held[thread]
            return held[1]
        ref = self._refs.get(id(work))
        return ref.operations if ref is not None and ref() is work else None

    def _make_wait(self, original: Any) -> Callable[..., Any]:
        log, clock, caught, find = self._log, self._clock, self._guard.caught, self._find
        is_completed = self._is_completed
        blocked, timeline = self._blocked, log.timeline

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
            begin_ns = clock()
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
                self._waited(work, operations, begin_ns, was_over, mark, original)
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("wait end", error)
            return result

        return wait

    def _begin_device_wait(self, operation: Operation) -> Any:
        if self._device is None or operation.start_event is None or operation.has_future:
            return None
        return self._device.begin_wait()

    def _waited(
        self,
        work: Any,
        operations: list[Operation] | None,
        begin_ns: int,
        was_over: bool,  # noqa: FBT001 - positional for speed
        mark: Any,
        original: Any,
    ) -> None:
        log = self._log
        end_ns = self._clock()
        if operations is None:
            if end_ns - begin_ns > NOTED_WAIT_NS:
                log.wait(None, WaitSource.WORK, begin_ns, end_ns)
            return
        first = operations[0]
        flags = first.a >> 24
        if flags & OperationFlag.DEVICE and self._device is not None:
            if not first.is_over and not first.has_future:
                self._device.end_wait(
                    operations, mark, begin_ns, lambda: original(work), WaitSource.WORK
                )
            return
        if flags & _ASYNC:
            log.wait(first, WaitSource.WORK, begin_ns, end_ns)
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

    def _make_synchronize(self, original: Any) -> Callable[..., Any]:
        """On a device a wait by another name; on the host it does not wait for anything."""
        wait = self._make_wait(original)

        def synchronize(work: Any, *args: Any, **kwargs: Any) -> Any:
            ref = self._refs.get(id(work))
            is_device = ref is not None and ref.operations[0].a >> 24 & OperationFlag.DEVICE
            return (wait if is_device else original)(work, *args, **kwargs)

        return synchronize

    def _make_is_completed(self, original: Any) -> Callable[..., Any]:
        """A program that polls: the first yes is a bound on the end."""

        def is_completed(work: Any) -> Any:
            answer = original(work)
            if answer and self._log.is_on:
                try:
                    for operation in self._find(work) or ():
                        is_device = operation.a >> 24 & OperationFlag.DEVICE
                        if not (operation.has_future or operation.is_over or is_device):
                            self._log.end(operation, self._clock(), EndSource.WAIT_LATE)
                except Exception as error:  # noqa: BLE001 - the guard's
                    self._guard.caught("completion query", error)
            return answer

        return is_completed

    def _make_get_future(self, original: Any) -> Callable[..., Any]:
        """A program that goes on with the future (a communication hook) will drop the handle."""

        def get_future(work: Any) -> Any:
            future = original(work)
            if self._log.is_on:
                try:
                    operations = self._find(work)
                    if operations is not None and not operations[0].has_future:
                        self._future_taken(operations, future)
                except Exception as error:  # noqa: BLE001 - the guard's
                    self._guard.caught("future", error)
            return future

        return get_future

    def _future_taken(self, operations: list[Operation], future: Any) -> None:
        first = operations[0]
        is_device = first.a >> 24 & OperationFlag.DEVICE
        if first.a >> 48 == _BACKWARD:  # a communication hook: the reducer waits, not the program
            for operation in operations:
                operation.a |= OperationFlag.ENGINE << 24
        if not is_device:
            self._add_callback(operations, future)
        elif first.a >> 24 & OperationFlag.ENGINE and self._device is not None:
            self._device.issued_by_engine(first, future)

    # --- batches --------------------------------------------------------------------------

    def _make_start_batch(self, original: Any) -> Callable[..., Any]:
        def start_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(group, *args, **kwargs)
            self._batches[get_ident()] = []
            self._book.set_batching(is_batching=True)
            return result

        return start_coalescing

    def _make_end_batch(self, original: Any) -> Callable[..., Any]:
        def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
            batch = self._batches.pop(get_ident(), None)
            if not self._batches:
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
                if operation.a >> 24 & OperationFlag.DEVICE and self._device is not None:
                    self._device.issued(operation)
                else:
                    self._log.end(operation, self._clock(), EndSource.CALL)
            return
        for operation in batch:
            operation.a |= _ASYNC << 24
        self._watch_handle(work, batch)

    # --- functional collectives -----------------------------------------------------------

    def _make_wait_for_tensor(self, original: Any) -> Callable[..., Any]:
        log, clock, caught = self._log, self._clock, self._guard.caught
        by_pointer, plain = self._by_pointer, self._tensor

        def waited(keyset: Any, tensor: Any) -> Any:
            if self._sentinels is not None and self.sees_all:
                self._drop_sentinels()
            if not log.is_on or not by_pointer or type(tensor) is not plain:
                return original(keyset, tensor)
            begin_ns = clock()
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
                result = original(keyset, tensor)
            except BaseException as error:
                self._wait_failed([operation] if operation is not None else None, error)
                raise
            if operation is not None:
                try:
                    self._tensor_waited(operation, begin_ns, mark)
                except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                    caught("wait end", error)
            return result

        return waited

    def _meet_functional(self, frame: Any) -> None:
        """Finds out, at the first functional collectives, how their results are waited for."""
        self._num_functional += 1
        self._install_wait_function()
        for _ in range(MAX_FRAMES):
            if frame is None or self._has_wait_kernel:
                break
            if frame.f_code.co_filename.endswith("_functional_collectives.py"):
                return
            frame = frame.f_back
        if not self._has_wait_kernel:
            self._install_wait_kernel()

    def _tensor_waited(self, operation: Operation, begin_ns: int, mark: Any) -> None:
        log = self._log
        if operation.a >> 24 & OperationFlag.DEVICE and self._device is not None:
            if not operation.is_over and not operation.has_future:
                self._device.end_wait([operation], mark, begin_ns, None, WaitSource.TENSOR)
            return
        end_ns = self._clock()
        log.wait(operation, WaitSource.TENSOR, begin_ns, end_ns)
        if not operation.has_future:
            is_late = end_ns - begin_ns < NOTED_WAIT_NS
            log.end(operation, end_ns, EndSource.WAIT_LATE if is_late else EndSource.WAIT)
