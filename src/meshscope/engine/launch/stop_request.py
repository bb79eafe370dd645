"""A request to end training early, made by a signal and kept until the step is over.

    with StopRequest.on_signals() as stop:
        for batch in batches:
            engine.step(batch)
            if stop.is_set:          # agree with the other ranks first: signals come one by one
                break

A handler that raised in the middle of a collective would leave the other ranks waiting, so it only
notes the signal. Any number of signals is one request; to stop at once, kill. A rank that hangs in
a collective never looks, and only a kill ends it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether to stop after the current step; `set` from code, or by signals."""

    def __init__(self) -> None:
        self.is_set = False
        self.signal_number: int | None = None
        """The first signal that asked; None when it was code."""

    def set(self, signal_number: int | None = None) -> None:
        """Requests the stop; only the first request counts."""
        if not self.is_set:
            self.signal_number = signal_number
        self.is_set = True

    @classmethod
    @contextmanager
    def on_signals(cls) -> "Iterator[StopRequest]":
        """One that SIGINT and SIGTERM set; handlers from before are back afterwards.

        Main thread only: Python has signal handlers nowhere else.
        """
        stop = cls()

        def note(number: int, frame: FrameType | None) -> None:
            stop.set(number)

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
