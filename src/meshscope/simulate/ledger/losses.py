"""Splits all work of a run into what the best step needs and what it could do without.

In each cell (step, place, segment) the usual is the median of the peers that do not stand out. What
a rank works beyond it is its own loss if the rank stands out in that place, a pause if it is a rare
long one, and variation otherwise. The usual itself, beyond its median over steps, is lost on all
ranks in slow steps; in places that are not training all of it is. Transfers beyond the median of
their kind, axis and size are lost on that axis.

So work = needed + losses, cell by cell, and removing losses in any combination is defined.

Wrong where more than half of the peers are slow: the others then look fast. A rank without peers
has no usual but its own other steps.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.simulate.ledger.peer_cells import PeerCells, Place, list_places
from meshscope.store.read.arrays import Bools, Floats, Int64s

MIN_LOSS_RATIO = 0.005
"""Least mean excess over its peers, of the step's period, of a rank that stands out."""
_MIN_ERRORS = 3.0
"""Least excess in standard errors of it."""
_NUM_BLOCKS = 8
"""Blocks of steps whose means tell the standard error: neighbouring steps repeat each other."""
_MAX_ROUNDS = 6
_SAME_SET_RATIO = 0.5
"""Ranks that lose at least this share of the worst one's are one set."""
_PAUSE_RATIO = 0.1
"""Least excess of a pause, of the period."""
_PAUSE_DEVIATIONS = 8.0
_MAD_TO_DEVIATION = 1.4826


class LossKind(StrEnum):
    SLOWER = "slower than peers"
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
    step_ns: Floats = field(default_factory=lambda: np.zeros(0))
    """[step]: the most that any rank loses by it in the step."""
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


def split_losses(timeline: Timeline, groups: list[PeerCells], period_ns: float) -> "SplitWork":
    split = _Split(timeline, period_ns)
    for index, cells in enumerate(groups):
        for place in np.unique(cells.place).tolist():
            split.add(index, cells, place)
    return SplitWork(losses=split.finish(groups), needed_ns=split.needed_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitWork:
    losses: list[Loss]
    """Removing all of them leaves what the best step needs."""
    needed_ns: dict[str, float]
    """By place: what that is, mean of a rank and step."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Excess:
    """One rank that stands out in one place of one group."""

    group: int
    member: int
    rank: int
    place: int
    mean_ns: float
    num_errors: float
    removed_ns: Floats
    """[cell of the group]; 0 elsewhere than in the place."""


class _Split:
    def __init__(self, timeline: Timeline, period_ns: float) -> None:
        self._timeline, self._period_ns = timeline, period_ns
        self._places = list_places(timeline)
        self._excesses: list[_Excess] = []
        self._common: dict[int, Loss] = {}
        self._pauses: dict[int, Loss] = {}
        self._variation = self._make(LossKind.VARIATION, None)
        self.needed_ns: dict[str, float] = {}

    def _make(self, kind: LossKind, place: int | None, **options: object) -> Loss:
        where = None if place is None else self._places[place]
        zeros = np.zeros(len(self._timeline.steps))
        return Loss(kind=kind, place=where, step_ns=zeros, **options)  # type: ignore[arg-type]

    def add(self, group: int, cells: PeerCells, place: int) -> None:
        rows = np.flatnonzero(cells.place == place)
        own = cells.work_ns[rows]
        by_step = _sum_steps(cells.step[rows], own, len(self._timeline.steps))
        chosen = self._choose(by_step) if cells.is_compared else np.zeros(own.shape[1], np.bool_)
        usual = np.median(own[:, ~chosen], axis=1)
        self._add_common(group, cells, place, rows, usual)
        excess = own - usual[:, None]
        errors = _count_errors(_sum_steps(cells.step[rows], excess, len(self._timeline.steps)))
        for member in np.flatnonzero(chosen).tolist():
            removed = np.zeros(len(cells.step))
            removed[rows] = excess[:, member]
            self._excesses.append(
                _Excess(
                    group=group,
                    member=member,
                    rank=self._timeline.ranks[cells.members[member]],
                    place=place,
                    mean_ns=float(excess[:, member].sum() / len(by_step)),
                    num_errors=float(errors[member]),
                    removed_ns=removed,
                )
            )
        if cells.is_compared:
            self._add_rest(group, cells, place, rows, np.where(chosen, 0.0, excess))

    def _choose(self, by_step: Floats) -> Bools:
        """[member]: whether it stands out among its peers, at most half of them."""
        num_members = by_step.shape[1]
        # From the median of all: of one fast rank the slower half would look slow.
        chosen = np.zeros(num_members, dtype=np.bool_)
        for _ in range(_MAX_ROUNDS):
            excess = by_step - np.median(by_step[:, ~chosen], axis=1)[:, None]
            found = self._stands_out(excess)
            rank = np.where(found, excess.mean(axis=0), -np.inf)
            keep = np.argsort(-rank, kind="stable")[: num_members // 2]
            now = np.zeros_like(chosen)
            now[keep] = found[keep]
            if np.array_equal(now, chosen):
                break
            chosen = now
        return chosen

    def _stands_out(self, excess: Floats) -> Bools:
        is_large = excess.mean(axis=0) >= MIN_LOSS_RATIO * self._period_ns
        found: Bools = is_large & (_count_errors(excess) >= _MIN_ERRORS)
        return found

    def _add_common(
        self, group: int, cells: PeerCells, place: int, rows: Int64s, usual: Floats
    ) -> None:
        kind = LossKind.ASIDE if self._places[place].is_aside else LossKind.SLOW_STEPS
        lost = usual if kind is LossKind.ASIDE else usual - _find_usual(cells.slot[rows], usual)
        if kind is not LossKind.ASIDE:
            name, count = self._places[place].name, len(cells.members)
            needed = float((usual - lost).sum()) * count / self._timeline.period_end_ns.size
            self.needed_ns[name] = self.needed_ns.get(name, 0.0) + needed
        removed = np.zeros(cells.work_ns.shape)
        removed[rows] = lost[:, None]
        self._common.setdefault(place, self._make(kind, place)).add(group, cells, removed)

    def _add_rest(
        self, group: int, cells: PeerCells, place: int, rows: Int64s, excess: Floats
    ) -> None:
        """Pauses, and what is left."""
        by_step = _sum_steps(cells.step[rows], excess, len(self._timeline.steps))
        deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(by_step)))
        limit = max(_PAUSE_RATIO * self._period_ns, _PAUSE_DEVIATIONS * deviation)
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
                    found = [cells.members[i] for i in np.flatnonzero(removed.any(axis=0)).tolist()]
                    ranks = {*loss.ranks, *(self._timeline.ranks[index] for index in found)}
                    loss.ranks = tuple(sorted(ranks))

    def finish(self, groups: list[PeerCells]) -> list[Loss]:
        found = [*self._join_sets(groups), *self._pauses.values(), *self._common.values()]
        return [loss for loss in [*found, self._variation] if loss.removed_ns]

    def _join_sets(self, groups: list[PeerCells]) -> list[Loss]:
        """Ranks that lose about as much in the same place are one loss."""
        left = sorted(self._excesses, key=lambda one: (one.place, -one.mean_ns, one.rank))
        sets: list[Loss] = []
        while left:
            worst = left[0]
            least = _SAME_SET_RATIO * worst.mean_ns
            same = [one for one in left if one.place == worst.place and one.mean_ns >= least]
            left = [one for one in left if one not in same]
            ranks = tuple(sorted(one.rank for one in same))
            loss = self._make(LossKind.SLOWER, worst.place, ranks=ranks)
            loss.num_errors = min(one.num_errors for one in same)
            for one in same:
                removed = np.zeros(groups[one.group].work_ns.shape)
                removed[:, one.member] = one.removed_ns
                loss.add(one.group, groups[one.group], removed)
            sets.append(loss)
        return sets


def _count_errors(excess: Floats) -> Floats:
    """[member]: the mean over steps, in standard errors between blocks of steps."""
    blocks = np.array_split(excess, min(_NUM_BLOCKS, len(excess)))
    means = np.array([block.mean(axis=0) for block in blocks])
    if len(means) < 2:
        return np.zeros(excess.shape[1])
    error = means.std(axis=0, ddof=1) / np.sqrt(len(means))
    return np.asarray(means.mean(axis=0) / np.maximum(error, 1e-9))


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
