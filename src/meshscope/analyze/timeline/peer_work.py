"""The work of ranks that do the same, as matrices to compare: [step, rank] by phase.

True peers share all coordinates but dp, cp and ep: they have the same layers and other tokens
(experts that get more tokens, and later parts of sequences under causal attention, are more work
on the same rank in every step: that looks like a slow rank). Where these are fewer than FEW_PEERS,
the ranks of their tp groups are peers as well: they hold equal shares of the same layers, and one
peer alone says little about which of the two is slow. Any other rank has no peer and is compared
only with its own other steps (`change_point`). Without a layout all ranks are peers, unless any two
sent each other messages: then they may be stages of a pipeline.

Only WORK inside steps counts. Fetching data, compilation, checkpoints, evaluation and logging do
not: a rank may do these alone by design, and other rules look at them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import PEER_AXES, Axis, Layout
from meshscope.core.operations import POINT_TO_POINT
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.paired_excess import Indices
from meshscope.store.read.arrays import Bools, Floats, Int64s

_OTHERS_PHASES = frozenset(("data", "compile", "checkpoint", "eval", "logging", "earlier"))
"""Their length does not show how fast a rank computes; `earlier` is what a trace has of the steps
before it."""
FEW_PEERS = 4
"""Ranks that differ along dp, cp and ep alone: with fewer, those of the tp axis join them."""
MAX_PHASES = 8
"""The phases with most work are compared one by one; the rest counts in the total only."""
_MIN_PHASE_SHARE = 0.01
"""Least share of a step's period of a phase that is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGroup:
    """Ranks that do the same work in every step."""

    indices: tuple[int, ...]
    """In `PeerWork.ranks`."""
    axis: str
    """Along which they differ: "dp", "dp+cp", "tp" and so on; "" where no layout is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerWork:
    """Work by phase, step and rank, and which ranks are comparable."""

    ranks: tuple[int, ...]
    steps: Int64s
    step_ns: float
    """Median period of a step."""
    phases: tuple[str, ...]
    """The compared ones, most work first; "" is work in steps outside all phases."""
    phase_indices: tuple[int, ...]
    """Their indices in `Timeline.phases`."""
    work_ns: npt.NDArray[np.float64]
    """[phase, step, rank]."""
    total_ns: Floats
    """[step, rank]: over all phases but those of _OTHERS_PHASES."""
    groups: tuple[PeerGroup, ...]
    """Groups of two ranks or more."""


def measure_peer_work(timeline: Timeline) -> PeerWork | Unavailable:
    if len(timeline.ranks) < 2:
        return Unavailable("there is only one rank, and no other to compare it with")
    if not len(timeline.steps):
        return Unavailable("no step finished on every rank")
    rows = find_compared(timeline)
    pieces = timeline.pieces
    duration = pieces.duration_ns[rows].astype(np.float64)
    total = sum_compared(timeline, pieces.duration_ns)
    step_ns = float(np.median(timeline.period_end_ns - timeline.period_start_ns))
    kept = _choose_phases(pieces.phase[rows], duration, len(timeline.phases), step_ns * total.size)
    return PeerWork(
        ranks=timeline.ranks,
        steps=timeline.steps,
        step_ns=step_ns,
        phases=tuple(timeline.phases[phase] for phase in kept),
        phase_indices=tuple(kept),
        work_ns=_sum_by_phase(timeline, kept, pieces.duration_ns),
        total_ns=total,
        groups=group_true_peers(timeline.layout, timeline.ranks, is_piped=has_messages(timeline)),
    )


def find_compared(timeline: Timeline) -> Indices:
    """Rows of the pieces that count as a rank's own work."""
    pieces = timeline.pieces
    is_others = np.array([name in _OTHERS_PHASES for name in timeline.phases])
    is_own: Bools = (pieces.kind == PieceKind.WORK) & ~pieces.is_between
    return np.flatnonzero(is_own & ~is_others[pieces.phase])


def sum_compared(timeline: Timeline, values: Int64s, *, phase: int | None = None) -> Floats:
    """[step, rank]: sums of `values` (one per piece) over compared work, or one phase of it."""
    rows, pieces = find_compared(timeline), timeline.pieces
    if phase is not None:
        rows = rows[pieces.phase[rows] == phase]
    shape = (len(timeline.steps), len(timeline.ranks))
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank[rows])
    cell = pieces.step[rows].astype(np.int64) * shape[1] + index
    sums = np.bincount(cell, values[rows], minlength=shape[0] * shape[1])
    return np.asarray(sums.reshape(shape), dtype=np.float64)


def split_idle(timeline: Timeline) -> dict[str, Floats]:
    """By the phase whose work ended it, [step, rank]: how long devices had nothing to do."""
    pieces = timeline.pieces
    order = np.lexsort((pieces.start_ns, pieces.rank))
    is_idle = find_idle(timeline)[order]
    place = np.arange(len(order))
    following = np.where(is_idle, len(order), place)[::-1]
    following = np.minimum.accumulate(following)[::-1]
    phase = np.append(pieces.phase[order], 0)[following]
    ended = np.empty_like(phase)
    ended[order] = phase
    return {
        timeline.phases[index]: sum_compared(
            timeline, np.where(find_idle(timeline) & (ended == index), pieces.duration_ns, 0)
        )
        for index in np.unique(phase[is_idle]).tolist()
    }


def find_idle(timeline: Timeline) -> Bools:
    """Pieces in which a device had nothing to do, no operation ran and no phase explains it."""
    pieces = timeline.pieces
    on_device = timeline.on_device[np.searchsorted(np.array(timeline.ranks), pieces.rank)]
    found: Bools = on_device & (pieces.kind == PieceKind.WORK) & (pieces.phase == 0)
    found &= pieces.row < 0
    return found


def subtract_lost(work: PeerWork, timeline: Timeline, lost_ns: Int64s) -> PeerWork:
    """The work without the `lost_ns` of each piece."""
    return replace(
        work,
        work_ns=work.work_ns - _sum_by_phase(timeline, work.phase_indices, lost_ns),
        total_ns=work.total_ns - sum_compared(timeline, lost_ns),
    )


def _sum_by_phase(
    timeline: Timeline, phases: Sequence[int], values: Int64s
) -> npt.NDArray[np.float64]:
    """[phase, step, rank]."""
    sums = [sum_compared(timeline, values, phase=phase) for phase in phases]
    return np.array(sums).reshape(len(phases), len(timeline.steps), len(timeline.ranks))


def _choose_phases(
    phase: npt.NDArray[np.int32], duration: Floats, num_phases: int, period_ns: float
) -> list[int]:
    by_phase = np.bincount(phase, duration, minlength=num_phases)
    order = np.argsort(-by_phase, kind="stable")[:MAX_PHASES]
    return [int(index) for index in order if by_phase[index] > _MIN_PHASE_SHARE * period_ns]


def has_messages(timeline: Timeline) -> bool:
    if timeline.actions is not None:
        return len(np.unique(timeline.actions.stage)) > 1
    if timeline.communication is None:
        return False
    kinds = np.unique(timeline.communication.operations.rows.kind).tolist()
    return any(kind in POINT_TO_POINT for kind in kinds)


def group_true_peers(
    layout: Layout | Unavailable, ranks: tuple[int, ...], *, is_piped: bool
) -> tuple[PeerGroup, ...]:
    """Groups of two recorded ranks or more that do the same work."""
    if isinstance(layout, Unavailable):
        whole = PeerGroup(indices=tuple(range(len(ranks))), axis="")
        return () if is_piped or len(ranks) < 2 else (whole,)
    axes = [axis for axis in PEER_AXES if layout.degree(axis) > 1]
    has_few = math.prod(layout.degree(axis) for axis in axes) < FEW_PEERS
    if has_few and layout.degree(Axis.TP) > 1:
        axes.append(Axis.TP)
    # Only recorded ranks: a header can claim a million.
    members: dict[int, list[int]] = {}
    places = [(layout.stride(axis), layout.degree(axis)) for axis in axes]
    for index, rank in enumerate(ranks):
        offset = sum(rank // stride % degree * stride for stride, degree in places)
        members.setdefault(rank - offset, []).append(index)
    axis = "+".join(axes)
    found = [PeerGroup(indices=tuple(indices), axis=axis) for _, indices in sorted(members.items())]
    return tuple(group for group in found if len(group.indices) > 1)
