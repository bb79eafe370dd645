"""The first steps of a run, in which every rank's own work takes far longer than it usually does.

Memory is allocated, kernels are chosen, caches are cold: it does not come again, so prices of a
step leave it out. What one rank does alone, and what comes again later in the run, is no start-up.
"""

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline

_MIN_STEPS = 20
"""Fewer do not tell what is usual."""
_MIN_ROW = 2
"""One long first step may be the first of what comes every so often."""
_MAX_ROW_RATIO = 1 / 3
"""Of the steps: from there on it is the run that changes."""
_LONG_RATIO = 1.25
"""Times the rank's usual work, on all ranks."""


def count_start_up(timeline: Timeline) -> int:
    """How many of the timeline's first steps are a start-up; 0 if none is."""
    num_ranks, num_steps = len(timeline.ranks), len(timeline.steps)
    if num_steps < _MIN_STEPS or not num_ranks:
        return 0
    pieces = timeline.pieces
    own = pieces.kind == PieceKind.WORK
    rank = np.searchsorted(np.array(timeline.ranks), pieces.rank[own]).astype(np.int64)
    cell = rank * num_steps + pieces.step[own]
    work_ns = np.bincount(cell, pieces.duration_ns[own], minlength=num_ranks * num_steps)
    work_ns = work_ns.reshape(num_ranks, num_steps)
    usual_ns = np.median(work_ns, axis=1, keepdims=True)
    is_long = (work_ns > _LONG_RATIO * usual_ns).all(axis=0)
    row = int(np.argmin(is_long)) if not is_long.all() else num_steps
    is_start_up = _MIN_ROW <= row <= _MAX_ROW_RATIO * num_steps and not is_long[row:].any()
    return row if is_start_up else 0
