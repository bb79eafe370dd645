"""Recorders that are open in this process: closed at exit, disarmed after a fork.

Nothing is registered with the interpreter until the first recorder is made.
"""

import atexit
import os
import weakref
from typing import Protocol


class _Living(Protocol):
    """Something to close at exit and to disarm after a fork."""

    def close(self) -> None:
        """Called when the process ends."""

    def disarm_after_fork(self) -> None:
        """Called in a forked child."""


_live: "weakref.WeakSet[_Living]" = weakref.WeakSet()
_is_watching = False


def remember(living: _Living) -> None:
    """Closes `living` at exit and disarms it after a fork, from now on."""
    global _is_watching
    _live.add(living)
    if not _is_watching:
        _is_watching = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_disarm_all)


def forget(living: _Living) -> None:
    """Drops `living`, which has closed itself."""
    _live.discard(living)


def _close_all() -> None:
    for living in list(_live):
        living.close()


def _disarm_all() -> None:
    for living in list(_live):
        living.disarm_after_fork()
