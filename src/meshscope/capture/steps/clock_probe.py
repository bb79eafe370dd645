"""Where an accelerator's clock lies on the host's: an event that nothing stands in front of.

An event on a stream of our own that is always empty is reached as soon as it is issued, whatever
the program has queued on its streams. So the moment of issuing bounds the offset from below, and
closely: without probes, a device that is always behind its host would seem to run early by as much
as it lags. The host looks for the event for some microseconds at most; one that takes longer (its
hardware queue was in use) still gives a bound, a loose one.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

EVERY_NS = 500_000_000
_LOOK_FOR_NS = 60_000
_NUM_KEPT = 3
"""Older ones would be off by the clocks' drift."""


class ClockProbe:
    """Probes of one device, and those who want to hear of them."""

    def __init__(self, backend: Any, clock: Callable[[], int]) -> None:
        self._backend = backend
        self._clock = clock
        self._stream: Any = None
        self._event: Any = None
        self._next_ns = 0
        self.listeners: list[Callable[[Any, int], None]] = []
        """Called with the event, which has been reached, and when it was issued."""
        self.num_taken = self.num_late = 0

    def visit(self, now_ns: int) -> None:
        """Takes a probe when one is due; never while a graph is captured."""
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + EVERY_NS
        if self._stream is None:
            self._stream = self._backend.Stream()
            self._event = self._backend.Event(enable_timing=True)
        clock, event = self._clock, self._event
        issued_ns = clock()
        event.record(self._stream)
        until_ns = issued_ns + _LOOK_FOR_NS
        while not event.query():
            if clock() > until_ns:
                self.num_late += 1
                self._event = self._backend.Event(enable_timing=True)
                return
        self.num_taken += 1
        for listener in self.listeners:
            listener(event, issued_ns)


class ProbeOffsets:
    """The latest bounds that probes gave for one time line of a device."""

    def __init__(self) -> None:
        self._offsets: deque[int] = deque(maxlen=_NUM_KEPT)

    def note(self, issued_ns: int, device_ns: int) -> None:
        self._offsets.append(issued_ns - device_ns)

    def tighten(self, bound_ns: int) -> int:
        """The higher of a lower bound and the probes'."""
        return max(bound_ns, *self._offsets) if self._offsets else bound_ns
