"""Makes edits of recorded runs: other durations for some of its work or transfers.

Work is edited by part (`work_parts`): the work of one rank in one phase of one step and, if the
compared ranks communicate in the same order, between two of its operations. A part is scaled as a
whole. A part without work cannot become longer.

"Even" is the mean over ranks and steps for work, over those that have any in that phase, and the
median for transfers of one kind, axis and size (OSDI'25).
"""

from collections.abc import Collection, Sequence

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit
from meshscope.simulate.work_parts import WorkParts, cut_work
from meshscope.store.read.arrays import Bools, Floats


def choose_pieces(
    timeline: Timeline,
    *,
    ranks: Collection[int] | None = None,
    phases: Collection[str] | None = None,
    steps: Collection[int] | None = None,
) -> Bools:
    """[piece]: whether it is of these ranks, phases and steps; None takes all."""
    pieces = timeline.pieces
    chosen = np.ones(len(pieces), dtype=np.bool_)
    if ranks is not None:
        chosen &= np.isin(pieces.rank, list(ranks))
    if steps is not None:
        chosen &= np.isin(timeline.steps, list(steps))[pieces.step]
    if phases is not None:
        chosen &= np.array([name in phases for name in timeline.phases])[pieces.phase]
    return chosen


def scale_work(
    timeline: Timeline,
    *,
    factor: float,
    ranks: Collection[int] | None = None,
    phases: Collection[str] | None = None,
    steps: Collection[int] | None = None,
    name: str = "scaled work",
) -> Edit:
    """Work of some ranks, phases and steps takes `factor` times as long."""
    chosen = choose_pieces(timeline, ranks=ranks, phases=phases, steps=steps)
    work = measured_work(timeline)
    return Edit(name=name, work_ns=np.where(chosen, np.rint(work * factor), work).astype(np.int64))


def equalise(
    timeline: Timeline,
    ranks: Collection[int],
    *,
    phases: Collection[str] | None = None,
    steps: Collection[int] | None = None,
    peers: Sequence[int] | None = None,
    parts: WorkParts | None = None,
) -> Edit | Unavailable:
    """In every step, phase and segment these ranks work as long as the median of their peers.

    Peers are ranks that differ only along dp, cp and ep and are not among `ranks`; without any, all
    other ranks of the run. Segments are compared in steps in which all peers communicate as the
    rank does, otherwise whole phases. `parts` (from `cut_work`) saves cutting again for several
    edits.
    """
    missing = sorted(set(ranks) - set(timeline.ranks))
    if missing:
        return Unavailable(f"rank {missing[0]} is not among those that were recorded")
    parts = cut_work(timeline) if parts is None else parts
    edited = parts.work_ns.astype(np.float64)
    for index, rank in enumerate(timeline.ranks):
        if rank not in ranks:
            continue
        others = _find_peers(timeline, rank, ranks) if peers is None else peers
        indices = [timeline.ranks.index(o) for o in others if o in timeline.ranks and o != rank]
        if not indices:
            return Unavailable(f"rank {rank} has no peer whose work could be compared with its own")
        _take_median(timeline, parts, index, indices, edited)
    work = parts.join(timeline, edited)
    chosen = choose_pieces(timeline, ranks=ranks, phases=phases, steps=steps)
    names = ", ".join(str(rank) for rank in sorted(ranks))
    return Edit(
        name=f"rank {names} like its peers",
        work_ns=np.where(chosen, work, measured_work(timeline)),
    )


def _take_median(
    timeline: Timeline, parts: WorkParts, index: int, peers: Sequence[int], edited: Floats
) -> None:
    """Sets the parts of one rank to the median of its peers' work."""
    is_alike = (parts.signature[peers] == parts.signature[index]).all(axis=0)
    key = parts.key(np.broadcast_to(is_alike, parts.signature.shape), len(timeline.phases))
    own = parts.slice_rank(index)
    if own.start == own.stop:
        return
    cells, cell = np.unique(key[own], return_inverse=True)
    work = np.bincount(cell, weights=parts.work_ns[own], minlength=len(cells))
    theirs = np.zeros((len(peers), len(cells)))
    for row, peer in enumerate(peers):
        of_peer = parts.slice_rank(peer)
        at = np.searchsorted(cells[:-1], key[of_peer])
        is_there = cells[at] == key[of_peer]
        np.add.at(theirs[row], at[is_there], parts.work_ns[of_peer][is_there])
    factor = np.median(theirs, axis=0) / np.maximum(work, 1)
    edited[own] = parts.work_ns[own] * factor[cell]


def _find_peers(timeline: Timeline, rank: int, excluded: Collection[int]) -> list[int]:
    """Ranks that differ only along dp, cp and ep; all others if there is none."""
    others = [other for other in timeline.ranks if other != rank and other not in excluded]
    layout = timeline.layout
    if not isinstance(layout, Layout):
        return others
    head = layout.peer_head(rank)
    same = [other for other in others if layout.peer_head(other) == head]
    return same or others


def transfer_factor(
    timeline: Timeline,
    *,
    factor: float,
    axis: str | None = None,
    kind: Kind | None = None,
    name: str = "scaled transfers",
) -> Edit | Unavailable:
    """Transfers of an axis, of a kind, or all of them take `factor` times as long."""
    if timeline.communication is None:
        return Unavailable("the run has no recorded communication")
    chosen = choose_rows(timeline, axis=axis, kind=kind)
    if not chosen.any():
        return Unavailable(f"no operation along {axis or 'any axis'} was recorded")
    transfer = timeline.communication.row_times.transfer_ns
    scaled = np.where(chosen, np.rint(transfer * factor), transfer).astype(np.int64)
    return Edit(name=name, transfer_ns=scaled)


def choose_rows(timeline: Timeline, *, axis: str | None = None, kind: Kind | None = None) -> Bools:
    """Rows of operations along an axis and of a kind; None takes all."""
    assert timeline.communication is not None
    operations = timeline.communication.operations
    axes = [group.axis for group in operations.groups] + [OTHER]
    chosen = np.array([axis is None or one == axis for one in axes])[operations.rows.group]
    if kind is not None:
        chosen = chosen & (operations.rows.kind == kind)
    found: Bools = chosen
    return found
