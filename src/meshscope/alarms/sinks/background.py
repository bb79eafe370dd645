"""A thread between the watcher and a receiver that may be slow: calls wait there, not here."""

import queue
import threading
from collections.abc import Callable

_MAX_WAITING = 1000
_CLOSE_S = 10.0


class Background:
    """Runs calls one after another. Beyond so many waiting, new ones are dropped and counted."""

    def __init__(self, name: str, *, close_s: float = _CLOSE_S) -> None:
        self._name = name
        self._close_s = close_s
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_WAITING)
        self._lock = threading.Lock()
        self._problems: list[str] = []
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"meshscope-{name}", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            with self._lock:
                self._num_dropped += 1

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a receiver must not end the watcher
                self.note(f"{type(error).__name__}: {error}")

    def note(self, text: str) -> None:
        with self._lock:
            if len(self._problems) < 10:
                self._problems.append(f"{self._name}: {text}")

    def problems(self) -> list[str]:
        with self._lock:
            found, self._problems = self._problems, []
            if self._num_dropped:
                found.append(f"{self._name}: {self._num_dropped} calls were dropped: it is slow")
                self._num_dropped = 0
        return found

    def close(self) -> None:
        """Waits for what is under way, for some seconds."""
        try:
            self._calls.put(None, timeout=self._close_s)
        except queue.Full:
            return
        self._thread.join(self._close_s)
