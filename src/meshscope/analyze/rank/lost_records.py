"""Steps of which records are lost: what they did in that time is not known.

A table that lost records (its limit or the disk was full, it is cut or damaged) lacks those of some
steps, and nothing says which. A program does about the same in every step, so a step with fewer
records than the median of those that have any counts as incomplete. To leave out too many is
harmless: the rest are measured. To keep one would turn its lost operations into compute, and its
lost phases into no time at all. One record in a thousand changes no number by more than that, and
leaves all steps in.

Steps that were thinned to keep the run small are known one by one, and count as incomplete, too.
"""

import math

import numpy as np

from meshscope.analyze.rank.phases import StepTimes
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import ProblemKind, int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.retention_tables import THINNED_TABLES

_TIMES = {
    "phases": "",
    "spans": "start_host_mono_ns",
    "device_spans": "host_start_host_mono_ns",
    "collectives": "enqueue_host_mono_ns",
    "waits": "start_host_mono_ns",
    "actions": "begin_host_mono_ns",
}
"""The column by which a row belongs to a step; `phases` are read as rows of `spans`."""
PHASE_TABLES = ("phases", "spans")
OPERATION_TABLES = ("collectives", "waits")
_LOSSES = frozenset(
    (ProblemKind.DROPPED, ProblemKind.CUT, ProblemKind.DAMAGED, ProblemKind.UNREADABLE)
)


_MAX_NEGLIGIBLE_RATIO = 0.001
"""Of a table's records."""


def find_lossy_tables(recording: Recording) -> tuple[str, ...]:
    """Tables of a rank that lost more than a few records, as far as they have been read."""
    lost: dict[str, float] = {}
    for problem in recording.problems:
        if problem.kind in _LOSSES and problem.path is not None:
            count = math.inf if problem.num_records is None else problem.num_records
            name = problem.path.name.partition(".")[0]
            lost[name] = lost.get(name, 0.0) + count
    return tuple(
        name
        for name in _TIMES
        if name in lost and lost[name] > _MAX_NEGLIGIBLE_RATIO * recording.count_rows(name)
    )


def mark_incomplete(
    recording: Recording, steps: StepTimes, tables: tuple[str, ...] | None = None
) -> Bools:
    """Per step of the rank: some of its records are lost. None of them where no table lost any."""
    lossy = find_lossy_tables(recording)
    if tables is not None:
        lossy = tuple(name for name in lossy if name in tables)
    if tables != PHASE_TABLES or has_thinned_phases(recording):
        found = recording.find_thinned(steps.step)
    else:
        found = np.zeros(len(steps), dtype=np.bool_)
    for name in dict.fromkeys("spans" if one == "phases" else one for one in lossy):
        counts = _count_rows(int64_column(recording.read(name), _TIMES[name]), steps)
        usual = np.median(counts[counts > 0]) if counts.any() else 1
        found |= counts < usual
    return found


def has_thinned_phases(recording: Recording) -> bool:
    """Whether phases were among the spans that were thinned; those of table `phases` never are."""
    if not recording.has_table("aggregates"):
        return False
    sums = recording.read("aggregates")
    is_span = sums["source"] == THINNED_TABLES.index("spans")
    return bool((is_span & (sums["kind"] == 1)).any())


def _count_rows(start_ns: Int64s, steps: StepTimes) -> Int64s:
    """Rows of every step with the gap before it."""
    index = np.searchsorted(steps.end_ns, start_ns, side="left")
    inside = index[index < len(steps)]
    return np.bincount(inside, minlength=len(steps)).astype(np.int64)
