"""Hooks on modules that survive what programs do to modules: copies and pickles.

A model is copied for an average of its weights, and saved whole. A hook that is a bound method
takes the recorder with it, or cannot be pickled at all, which the program would see as an error of
its own. In a copy these hooks are the standard library's `nullcontext().__exit__`: it takes
anything, does nothing, and can be loaded where meshscope is not installed.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any


class ModuleHook(partial[Any]):
    """A hook; nothing in a copy or a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
