"""From when to when each rank of the job had its last trace window: the times of empty files.

    RUN/.trace_windows/rank00003        accessed: its begin, modified: the last step's end in it

Ranks wait for each other, so that starting the profiler on one and writing its trace make steps of
the others slow. That is no anomaly, and nothing about it would show in their traces. A rank that
sees a slow step looks here first, which costs one `stat` for every rank that ever had a window.
Hosts whose clocks differ by more than half of a slow step, and file systems that show changes late,
let such a step pass for an anomaly.
"""

import contextlib
import os
import time
from pathlib import Path

from meshscope.store.write.access import FOLDER_MODE

MARKS_NAME = ".trace_windows"


class WindowMarks:
    """The marks of a run, as one rank sets and reads them."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._folder = run_dir / MARKS_NAME
        self._own = self._folder / f"rank{rank:05d}"
        self._start_ns = 0

    def begin(self) -> None:
        """A window of this rank is about to begin."""
        self._start_ns = time.time_ns()
        with contextlib.suppress(OSError):
            self._folder.mkdir(FOLDER_MODE, exist_ok=True)  # not its run, which may be gone
            self._own.touch()
        self.move()

    def move(self) -> None:
        """It is still open, and about to hold this rank up."""
        with contextlib.suppress(OSError):
            os.utime(self._own, ns=(self._start_ns, time.time_ns()))

    def is_any_near(self, age_ns: int, duration_ns: int) -> bool:
        """Whether any rank had a window open near the begin of a step.

        The step began so long ago and took so long. Near is up to half its duration away: a rank
        with the same slow step opens its window at the end of that step.
        """
        start_ns = time.time_ns() - age_ns
        low_ns, high_ns = start_ns - duration_ns // 2, start_ns + duration_ns // 2
        try:
            with os.scandir(self._folder) as entries:
                times = [entry.stat() for entry in entries]
        except OSError:
            return False
        return any(one.st_atime_ns < high_ns and one.st_mtime_ns > low_ns for one in times)
