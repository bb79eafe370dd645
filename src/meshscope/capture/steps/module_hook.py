"""Hooks on modules that survive what programs do to modules: copies and pickles.

A model is copied for an average of its weights, and saved whole. A hook that is a bound method
takes the recorder with it, or cannot be pickled at all, which the program would see as an error of
its own. In a copy these hooks are the standard library's `nullcontext().__exit__`: it takes
anything, does nothing, and can be loaded where meshscope is not installed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from meshscope.capture.steps.hooks import Hooks


class ModuleHook(partial[Any]):
    """A hook; nothing in a copy or a pickle."""

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
