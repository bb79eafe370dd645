"""S, S_t, S_w, M_W and M_S of a recorded run.

Types are phases of work and, for transfers, axis and kind of operation. S_w is replayed for each
rank. If there are more than `_MAX_REPLAYED` ranks, or coordinates along an axis, only those with
the most work are replayed and listed: a rank that worked no longer than most is no straggler. A
part keeps its measured work and the transfers of its own rows.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.even_shares import EvenShares, find_even_shares
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.straggler.slowdown import (
    Share,
    Slowdown,
    choose_worst,
    share_excess,
    sort_slowdowns,
)
from meshscope.simulate.what_if import Edit, Replay
from meshscope.store.read.arrays import Bools

_MAX_REPLAYED = 32
"""Ranks, and coordinates along an axis, that are replayed one by one."""
NO_PHASE = "(no phase)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Work and transfers of some ranks, or work of a phase, or transfers of a type.

    What it covers is looked up for each edit: masks of all parts would outweigh the timeline."""

    ranks: Sequence[int] = ()
    phase: int | None = None
    """Index into `Timeline.phases`."""
    row_type: int | None = None
    """Index into `EvenShares.row_types`."""

    def edit(self, shares: EvenShares, name: str, *, alone: bool) -> Edit:
        """Only this part as measured, or only this part even."""
        pieces, rows = self._find_pieces(shares.timeline), self._find_rows(shares)
        if alone:
            return shares.edit(name, ~pieces, ~rows)
        return shares.edit(name, pieces, rows)

    def _find_pieces(self, timeline: Timeline) -> Bools:
        if self.phase is not None:
            found: Bools = timeline.pieces.phase == self.phase
            return found
        return np.isin(timeline.pieces.rank, self.ranks)

    def _find_rows(self, shares: EvenShares) -> Bools:
        communication = shares.timeline.communication
        if communication is None:
            return np.zeros(0, dtype=np.bool_)
        if self.row_type is not None:
            found: Bools = shares.row_type == self.row_type
            return found
        return np.isin(communication.operations.rows.rank, self.ranks)


Parts = dict[tuple[str, Hashable], _Part]


def measure_run_slowdown(replay: Replay) -> Slowdown | Unavailable:
    if replay.fidelity.problem is not None:
        return replay.fidelity.problem
    timeline = replay.timeline
    shares = find_even_shares(replay)
    parts: Parts = {("ideal", 0): _Part()}
    parts |= _find_types(timeline, shares) | _find_coordinates(timeline)
    busiest = _choose_busiest(timeline, {rank: [rank] for rank in timeline.ranks})
    parts |= {("rank", rank): _Part(ranks=ranks) for rank, ranks in busiest.items()}
    edits = (part.edit(shares, str(key), alone=True) for key, part in parts.items())
    times = dict(zip(parts, replay.step_times_ns(edits), strict=True))
    ideal_ns = times["ideal", 0]
    if ideal_ns <= 0:
        return Unavailable("an even run would take no time at all")
    slow = {key: value / ideal_ns for key, value in times.items()}
    by_axis = {
        str(axis): sort_slowdowns({int(str(at)): s for (a, at), s in slow.items() if a == axis})
        for axis in Axis
        if any(a == axis for a, _ in slow)
    }
    by_worker = sort_slowdowns(
        {int(str(at)): s for (kind, at), s in slow.items() if kind == "rank"}
    )
    worst = choose_worst(by_worker, len(timeline.ranks))
    worst_share, stage_share = _share_out(replay, shares, ideal_ns, worst)
    return Slowdown(
        fidelity=replay.fidelity,
        step_ns=replay.fidelity.replayed_ns,
        ideal_ns=ideal_ns,
        by_type=sort_slowdowns({str(at): s for (kind, at), s in slow.items() if kind == "type"}),
        by_axis=by_axis,
        by_worker=by_worker,
        worst_workers=worst,
        worst_share=worst_share,
        last_stage_share=stage_share,
    )


def _find_types(timeline: Timeline, shares: EvenShares) -> Parts:
    pieces = timeline.pieces
    is_work = pieces.kind == PieceKind.WORK
    found: Parts = {}
    for index in np.unique(pieces.phase[is_work]).tolist():
        name = timeline.phases[index] or NO_PHASE
        found["type", name] = _Part(phase=index)
    for index, name in enumerate(shares.row_types):
        found["type", name] = _Part(row_type=index)
    return found


def _find_coordinates(timeline: Timeline) -> Parts:
    layout = timeline.layout
    found: Parts = {}
    if not isinstance(layout, Layout):
        return found
    for axis in Axis:
        if layout.degree(axis) < 2:
            continue
        at = {rank: layout.coordinates(rank).along(axis) for rank in timeline.ranks}
        groups: dict[int, list[int]] = {}
        for rank, coordinate in at.items():
            groups.setdefault(coordinate, []).append(rank)
        for coordinate, ranks in _choose_busiest(timeline, groups).items():
            found[str(axis), coordinate] = _Part(ranks=ranks)
    return found


def _choose_busiest(timeline: Timeline, groups: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """The groups whose ranks work most, at most `_MAX_REPLAYED`."""
    if len(groups) <= _MAX_REPLAYED:
        return dict(groups)
    work = np.bincount(timeline.pieces.rank, weights=measured_work(timeline))
    total = {index: sum(work[rank] for rank in ranks) for index, ranks in groups.items()}
    busiest = sorted(groups, key=lambda index: (-total[index], index))[:_MAX_REPLAYED]
    return {index: groups[index] for index in sorted(busiest)}


def _share_out(
    replay: Replay, shares: EvenShares, ideal_ns: float, worst: Sequence[int]
) -> tuple[Share | Unavailable, Share | Unavailable]:
    """M_W and M_S."""
    timeline = replay.timeline
    groups: list[Sequence[int]] = [worst]
    layout = timeline.layout
    if isinstance(layout, Layout) and layout.pp > 1:
        last = layout.pp - 1
        groups.append([rank for rank in timeline.ranks if layout.coordinates(rank).pp == last])
    parts = [_Part(ranks=ranks) for ranks in groups]
    edits = (part.edit(shares, "share", alone=alone) for part in parts for alone in (False, True))
    times = replay.step_times_ns(edits)
    found = [
        share_excess(
            step_ns=replay.fidelity.replayed_ns,
            ideal_ns=ideal_ns,
            removed_ns=times[2 * index],
            alone_ns=times[2 * index + 1],
        )
        for index in range(len(parts))
    ]
    none = Unavailable("the run has no pipeline stages, or its layout is not known")
    return found[0], found[1] if len(found) > 1 else none
