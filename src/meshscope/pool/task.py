"""What a worker of a cluster is sent: some items, and where this process reads by URL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshscope.store.remote.mirror import list_mounts, mount_as

_TASKS_PER_WORKER = 4
_ITEMS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Task:
    """Called in the worker; meshscope and what the items name have to be there."""

    work: Callable[[Any], Any]
    items: Sequence[Any]
    mounts: tuple[tuple[str, str], ...]
    """URLs, and the folders that stand for them."""

    def __call__(self) -> list[Any]:
        for url, folder in self.mounts:
            mount_as(url, folder)
        return [self.work(item) for item in self.items]


def cut_into_tasks(
    work: Callable[[Any], Any], items: Sequence[Any], num_workers: int
) -> list[Task]:
    """Some for each worker, so that a slow one does not hold up the rest."""
    count = max(1, min(_ITEMS_AT_ONCE, len(items) // (_TASKS_PER_WORKER * max(num_workers, 1))))
    mounts = list_mounts()
    return [
        Task(work, items[first : first + count], mounts) for first in range(0, len(items), count)
    ]
