"""Turns packed step records and the stamps of an unfinished step back into rows of `spans`.

Analyses and SQL see one table of spans and need not know that the usual phases of a step are
written as one record (table `phases`), or that those of the step a process died in are stamps.
"""

import numpy as np
import numpy.typing as npt

from meshscope.store.columns import Columns
from meshscope.store.open_step import PHASE_IDS, PHASE_ORDER, OpenPhase


def expand_phases(phases: Columns) -> Columns:
    """The rows of `phases` as rows of `spans`: depth 0, training thread, microbatch 0."""
    starts = phases["start_host_mono_ns"].astype(np.int64)
    parts: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for name, name_id in zip(PHASE_ORDER, PHASE_IDS, strict=True):
        offsets = phases[f"{name}_offset_ns"].astype(np.int64)
        durations = phases[f"{name}_ns"].astype(np.int64)
        occurred = (offsets | durations) != 0
        parts.append((name_id, (starts + offsets)[occurred], durations[occurred]))
    name_ids = np.concatenate([np.full(len(s), i, dtype=np.uint16) for i, s, _ in parts])
    return _rows(
        name_ids,
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
    )


def open_phase_rows(phases: list[OpenPhase]) -> Columns:
    """The finished phases of an unfinished step as rows of `spans`."""
    over = [(p.name_id, p.start_host_mono_ns, p.end_host_mono_ns) for p in phases]
    done = [(i, begin, end) for i, begin, end in over if end is not None]
    starts = np.array([begin for _, begin, _ in done], dtype=np.int64)
    ends = np.array([end for _, _, end in done], dtype=np.int64)
    return _rows(np.array([i for i, _, _ in done], dtype=np.uint16), starts, ends - starts)


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
