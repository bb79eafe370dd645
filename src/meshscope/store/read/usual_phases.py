"""Turns packed step records and the stamps of an unfinished step back into rows of `spans`.

Analyses and SQL see one table of spans and need not know that the usual phases of a step are
written as one record (table `phases`), or that those of the step a process died in are stamps.
"""

import numpy as np
import numpy.typing as npt

from meshscope.store.read.columns import Columns
from meshscope.store.write.open_step import PHASE_IDS, PHASE_ORDER, OpenPhase


def expand_phases(phases: Columns) -> Columns:
    """The rows of `phases` as rows of `spans`: depth 0, training thread, microbatch 0."""
    starts: list[npt.NDArray[np.int64]] = []
    durations: list[npt.NDArray[np.int64]] = []
    for name in PHASE_ORDER[:-1]:
        start = phases[f"{name}_start_host_mono_ns"].astype(np.int64, copy=False)
        end = phases[f"{name}_end_host_mono_ns"].astype(np.int64, copy=False)
        starts.append(start)
        durations.append(end - start)
    gap = phases["optimizer_gap_ns"].astype(np.int64)
    length = phases["optimizer_ns"].astype(np.int64)
    backward_end = phases["backward_end_host_mono_ns"].astype(np.int64, copy=False)
    occurs = ((gap | length) != 0) & (phases["backward_start_host_mono_ns"] != 0)
    starts.append(np.where(occurs, backward_end + gap, 0))
    durations.append(length)
    all_starts = np.concatenate(starts)
    occurred = all_starts != 0
    name_ids = np.repeat(np.array(PHASE_IDS, dtype=np.uint16), len(gap))
    return _rows(name_ids[occurred], all_starts[occurred], np.concatenate(durations)[occurred])


def open_phase_rows(phases: list[OpenPhase]) -> Columns:
    """The finished phases of an unfinished step as rows of `spans`."""
    over = [(p.name_id, p.start_host_mono_ns, p.end_host_mono_ns) for p in phases]
    done = [(i, begin, end) for i, begin, end in over if end is not None]
    starts = np.array([begin for _, begin, _ in done], dtype=np.int64)
    ends = np.array([end for _, _, end in done], dtype=np.int64)
    return _rows(np.array([i for i, _, _ in done], dtype=np.uint16), starts, ends - starts)


def is_recorded(phase: OpenPhase, spans: Columns) -> bool:
    """Whether a stamped phase has its own row: the same name and start."""
    is_same = spans["start_host_mono_ns"] == phase.start_host_mono_ns
    return bool((is_same & (spans["name_id"] == phase.name_id)).any())


def _rows(
    name_ids: npt.NDArray[np.uint16],
    starts: npt.NDArray[np.int64],
    durations: npt.NDArray[np.int64],
) -> Columns:
    size = len(starts)
    return {
        "name_id": name_ids,
        "depth": np.zeros(size, dtype=np.uint8),
        "flags": np.zeros(size, dtype=np.uint8),
        "thread": np.zeros(size, dtype=np.uint16),
        "start_host_mono_ns": starts,
        "duration_ns": durations,
        "self_ns": durations,
        "microbatch": np.zeros(size, dtype=np.int64),
    }
