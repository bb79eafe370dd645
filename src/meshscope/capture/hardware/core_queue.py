"""How long the training thread waited for a core, by what the kernel's scheduler counts, and which
cores and how many threads the rank has.

`/proc/thread-self/schedstat` has the time a thread ran and the time it was ready and had no core,
since it began. It is read about once a second, at a step's end, by the thread that trains, and at
the end of a run that was too short for a second time. Where
the kernel does not tell, nothing is written. Other threads of the rank are not in it.
"""

import os
import sys
import threading
from typing import Any, Protocol

_SCHEDSTAT = "/proc/thread-self/schedstat"
_MAX_BYTES = 128
_WRITE_EVERY_NS = 60_000_000_000
_CPU_MAX = "/sys/fs/cgroup/cpu.max"
_MAX_TEXT = 400
_MAX_SHORT_NS = 3_000_000_000


class _Journal(Protocol):
    def __call__(self, kind: str, **fields: Any) -> object: ...


class CoreQueue:
    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self._first: tuple[int, int, int] | None = None
        """Time, run and queued when it was first read."""
        self._last = self._written = (0, 0, 0)
        self._thread = 0

    def visit(self, now_ns: int) -> None:
        found = read_schedstat()
        if found is None:
            return
        self._last = (now_ns, *found)
        if self._first is None:
            self._first = self._written = self._last
            self._thread = threading.get_ident()
        elif now_ns - self._written[0] >= _WRITE_EVERY_NS:
            self.write()

    def close(self, now_ns: int) -> None:
        """Reads a second time if the run was too short for one, by the thread that trained."""
        is_short = self._last == self._first and now_ns - self._last[0] < _MAX_SHORT_NS
        if is_short and self._thread == threading.get_ident():
            self.visit(now_ns)
        self.write()

    def write(self) -> None:
        """What was counted since the first reading, if anything was since it was last written."""
        if self._first is None or self._last[0] <= self._written[0]:
            return
        self._written = self._last
        passed = [last - first for last, first in zip(self._last, self._first, strict=True)]
        names = ("elapsed_ns", "run_ns", "queued_ns")
        counted: dict[str, object] = dict(zip(names, passed, strict=True))
        self._journal("update", core_queue=counted | read_threads())


def read_schedstat(path: str = _SCHEDSTAT) -> tuple[int, int] | None:
    """Run and queued time of this thread, in nanoseconds; None where the system does not tell."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            fields = os.read(file, _MAX_BYTES).split()
        finally:
            os.close(file)
        return int(fields[0]), int(fields[1])
    except (OSError, ValueError, IndexError):
        return None


def read_threads() -> dict[str, object]:
    """Threads that torch computes with, and the cores they may run on."""
    torch: Any = sys.modules.get("torch")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if torch is None or not cores:
        return {}
    return {
        "num_threads": int(torch.get_num_threads()),
        "num_cores": min(len(cores), read_quota() or len(cores)),
        "cores": write_ranges(cores)[:_MAX_TEXT],
    }


def read_quota(path: str = _CPU_MAX) -> int | None:
    """Cores that a container's share of time is worth; None without a limit."""
    try:
        with open(path, encoding="ascii") as file:
            quota, period = file.read(_MAX_BYTES).split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None


def write_ranges(numbers: list[int]) -> str:
    """`0-3,8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
