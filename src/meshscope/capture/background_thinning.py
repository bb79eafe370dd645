"""Thins a rank's old records while it trains, in a thread that mostly rests.

The size may be given per rank (`max_disk_bytes`) or per job (`meshscope run --max-disk`), which is
divided by its ranks. Without either a rank has a size that most runs never reach: a run of weeks
must not lose its newest records because nobody thought of a limit.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from meshscope.capture.config import MAX_DISK_VARIABLE
from meshscope.capture.guard import Guard
from meshscope.store.write.thinning import Thinner

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 16 << 30
"""Of a rank, where nobody gave a size. Nothing is thinned below a sixteenth of it."""
_MANY_BYTES = 128 << 20
"""A segment of that size takes longer than a minute to fill, at 2 MB a second."""
_LOOK_SECONDS = 1.0
_WORK_SHARE = 0.02
"""Of the time, at most."""
_LATE_WORK_SHARE = 0.1
"""The same once the next segment is full before the last one is thinned."""
_MIN_SHARE_LEFT = 0.25
"""Of a rank's size, whatever its earlier attempts take."""
_STOP_SECONDS = 5.0


def find_max_bytes(
    given_bytes: int | None, env: Mapping[str, str], world_size: int, rank_dir: Path
) -> int | None:
    """What this attempt of a rank may take; None without a limit, which a size of 0 asks for."""
    max_bytes = given_bytes
    job_text = env.get(MAX_DISK_VARIABLE, "")
    if max_bytes is None and job_text.isdecimal():
        max_bytes = int(job_text) // max(world_size, 1)
    if max_bytes is None:
        max_bytes = DEFAULT_MAX_BYTES
    if max_bytes == 0:
        return None
    return max(max_bytes - _measure(rank_dir), int(max_bytes * _MIN_SHARE_LEFT))


def _measure(folder: Path) -> int:
    """Bytes of what earlier attempts left."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total_bytes


class BackgroundThinning:
    """The thread of one attempt. It is there from the begin where the size is small; else it comes
    when there is something to thin, and most runs never have it."""

    def __init__(self, thinner: Thinner, guard: Guard, note: Callable[[str, str], None]) -> None:
        self._thinner = thinner
        self._guard = guard
        self._note = note
        self._stop = threading.Event()
        self._has_noted = False
        self._thread: threading.Thread | None = None
        if thinner.segment_bytes < _MANY_BYTES:
            self._start()

    def look(self) -> None:
        """Called now and then by somebody else, once a minute or so."""
        if self._thread is None and self._thinner.is_due():
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="meshscope-thin", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends at the next slice; a file that is half written is removed."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._guard.run("thinning", self._look)

    def _look(self) -> None:
        if self._thinner.is_due():
            self._do_round()
        if self._thinner.excess_bytes and not self._has_noted:
            self._has_noted = True
            self._note("thinning", "what is kept whole alone takes more than the size allows")

    def _do_round(self) -> None:
        round_begin, is_late, work = time.monotonic(), False, self._thinner.work()
        try:
            while not self._stop.is_set():
                begin = time.monotonic()
                rest_s = next(work, None)
                if rest_s is None:
                    return
                now = time.monotonic()
                if not is_late and now - round_begin > _LOOK_SECONDS:
                    is_late, round_begin = self._thinner.is_due(), now
                share = _LATE_WORK_SHARE if is_late else _WORK_SHARE
                self._stop.wait(max(rest_s, (now - begin) * (1 / share - 1)))
        finally:
            work.close()
