"""The edit that removes garbage collections from a recorded run, with what comes with them.

The collector's own time is recorded. More is lost in the same steps: the garbage was made just
before, ranks that collect at once wait for a core, caches are cold and callbacks late, in the next
step as well (of collections between steps in the one before). All of this shows as work that is
longer than in the run's other steps, and as transfers that are. It is removed too where it comes
with collections clearly more often than without.

Nothing but the collector's time is removed where nearly every step has a collection (no other steps
tell what is usual), in phases that are not training (an evaluation may come as often), and in steps
whose other work is longer by more than twice the collections: something else happens there.
"""

import numpy as np

from meshscope.analyze.timeline.gc_collections import Collections
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.numerics.chance import SIGNIFICANCE_RATIO, binomial_tail
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.simulate.ledger.peer_cells import list_places
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit
from meshscope.store.read.arrays import Bools, Floats, Int64s

MAX_MORE_RATIO = 2.0
"""Other work that is longer, over the collections of the same step: what made as much garbage takes
about as long as to collect it."""
_MIN_OTHER_STEPS = 5
"""Steps without collections that tell what is usual."""
_LONG_DEVIATIONS = 5.0
"""By which work is longer than usual."""
_MIN_LONG_RATIO = 0.005
"""Of the step, likewise."""
_MIN_LIKE_RATIO = 0.25
"""Of a collection: work that is longer by this is as long as a wait for a core beside it."""
_MIN_ERRORS = 3.0
"""By which steps with collections must be longer than others, in standard errors."""


def remove_collections(timeline: Timeline, collections: Collections) -> tuple[Edit, float]:
    """The edit, and how much other work it removes: mean of a step, on the rank with most."""
    work = np.maximum(measured_work(timeline) - collections.lost_ns, 0)
    # A gap belongs to the step after it: collections in it may hold up the end of the one before.
    between_ns = int(collections.lost_ns[timeline.pieces.is_between].sum())
    shift = -1 if 2 * between_ns > int(collections.lost_ns.sum()) else 1
    collected = collections.sum_by_step(timeline)
    most_ns = collected.max(axis=1)
    most_ns = np.maximum(most_ns, _move(most_ns, shift))
    cells = _Cells(timeline, work)
    like_ns = _MIN_LIKE_RATIO * float(np.median(most_ns[most_ns > 0]))
    beside = _mark_beside(collected > 0, shift)
    removed = cells.find_long(beside, like_ns)
    is_more = cells.sum_by_rank(removed).max(axis=1) > MAX_MORE_RATIO * most_ns
    removed[:, is_more] = 0.0
    edit = Edit(
        name="without collections",
        work_ns=cells.shorten(work, removed),
        transfer_ns=_shorten_transfers(timeline, beside.any(axis=1) & ~is_more, like_ns),
    )
    return edit, float(cells.sum_by_rank(removed).max(axis=1).mean())


def _shorten_transfers(timeline: Timeline, is_beside: Bools, like_ns: float) -> Int64s | None:
    """[row]: transfers as usual of their kind where those beside collections are often as much
    longer as a wait for a core: the threads that move data had none. None where they are not."""
    if timeline.communication is None or not is_beside.any() or is_beside.all():
        return None
    rows = timeline.communication.operations.rows
    transfer = timeline.communication.row_times.transfer_ns.copy()
    step = np.minimum(np.searchsorted(timeline.steps, rows.step), len(timeline.steps) - 1)
    is_kept = timeline.steps[step] == rows.step
    is_long = np.zeros(len(transfer), dtype=np.bool_)
    usual = np.zeros(len(transfer))
    for kind in np.unique(rows.kind[is_kept]).tolist():
        own = is_kept & (rows.kind == kind)
        if (own & ~is_beside[step]).any():
            usual[own] = np.median(transfer[own & ~is_beside[step]])
            is_long[own] = transfer[own] > usual[own] + like_ns
    has_long = np.zeros(len(timeline.steps), dtype=np.bool_)
    has_long[step[is_long]] = True
    if not _is_more_often(has_long[is_beside], has_long[~is_beside]):
        return None
    chosen = is_long & is_beside[step]
    transfer[chosen] = usual[chosen].astype(np.int64)
    return transfer


def _is_more_often(beside: Bools, others: Bools) -> bool:
    usual = (np.count_nonzero(others) + 1) / (len(others) + 2)
    count = int(np.count_nonzero(beside))
    return binomial_tail(count, len(beside), usual) < SIGNIFICANCE_RATIO


def _move(values: np.ndarray, shift: int) -> np.ndarray:
    """What each step has, told to the one after it (1) or before it (-1)."""
    moved = np.roll(values, shift, axis=0)
    moved[0 if shift > 0 else -1] = 0
    return moved


def _mark_beside(has_collection: Bools, shift: int) -> Bools:
    """[step, rank]: whether the step, or its neighbour, has a collection: on any rank where enough
    steps have none, else on the rank itself."""
    on_any = np.broadcast_to(has_collection.any(axis=1, keepdims=True), has_collection.shape)
    for chosen in (on_any, has_collection):
        beside: Bools = chosen | _move(chosen, shift)
        if (np.count_nonzero(~beside, axis=0) >= _MIN_OTHER_STEPS).all():
            return beside
    return np.zeros_like(has_collection)


class _Cells:
    """Work by slot (a rank in a place of training) and step."""

    def __init__(self, timeline: Timeline, work: Int64s) -> None:
        pieces = timeline.pieces
        places = list_places(timeline)
        is_wanted = np.array([not one.phase or not one.is_aside for one in places])
        place = pieces.phase.astype(np.int64) * 2 + pieces.is_between
        self._rows = np.flatnonzero((pieces.kind == PieceKind.WORK) & is_wanted[place])
        rank = np.searchsorted(np.array(timeline.ranks), pieces.rank[self._rows])
        slots, slot = np.unique(place[self._rows] * len(timeline.ranks) + rank, return_inverse=True)
        self._rank = slots % len(timeline.ranks)
        self._shape = (len(slots), len(timeline.steps))
        self._num_ranks = len(timeline.ranks)
        self._cell = slot * self._shape[1] + pieces.step[self._rows]
        size = self._shape[0] * self._shape[1]
        sums = np.bincount(self._cell, work[self._rows], minlength=size)
        self._work = np.asarray(sums.reshape(self._shape), dtype=np.float64)
        period_ns = float(np.median(timeline.period_end_ns - timeline.period_start_ns))
        self._least_ns = _MIN_LONG_RATIO * period_ns

    def find_long(self, beside: Bools, like_ns: float) -> Floats:
        """[slot, step]: what is longer than in other steps, where it comes with collections, which
        take about four times `like_ns`."""
        found = np.zeros(self._shape)
        if not beside.any():
            return found
        is_beside = beside.T[self._rank]
        others = np.where(is_beside, np.nan, self._work)
        usual = np.nanmedian(others, axis=1, keepdims=True)
        deviation = MAD_TO_DEVIATION * np.nanmedian(np.abs(others - usual), axis=1, keepdims=True)
        excess = self._work - usual
        long = np.where(
            excess > np.maximum(_LONG_DEVIATIONS * deviation, self._least_ns), excess, 0
        )
        # Of all places together: which of them the next rank waits in is chance.
        return np.where(is_beside, long, 0.0) if _comes_with(long, is_beside, like_ns) else found

    def sum_by_rank(self, values: Floats) -> Floats:
        """[step, rank]."""
        total = np.zeros((self._num_ranks, self._shape[1]))
        np.add.at(total, self._rank, values)
        return total.T

    def shorten(self, work: Int64s, removed: Floats) -> Int64s:
        """[piece]: without what is removed of its cell, in proportion."""
        left = np.maximum(self._work - removed, 0.0)
        factor = np.divide(left, self._work, where=self._work > 0, out=np.ones(self._shape))
        shorter = work.copy()
        scaled = work[self._rows] * factor.ravel()[self._cell]
        shorter[self._rows] = np.rint(scaled).astype(np.int64)
        return shorter


def _comes_with(long: Floats, is_beside: Bools, like_ns: float) -> bool:
    """Whether the longest of [slot, step] is longer beside collections than elsewhere, on average
    over steps, or more often as long as these: of what else holds steps up a few hide a mean."""
    beside, others = (
        np.where(chosen, long, 0.0).max(axis=0)[chosen.any(axis=0)]
        for chosen in (is_beside, ~is_beside)
    )
    if len(beside) < 2 or len(others) < 2:
        return False
    if _is_more_often(beside > like_ns, others > like_ns):
        return True
    error = np.sqrt(beside.var(ddof=1) / len(beside) + others.var(ddof=1) / len(others))
    return bool(beside.mean() - others.mean() > _MIN_ERRORS * error)
