"""Every operator of a profiled step, seen by a dispatch mode: what it made, used and left behind.

Torch calls the mode for each operator of the thread that began the step and of the backward that
it starts, below autograd and autocast: casts of weights, temporaries of backward's nodes, what the
loss and the optimizer make. Of each result a weak reference to its storage is kept, so what is
alive here is alive there. Operators of tensors that wrap others (DTensor) are declined, and torch
then runs what they are made of, which is seen.

What an operator leaves in use beyond its results is a library's: the workspace of cuBLAS, caches
of oneDNN. It is measured, as the difference the call made; other threads that allocate at the same
time are in it.

Operators run wherever torch calls them, also while it holds locks (DDP's reducer does): nothing
here may ask torch for what takes one.

Torch has other formulas for some nodes of backward where any dispatch mode is on (`prod`,
`cumprod`, determinants), which round differently: ours is out while such a node runs.

Not seen: what torch.compile has compiled (it runs as it would without us), kernels called past
torch's dispatcher, and other threads.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from meshscope.capture.guard import Guard
from meshscope.capture.memory.allocator import CudaAllocator, HostAllocator
from meshscope.capture.memory.storages import (
    WeakStorages,
    in_backward,
    plain_tensors,
    tensors_in,
)

_MIN_LIBRARY_BYTES = 1 << 16
"""Differences below are malloc's own bookkeeping, or Python objects."""
_COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of operators that send, which goes on after they return."""
_RESIZING = ("resize_", "resize_as_", "set_", "resize_storage_bytes_")
_DELICATE = ("prod", "cumprod", "_linalg_det", "_linalg_slogdet")
"""Operators whose backward torch computes by another formula where a dispatch mode is on."""
SITE = "memory operators"


class Operators:
    """Storages that operators made and used, and what libraries keep."""

    def __init__(
        self,
        torch: Any,
        guard: Guard,
        allocator: CudaAllocator | HostAllocator,
        *,
        find_path: Callable[[], str],
        device: str,
        sample: Callable[[], None],
    ) -> None:
        """`sample` is called after each operator."""
        self._torch = torch
        self._guard = guard
        self._allocator = allocator
        self._find_path = find_path
        self._device = device
        self._sample = sample
        self._made, self._used = WeakStorages(torch), WeakStorages(torch)
        self._sent = WeakStorages(torch)
        self._libraries: dict[str, int] = {}
        self._mode: Any = None
        self._thread_id = 0
        self._local = threading.local()
        self._is_entered = False
        self._is_for_forward_only = False
        self.is_on = False
        """Whether operators are watched now."""
        self.last_name = ""
        """Name of the operator that ran last."""

    # --- when ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to watch operators of this thread."""
        if self._is_entered:
            self.is_on = True
        if self._is_entered or in_backward(self._torch):
            return
        self.is_on = True
        # Inside of another's mode ours must come out before it: it takes out what is on top.
        self._is_for_forward_only = bool(self._torch._C._len_torch_dispatch_stack())
        self._mode = self._mode or _make_mode(self)
        self._mode.__enter__()
        self._thread_id = threading.get_ident()
        self._is_entered = True

    def end_forward(self) -> None:
        if self._is_for_forward_only:
            self.end()

    def end(self) -> None:
        """Takes the mode out, unless another is on top, or this is another thread: then it only
        hands on from now on, and the next `end` tries again."""
        self.is_on = False
        is_here = self._is_entered and threading.get_ident() == self._thread_id
        if is_here and not in_backward(self._torch) and self._is_on_top():
            self._mode.__exit__(None, None, None)
            self._is_entered = False

    def _is_on_top(self) -> bool:
        core = self._torch._C
        num_modes = core._len_torch_dispatch_stack()
        return bool(num_modes) and core._get_dispatch_stack_at(num_modes - 1) is self._mode

    @property
    def is_out(self) -> bool:
        """Whether the mode is not left anywhere."""
        return not self._is_entered

    @property
    def is_delicate(self) -> bool:
        """Whether the operator that ran last in this thread has a delicate backward."""
        return bool(getattr(self._local, "is_delicate", False))

    def step_aside(self, is_delicate: bool) -> None:  # noqa: FBT001 - a callback's
        """Called before a node of backward uses what it saved: out for delicate ones, else in.

        Only where no other mode is there, and only in backward: at its end torch sets modes back to
        what they were when it began.
        """
        was_aside = getattr(self._local, "is_aside", False)
        if not (is_delicate or was_aside) or not self.is_on or not self._is_entered:
            return
        core = self._torch._C
        if not in_backward(self._torch):
            return
        num_modes = core._len_torch_dispatch_stack()
        if is_delicate and num_modes == 1 and self._is_on_top():
            core._pop_torch_dispatch_stack(None)
            self._local.is_aside = True
        elif not is_delicate:
            self._local.is_aside = False
            if not num_modes:
                core._push_on_torch_dispatch_stack(self._mode)

    def forget(self) -> None:
        """Forgets storages, but not what libraries keep."""
        for storages in (self._made, self._used, self._sent):
            storages.clear()

    # --- what ---------------------------------------------------------------------------------

    def made(self) -> Iterator[tuple[str, tuple[str, int], int]]:
        """Path, key and bytes of what operators made and is alive."""
        return self._made.alive()

    def used(self) -> Iterator[tuple[str, tuple[str, int], int]]:
        """Likewise, of what they were given and did not make."""
        return self._used.alive()

    def sent(self) -> Iterator[tuple[str, tuple[str, int], int]]:
        """Likewise, of what communication was given or has made."""
        return self._sent.alive()

    @property
    def libraries(self) -> dict[str, int]:
        """Bytes by the operator that left them."""
        return dict(self._libraries)

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator; only its own errors come out."""
        if not self.is_on:
            return function(*args, **kwargs)
        before = self._guard.run(SITE, lambda: self._look_before(function, args, kwargs))
        result = function(*args, **kwargs)
        self._local.is_delicate = str(getattr(function, "_opname", "")) in _DELICATE
        self._guard.run(SITE, lambda: self._look_after(function, result, before))
        return result

    def _look_before(self, function: Any, args: Any, kwargs: Any) -> int:
        path, is_sent = self._find_path(), _is_communication(function)
        for tensor in tensors_in(self._torch, (args, kwargs)):
            for plain in plain_tensors(tensor):
                if not self._made.knows(plain):
                    self._used.add_plain(path, plain)
                if is_sent:
                    self._sent.add_plain(str(function), plain)
        return self._allocator.requested_bytes()

    def _look_after(self, function: Any, result: Any, before: int | None) -> None:
        path, num_new, is_sent = self._find_path(), 0, _is_communication(function)
        for tensor in tensors_in(self._torch, result):
            for plain in plain_tensors(tensor):
                if not self._used.knows(plain):
                    num_bytes = self._made.add_plain(path, plain)
                    num_new += num_bytes if str(plain.device) == self._device else 0
                if is_sent:
                    self._sent.add_plain(str(function), plain)
        self.last_name = str(function)
        if before is not None and before >= 0 and not is_sent and _allocates_results_only(function):
            self._note_library(self._allocator.requested_bytes() - before - num_new)
        self._sample()

    def _note_library(self, num_bytes: int) -> None:
        if num_bytes >= _MIN_LIBRARY_BYTES:
            self._libraries[self.last_name] = self._libraries.get(self.last_name, 0) + num_bytes
        elif num_bytes <= -_MIN_LIBRARY_BYTES:
            known = self._libraries.get(self.last_name, 0)
            self._libraries[self.last_name] = max(0, known + num_bytes)


def _is_communication(function: Any) -> bool:
    return getattr(function, "namespace", "") in _COMMUNICATION


def _allocates_results_only(function: Any) -> bool:
    """Whether what is in use changes by its results only."""
    return str(getattr(function, "_opname", "")) not in _RESIZING


def _make_mode(operators: Operators) -> Any:
    """A dispatch mode that tells `operators`; its class comes from the program's torch."""
    # By name: what reads runs must not need torch, and torch has no types for it.
    base: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class OperatorWatch(base):  # type: ignore[misc]  # so is its subclass
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # else torch.compile would fall back to eager in a profiled step

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Skipping imports the compiler, seconds and many MiB, in a program that has none.
            return "torch._dynamo" in sys.modules

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # its parts come here
            return operators.run(func, args, kwargs or {})

    return OperatorWatch()
