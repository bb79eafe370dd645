"""Edits that remove a late rank's own time from a recorded run, for pricing.

A slow rank gets, in each step, phase and segment, the work of peers that are not slow. A rank
without such peers gets its own work of its normal steps. A pause is removed from the pieces of the
phase it is in, by what each takes beyond the usual piece there; collections are in `collected`.
Uneven load gets the mean of the
peers, step by step: rebalancing conserves work.
"""

from collections.abc import Sequence

import numpy as np

from meshscope.analyze.stragglers.stragglers import FailSlowRank, FailSlowSet, SlowSet
from meshscope.analyze.timeline.peer_work import PeerWork, find_compared
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.pricing import join_edits
from meshscope.simulate.edits import equalise
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit
from meshscope.simulate.work_parts import cut_work
from meshscope.store.read.arrays import Bools, Floats, Int64s

MAX_SEGMENTED = 32
"""Ranks and peers whose segments are compared one by one. More ranks are compared by whole phases,
and more peers by a part of them."""


def relieve_slow(timeline: Timeline, slow_set: SlowSet, work: PeerWork) -> Edit | Unavailable:
    """All ranks of a set work as their peers do."""
    able = [slow for slow in slow_set.slow if slow.reference]
    if not able:
        return _NO_PEER
    everywhere = np.ones(len(timeline.steps), dtype=np.bool_)
    if len(able) > MAX_SEGMENTED:
        return _scale(timeline, work, [(one.rank, one.reference, everywhere) for one in able])
    peers = {slow.rank: _thin(slow.reference) for slow in able}
    compared = {rank for own, others in peers.items() for rank in (own, *others)}
    parts = cut_work(timeline, compared)
    made = [
        _keep_faster(timeline, rank, equalise(timeline, (rank,), peers=others, parts=parts))
        for rank, others in peers.items()
    ]
    return _join(timeline, made)


def _keep_faster(timeline: Timeline, rank: int, edit: Edit | Unavailable) -> Edit | Unavailable:
    """Only compared work, in phases in which the rank takes longer than its peers: those may be
    slow in another one."""
    if isinstance(edit, Unavailable) or edit.work_ns is None:
        return edit
    work, rows, pieces = measured_work(timeline), find_compared(timeline), timeline.pieces
    rows = rows[pieces.rank[rows] == rank]
    more = np.bincount(pieces.phase[rows], (work - edit.work_ns)[rows], minlength=1)
    rows = rows[more[pieces.phase[rows]] > 0]
    work[rows] = edit.work_ns[rows]
    return Edit(name=edit.name, work_ns=work)


def _thin(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """At most MAX_SEGMENTED of them, evenly spread."""
    if len(ranks) <= MAX_SEGMENTED:
        return ranks
    return tuple(ranks[index * len(ranks) // MAX_SEGMENTED] for index in range(MAX_SEGMENTED))


def _scale(
    timeline: Timeline, work: PeerWork, late: Sequence[tuple[int, tuple[int, ...], Bools]]
) -> Edit:
    """The work of many ranks in some steps, phase by phase, at the median of their peers."""
    index_of = {rank: index for index, rank in enumerate(work.ranks)}
    factor = np.ones((len(timeline.phases), *work.total_ns.shape))
    bases: dict[tuple[int, ...], Floats] = {}
    for rank, reference, inside in late:
        if reference not in bases:
            peers = [index_of[other] for other in reference]
            bases[reference] = np.median(work.work_ns[:, :, peers], axis=2)
        own = work.work_ns[:, :, index_of[rank]]
        share = np.divide(bases[reference], own, where=own > 0, out=np.ones_like(own))
        factor[list(work.phase_indices), :, index_of[rank]] = np.where(inside, share, 1.0)
    rows = find_compared(timeline)
    pieces = timeline.pieces
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank[rows])
    durations = measured_work(timeline)
    scaled = durations[rows] * factor[pieces.phase[rows], pieces.step[rows], index]
    durations[rows] = np.rint(scaled).astype(np.int64)
    return Edit(name="slow ranks like their peers", work_ns=durations)


def relieve_fail_slow(
    timeline: Timeline, fail_set: FailSlowSet, work: PeerWork
) -> Edit | Unavailable:
    """All ranks of a set work in their slow steps as their peers do, or as they did before."""
    late = [(one.rank, _thin(one.reference), _mark_inside(timeline, one)) for one in fail_set.slow]
    if len(late) > MAX_SEGMENTED and all(reference for _, reference, _ in late):
        return _scale(timeline, work, late)
    parts = cut_work(timeline, {rank for own, others, _ in late for rank in (own, *others)})
    made: list[Edit | Unavailable] = []
    for rank, reference, inside in late[:MAX_SEGMENTED]:
        if reference:
            steps = timeline.steps[inside].tolist()
            relieved = equalise(timeline, (rank,), peers=reference, steps=steps, parts=parts)
            made.append(_keep_faster(timeline, rank, relieved))
        else:
            made.append(_restore(timeline, work, rank, inside))
    return _join(timeline, made)


def _mark_inside(timeline: Timeline, failed: FailSlowRank) -> Bools:
    inside = np.zeros(len(timeline.steps), dtype=np.bool_)
    inside[failed.change.onset : failed.change.recovery] = True
    return inside


def _join(timeline: Timeline, made: Sequence[Edit | Unavailable]) -> Edit | Unavailable:
    edits = [edit for edit in made if not isinstance(edit, Unavailable)]
    if not edits:
        return next((edit for edit in made if isinstance(edit, Unavailable)), _NO_PEER)
    return join_edits(timeline, edits) if len(edits) > 1 else edits[0]


_NO_PEER = Unavailable("no peer is left whose work could be taken instead")


def _restore(timeline: Timeline, work: PeerWork, rank: int, inside: Bools) -> Edit:
    """The rank's work in some steps, phase by phase, at the level of its other steps."""
    rank_index = work.ranks.index(rank)
    factors = np.ones(len(timeline.phases))
    for index, phase in enumerate(work.phase_indices):
        own = work.work_ns[index][:, rank_index]
        high = float(np.median(own[inside]))
        if high > 0:
            factors[phase] = min(1.0, float(np.median(own[~inside])) / high)
    rows = find_compared(timeline)
    pieces = timeline.pieces
    rows = rows[(pieces.rank[rows] == rank) & inside[pieces.step[rows]]]
    durations = measured_work(timeline)
    durations[rows] = np.rint(durations[rows] * factors[pieces.phase[rows]]).astype(np.int64)
    return Edit(name=f"rank {rank} as it was before", work_ns=durations)


def remove_pauses(timeline: Timeline, excess_ns: Floats, *, name: str) -> Edit:
    """Removes `excess_ns` [step, rank] from the pieces of the phase that is longest against its
    usual there."""
    durations = measured_work(timeline)
    rows, pieces = find_compared(timeline), timeline.pieces
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank[rows])
    cell = pieces.step[rows].astype(np.int64) * len(timeline.ranks) + index
    usual = _find_usual_piece(durations[rows], index * len(timeline.phases) + pieces.phase[rows])
    is_chosen = _choose_longer_phase(timeline, rows, cell, excess_ns)
    rows, cell, usual = rows[is_chosen], cell[is_chosen], usual[is_chosen]
    own = durations[rows]
    beyond = np.maximum(own - usual, 0.0)
    total = np.bincount(cell, beyond, minlength=excess_ns.size)[cell]
    share = np.divide(beyond, total, where=total > 0, out=np.zeros(len(beyond)))
    removed = np.rint(share * excess_ns.ravel()[cell]).astype(np.int64)
    durations[rows] = np.maximum(own - removed, 0)
    return Edit(name=name, work_ns=durations)


def _find_usual_piece(duration_ns: Int64s, key: Int64s) -> Floats:
    """[piece]: the median of the pieces with the same key."""
    order = np.lexsort((duration_ns, key))
    found, first, count = np.unique(key[order], return_index=True, return_counts=True)
    middle = duration_ns[order[first + (count - 1) // 2]]
    return np.asarray(middle[np.searchsorted(found, key)], dtype=np.float64)


def _choose_longer_phase(
    timeline: Timeline, rows: Int64s, cell: Int64s, excess_ns: Floats
) -> Bools:
    """[row]: of the pieces in cells with an excess those of one phase: where the rank is longest
    against its median over steps."""
    work, phase = measured_work(timeline)[rows], timeline.pieces.phase[rows]
    paused = np.flatnonzero(excess_ns.ravel() > 0)
    most, chosen = np.full(len(paused), -np.inf), np.full(len(paused), -1)
    for one in np.unique(phase).tolist():
        own = phase == one
        total = np.bincount(cell[own], work[own], minlength=excess_ns.size)
        total = total.reshape(excess_ns.shape)
        gap = (total - np.median(total, axis=0)).ravel()[paused]
        chosen = np.where(gap > most, one, chosen)
        most = np.maximum(gap, most)
    phase_of = np.full(excess_ns.size, -1)
    phase_of[paused] = chosen
    is_chosen: Bools = phase == phase_of[cell]
    return is_chosen


def even_load(timeline: Timeline, work: PeerWork) -> Edit:
    """Peers take the mean of theirs in each step and phase: what is even already stays, such as an
    optimizer's step, which a rank with a short batch does not take longer for."""
    factor = np.ones((len(timeline.phases), *work.total_ns.shape))
    for phase, phase_ns in zip(work.phase_indices, work.work_ns, strict=True):
        for group in work.groups:
            own = phase_ns[:, list(group.indices)]
            mean = np.broadcast_to(own.mean(axis=1, keepdims=True), own.shape)
            share = np.divide(mean, own, where=own > 0, out=np.ones_like(own))
            factor[phase][:, list(group.indices)] = share
    rows = find_compared(timeline)
    pieces = timeline.pieces
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank[rows])
    durations = measured_work(timeline)
    scaled = durations[rows] * factor[pieces.phase[rows], pieces.step[rows], index]
    durations[rows] = np.rint(scaled).astype(np.int64)
    return Edit(name="peers share their work evenly", work_ns=durations)


def even_microbatches(timeline: Timeline) -> Edit:
    """Microbatches of a stage take, in each step, the mean of all its microbatches and replicas."""
    actions, pieces = timeline.actions, timeline.pieces
    durations = measured_work(timeline)
    if actions is None or not len(actions):
        return Edit(name="even microbatches", work_ns=durations)
    rows = np.flatnonzero((pieces.kind == PieceKind.WORK) & (pieces.action >= 0))
    own = np.bincount(pieces.action[rows], durations[rows], minlength=len(actions))
    columns = (actions.step, actions.stage, actions.chunk, actions.kind)
    _, key = np.unique(np.stack(columns).astype(np.int64), axis=1, return_inverse=True)
    key = key.ravel()
    mean = (np.bincount(key, own) / np.maximum(np.bincount(key), 1))[key]
    factor = np.divide(mean, own, where=own > 0, out=np.ones(len(own)))
    durations[rows] = np.rint(durations[rows] * factor[pieces.action[rows]]).astype(np.int64)
    return Edit(name="even microbatches", work_ns=durations)
