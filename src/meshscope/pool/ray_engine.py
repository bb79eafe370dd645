"""Ray: attaches to a cluster that is there (`RAY_ADDRESS`), and starts none."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray

from meshscope.errors import UsageError
from meshscope.pool.task import Task, cut_into_tasks

A = TypeVar("A")
T = TypeVar("T")
_ATTACH_S = 10
_RETRIES = 3
"""Of a task whose worker died; then it is done here."""


class RayEngine:
    def __init__(self) -> None:
        """Raises UsageError where no cluster answers."""
        address = os.environ.get("RAY_ADDRESS") or "auto"
        self._was_attached = ray.is_initialized()
        if self._was_attached:
            return
        _require_listener(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"no Ray cluster answers at {address!r} ({line[:200]}); start one on this machine "
                "with `ray start --head`, or set RAY_ADDRESS"
            ) from error

    def map(self, work: Callable[[A], T], items: Sequence[A], sizes: Sequence[int]) -> Iterator[T]:
        num_workers = int(ray.cluster_resources().get("CPU", 1))
        run = ray.remote(max_retries=_RETRIES)(_run)
        tasks = cut_into_tasks(work, items, num_workers)
        running: list[Any] = [run.remote(task) for task in tasks]
        try:
            for place, task in enumerate(tasks):
                try:
                    found = ray.get(running[place])
                except (ray.exceptions.RaySystemError, ray.exceptions.WorkerCrashedError):
                    found = task()
                except ray.exceptions.RayTaskError as error:
                    raise error.as_instanceof_cause() from None
                running[place] = None  # its result may leave the cluster's memory
                yield from found
        finally:
            for one in running:
                if one is not None:
                    ray.cancel(one, force=True)

    def close(self) -> None:
        if not self._was_attached:
            ray.shutdown()


def _require_listener(address: str) -> None:
    """Ray ends the whole process where nobody answers at an address."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ATTACH_S).close()
    except OSError as error:
        raise UsageError(
            f"no Ray cluster answers at {address!r} ({error.strerror or error}); start one on this "
            "machine with `ray start --head`, or set RAY_ADDRESS"
        ) from error


def _run(task: Task) -> list[Any]:
    return task()
