"""Dask: attaches to a scheduler that is there (`DASK_SCHEDULER_ADDRESS`), and starts none."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from distributed.scheduler import KilledWorker

from distributed import Client
from meshscope.errors import UsageError
from meshscope.pool.task import Task, cut_into_tasks

A = TypeVar("A")
T = TypeVar("T")
_ADDRESS = "DASK_SCHEDULER_ADDRESS"
_FILE = "DASK_SCHEDULER_FILE"
_ATTACH_S = 20


class DaskEngine:
    def __init__(self) -> None:
        """Raises UsageError where no scheduler answers."""
        address, file = os.environ.get(_ADDRESS), os.environ.get(_FILE)
        if not address and not file:
            raise UsageError(
                f"--engine dask needs a scheduler: set {_ADDRESS} (or {_FILE}); on this machine "
                "start one with `dask scheduler` and `dask worker tcp://127.0.0.1:8786`"
            )
        where = {"address": address} if address else {"scheduler_file": file}
        try:
            self._client: Any = Client(**where, timeout=_ATTACH_S, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise UsageError(f"no Dask scheduler answers at {address or file}") from error

    def map(self, work: Callable[[A], T], items: Sequence[A], sizes: Sequence[int]) -> Iterator[T]:
        num_workers = sum(self._client.nthreads().values())
        tasks = cut_into_tasks(work, items, num_workers)
        # pure: equal tasks of two commands are two: their files may have changed in between.
        running: list[Any] = [self._client.submit(_run, task, pure=False) for task in tasks]
        try:
            for place, task in enumerate(tasks):
                try:
                    found = running[place].result()
                except KilledWorker:
                    found = task()
                running[place] = None
                yield from found
        finally:
            self._client.cancel([one for one in running if one is not None])

    def close(self) -> None:
        self._client.close()


def _run(task: Task) -> list[Any]:
    return task()
