"""Where an accelerator's clock lies on the host's: an event that nothing stands in front of.

An event on a stream of our own that is always empty is reached as soon as it is issued, whatever
the program has queued on its streams. So the moment of issuing bounds the offset from below, and
closely: without probes, a device that is always behind its host would seem to run early by as much
as it lags. The host looks for the event for some microseconds at most; one that takes longer (its
hardware queue was in use) still gives a bound, a loose one.
"""

from collections.abc import Callable
from typing import Any

EVERY_NS = 500_000_000
_LOOK_FOR_NS = 60_000
_MAX_LATE = 3
"""After so many late ones in a row none is taken any more: streams share their queues here."""
_WORTH_NS = 20_000
"""A bound that is tighter by less changes nothing."""


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
        self._num_late_in_a_row = 0

    def visit(self, now_ns: int) -> None:
        """Takes a probe when one is due; never while a graph is captured."""
        if now_ns < self._next_ns or self._num_late_in_a_row >= _MAX_LATE:
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
                self._num_late_in_a_row += 1
                self._event = self._backend.Event(enable_timing=True)
                return
        self.num_taken += 1
        self._num_late_in_a_row = 0
        for listener in self.listeners:
            listener(event, issued_ns)


class DeviceOffset:
    """Host time less device time of one time line of a device, bounded from both sides.

    The device reaches an event after the host has issued it (lower bounds), and before the host
    sees that it has been reached (upper ones). The highest lower bound ever seen holds, so that
    times placed by it keep their distances; an upper bound below it says that the clocks have
    drifted apart, and replaces it. Every value it ever had is told, so that readers who know better
    (kernel samples) can place all times anew.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note
        self.ns: int | None = None

    def bound_below(self, offset_ns: int) -> None:
        if self.ns is None or offset_ns > self.ns + _WORTH_NS:
            self._set(offset_ns)

    def bound_above(self, offset_ns: int) -> None:
        if self.ns is not None and offset_ns < self.ns:
            self._set(offset_ns)

    def _set(self, offset_ns: int) -> None:
        self.ns = offset_ns
        self._note(offset_ns)
