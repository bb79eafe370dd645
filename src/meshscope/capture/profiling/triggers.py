"""Who may ask for a window while training runs: a file, a signal, or what the recorder saw.

All are checked where a step ends, by the training thread. The file costs one `stat` a second at
most. The signal's handler sets a flag and nothing else. An anomaly is a step that took more than
three times the median of the last ones and more than 50 ms, or a loss that is not finite; the
window comes after it, and shows what is left of it by then. A step that was slow because a window
of another rank held the job up is none.
"""

import math
import os
import signal
import statistics
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from meshscope.capture.profiling.window_request import (
    MAX_TRIGGER_BYTES,
    WindowRequest,
    parse_request,
)

LOOK_EVERY_NS = 1_000_000_000
_SLOW_FACTOR = 3.0
_SLOW_MIN_NS = 50_000_000
_NUM_COMPARED_STEPS = 64
MIN_COMPARED_STEPS = 10
"""Steps needed to know the usual step time."""


class FileTrigger:
    """Looks whether a file was written; what stood there at first is not for us."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen_ns = self._modified_ns()
        self._next_look_ns = 0

    def take(self, now_ns: int) -> WindowRequest | None:
        """A request that came since the last look; raises UsageError when it makes no sense."""
        if now_ns < self._next_look_ns:
            return None
        self._next_look_ns = now_ns + LOOK_EVERY_NS
        modified_ns = self._modified_ns()
        if modified_ns in (0, self._seen_ns):
            return None
        self._seen_ns = modified_ns
        with open(self._path, "rb") as file:
            return parse_request(file.read(MAX_TRIGGER_BYTES))

    def _modified_ns(self) -> int:
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return 0


class SignalTrigger:
    """SIGUSR2, unless the program handles it."""

    def __init__(self) -> None:
        self._has_come = False
        self._is_installed = False

    def install(self) -> str:
        """Why it could not be installed; empty when it was."""
        if threading.current_thread() is not threading.main_thread():
            return "steps do not end in the main thread, where signals are handled"
        if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
            return "the program handles SIGUSR2 itself"
        signal.signal(signal.SIGUSR2, self._note)
        self._is_installed = True
        return ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True

    def take(self) -> WindowRequest | None:
        """A request that came since the last look."""
        if not self._has_come:
            return None
        self._has_come = False
        return WindowRequest(reason="a signal")

    def remove(self) -> None:
        """Leaves the signal as it was, unless the program has taken it since."""
        if self._is_installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGUSR2) == self._note:
                signal.signal(signal.SIGUSR2, signal.SIG_DFL)
            self._is_installed = False


class AnomalyTrigger:
    """Watches step times and losses; `cooldown` and `limit` keep it from asking all the time."""

    def __init__(self, *, cooldown_steps: int, cooldown_ns: int, limit: int) -> None:
        self._cooldown_steps = cooldown_steps
        self._cooldown_ns = cooldown_ns
        self._num_left = limit
        self._usual_ns: deque[int] = deque(maxlen=_NUM_COMPARED_STEPS)
        self._loss = ""
        self._quiet_until_step = -1
        self._quiet_until_ns = 0

    @property
    def is_spent(self) -> bool:
        """Whether it will never ask again."""
        return self._num_left <= 0

    def note_loss(self, name: str, value: float) -> None:
        """Called when a loss is logged."""
        if not math.isfinite(value):
            self._loss = f"{name[:80]} is {value}"

    def take(
        self,
        step: int,
        now_ns: int,
        duration_ns: int,
        is_disturbed: Callable[[], bool] = lambda: False,
    ) -> WindowRequest | None:
        """What this step or its loss gives reason for; `is_disturbed` is asked when it is slow."""
        usual_ns = self._usual_ns
        median_ns = statistics.median(usual_ns) if len(usual_ns) >= MIN_COMPARED_STEPS else math.inf
        usual_ns.append(duration_ns)
        loss, self._loss = self._loss, ""
        if self.is_spent or step < self._quiet_until_step or now_ns < self._quiet_until_ns:
            return None
        reason = f"{loss}, seen at step {step}" if loss else ""
        if duration_ns > max(_SLOW_FACTOR * median_ns, _SLOW_MIN_NS) and not is_disturbed():
            reason = f"step {step} took {duration_ns / median_ns:.1f} times the median"
        if not reason:
            return None
        self._num_left -= 1
        return WindowRequest(reason=reason)

    def keep_quiet_after(self, step: int, now_ns: int) -> None:
        """Called when any window has ended."""
        self._quiet_until_step = step + 1 + self._cooldown_steps
        self._quiet_until_ns = now_ns + self._cooldown_ns
