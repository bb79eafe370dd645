"""Hooks on modules that survive what programs do to modules: copies, pickles, TorchScript.

A model is copied for an average of its weights, and saved whole. A hook that is a bound method
takes the recorder with it, or cannot be pickled at all, which the program would see as an error of
its own. In a copy these hooks are the standard library's `nullcontext().__exit__`: it takes
anything, does nothing, and can be loaded where meshscope is not installed.

TorchScript compiles a module's hooks with the module, and fails where they are not TorchScript.
While it looks at a module, these hooks are out.
"""

import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

from meshscope.capture.steps.hooks import Hooks

_MAX_RESULTS = 16
"""Looked at of what a compiled function returns."""


WRAPPED = "module"
"""What DistributedDataParallel and others of its kind call what they wrap."""


class ModuleHook(partial[Any]):
    """A hook; nothing in a copy or a pickle."""

    @property
    def __name__(self) -> str:
        """Programs that list their hooks expect functions."""
        return str(self.func.__name__)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class CompiledCall:
    """Stands around the call of a module compiled in place, whose hooks are traced away.

    Modules neither copy nor pickle what holds it.
    """

    __slots__ = ("ask", "compiled", "hooks", "module")

    def __init__(self, module: Any, compiled: Callable[..., Any]) -> None:
        self.module = module
        self.compiled = compiled
        self.ask: Callable[[CompiledCall], None] | None = None
        """Called before each call until it is None."""
        self.hooks: Hooks | None = None
        """Who times the calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ask is not None:
            self.ask(self)
        hooks = self.hooks
        if hooks is None:
            return self.compiled(*args, **kwargs)
        hooks.forward_begins(self.module, args, kwargs)
        try:
            return self.compiled(*args, **kwargs)
        finally:
            hooks.forward_ends(self.module, args, None)


class CompiledFunction:
    """Put among what torch does around each call of a compiled function.

    Hooks of modules called in such a function are traced away, and torch tells nobody of its calls.
    """

    __slots__ = ("is_forward", "is_open", "makes_gradients", "on_time", "timed_by", "unread_ns")

    training = True
    """As of the module that it stands for: evaluation is known by gradients being off."""

    def __init__(
        self, timed_by: Hooks, on_time: "Callable[[CompiledFunction | None], None]"
    ) -> None:
        """`on_time` is told of the function whose forward pass is going on, and of its end."""
        self.timed_by = timed_by
        self.on_time = on_time
        self.is_forward = False
        """Whether its calls are a forward pass: known once backward comes after, or in, one."""
        self.is_open = False
        """Whether a forward pass is going on."""
        self.makes_gradients = False
        """Whether what it returned last can be called backward on."""
        self.unread_ns: int | None = None
        """When the last call ended whose result torch did not keep (before 2.13)."""

    def __call__(self) -> Callable[[], None]:
        """Before a call; what is returned is called after it."""
        hooks = self.timed_by
        if self.is_forward:
            found = _read_caller("args", "kwargs")
            hooks.forward_begins(self, found.get("args", ()), found.get("kwargs", {}))
            self.is_open = True
            self.on_time(self)
            return self._forward_ends
        return self.see_result

    def see_result(self) -> None:
        """After a call that is not timed."""
        if self.timed_by.is_inside_pass():
            return
        found = _read_caller("result")
        if "result" in found:
            self.makes_gradients = _holds_gradients(found["result"])
        else:
            self.unread_ns = time.monotonic_ns()

    def _forward_ends(self) -> None:
        self.end_forward(_read_caller("result").get("result"))

    def end_forward(self, result: Any) -> None:
        """The forward pass is over: with the call, or before an optimizer steps in it."""
        if self.is_open:
            self.is_open = False
            self.on_time(None)
            self.timed_by.forward_ends(self, (), result)


_WRAPPER = "compile_wrapper"
"""The name of torch's function around a compiled one."""


def find_compiled_calls() -> list[tuple[Any, list[Any]]]:
    """What torch keeps of each compiled function that is being called, and what it will call at
    the end of this call."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER:
            context, ends = (frame.f_locals.get(name) for name in ("self", "cleanups"))
            if isinstance(getattr(context, "enter_exit_hooks", None), list):
                found.append((context, ends if isinstance(ends, list) else []))
        frame = frame.f_back
    return found


def _read_caller(*names: str) -> dict[str, Any]:
    """Variables of torch's wrapper that calls us: the call's arguments, or its result."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(2):  # a comprehension has a frame of its own before Python 3.12
        if frame is not None and frame.f_code.co_name == _WRAPPER:
            variables = frame.f_locals
            return {name: variables[name] for name in names if name in variables}
        frame = None if frame is None else frame.f_back
    return {}


def _holds_gradients(result: Any) -> bool:
    if isinstance(result, (tuple, list)):
        return any(map(_holds_gradients, result[:_MAX_RESULTS]))
    if isinstance(result, dict):
        return any(map(_holds_gradients, list(result.values())[:_MAX_RESULTS]))
    return getattr(result, "requires_grad", False) is True


Hidden = list[tuple[MutableMapping[int, Any], dict[int, Any]]]
"""Hooks of modules by their table, as they were."""


def hide_hooks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hidden:
    """Takes our hooks out of the module that TorchScript is given first, and of those in it."""
    hidden: Hidden = []
    for module in args[0].modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in table.items() if _is_ours(hook)]
            if ours:
                hidden.append((table, dict(table)))
                for key in ours:
                    del table[key]
    return hidden


def _is_ours(hook: Any) -> bool:
    """Whether it is one of our hooks, or what stands for one in a copy."""
    is_copy = getattr(hook, "__func__", None) is nullcontext.__exit__
    return isinstance(hook, ModuleHook) or is_copy


def show_hooks(hidden: Hidden | None) -> None:
    """Puts them back, in their order."""
    for table, hooks in hidden or ():
        table.clear()
        table.update(hooks)


def tell_script_compiler(torch: Any, original: Any, stand_in: Any) -> None:
    """TorchScript knows functions of torch by identity: what stands for one is the same to it."""
    builtins = torch.jit._builtins
    for name in [name for function, name in builtins._builtin_ops if function is original]:
        builtins._builtin_ops.append((stand_in, name))
        if builtins._builtin_table is not None:
            builtins._register_builtin(stand_in, name)


def untell_script_compiler(torch: Any, stand_in: Any) -> None:
    """Takes it back: torch's list would keep the recorder of what stood for a function."""
    builtins = torch.jit._builtins
    kept = [entry for entry in builtins._builtin_ops if entry[0] is not stand_in]
    if len(kept) < len(builtins._builtin_ops):
        builtins._builtin_ops[:] = kept
        if builtins._builtin_table is not None:
            builtins._builtin_table.pop(id(stand_in), None)
