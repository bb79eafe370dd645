"""Splits all work of a run into what the best step needs and what it could do without.

In each cell (step, place, segment) the usual is the median of the peers that do not stand out. What
a rank works beyond it is its own loss if the rank stands out in that place, a pause if it is a rare
long one, and variation otherwise. The usual itself, beyond its median over steps, is lost on all
ranks in slow steps; in places that are not training all of it is. Transfers beyond the median of
their kind, axis and size are lost on that axis.

So work = needed + losses, cell by cell, and removing losses in any combination is defined.

Groups of peers are then compared with each other, by their usual: stages of a pipeline in
proportion to what is known of their sizes, other groups as equals. What a whole group takes beyond
that is its loss.

Wrong where more than half of the peers are slow: the others then look fast. Stages may have more to
do than their sizes say; `Loss.doubt` says what is not known.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from meshscope.analyze.pipeline.stage_sizes import RankSizes, SizeKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.simulate.ledger.peer_cells import PeerCells, Place, list_places
from meshscope.simulate.ledger.standing_out import (
    choose_outstanding,
    count_errors,
    expect_by_best_size,
    expect_by_size,
    expect_median,
)
from meshscope.store.read.arrays import Bools, Floats, Int64s

MIN_LOSS_RATIO = 0.005
"""Least mean excess over its peers, of the step's period, of a rank that stands out."""
MIN_ERRORS = 3.0
"""Least excess in standard errors of it."""
_MIN_STAGE_RATIO = 0.1
"""Least mean excess of a stage over what its size allows: stages are never quite alike."""
_SAME_SET_RATIO = 0.5
"""Ranks that lose at least this share of the worst one's are one set."""
_PAUSE_RATIO = 0.1
"""Least excess of a pause, of the period."""
_PAUSE_DEVIATIONS = 8.0
_MAIN_RANK_RATIO = 0.8
"""Of all pauses in a place that one rank must have for them to be its own."""
_OPTIMIZER = "optimizer"
_UNKNOWN_PARAMETERS = "how many parameters each stage holds was not recorded"
_UNKNOWN_SIZES = "what each stage holds was not recorded"
_LAST_STAGE = "the last stage also computes the loss, whose cost is not known"


class LossKind(StrEnum):
    SLOWER = "slower than peers"
    LONGER_STAGE = "longer than other stages"
    PAUSES = "pauses"
    ASIDE = "not training"
    """On all ranks alike, in a place that the best step does without."""
    SLOW_STEPS = "slow steps"
    """On all ranks alike, in some steps."""
    VARIATION = "variation"
    TRANSFERS = "slow transfers"


@dataclass(slots=True, kw_only=True, eq=False)
class Loss:
    """Time that could be removed from some ranks' work in one place."""

    kind: LossKind
    place: Place | None
    """None: all places, or transfers."""
    ranks: tuple[int, ...] = ()
    """Those it is about; empty for all."""
    axis: str = ""
    """Of transfers."""
    removed_ns: dict[int, Floats] = field(default_factory=dict)
    """Index of the `PeerCells` to [cell, member]: what is removed there."""
    num_errors: float = 0.0
    """The least excess of its ranks, in standard errors."""
    doubt: str = ""
    """Why it may be meant: what is not known of a stage."""
    step_ns: Floats = field(default_factory=lambda: np.zeros(0))
    """[step]: the most that any rank loses by it in the step."""
    num_pauses: int = 0
    """Steps in which its rank takes far longer than the others' scatter, if nearly all such steps
    in the place are its own; of several ranks that are slower, the least."""
    transfer_rows: Bools | None = None
    """Rows whose transfers take the usual time."""

    @property
    def excess_ns(self) -> float:
        """Per step: the mean of `step_ns`."""
        return float(self.step_ns.mean()) if len(self.step_ns) else 0.0

    def add(self, group: int, cells: PeerCells, removed_ns: Floats) -> None:
        if group in self.removed_ns:
            removed_ns = self.removed_ns[group] + removed_ns
        self.removed_ns[group] = removed_ns
        by_step = np.zeros((len(self.step_ns), removed_ns.shape[1]))
        np.add.at(by_step, cells.step, removed_ns)
        self.step_ns = np.maximum(self.step_ns, by_step.max(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What is known of the groups that are compared with each other."""

    are_stages: bool
    """They hold different layers."""
    sizes: RankSizes
    """Of `Timeline.ranks`."""
    ends: frozenset[int] = frozenset()
    """Ranks of the last stage: they compute the loss as well."""


def split_losses(
    timeline: Timeline, groups: list[PeerCells], period_ns: float, stages: Stages
) -> "SplitWork":
    split = _Split(timeline, groups, period_ns, stages)
    for index, cells in enumerate(groups):
        for place in np.unique(cells.place).tolist():
            split.add(index, place)
    return SplitWork(losses=split.finish(), needed_ns=split.needed_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitWork:
    losses: list[Loss]
    """Removing all of them leaves what the best step needs."""
    needed_ns: dict[str, float]
    """By place: what that is, mean of a rank and step."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Excess:
    """One rank, or one group of peers, that stands out in one place."""

    kind: LossKind
    group: int
    members: list[int]
    """In the group."""
    place: int
    mean_ns: float
    num_errors: float
    removed_ns: Floats
    """[cell of the group], of each of its members; 0 elsewhere than in the place."""
    num_pauses: int = 0
    doubt: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Usual:
    """What peers that do not stand out take in one place."""

    group: int
    rows: Int64s
    """Cells of the group."""
    ns: Floats
    """[row]."""


class _Split:
    def __init__(
        self, timeline: Timeline, groups: list[PeerCells], period_ns: float, stages: Stages
    ) -> None:
        self._timeline, self._groups = timeline, groups
        self._period_ns, self._stages = period_ns, stages
        self._places = list_places(timeline)
        self._excesses: list[_Excess] = []
        self._usual: dict[int, list[_Usual]] = {}
        self._common: dict[int, Loss] = {}
        self._pauses: dict[int, Loss] = {}
        self._paused_ns: dict[int, dict[int, Floats]] = {}
        self._variation = self._make(LossKind.VARIATION, None)
        self.needed_ns: dict[str, float] = {}

    def _make(self, kind: LossKind, place: int | None, **options: object) -> Loss:
        where = None if place is None else self._places[place]
        zeros = np.zeros(len(self._timeline.steps))
        return Loss(kind=kind, place=where, step_ns=zeros, **options)  # type: ignore[arg-type]

    def _sum_steps(self, group: int, rows: Int64s, values: Floats) -> Floats:
        return _sum_steps(self._groups[group].step[rows], values, len(self._timeline.steps))

    def add(self, group: int, place: int) -> None:
        """Compares the members of a group in a place."""
        cells = self._groups[group]
        rows = np.flatnonzero(cells.place == place)
        own = cells.work_ns[rows]
        chosen = np.zeros(own.shape[1], np.bool_)
        if cells.is_compared:
            chosen = choose_outstanding(
                self._sum_steps(group, rows, own),
                expect_median,
                min_mean_ns=MIN_LOSS_RATIO * self._period_ns,
                min_errors=MIN_ERRORS,
            )
        usual = np.median(own[:, ~chosen], axis=1)
        self._usual.setdefault(place, []).append(_Usual(group=group, rows=rows, ns=usual))
        excess = own - usual[:, None]
        by_step = self._sum_steps(group, rows, excess)
        num_pauses = self._count_own_pauses(by_step, chosen)
        for index, member in enumerate(np.flatnonzero(chosen).tolist()):
            self._note_excess(
                LossKind.SLOWER,
                group,
                [member],
                place,
                rows,
                excess[:, member],
                by_step[:, [member]],
            )
            self._excesses[-1].num_pauses = num_pauses[index]
        if cells.is_compared:
            self._add_rest(group, cells, place, rows, np.where(chosen, 0.0, excess))

    def _count_own_pauses(self, by_step: Floats, chosen: Bools) -> list[int]:
        """Of each that stands out: steps far beyond the others' scatter; 0 for all if others have
        such steps as well."""
        is_long = by_step > self._find_pause_limit(by_step[:, ~chosen])
        long_ns = np.where(is_long, by_step, 0.0).sum(axis=0)
        if long_ns[chosen].sum() < _MAIN_RANK_RATIO * long_ns.sum():
            return [0] * int(chosen.sum())
        found: list[int] = np.count_nonzero(is_long[:, chosen], axis=0).tolist()
        return found

    def _find_pause_limit(self, by_step: Floats) -> float:
        """The least excess of a pause among these [step, member]."""
        deviation = MAD_TO_DEVIATION * float(np.median(np.abs(by_step)))
        return max(_PAUSE_RATIO * self._period_ns, _PAUSE_DEVIATIONS * deviation)

    def _note_excess(
        self,
        kind: LossKind,
        group: int,
        members: list[int],
        place: int,
        rows: Int64s,
        excess: Floats,
        by_step: Floats,
        doubt: str = "",
    ) -> None:
        removed = np.zeros(len(self._groups[group].step))
        removed[rows] = excess
        self._excesses.append(
            _Excess(
                kind=kind,
                group=group,
                members=members,
                place=place,
                mean_ns=float(by_step.mean()),
                num_errors=float(count_errors(by_step)[0]),
                removed_ns=removed,
                doubt=doubt,
            )
        )

    def _compare_groups(self, place: int, usual: list[_Usual]) -> None:
        """Takes from `usual` what a group takes beyond the others."""
        if self._places[place].is_aside or len(usual) < 2:
            return
        by_step = np.concatenate(
            [self._sum_steps(one.group, one.rows, one.ns[:, None]) for one in usual], axis=1
        )
        sizes = self._find_sizes(place, usual)
        chosen = choose_outstanding(
            by_step,
            expect_by_size(list(sizes.values())),
            min_mean_ns=MIN_LOSS_RATIO * self._period_ns,
            min_errors=MIN_ERRORS,
            min_ratio=_MIN_STAGE_RATIO if self._stages.are_stages else 0.0,
        )
        # Whoever no size explains; what it takes beyond the size that explains the others.
        excess = by_step - expect_by_best_size(list(sizes.values()))(by_step, chosen)
        kind = LossKind.LONGER_STAGE if self._stages.are_stages else LossKind.SLOWER
        for index in np.flatnonzero(chosen).tolist():
            one = usual[index]
            share = np.divide(
                excess[:, index],
                by_step[:, index],
                where=by_step[:, index] > 0,
                out=np.zeros(len(by_step)),
            )
            lost = one.ns * share[self._groups[one.group].step[one.rows]]
            members = list(range(len(self._groups[one.group].members)))
            doubt = self._find_doubt(place, one.group, sizes)
            self._note_excess(
                kind, one.group, members, place, one.rows, lost, excess[:, [index]], doubt
            )
            one.ns = one.ns - lost

    def _find_sizes(self, place: int, usual: list[_Usual]) -> dict[SizeKind, Floats]:
        """[group] of each kind of size that work in this place goes by."""
        if not self._stages.are_stages:
            return {}
        first = [self._groups[one.group].members[0] for one in usual]
        is_optimizer = self._places[place].phase == _OPTIMIZER
        return {
            kind: sizes[first]
            for kind, sizes in self._stages.sizes.by_kind.items()
            if not (is_optimizer and kind is SizeKind.FLOPS)
        }

    def _find_doubt(self, place: int, group: int, sizes: dict[SizeKind, Floats]) -> str:
        if not self._stages.are_stages:
            return ""
        ranks = {self._timeline.ranks[index] for index in self._groups[group].members}
        phase = self._places[place].phase
        if phase == _OPTIMIZER:
            return "" if SizeKind.PARAMETERS in sizes else _UNKNOWN_PARAMETERS
        if not sizes:
            return _UNKNOWN_SIZES
        return _LAST_STAGE if ranks & self._stages.ends else ""

    def _add_common(self, place: int, one: _Usual) -> None:
        cells, usual = self._groups[one.group], one.ns
        kind = LossKind.ASIDE if self._places[place].is_aside else LossKind.SLOW_STEPS
        lost = usual
        if kind is not LossKind.ASIDE:
            lost = usual - _find_usual(cells.slot[one.rows], usual)
            name, count = self._places[place].name, len(cells.members)
            needed = float((usual - lost).sum()) * count / self._timeline.period_end_ns.size
            self.needed_ns[name] = self.needed_ns.get(name, 0.0) + needed
        removed = np.zeros(cells.work_ns.shape)
        removed[one.rows] = lost[:, None]
        self._common.setdefault(place, self._make(kind, place)).add(one.group, cells, removed)

    def _add_rest(
        self, group: int, cells: PeerCells, place: int, rows: Int64s, excess: Floats
    ) -> None:
        """Pauses, and what is left."""
        by_step = _sum_steps(cells.step[rows], excess, len(self._timeline.steps))
        limit = self._find_pause_limit(by_step)
        is_pause = (by_step > limit)[cells.step[rows]]
        for loss, wanted in (
            (self._pauses.setdefault(place, self._make(LossKind.PAUSES, place)), is_pause),
            (self._variation, ~is_pause),
        ):
            removed = np.zeros(cells.work_ns.shape)
            removed[rows] = np.where(wanted, excess, 0.0)
            if removed.any():
                loss.add(group, cells, removed)
                if loss.kind is LossKind.PAUSES:
                    paused = self._paused_ns.setdefault(place, {})
                    for index in np.flatnonzero(removed.any(axis=0)).tolist():
                        rank = self._timeline.ranks[cells.members[index]]
                        paused[rank] = np.where(by_step[:, index] > limit, by_step[:, index], 0.0)
                    loss.ranks = tuple(sorted({*loss.ranks, *paused}))

    def finish(self) -> list[Loss]:
        for place, usual in self._usual.items():
            self._compare_groups(place, usual)
            for one in usual:
                self._add_common(place, one)
        for place, loss in self._pauses.items():
            _name_main_rank(loss, self._paused_ns.get(place, {}))
        found = [*self._join_sets(), *self._pauses.values(), *self._common.values()]
        return [loss for loss in [*found, self._variation] if loss.removed_ns]

    def _join_sets(self) -> list[Loss]:
        """Ranks that lose about as much in the same place are one loss."""
        left = sorted(
            self._excesses, key=lambda one: (one.place, one.kind, -one.mean_ns, one.group)
        )
        sets: list[Loss] = []
        while left:
            worst = left[0]
            least = _SAME_SET_RATIO * worst.mean_ns
            same = [
                one
                for one in left
                if (one.place, one.kind) == (worst.place, worst.kind) and one.mean_ns >= least
            ]
            left = [one for one in left if one not in same]
            loss = self._make(worst.kind, worst.place, ranks=self._list_ranks(same))
            loss.num_errors = min(one.num_errors for one in same)
            loss.num_pauses = min(one.num_pauses for one in same)
            loss.doubt = next((one.doubt for one in same if one.doubt), "")
            for one in same:
                cells = self._groups[one.group]
                removed = np.zeros(cells.work_ns.shape)
                removed[:, one.members] = one.removed_ns[:, None]
                loss.add(one.group, cells, removed)
            sets.append(loss)
        return sets

    def _list_ranks(self, excesses: list[_Excess]) -> tuple[int, ...]:
        found = {
            self._timeline.ranks[self._groups[one.group].members[member]]
            for one in excesses
            for member in one.members
        }
        return tuple(sorted(found))


def _name_main_rank(loss: Loss, paused_ns: dict[int, Floats]) -> None:
    """If one rank has nearly all of the pauses [step], they are its own."""
    if not paused_ns:
        return
    total_ns = {rank: float(own.sum()) for rank, own in paused_ns.items()}
    main = max(total_ns, key=lambda rank: total_ns[rank])
    if total_ns[main] >= _MAIN_RANK_RATIO * sum(total_ns.values()):
        loss.ranks = (main,)
        loss.num_pauses = int(np.count_nonzero(paused_ns[main]))


def _sum_steps(step: Int64s, values: Floats, num_steps: int) -> Floats:
    """[step, member]."""
    total = np.zeros((num_steps, values.shape[1]))
    np.add.at(total, step, values)
    return total


def _find_usual(slot: Int64s, usual: Floats) -> Floats:
    """[cell]: the median over steps of its slot."""
    order = np.lexsort((usual, slot))
    found, first, count = np.unique(slot[order], return_index=True, return_counts=True)
    low, high = usual[order[first + (count - 1) // 2]], usual[order[first + count // 2]]
    at = np.searchsorted(found, slot)
    middle: Floats = ((low + high) / 2)[at]
    return middle
