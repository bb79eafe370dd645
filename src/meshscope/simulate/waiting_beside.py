"""What a device computes beside an operation that waits for another rank takes longer.

A collective's kernel occupies multiprocessors from the moment its rank issues it until the last
rank has come and the data is there. On ranks that wait for a late one, backward runs beside such
kernels far longer than on the late rank, and is slower for it: with DistributedDataParallel on four
ranks 32 ms instead of 25. Once nobody is late, nobody waits. So where an edit takes time from a
rank, phases in which its peers waited take them no longer than they take that rank.

Only on devices: a host's threads sleep while they wait. Wrong where peers have more to do in the
phase than the late rank, and nothing else says so; `_MIN_KEPT` of a phase stays in any case.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.peer_work import group_true_peers, has_messages
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Missing, or_unavailable
from meshscope.store.read.arrays import Bools, Floats, Int64s

_MIN_EASED_RATIO = 0.01
"""Of a step, that an edit takes from a rank, for the rank to have been late in it."""
_MIN_WAITED_RATIO = 0.01
"""Of a step, that a peer waits in a phase."""
_MIN_KEPT = 0.6
"""Of a phase: a bound that was chosen, not measured. Waiting kernels took a fifth to a quarter of
backward where this was found."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingBeside:
    """Work that ran beside waiting operations, for one timeline."""

    group_of: Int64s
    """[rank index]: of ranks that do the same work; -1 for one without peers."""
    cell: Int64s
    """[piece]: its rank, step and phase, one number."""
    shape: tuple[int, int, int]
    is_work: Bools
    """[piece]"""
    work_ns: Floats
    """[rank, step, phase]"""
    has_waited: Bools
    """[rank, step, phase]"""
    period_ns: Floats
    """[step]"""

    def ease(self, work_ns: Int64s) -> Int64s:
        """Edited durations of pieces, with those that ran beside waits for the ranks relieved."""
        edited = self._sum(np.where(self.is_work, work_ns, 0))
        eased = (self.work_ns - edited).sum(axis=2)
        is_late = eased > _MIN_EASED_RATIO * self.period_ns
        factor = np.ones(self.shape)
        for group in range(int(self.group_of.max()) + 1):
            own = np.flatnonzero(self.group_of == group)
            late = is_late[own]
            if not late.any():
                continue
            theirs = np.where(late[:, :, None], edited[own], np.inf).min(axis=0)
            wanted = np.maximum(theirs, _MIN_KEPT * edited[own])
            is_eased = self.has_waited[own] & ~late[:, :, None] & (wanted < edited[own])
            factor[own] = np.where(is_eased, wanted / np.maximum(edited[own], 1), 1.0)
        if (factor == 1).all():
            return work_ns
        scale = factor.ravel()[self.cell]
        return np.where(self.is_work, np.rint(work_ns * scale), work_ns).astype(np.int64)

    def _sum(self, duration_ns: Int64s) -> Floats:
        return _sum_cells(self.cell, duration_ns, self.shape)


@or_unavailable
def find_waiting_beside(timeline: Timeline) -> WaitingBeside:
    if timeline.communication is None or not timeline.on_device.all():
        raise Missing("ranks do not communicate on devices")
    groups = group_true_peers(timeline.layout, timeline.ranks, is_piped=has_messages(timeline))
    if not groups:
        raise Missing("no rank has a peer")
    group_of = np.full(len(timeline.ranks), -1, dtype=np.int64)
    for number, group in enumerate(groups):
        group_of[list(group.indices)] = number
    pieces = timeline.pieces
    shape = (len(timeline.ranks), len(timeline.steps), len(timeline.phases))
    rank = np.searchsorted(np.array(timeline.ranks), pieces.rank).astype(np.int64)
    cell = (rank * shape[1] + pieces.step) * shape[2] + pieces.phase
    is_work = pieces.kind == PieceKind.WORK
    waited = _sum_cells(cell, np.where(pieces.kind == PieceKind.WAIT, pieces.duration_ns, 0), shape)
    period_ns = (timeline.period_end_ns - timeline.period_start_ns).mean(axis=0)
    return WaitingBeside(
        group_of=group_of,
        cell=cell,
        shape=shape,
        is_work=is_work,
        work_ns=_sum_cells(cell, np.where(is_work, pieces.duration_ns, 0), shape),
        has_waited=waited > _MIN_WAITED_RATIO * period_ns[:, None],
        period_ns=period_ns,
    )


def _sum_cells(cell: Int64s, duration_ns: Int64s, shape: tuple[int, int, int]) -> Floats:
    sums = np.bincount(cell, duration_ns, minlength=shape[0] * shape[1] * shape[2])
    return np.asarray(sums.reshape(shape), dtype=np.float64)
