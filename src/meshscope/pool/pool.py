"""The seam between analyses and whoever runs them: `map_items`.

Analyses are a map over files or ranks, whose results are merged here, in the order of the items. So
every engine gives the same document. An engine that is chosen for a command (`use_engine`) takes
all maps of it; otherwise the cores of this machine do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

from meshscope.errors import UsageError
from meshscope.pool.local import LocalEngine

A = TypeVar("A")
T = TypeVar("T")
ENGINES = ("local", "ray", "dask")


class Engine(Protocol):
    """Runs functions elsewhere."""

    def map(self, work: Callable[[A], T], items: Sequence[A], sizes: Sequence[int]) -> Iterator[T]:
        """What `work`, which can be pickled, gives for each item, in their order. A worker that
        dies costs time only. `sizes` is the memory that each may take, in bytes."""
        ...

    def close(self) -> None:
        """Leaves the cluster as it was."""
        ...


@dataclass(slots=True)
class Progress:
    """How far the map that is under way has come."""

    num_done: int = 0
    num_items: int = 0

    def __str__(self) -> str:
        return f"{self.num_done} of {self.num_items}" if self.num_items > 1 else ""


progress = Progress()
_engine: ContextVar[Engine | None] = ContextVar("engine", default=None)


def map_items(work: Callable[[A], T], items: Sequence[A], sizes: Sequence[int]) -> Iterator[T]:
    """What `work` gives for each item, by the engine that is in use."""
    progress.num_done, progress.num_items = 0, len(items)
    engine = _engine.get() or LocalEngine()
    for found in engine.map(work, items, sizes):
        progress.num_done += 1
        yield found


def is_chosen() -> bool:
    """Whether somebody chose an engine: a command does, and may start processes."""
    return _engine.get() is not None


def is_cluster() -> bool:
    """Whether another engine than this machine's cores was chosen."""
    return is_chosen() and not isinstance(_engine.get(), LocalEngine)


@contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Chooses the engine by its name. Raises UsageError, or ModuleNotFoundError for its package."""
    engine = _open(name)
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)
        engine.close()


def _open(name: str) -> Engine:
    if name == "ray":
        from meshscope.pool.ray_engine import RayEngine

        return RayEngine()
    if name == "dask":
        from meshscope.pool.dask_engine import DaskEngine

        return DaskEngine()
    if name == "local":
        return LocalEngine()
    raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
