"""The last steps of a run as an attempt of their own, so that a diagnosis speaks of now.

Rules judge whole attempts. A fault that began a minute ago is little in a day of steps, and one
that is over stays in them for ever. So a watcher diagnoses the last steps of some ranks alone, read
from the files' ends: what is found is there now, and what is no longer found is gone.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from meshscope.store.read.columns import (
    Columns,
    concatenate_columns,
    int64_column,
    select_rows,
)
from meshscope.store.read.memory import MemoryRecording
from meshscope.store.read.rank_ranges import RankRanges
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.read.table_files import table_files
from meshscope.store.read.table_window import TIME_OF, TimeWindows, read_since
from meshscope.store.schema import STEPS, TABLES

_TIME_COLUMN = "time_host_mono_ns"
_STAMPED = ("scalars", "memory", "allocator", "hardware", "stacks", "operation_notes")
"""Tables whose rows have one moment, by which they are taken."""


def take_recent(attempt: Attempt, ranks: Iterable[int], num_steps: int) -> Attempt | None:
    """The last steps that all these ranks finished; None where there is none."""
    recordings = [attempt.ranks[rank] for rank in ranks if rank in attempt.ranks]
    extents = [one.find_step_extent() for one in recordings]
    lasts = [extent[1] for extent in extents if extent is not None]
    if not lasts:
        return None
    last = min(lasts)
    first = last - num_steps + 1
    taken = {one.rank: _take_rank(one, first, last) for one in recordings}
    return replace(
        attempt,
        ranks={rank: one for rank, one in taken.items() if one is not None},
        missing_ranks=RankRanges(()),
        problems=(),
    )


def _take_rank(recording: Recording, first: int, last: int) -> MemoryRecording | None:
    """Rows from the end of the step before `first` on to the end of `last`."""
    steps = recording.read_steps([(first, last)])
    if not len(steps["step"]):
        return None
    start_ns = int(int64_column(steps, "start_host_mono_ns").min())
    end_ns = int(int64_column(steps, "end_host_mono_ns").max())
    window = TimeWindows(start_ns=np.array([start_ns]), end_ns=np.array([end_ns]))
    narrowed = recording.narrow(window)
    columns: dict[str, Columns] = {STEPS.name: steps}
    for name in TIME_OF:
        if recording.has_table(name):
            columns[name] = narrowed.read_raw(name)
    for name in _STAMPED:
        if recording.has_table(name):
            columns[name] = _read_since(recording, name, start_ns)
    if recording.has_table("clocks"):
        columns["clocks"] = recording.read_raw("clocks")
    return MemoryRecording(
        rank=recording.rank,
        attempt=recording.attempt,
        directory=recording.directory,
        header=recording.header,
        names=recording.names,
        updates=recording.updates,
        closing=recording.closing,
        exception=recording.exception,
        groups=recording.groups,
        columns=columns,
    )


def _read_since(recording: Recording, name: str, start_ns: int) -> Columns:
    try:
        paths = table_files(recording.directory, name)
        parts = [read_since(path, TABLES[name], start_ns) for path in paths]
    except OSError:
        parts = []
    if parts:
        return parts[0] if len(parts) == 1 else concatenate_columns(TABLES[name], parts)
    # A recording that is not in files of its own.
    whole = recording.read_raw(name)
    return select_rows(whole, int64_column(whole, _TIME_COLUMN) >= start_ns)
