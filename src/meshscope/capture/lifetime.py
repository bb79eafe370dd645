"""Recorders that are open in this process: closed at its end, told about forks.

Nothing is registered with the interpreter until the first recorder is made.
"""

import atexit
import os
import weakref
from typing import Protocol


class Living(Protocol):
    """What has to be told about the end of the process and about forks."""

    def close(self) -> None:
        """The process ends."""

    def disarm_after_fork(self) -> None:
        """This is a forked child."""


_live: "weakref.WeakSet[Living]" = weakref.WeakSet()
_is_watching = False


def remember(living: Living) -> None:
    """From now on `living` is closed at exit and told about forks."""
    global _is_watching
    _live.add(living)
    if not _is_watching:
        _is_watching = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_disarm_all)


def forget(living: Living) -> None:
    """`living` has ended by itself."""
    _live.discard(living)


def _close_all() -> None:
    for living in list(_live):
        living.close()


def _disarm_all() -> None:
    for living in list(_live):
        living.disarm_after_fork()
