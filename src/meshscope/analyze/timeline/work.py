"""How long each rank worked and was held up in each step: the input of comparisons.

Work is split by phase, other kinds of pieces are summed. Sums are integer nanoseconds in float64,
exact below 104 days. Phases beyond the largest `MAX_PHASES` share one column, so that a program
with a new name in every step does not fill memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.peers import group_peers
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Floats, Int64s

MAX_PHASES = 32
OTHER_PHASES = "(other phases)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkTable:
    """Work and hold-ups by rank and step; gaps before steps are included."""

    ranks: tuple[int, ...]
    layout: Layout | Unavailable
    steps: Int64s
    phases: tuple[str, ...]
    """Names; the first is empty and stands for no phase."""
    work_ns: Floats
    """[rank, step, phase]"""
    held_ns: Floats
    """[rank, step, PieceKind]; the column of WORK is the sum over all phases."""
    period_ns: Floats
    """[rank, step]; the sum over the kinds."""

    def of_phases(self, names: Iterable[str] | None = None) -> Floats:
        """[rank, step]: work in the phases of these names, or in all."""
        if names is None:
            return self.held_ns[:, :, PieceKind.WORK]
        wanted = set(names)
        columns = [index for index, name in enumerate(self.phases) if name in wanted]
        return np.asarray(self.work_ns[:, :, columns].sum(axis=2), dtype=np.float64)

    def peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices in `ranks`, grouped by equal work."""
        return group_indices(self.layout, self.ranks)

    @property
    def step_ns(self) -> Floats:
        """The job's pace: per step the median over ranks of their periods."""
        return np.asarray(np.median(self.period_ns, axis=0), dtype=np.float64)


def group_indices(
    layout: Layout | Unavailable, ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Indices of ranks, grouped by true peers: `Layout.peers`."""
    groups: dict[int, list[int]] = {}
    of_rank = group_peers(layout, ranks)
    for index, rank in enumerate(ranks):
        groups.setdefault(of_rank[rank], []).append(index)
    return tuple(tuple(indices) for indices in groups.values())


def measure_work(timeline: Timeline) -> WorkTable:
    pieces = timeline.pieces
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank)
    cell = index.astype(np.int64) * len(timeline.steps) + pieces.step
    shape = (len(timeline.ranks), len(timeline.steps))
    duration = pieces.duration_ns
    is_work = pieces.kind == PieceKind.WORK
    phases, column = _choose_phases(timeline, is_work)
    held = _sum(cell * len(PieceKind) + pieces.kind, duration, (*shape, len(PieceKind)))
    work = _sum(
        cell[is_work] * len(phases) + column[pieces.phase[is_work]],
        duration[is_work],
        (*shape, len(phases)),
    )
    return WorkTable(
        ranks=timeline.ranks,
        layout=timeline.layout,
        steps=timeline.steps,
        phases=phases,
        work_ns=work,
        held_ns=held,
        period_ns=held.sum(axis=2),
    )


def _choose_phases(timeline: Timeline, is_work: Bools) -> tuple[tuple[str, ...], Int64s]:
    """Names of the columns, and the column of each phase."""
    names, pieces = timeline.phases, timeline.pieces
    if len(names) <= MAX_PHASES:
        return names, np.arange(len(names))
    total = np.bincount(pieces.phase[is_work], pieces.duration_ns[is_work], minlength=len(names))
    total[0] = np.inf
    kept = np.sort(np.argsort(-total, kind="stable")[: MAX_PHASES - 1])
    column = np.full(len(names), len(kept), dtype=np.int64)
    column[kept] = np.arange(len(kept))
    return (*(names[index] for index in kept.tolist()), OTHER_PHASES), column


def _sum(cell: Int64s, values: Int64s, shape: tuple[int, ...]) -> Floats:
    sums = np.bincount(cell, values, minlength=int(np.prod(shape)))
    return np.asarray(sums.reshape(shape), dtype=np.float64)
