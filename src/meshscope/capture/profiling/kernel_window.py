"""torch's profiler over a few steps, watching the device alone and waiting for nothing.

The functions under `torch.profiler` are called as its own schedule calls them: prepare, a step
later enable, disable after the last step. Less than `torch.profiler.profile` does: it synchronises
the device before it stops, and tells the rest of torch that a profiler is on. Here the window
ends once the device has passed an event that was recorded behind the last step.

A profiler of the program's own must not meet this one: torch refuses to start a second, and one
that is only prepared crashes when another comes by. So torch's entry points are wrapped for as
long as the recorder lives: they note what the program does, and end an open window first.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_OLDEST_CUPTI = 18
"""Of CUDA 12."""
_OTHERS_VARIABLES = ("CUDA_INJECTION64_PATH", "KINETO_USE_DAEMON", "TEARDOWN_CUPTI")
"""Set where other tools use CUPTI, or torch takes it out by itself."""
_GRAPH_CALLS = ("graph", "capture")
_GRAPH_MODULE = "torch._inductor.cudagraph_trees"
_NAMES = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


class ProfilerGate:
    """Keeps the program's profilers and ours apart."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._originals: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}
        self.is_program_profiling = False
        """The program has prepared or started a profiler and not stopped it yet."""
        self.has_program_profiled = False

    def install(self, torch: Any) -> bool:
        """False where torch has no such entry points."""
        module = torch.autograd.profiler
        if self._originals:
            return True
        if not all(callable(getattr(module, name, None)) for name in _NAMES):
            return False
        for name in _NAMES:
            self._originals[name] = original = getattr(module, name)
            self._wrappers[name] = wrapper = self._wrap(original, is_end=name == _NAMES[2])
            setattr(module, name, wrapper)
        return True

    def _wrap(self, original: Any, *, is_end: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_end:
                self._give_way()
            self.is_program_profiling = not is_end
            self.has_program_profiled = True
            return original(*args, **kwargs)

        return call

    def remove(self) -> None:
        """Puts torch's own back, where nobody has put something else there."""
        torch: Any = sys.modules.get("torch")
        for name, original in self._originals.items():
            module = torch.autograd.profiler
            if getattr(module, name, None) is self._wrappers[name]:
                setattr(module, name, original)
        self._originals.clear()
        self._wrappers.clear()


class KernelWindow:
    """One window: prepared, enabled, disabled, all from the training thread."""

    def __init__(self, torch: Any) -> None:
        self._functions = torch._C._autograd
        self._torch = torch
        self._is_prepared = self._is_enabled = False
        self._event: Any = None
        kinds = torch._C._profiler
        self._activities = {kinds.ProfilerActivity.CUDA}
        self._config = kinds.ProfilerConfig(
            kinds.ProfilerState.KINETO,
            False,  # shapes
            False,  # memory
            False,  # stacks
            False,  # FLOPs
            False,  # modules
            kinds._ExperimentalConfig(),
            "",
        )

    def prepare(self) -> None:
        self._functions._prepare_profiler(self._config, self._activities)
        self._is_prepared = True

    def enable(self) -> None:
        self._functions._enable_profiler(self._config, self._activities)
        self._is_enabled = True

    def mark_end(self) -> None:
        """Behind the last step on the current stream: once it is reached, all is known."""
        self._event = self._torch.cuda.Event()
        self._event.record()

    @property
    def is_passed(self) -> bool:
        return self._event is not None and bool(self._event.query())

    def disable(self) -> Any:
        """What was seen; None of a window that never started."""
        if not self._is_prepared:
            return None
        if not self._is_enabled:
            # Torch has no way back from prepared: it has to start before it can stop.
            self.enable()
        self._is_prepared = self._is_enabled = False
        return self._functions._disable_profiler()


def find_obstacle(torch: Any) -> str:
    """Why no kernel can be watched; empty when nothing is in the way."""
    kinds = getattr(torch._C, "_profiler", None)
    functions = getattr(torch._C, "_autograd", None)
    if kinds is None or not all(hasattr(functions, name) for name in _NAMES):
        return "this torch has no such profiler"
    if kinds.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return "this torch's profiler does not see the device"
    return ""


def _compiles_graphs() -> bool:
    """Whether compiled functions have made CUDA graphs. That the module is loaded does not say so:
    `torch._dynamo.reset` loads it."""
    module = sys.modules.get(_GRAPH_MODULE)
    if module is None:
        return False
    return bool(getattr(getattr(module, "local", None), "tree_manager_containers", True))


def detach(calls: Iterable[str]) -> bool:
    """Takes CUPTI, the profiler's part below torch, out of the process; whether it is out.

    Torch leaves it in, and every call of CUDA then takes 2 to 4 µs more for the rest of the
    program, watched or not: a host that the device waits for loses 5 to 15 % by it. A later window
    would bring it back. It stays where CUDA graphs are used, whose next launch would fail
    (`calls`, the names of what was called in the window, tell), and where others may use it.
    """
    has_graphs = any(part in name.lower() for name in calls for part in _GRAPH_CALLS)
    has_others = any(os.environ.get(name) for name in _OTHERS_VARIABLES)
    if has_graphs or has_others or _compiles_graphs():
        return False
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcupti.so" in line}
    if len(paths) != 1:
        return False
    cupti, version = ctypes.CDLL(paths.pop()), ctypes.c_uint32()
    if cupti.cuptiGetVersion(ctypes.byref(version)) or version.value < _OLDEST_CUPTI:
        return False
    return int(cupti.cuptiFinalize()) == 0
