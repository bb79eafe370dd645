"""Hooks on modules that survive what programs do to modules: copies, pickles, TorchScript.

A model is copied for an average of its weights, and saved whole. A hook that is a bound method
takes the recorder with it, or cannot be pickled at all, which the program would see as an error of
its own. In a copy these hooks are the standard library's `nullcontext().__exit__`: it takes
anything, does nothing, and can be loaded where meshscope is not installed.

TorchScript compiles a module's hooks with the module, and fails where they are not TorchScript.
While it looks at a module, these hooks are out.
"""

from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from meshscope.capture.steps.hooks import Hooks


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


Hidden = list[tuple[MutableMapping[int, Any], dict[int, Any]]]
"""Hooks of modules by their table, as they were."""


def hide_hooks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hidden:
    """Takes our hooks out of the module that TorchScript is given first, and of those in it."""
    hidden: Hidden = []
    for module in args[0].modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in table.items() if isinstance(hook, ModuleHook)]
            if ours:
                hidden.append((table, dict(table)))
                for key in ours:
                    del table[key]
    return hidden


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
