"""The ledger of lost time: the way from the measured step to the best one, loss by loss.

The best step is a replay without any loss (`losses`): every piece of work takes its peers' usual
time, nothing pauses, data is ready, transfers take their usual time; the waits and bubbles that
remain are those of the schedule. Every loss gets its share of the difference (`shapley`), so two
faults that hide each other each have one, and what several ranks lose at the same time is counted
once. Shares sum to the difference exactly; the replay's own error comes with it.

Wrong where the replay is: see `what_if`. Losses that all ranks share in training itself (slow
kernels, small operations) are not in it: no peer shows that they could be shorter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshscope.analyze.job.job import Job
from meshscope.analyze.pipeline.stage_sizes import RankSizes
from meshscope.analyze.timeline.peer_work import group_true_peers, has_messages
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.shapley import Coalition, share_out
from meshscope.simulate.even_shares import find_even_transfers
from meshscope.simulate.ledger.losses import (
    MIN_ERRORS,
    MIN_LOSS_RATIO,
    Loss,
    LossKind,
    Stages,
    split_losses,
)
from meshscope.simulate.ledger.peer_cells import PeerCells, Place, collect_cells
from meshscope.simulate.ledger.standing_out import choose_outstanding, count_errors, expect_median
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit, Replay
from meshscope.simulate.work_parts import WorkParts, cut_work
from meshscope.store.read.arrays import Bools, Floats, Int64s

MAX_ENTRIES = 12
"""Losses that are priced one by one, the largest; the others are one entry."""
_MAX_NAMED = 4
"""Ranks listed in a name."""
_INTERACTION_RATIO = 0.005
"""Of the step: differences below are no interaction."""
CAUSES = frozenset((LossKind.SLOWER, LossKind.LONGER_STAGE, LossKind.PAUSES, LossKind.ASIDE))
"""Removed first: what a rank, or the program, does. Noise that hides a fault stays then, as it
stays when the fault is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One loss and its price."""

    loss: Loss | None
    """None: all small ones together."""
    share_ns: float
    """Its share of what is lost in a step."""
    alone_ns: float
    """What a step saves without this loss alone."""
    edit: Edit = field(repr=False)
    """What removes it alone."""

    @property
    def name(self) -> str:
        return _name(self.loss) if self.loss is not None else "smaller losses"

    @property
    def is_hidden(self) -> bool:
        """Whether removing it alone saves less than half of its share: others hide it."""
        return self.alone_ns < self.share_ns / 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ledger:
    measured_ns: float
    """Per step, by the clock."""
    replayed_ns: float
    """Per step, replayed as measured; entries lead from here to `best_ns`."""
    best_ns: float
    """Per step, replayed without any loss."""
    error_ns: float
    """Of the replay against the clock, per step."""
    needed_ns: Mapping[str, float]
    """What training needs in each phase without losses, mean of a rank and step."""
    entries: tuple[Entry, ...]
    """The largest share first; the shares sum to `replayed_ns` less `best_ns`."""

    @property
    def lost_ns(self) -> float:
        return self.replayed_ns - self.best_ns


def open_ledger(replay: Replay, sizes: RankSizes | None = None) -> Ledger | Unavailable:
    """`sizes`: what is known of the ranks' stages, if there is a pipeline."""
    if replay.fidelity.problem is not None:
        return replay.fidelity.problem
    book = _Book(replay, sizes)
    tiers = book.choose_entries()
    step_ns = replay.fidelity.replayed_ns
    entries: list[Entry] = []
    before: list[Loss] = []
    best_ns = step_ns
    for tier in tiers:
        best_ns = _price_tier(replay, book, tier, before, best_ns, entries)
        before += [loss for losses in tier for loss in losses]
    return Ledger(
        measured_ns=replay.fidelity.measured_ns,
        replayed_ns=step_ns,
        best_ns=best_ns,
        error_ns=replay.fidelity.error_ratio * replay.fidelity.measured_ns,
        needed_ns=book.needed_ns,
        entries=tuple(sorted(entries, key=lambda entry: -entry.share_ns)),
    )


def _price_tier(
    replay: Replay,
    book: "_Book",
    tier: Sequence[Sequence[Loss]],
    before: Sequence[Loss],
    step_ns: float,
    entries: list[Entry],
) -> float:
    """Adds the entries of a tier; returns the step without the losses `before` and these."""

    def price(coalitions: Sequence[Coalition]) -> list[float]:
        edits = (
            book.remove([*before, *(one for i in sorted(chosen) for one in tier[i])])
            for chosen in coalitions
        )
        return [step_ns - time for time in replay.step_times_ns(edits)]

    shares = share_out(price, len(tier), tolerance=_INTERACTION_RATIO * step_ns)
    entries += [
        Entry(
            loss=losses[0] if len(losses) == 1 else None,
            share_ns=float(shares.share[index]),
            alone_ns=float(shares.alone[index]),
            edit=book.remove(losses),
        )
        for index, losses in enumerate(tier)
    ]
    return step_ns - shares.total


def _describe_stages(timeline: Timeline, sizes: RankSizes | None, *, is_piped: bool) -> Stages:
    layout = known(timeline.layout)
    num_stages = 1 if layout is None else layout.pp
    stage_of: dict[int, int] = {}
    if layout is not None and num_stages > 1:
        stage_of = {rank: layout.coordinates(rank).pp for rank in timeline.ranks}
    known_sizes = RankSizes(ranks=(), by_kind={}) if sizes is None else sizes
    return Stages(
        are_stages=num_stages > 1 or is_piped,
        sizes=known_sizes.select(timeline.ranks),
        ends=frozenset(rank for rank, stage in stage_of.items() if stage == num_stages - 1),
    )


class _Book:
    """The losses of a run, and edits that remove any of them."""

    def __init__(self, replay: Replay, sizes: RankSizes | None) -> None:
        timeline = replay.timeline
        self._timeline = timeline
        self._parts: WorkParts = cut_work(timeline)
        is_piped = has_messages(timeline)
        peers = group_true_peers(timeline.layout, timeline.ranks, is_piped=is_piped)
        self._groups: list[PeerCells] = collect_cells(timeline, self._parts, peers)
        self._period_ns = replay.fidelity.replayed_ns
        self._even_transfer_ns: Int64s | None = None
        stages = _describe_stages(timeline, sizes, is_piped=is_piped)
        split = split_losses(timeline, self._groups, self._period_ns, stages)
        self.needed_ns = split.needed_ns
        self.losses = [*split.losses, *self._find_transfer_losses(replay)]

    def choose_entries(self) -> list[list[list[Loss]]]:
        """Causes first, then what is left between all ranks; too small ones last, as one."""
        least_ns = MIN_LOSS_RATIO * self._period_ns
        order = sorted(self.losses, key=lambda loss: -loss.excess_ns)
        named = [loss for loss in order if loss.excess_ns >= least_ns][:MAX_ENTRIES]
        causes = [[loss] for loss in named if loss.kind in CAUSES]
        others = [[loss] for loss in named if loss.kind not in CAUSES]
        small = [loss for loss in order if loss not in named]
        return [causes, [*others, small] if small else others]

    def remove(self, losses: Sequence[Loss]) -> Edit:
        """All of these losses at once."""
        part_ns = self._parts.work_ns.astype(np.float64)
        for index, cells in enumerate(self._groups):
            removed = [loss.removed_ns[index] for loss in losses if index in loss.removed_ns]
            if not removed:
                continue
            left = np.maximum(cells.work_ns - sum(removed), 0.0)
            factor = np.divide(left, cells.work_ns, where=cells.work_ns > 0, out=np.ones_like(left))
            part_ns[cells.part] *= factor[cells.part_cell, cells.part_member]
        return Edit(
            name=", ".join(_name(loss) for loss in losses) or "as measured",
            work_ns=self._join(part_ns),
            transfer_ns=self._even_transfers(losses),
        )

    def _join(self, part_ns: np.ndarray) -> Int64s:
        work = self._parts.join(self._timeline, part_ns)
        # Work that no part covers (in windows that are not replayed) stays.
        has_part = np.zeros(len(work), dtype=np.bool_)
        has_part[self._parts.piece] = True
        return np.where(has_part, work, measured_work(self._timeline))

    def _find_transfer_losses(self, replay: Replay) -> list[Loss]:
        communication = self._timeline.communication
        even, names, types = find_even_transfers(replay)
        if communication is None or even is None:
            return []
        axes = np.array([name.split(" ")[0] for name in names])[types]
        measured = communication.row_times.transfer_ns
        aside = self._find_aside_transfers(communication)
        is_aside: Bools = np.zeros(len(measured), np.bool_)
        if aside is not None and aside.transfer_rows is not None:
            is_aside = aside.transfer_rows
        self._even_transfer_ns = even = np.where(is_aside, 0, even)
        losses = [] if aside is None else [aside]
        for axis in np.unique(axes).tolist():
            own = (axes == axis) & ~is_aside
            by_rank = self._sum_by_rank(communication, own, measured - even)
            losses.append(
                Loss(
                    kind=LossKind.TRANSFERS,
                    place=None,
                    axis=axis,
                    step_ns=by_rank.max(axis=1),
                    transfer_rows=own,
                )
            )
        return losses

    def _find_aside_transfers(self, communication: Job) -> Loss | None:
        """Of ranks that communicate between steps while their peers do not: all of it is lost."""
        pieces, place = self._timeline.pieces, Place(phase="", is_between=True)
        is_between = pieces.is_between & (pieces.phase == 0) & (pieces.row >= 0)
        measured = communication.row_times.transfer_ns
        is_aside = np.zeros(len(measured), np.bool_)
        is_aside[pieces.row[is_between]] = True
        by_rank = self._sum_by_rank(communication, is_aside, measured)
        chosen = choose_outstanding(
            by_rank,
            expect_median,
            min_mean_ns=MIN_LOSS_RATIO * self._period_ns,
            min_errors=MIN_ERRORS,
        )
        if not chosen.any():
            return None
        ranks = tuple(rank for rank, one in zip(self._timeline.ranks, chosen, strict=True) if one)
        own = is_aside & np.isin(communication.operations.rows.rank, ranks)
        return Loss(
            kind=LossKind.SLOWER,
            place=place,
            ranks=ranks,
            step_ns=by_rank[:, chosen].max(axis=1),
            num_errors=float(count_errors(by_rank[:, chosen]).min()),
            transfer_rows=own,
        )

    def _sum_by_rank(self, communication: Job, chosen: Bools, values: Int64s) -> Floats:
        """[step, rank]: of the rows chosen, in steps that are replayed."""
        rows, steps = communication.operations.rows, self._timeline.steps
        step = np.minimum(np.searchsorted(steps, rows.step), len(steps) - 1)
        own = chosen & (steps[step] == rows.step)
        rank = np.searchsorted(np.array(self._timeline.ranks), rows.rank[own])
        by_rank = np.zeros((len(steps), len(self._timeline.ranks)))
        np.add.at(by_rank, (step[own], rank), values[own])
        return by_rank

    def _even_transfers(self, losses: Sequence[Loss]) -> Int64s | None:
        chosen = [loss.transfer_rows for loss in losses if loss.transfer_rows is not None]
        communication = self._timeline.communication
        if not chosen or communication is None or self._even_transfer_ns is None:
            return None
        is_even = np.logical_or.reduce(chosen)
        return np.where(is_even, self._even_transfer_ns, communication.row_times.transfer_ns)


def _name(loss: Loss) -> str:
    if loss.place is None:
        return f"{loss.axis} {loss.kind}".strip()
    if loss.kind is LossKind.PAUSES and len(loss.ranks) > 2:
        return f"some ranks, {loss.place.name}: {loss.kind}"
    plural = "s" if len(loss.ranks) > 1 else ""
    shown = ", ".join(map(str, loss.ranks[:_MAX_NAMED])) + ("…" if loss.ranks[_MAX_NAMED:] else "")
    who = f"rank{plural} {shown}" if loss.ranks else "all ranks"
    return f"{who}, {loss.place.name}: {loss.kind}"
