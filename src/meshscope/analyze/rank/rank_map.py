"""A function of one rank's recording, for all ranks of an attempt, by the engine that is in use."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from meshscope.pool.pool import is_chosen, is_cluster, map_items
from meshscope.store.read.columns import Problem
from meshscope.store.read.parquet import CompactedRun, open_compacted
from meshscope.store.read.recording import FolderRecording, Recording, open_recording
from meshscope.store.read.run import Attempt
from meshscope.store.schema import RECORD_BYTES, TABLES

T = TypeVar("T")
_MEMORY_RATIO = 4.0
"""Memory for each byte of a rank's tables: columns, and what is computed from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankFolder:
    """Where a rank's recording is."""

    rank: int
    attempt: int
    folder: Path


@dataclass(frozen=True, slots=True)
class _Read(Generic[T]):
    result: T
    problems: list[Problem]
    """All that are known of the recording now; some are found by reading."""


@dataclass(frozen=True, slots=True)
class _Work(Generic[T]):
    work: Callable[[Recording], T]

    def __call__(self, where: _RankFolder) -> _Read[T]:
        compacted = _open_compacted(where.folder.parent.parent)
        recording = open_recording(where.rank, where.attempt, where.folder, compacted)
        return _Read(self.work(recording), recording.problems)


@lru_cache(maxsize=1)
def _open_compacted(run_dir: Path) -> CompactedRun | None:
    return open_compacted(run_dir, [])


def map_ranks(work: Callable[[Recording], T], attempt: Attempt) -> Iterator[T]:
    """In the order of ranks. `work` can be pickled; what it finds wrong with a recording is noted
    in the attempt's own, wherever it was run."""
    recordings = list(attempt)
    if not _can_be_sent(recordings):
        yield from map(work, recordings)
        return
    places = [
        _RankFolder(rank=one.rank, attempt=one.attempt, folder=one.directory) for one in recordings
    ]
    sizes = [_estimate_memory(one) for one in recordings]
    found = map_items(_Work(work), places, sizes)
    for recording, read in zip(recordings, found, strict=True):
        recording.problems[:] = read.problems
        yield read.result


def _can_be_sent(recordings: list[Recording]) -> bool:
    """Runs in memory are here; of a small run, tables that are read here are kept for others."""
    if any(type(one) is not FolderRecording or one.windows is not None for one in recordings):
        return False
    return is_cluster() or (is_chosen() and all(one.kept is None for one in recordings))


def _estimate_memory(recording: Recording) -> int:
    rows = sum(recording.count_rows(name) for name in TABLES)
    return int(_MEMORY_RATIO * RECORD_BYTES * rows)
