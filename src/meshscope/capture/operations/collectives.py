"""Sees every communication operation of torch, from Python or C++.

As long as only Python communicates, the methods of `ProcessGroup` are patched (`group_methods`).
Functional collectives are seen where Python calls them (`functional_operations`), compiled graphs
included. Before C++ code can communicate by itself (DistributedDataParallel's reducer, graphs
compiled to C++), `kernels` in the dispatcher replace both. All tell `following` of every call; the
taps of `waits` tell it of ends. This module installs them, tests them and takes them out.
"""

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.operations.following import Follower
from meshscope.capture.operations.functional_operations import FunctionalOperations
from meshscope.capture.operations.group_methods import GroupMethods
from meshscope.capture.operations.kernels import Kernels
from meshscope.capture.operations.operation_log import OperationLog
from meshscope.capture.operations.operation_shapes import (
    METHODS,
    NAMESPACE,
    OperationShape,
    covers,
    find_shapes,
)
from meshscope.capture.operations.operation_stride import OperationStride
from meshscope.capture.operations.process_groups import GroupBook
from meshscope.capture.operations.sharded_waits import ShardedWaits
from meshscope.capture.operations.stand_ins import StandIns
from meshscope.capture.operations.waits import WaitTaps
from meshscope.errors import CaptureError
from meshscope.store.schema import MISSING

_installed: "CollectiveTap | None" = None


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
        self._book = book = log.groups = GroupBook(self._dist, journal)
        self._follower = follower = Follower(torch, log, book, guard, clock)
        self._waits = waits = WaitTaps(torch, log, book, follower, guard, clock)
        self._stand_ins = stand_ins = StandIns()
        self._sharded = ShardedWaits(torch, log, follower, guard, clock, stand_ins)
        self._kernels = Kernels(torch, log, book, follower, clock, guard.caught)
        self._functional = FunctionalOperations(
            torch, log, book, follower, waits, guard, clock, self.see_all, stand_ins
        )
        self._stride = OperationStride(log, follower)
        self._libraries: list[Any] = []
        self._shapes: list[OperationShape] = []
        self._lock = threading.Lock()
        self.is_compiled: Callable[[], bool] = lambda: False
        """Whether the program has compiled anything: guards of compiled code may name functions of
        torch, and would fail each time they change."""
        log.on_rest = self._follow_rest

    def install(self) -> None:
        """Installs everything and tests it. CaptureError when this torch does not allow it."""
        global _installed
        if _installed is not None:
            raise CaptureError("another recorder of this process watches communication already")
        torch = self._torch
        if not self._dist.is_available():
            raise CaptureError("this torch was built without torch.distributed")
        _installed = self
        try:
            self._install_taps()
            full_after = getattr(torch._C, "_dispatch_keyset_full_after", None)
            if full_after is None:
                raise CaptureError("this torch has no _dispatch_keyset_full_after")
            self._kernels.after = full_after(torch._C.DispatchKey.BackendSelect)
            self._install_short_way()
            self._functional.install()
            self._sharded.install()
            self._test()
        except BaseException:
            self.remove()
            raise

    def _install_short_way(self) -> None:
        """Patches group methods for Python callers, and detects when they no longer suffice."""
        self._shapes = find_shapes(self._torch)
        if not covers(self._shapes) or self._has_reducer():
            self._follower.sees_all = True
            self._install_kernels()
            return
        book, caught = self._book, self._guard.caught
        methods = GroupMethods(self._torch, self._log, book, self._follower, self._clock, caught)
        for name, method in METHODS.items():
            make = functools.partial(methods.make, name, method)
            self._stand_ins.add(self._dist.ProcessGroup, name, _named(name, make))
        # Not around its constructor, whose warnings would name our file as the caller.
        wrapper = self._torch.nn.parallel.DistributedDataParallel
        for owner, name in (
            (wrapper, "_pre_forward"),
            (self._dist, "_broadcast_coalesced"),
            (self._dist, "_verify_params_across_processes"),
        ):
            self._stand_ins.add(owner, name, _named(name, self._make_trigger), stays=True)

    def _has_reducer(self) -> bool:
        """Whether a DistributedDataParallel model was made before the recorder was started."""
        if not self._dist.is_initialized() or not self._has_communicated():
            return False
        wrapper = self._torch.nn.parallel.DistributedDataParallel
        return any(issubclass(kind, wrapper) for kind in set(map(type, gc.get_objects())))

    def _has_communicated(self) -> bool:
        """Whether any group has, or does not tell: a model compares its parameters across ranks
        when it is made, and one that is told not to is met at its next forward pass."""
        try:
            groups = list(self._dist.distributed_c10d._world.pg_map)
            return any(group._get_sequence_number_for_group() for group in groups)
        except (RuntimeError, AttributeError):
            return True

    def _make_trigger(self, original: Any) -> Callable[..., Any]:
        def trigger(*args: Any, **kwargs: Any) -> Any:
            self._guard.run("dispatcher kernels", self.see_all)
            return original(*args, **kwargs)

        self._follower.trigger_code = trigger.__code__
        return functools.update_wrapper(trigger, original)

    def see_all(self) -> None:
        """Switches to the dispatcher's kernels: C++ code is about to communicate."""
        with self._lock:
            if self._follower.sees_all:
                return
            self._follower.sees_all = True
            self._install_kernels()
            group = self._dist.ProcessGroup
            self._stand_ins.remove(
                lambda owner, name: (owner is group and name in METHODS) or name == "_pre_forward"
            )

    def _install_kernels(self) -> None:
        library = self._torch.library.Library(NAMESPACE, "IMPL")
        self._libraries.append(library)
        for shape in self._shapes:
            kernel = self._kernels.make(shape)
            library.impl(shape.overload, kernel, "BackendSelect", with_keyset=True)

    def _install_taps(self) -> None:
        work, group = self._dist.Work, self._dist.ProcessGroup
        self._follower.is_completed = work.is_completed
        self._follower.get_future = work.get_future
        for name, make in (
            ("wait", self._waits.make_wait),
            ("synchronize", self._waits.make_synchronize),
            ("is_completed", self._waits.make_is_completed),
            ("get_future", self._waits.make_get_future),
        ):
            self._stand_ins.add(work, name, _named(name, make))
        # A batch that has begun must end, whatever comes between.
        for name, make in (
            ("_start_coalescing", self._waits.make_start_batch),
            ("_end_coalescing", self._waits.make_end_batch),
        ):
            self._stand_ins.add(group, name, _named(name, make), stays=True)

    def _follow_rest(self, *, is_resting: bool) -> None:
        """Nothing of ours stands in the way of operations that are not recorded."""
        if not is_resting:
            self._stand_ins.go_on()
        elif not self.is_compiled():
            self._stand_ins.rest()

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
        before = self._follower.num_seen
        self._log.is_on, was_on = True, self._log.is_on
        self._follower.is_testing = True
        try:
            group.barrier()
        finally:
            self._follower.is_testing = False
            self._log.is_on = was_on
        if self._follower.num_seen != before + 1:
            raise CaptureError("a test operation went by unseen: communication is not recorded")

    def remove(self) -> None:
        global _installed
        if _installed is self:
            _installed = None
        for library in self._libraries:
            self._guard.run("tap removal", library._destroy)
        self._libraries.clear()
        self._stand_ins.remove()
        self._log.on_rest = None
        self._log.switch(is_on=False)  # a tap that someone else has wrapped passes everything on

    def drain(self, deadline_ns: int) -> None:
        """Waits a moment for callbacks and the device at the end of a recording."""
        self._follower.drain(deadline_ns)

    @property
    def device_clock_uncertainty_ns(self) -> int:
        """How far device times may be off on the host clock; -1 without a device."""
        return (
            MISSING
            if self._follower.device is None
            else self._follower.device.offset_uncertainty_ns
        )

    @property
    def uses_device(self) -> bool:
        """Whether an operation ran on a device, marked or not."""
        return self._follower.device is not None

    def visit(self) -> None:
        """Reads what the device has finished; the recorder calls it now and then."""
        self._sharded.install()
        inductor = sys.modules.get("torch._inductor.config")
        if inductor is not None and getattr(inductor, "cpp_wrapper", False):
            self.see_all()
        if self._follower.device is not None:
            self._follower.device.queue_waits()
            self._follower.device.read()

    @property
    def operation_stride(self) -> int:
        """The operations of one step in so many are recorded."""
        return self._stride.stride

    def end_step(self, step: int, start_ns: int, end_ns: int, *, is_wanted: bool) -> bool:
        """Chooses whether the next step's operations are recorded; whether they are, and those of
        other steps are not."""
        self._stride.end_step(step, start_ns, end_ns, is_wanted=is_wanted)
        return self.operation_stride > 1 and not self._log.is_resting

    def note_probe(self, event: Any, issued_ns: int) -> None:
        """Times of operations are placed by probes of the device's clock."""
        if self._follower.device is not None:
            self._follower.device.note_probe(event, issued_ns)

    def end_pass(self) -> None:
        """After a backward pass: the program waits for what was issued in it."""
        if self._follower.device is not None:
            self._follower.device.queue_waits()


def _named(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What it makes has the name and text of what it replaces."""

    def make_named(original: Any) -> Any:
        tapped = make(original)
        tapped.__name__, tapped.__doc__ = name, original.__doc__
        return tapped

    return make_named
