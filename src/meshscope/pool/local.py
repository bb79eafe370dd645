"""The same work on many items, on all cores, in their order.

Processes are forked, so that they begin with what is loaded here. Their number is limited by the
memory there is, by what one item may take; few and small ones, and one core, need none. Nothing is
left undone where a process dies: its item, and all that are left, are done here, one at a time.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from meshscope.store.read.files import read_file

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.connection import Connection

_MIN_BYTES = 6 << 20
_MIN_ITEMS = 64
"""Less than both is done before other processes have begun."""
_ITEMS_AT_ONCE = 16
"""Given to a process at a time, at most."""
_PARTS_LEFT = 4
"""For each process, of the size that the next part has: parts get smaller towards the end, so that
all processes end together."""
_PARTS_AHEAD = 2
"""Of those, under way or done and not yet used, for each process."""
_BASE_BYTES = 100 << 20
"""A process without an item."""
_MEMORY_SHARE = 0.5
"""Of what is free now."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")

A = TypeVar("A")
T = TypeVar("T")


class LocalEngine:
    """The cores of this machine."""

    def map(self, work: Callable[[A], T], items: Sequence[A], sizes: Sequence[int]) -> Iterator[T]:
        num_processes = choose_processes(sizes)
        if num_processes < 2:
            yield from map(work, items)
            return
        yield from _map_in_processes(items, work, num_processes)

    def close(self) -> None:
        """Nothing stays."""


def _map_in_processes(
    items: Sequence[A], work: Callable[[A], T], num_processes: int
) -> Iterator[T]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    parts = _cut(items, num_processes)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        # No more than are needed to keep all busy: results wait here, in memory, until used.
        ahead = _PARTS_AHEAD * num_processes
        running = deque(_submit(pool, work, part) for part in parts[:ahead])
        try:
            for place, part in enumerate(parts):
                result = running.popleft()
                try:
                    found = _work_on(work, part) if result is None else result.result()
                except BrokenProcessPool:
                    found = _work_on(work, part)
                del result
                if place + ahead < len(parts):
                    running.append(_submit(pool, work, parts[place + ahead]))
                yield from found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _cut(items: Sequence[A], num_processes: int) -> list[Sequence[A]]:
    parts = []
    first = 0
    while first < len(items):
        size = (len(items) - first) // (_PARTS_LEFT * num_processes)
        size = max(1, min(_ITEMS_AT_ONCE, size))
        parts.append(items[first : first + size])
        first += size
    return parts


def begin(work: Callable[[A], T], item: A, size: int) -> Callable[[], T]:
    """Begins `work` on `item`, which takes `size` bytes, in a process beside this one if there is
    a core and memory for it. What is given back waits for it; it does the work here where no such
    process is, or where that died. A result that nobody asks for ends with this process."""
    if choose_processes([max(size, _MIN_BYTES)] * 2) < 2:
        return partial(work, item)
    import multiprocessing

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work_apart, args=(work, item, sender), daemon=True)
    process.start()
    sender.close()

    def finish() -> T:
        try:
            found: T = receiver.recv()
        except (EOFError, OSError):  # it died or failed
            return work(item)
        process.join()
        return found

    return finish


def _work_apart(work: Callable[[A], T], item: A, sender: "Connection") -> None:
    # What fails here fails again where the result is asked for.
    with suppress(Exception):
        sender.send(work(item))


def _submit(
    pool: "ProcessPoolExecutor", work: Callable[[A], T], part: Sequence[A]
) -> "Future[list[T]] | None":
    """None where a process died before."""
    from concurrent.futures.process import BrokenProcessPool

    try:
        return pool.submit(_work_on, work, part)
    except BrokenProcessPool:
        return None


def _work_on(work: Callable[[A], T], part: Sequence[A]) -> list[T]:
    return [work(item) for item in part]


def choose_processes(sizes: Sequence[int]) -> int:
    """How many may work at once on items that take so much memory each."""
    if len(sizes) < 2 or (sum(sizes) < _MIN_BYTES and len(sizes) < _MIN_ITEMS):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    by_memory = int(_MEMORY_SHARE * _free_memory() / (_BASE_BYTES + max(sizes)))
    return max(1, min(cores or 1, len(sizes), by_memory))


def _free_memory() -> int:
    """Bytes that may still be taken, of the machine and of the container."""
    free = [1 << 62]
    try:
        lines = read_file(_MEMINFO).decode().splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit.isdecimal():
            used = (_CGROUP / "memory.current").read_text(encoding="ascii").strip()
            free.append(int(limit) - int(used))
    except (OSError, ValueError, IndexError):  # what is not told does not limit
        pass
    return max(min(free), 0)
