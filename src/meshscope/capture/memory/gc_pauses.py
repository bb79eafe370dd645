"""Pauses by Python's garbage collector, as detail spans `gc gen0`, `gc gen1`, `gc gen2`.

A collection may begin at any allocation, also inside the recorder while it holds a lock. So the
callback only takes the time and keeps what was long in a bounded queue; spans are written at the
next step's end. While a collection runs nothing else of Python does, whichever thread began it:
the span is written for that thread, and holds them all up.
"""

import gc
from collections import deque
from collections.abc import Callable
from threading import get_ident

LEAST_PAUSE_NS = 200_000
"""Shorter collections are not recorded."""
MAX_WAITING = 4096
"""Pauses kept until the next step's end; older ones are forgotten and counted."""
NAMES = ("gc gen0", "gc gen1", "gc gen2")

Pause = tuple[int, int, int, int]
"""Generation, begin and end by the recorder's clock, and the thread's ident."""


class GcPauses:
    """Listens to the collector from `install` to `remove`."""

    def __init__(self, clock: Callable[[], int], wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to write; it must not take locks."""
        self._clock = clock
        self._wake = wake
        self._start_ns = 0
        self._waiting: deque[Pause] = deque(maxlen=MAX_WAITING)
        self._is_installed = False
        self.num_forgotten = 0
        # One object: a bound method is a new one each time, and `remove` has to find it.
        self._callback = self._collection

    def install(self) -> None:
        """Begins to listen; again is harmless."""
        if not self._is_installed:
            self._is_installed = True
            gc.callbacks.append(self._callback)

    def remove(self) -> None:
        if self._is_installed:
            self._is_installed = False
            if self._callback in gc.callbacks:  # the program may have emptied the list
                gc.callbacks.remove(self._callback)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        # An exception here would be printed by the interpreter, not raised: it ends nothing.
        now_ns = self._clock()
        if phase == "start":
            self._start_ns = now_ns
            return
        start_ns, self._start_ns = self._start_ns, 0
        if start_ns and now_ns - start_ns >= LEAST_PAUSE_NS:
            if len(self._waiting) == MAX_WAITING:
                self.num_forgotten += 1
            self._waiting.append((info["generation"], start_ns, now_ns, get_ident()))
            self._wake()

    def take(self) -> list[Pause]:
        """The pauses since the last time."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken


def pause_name(generation: int) -> str:
    return NAMES[generation] if 0 <= generation < len(NAMES) else f"gc gen{generation}"
