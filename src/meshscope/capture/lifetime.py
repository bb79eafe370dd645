"""Recorders that are open in this process: closed at exit, disarmed after a fork.

Nothing is registered with the interpreter until the first recorder is made. A child that
multiprocessing forked, or its fork server, ends without the interpreter's exit functions; it calls
finalizers of its own, which it first forgets and then lets be registered anew.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class _Living(Protocol):
    """Something to close at exit and to disarm after a fork."""

    def close(self) -> None:
        """Called when the process ends."""

    def disarm_after_fork(self) -> None:
        """Called in a forked child."""


_live: "weakref.WeakSet[_Living]" = weakref.WeakSet()
_before_close: list[Callable[[], None]] = []
_is_watching = False


def remember(living: _Living) -> None:
    """Closes `living` at exit and disarms it after a fork, from now on."""
    global _is_watching
    _live.add(living)
    if not _is_watching:
        _is_watching = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_begin_child)
        _register_with_multiprocessing()


def call_before_close(function: Callable[[], None]) -> None:
    """Calls `function`, which must not raise, once at the end of the process while all is open."""
    if function not in _before_close:
        _before_close.append(function)


def forget(living: _Living) -> None:
    """Drops `living`, which has closed itself."""
    _live.discard(living)


def _close_all() -> None:
    for function in _before_close:
        function()
    for living in list(_live):
        living.close()


def _begin_child() -> None:
    for living in list(_live):
        living.disarm_after_fork()
    _register_with_multiprocessing()


def _register_with_multiprocessing() -> None:
    """For this process if it is a child at work, and for one that is about to begin as a child."""
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(_close_all, _add_finalizer)
        _add_finalizer(_close_all)


def _add_finalizer(close: Any) -> None:
    util: Any = sys.modules["multiprocessing.util"]
    util.Finalize(None, close, exitpriority=0)
