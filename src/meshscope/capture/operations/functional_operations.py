"""Sees functional collectives where Python calls them, before the dispatcher.

    torch.ops._c10d_functional.all_reduce(…)   DTensor, `_functional_collectives`, inductor's code
      → packet._op(…)                          a tap of ours, which calls torch's function
      → dispatcher, torch's kernel in C++      nothing of ours

Every call from Python passes `_op` of an operation or of one of its overloads, graphs compiled
to Python included: they call it as any program does. Tracing never looks at it: dynamo puts the
operation itself into a graph, and what tracers call with tensors that stand for others is passed
on. A tap hashes like what it replaces, because torch hashes an operation by it.

There is no handle to ask, so an operation ends with the wait for its tensor. That suits a device,
where ends are events; a group on the host needs torch's callbacks to know ends exactly, and goes
by the kernels of `kernels`, as everything does that C++ can go on with by itself (`trigger`).
"""

import functools
from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.following import SLOW_CALL_NS, Follower
from meshscope.capture.operations.operation_log import Operation, OperationLog
from meshscope.capture.operations.operation_shapes import add_up, dtype_codes_of, kind_of
from meshscope.capture.operations.process_groups import GroupBook
from meshscope.capture.operations.stand_ins import StandIns
from meshscope.capture.operations.waits import WaitTaps
from meshscope.core.operations import Kind
from meshscope.store.schema import MISSING, OperationFlag

_NAMESPACE = "_c10d_functional"
_AUTOGRAD_NAMESPACE = "_c10d_functional_autograd"
"""Its operations call those of the other one, in backward perhaps from a thread of torch's."""
_WAIT = "wait_tensor"
_GROUP = "group_name"
_KNOWN_KINDS = frozenset(
    (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BROADCAST, Kind.ALL_TO_ALL)
)


class FunctionalOperations:
    """The taps of one recorder."""

    def __init__(
        self,
        torch: Any,
        log: OperationLog,
        book: GroupBook,
        follower: Follower,
        waits: WaitTaps,
        guard: Guard,
        clock: Callable[[], int],
        see_all: Callable[[], None],
        stand_ins: StandIns,
    ) -> None:
        self._torch = torch
        self._log = log
        self._book = book
        self._follower = follower
        self._waits = waits
        self._guard = guard
        self._clock = clock
        self._see_all = see_all
        self._codes = dtype_codes_of(torch)
        self._plain_dispatch = torch.Tensor.__torch_dispatch__
        self._count_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        self._stand_ins = stand_ins

    def install(self) -> None:
        """Taps every functional operation of the running torch."""
        for schema in self._torch._C._jit_get_all_schemas():
            namespace, _, name = schema.name.partition("::")
            if namespace not in (_NAMESPACE, _AUTOGRAD_NAMESPACE) or schema.overload_name:
                continue
            names = [argument.name for argument in schema.arguments]
            packet = getattr(getattr(self._torch.ops, namespace), name)
            owners: tuple[Any, ...] = (packet, getattr(packet, "default", None))
            for owner in owners:
                make: Callable[[Any], Any] = self._make_trigger
                if namespace == _NAMESPACE and name == _WAIT:
                    make = self._waits.make_wait_for_tensor
                elif _GROUP not in names:
                    continue
                elif namespace == _NAMESPACE and kind_of(name) in _KNOWN_KINDS:
                    make = functools.partial(self._make_call, name=name, names=names)
                self._stand_ins.add(owner, "_op", functools.partial(self._make_tap, make))

    def _make_tap(self, make: Callable[[Any], Any], original: Any) -> Any:
        call = make(original)
        self._follower.functional_codes.add(call.__code__)
        return _make_tap(original, call)

    def _make_trigger(self, original: Any) -> Any:
        log, follower, count_modes = self._log, self._follower, self._count_modes

        def trigger(*args: Any, **kwargs: Any) -> Any:
            if log.is_on and not follower.sees_all and not count_modes():
                self._guard.run("dispatcher kernels", self._see_all)
            return original(*args, **kwargs)

        return trigger

    def _make_call(self, original: Any, name: str, names: list[str]) -> Any:
        """The tap of a collective; flat for the same reason as a kernel."""
        log, clock, caught, follower = self._log, self._clock, self._guard.caught, self._follower
        entries, timeline, codes = self._book.entries, log.timeline, self._codes
        count_modes, enter_unusual, issued = self._count_modes, self._enter_unusual, self._issued
        tensor_type, enter, find_device = self._torch.Tensor, log.enter, follower.find_device
        kind, group_index = kind_of(name), names.index(_GROUP)
        is_plain = kind is not Kind.BROADCAST and not names[0].endswith("s")
        is_gather = kind is Kind.ALL_GATHER
        host_code = int(kind) | OperationFlag.ASYNC << 24
        device_code = host_code | OperationFlag.DEVICE << 24

        def call(*args: Any, **kwargs: Any) -> Any:
            # A mode on torch's stack will call again, or only pretends.
            if not log.is_on or follower.sees_all or count_modes():
                return original(*args, **kwargs)
            operation: Operation | None = None
            now_ns = clock()
            try:
                entry = entries.get(args[group_index]) if len(args) > group_index else None
                value: Any = args[0] if args else None
                if (
                    is_plain
                    and entry is not None
                    and entry.is_plain
                    and not entry.is_host
                    and type(value) is tensor_type
                    and ((is_device := value.is_cuda) or value.is_cpu)
                    and entry.ref() is not None
                ):
                    size_bytes = value.nbytes * entry.size if is_gather else value.nbytes
                    detail = codes.get(value.dtype, 0) << 48
                    code = device_code if is_device else host_code
                    operation = enter(entry, entry, code, MISSING, detail, size_bytes, now_ns)
                    if is_device:
                        find_device(value).enter(operation, now_ns)
                else:
                    operation = enter_unusual(name, kind, names, args, kwargs, now_ns)
                if timeline.is_sampled:
                    timeline.own_ns += clock() - now_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("operation begin", error)
            if operation is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                follower.fail_operation(operation, error)
                raise
            try:
                now_ns = clock()
                issued(operation, result, now_ns)
                if timeline.is_sampled:
                    timeline.own_ns += clock() - now_ns
            except Exception as error:  # noqa: BLE001 - the guard's, kept inside for speed
                caught("operation issued", error)
            return result

        return call

    def _issued(self, operation: Operation, result: Any, now_ns: int) -> None:
        """torch has taken the operation: its end will be known by the tensor it gave."""
        if now_ns - operation.c > SLOW_CALL_NS:
            self._follower.note_slow_call(operation, now_ns)
        self._follower.remember_result(operation, result)

    def _enter_unusual(
        self, name: str, kind: Kind, names: list[str], args: Any, kwargs: Any, now_ns: int
    ) -> Operation | None:
        """The first of a group, with a root or several tensors, or of the host; None when the
        call is somebody else's to note, or no communication at all."""
        given = dict(zip(names, args, strict=False)) | kwargs
        size_bytes, dtype, tensor = add_up(given[names[0]], self._codes)
        if tensor is None or type(tensor).__torch_dispatch__ is not self._plain_dispatch:
            return None  # a subclass's own code will call again with what it holds
        if tensor.is_meta or not self._follower.is_ready():
            return None
        group = given[_GROUP]
        if type(group) is str:
            group = self._torch._C._distributed_c10d._resolve_process_group(group)
        entry = self._book.find(group)
        if entry.is_host:
            self._see_all()  # with torch's callbacks, for exact ends
            return None
        try:
            tensor.data_ptr()
        except RuntimeError:  # a tensor without data: the program is being traced
            return None
        peer = entry.global_rank(int(given["src"])) if kind is Kind.BROADCAST else MISSING
        size_bytes *= entry.size if kind is Kind.ALL_GATHER else 1
        return self._follower.enter_operation(
            entry, kind, name, peer, 0, size_bytes, dtype, tensor, now_ns, is_async=True
        )


def _make_tap(original: Any, call: Callable[..., Any]) -> Any:
    """An object that is called as `call`, and looks and hashes like what it replaces."""

    class Tap:
        __slots__ = ()
        __module__ = getattr(original, "__module__", "")
        __call__ = staticmethod(call)

        def __hash__(self) -> int:
            return hash(original)

        def __eq__(self, other: object) -> bool:
            return self is other or other is original

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    return Tap()
