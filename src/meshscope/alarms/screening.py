"""A cheap look at every rank: who works longer than its peers, and who falls behind.

Of every new step the time outside of operations is taken, by rank: the step's time less that of its
operations. Who is waited for has short operations and others' are long, whatever clock hosts have.
A rank stands out when its median of the last steps is above that of its peers by more than their
spread explains. That names no cause: it chooses whom a diagnosis looks at.

Wrong where operations are not recorded (nobody stands out) or overlap each other (their times add
up more than once, on all peers alike).
"""

import numpy as np

from meshscope.core.layout import Axis
from meshscope.core.unavailable import known
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.columns import decode_words, int64_column
from meshscope.store.read.run import Attempt
from meshscope.store.read.table_files import live_file
from meshscope.store.read.table_tails import TableTails
from meshscope.store.schema import COLLECTIVES, STEPS, Table

NUM_KEPT_STEPS = 128
_NUM_JUDGED_STEPS = 24
"""Last steps by which ranks are compared; fewer than half of them are not enough."""
_LATE_STEPS = 1
"""The newest steps, of which operations may still be written."""
_MAX_LAG_STEPS = 64
"""A rank that is further behind is not waited for."""
_MIN_SHARE = 0.02
_MIN_SPREADS = 6.0
"""Excess over peers, as a share of a step and in standard deviations of the peers."""
_MAX_SUSPECTS = 8


class Screening:
    """The last steps of all ranks of one attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks = tuple(attempt.ranks)
        self._tails = {table: _open_tails(attempt, table) for table in (STEPS, COLLECTIVES)}
        self._peers = _group_by_stage(attempt)
        shape = (len(self.ranks), NUM_KEPT_STEPS)
        self._number = np.full(shape, -1, dtype=np.int64)
        self._taken_ns = np.zeros(shape, dtype=np.int64)
        """Of the step; 0 while it is not over."""
        self._held_ns = np.zeros(shape, dtype=np.int64)
        self.last_step = np.full(len(self.ranks), -1, dtype=np.int64)
        self._told = -1

    def look(self) -> Int64s:
        """Reads what is new; how long each step took that is new on all ranks: their median."""
        for rank, words in self._tails[STEPS].read():
            steps = decode_words(STEPS, words)
            step = int64_column(steps, "step")
            start = int64_column(steps, "start_host_mono_ns")
            taken = int64_column(steps, "end_host_mono_ns") - start
            np.maximum.at(self.last_step, rank, step)
            slot = self._claim(rank, step)
            fresh = slot >= 0
            self._taken_ns[rank[fresh], slot[fresh]] = np.maximum(taken[fresh], 1)
        for rank, words in self._tails[COLLECTIVES].read():
            operations = decode_words(COLLECTIVES, words)
            start = int64_column(operations, "start_host_mono_ns")
            end = int64_column(operations, "end_host_mono_ns")
            slot = self._claim(rank, int64_column(operations, "step"))
            good = (slot >= 0) & (start > 0) & (end > start)
            np.add.at(self._held_ns, (rank[good], slot[good]), (end - start)[good])
        return self._take_new()

    def _claim(self, rank: Int64s, step: Int64s) -> Int64s:
        """The slot of every step, emptied where an older one was in it; -1 for steps too old."""
        slot = step % NUM_KEPT_STEPS
        is_known = step >= 0
        newest = np.full_like(self._number, -1)
        np.maximum.at(newest, (rank[is_known], slot[is_known]), step[is_known])
        is_new = newest > self._number
        self._number[is_new] = newest[is_new]
        self._taken_ns[is_new] = 0
        self._held_ns[is_new] = 0
        return np.where(is_known & (self._number[rank, slot] == step), slot, -1)

    def _take_new(self) -> Int64s:
        slots, rows = self._find_common()
        numbers = self._number[rows.argmax(), slots] if len(slots) else slots
        slots = slots[numbers > self._told]
        if not len(slots):
            return np.empty(0, dtype=np.int64)
        self._told = int(numbers.max())
        job_ns: Int64s = np.median(self._taken_ns[np.ix_(rows, slots)], axis=0).astype(np.int64)
        return job_ns

    @property
    def step(self) -> int | None:
        """The last step that all ranks finished that keep up."""
        return self._told if self._told >= 0 else None

    @property
    def num_steps(self) -> int:
        """Steps that all ranks finished, of those kept."""
        return len(self._find_common()[0])

    def find_behind(self, num_steps: int) -> tuple[int, ...]:
        """Ranks that many steps behind the first one."""
        highest = int(self.last_step.max(initial=-1))
        is_behind = self.last_step < highest - num_steps
        return tuple(self.ranks[i] for i in np.flatnonzero(is_behind))

    def find_suspects(self) -> tuple[int, ...]:
        """Ranks that stand out, the furthest first."""
        own, step_ns = self._own_ns()
        if own is None:
            return ()
        found: list[tuple[float, int]] = []
        for members in self._peers:
            if len(members) < 3:
                continue
            excess = own[members] - np.nanmedian(own[members])
            spread = MAD_TO_DEVIATION * float(np.nanmedian(np.abs(excess)))
            limit = max(_MIN_SHARE * step_ns, _MIN_SPREADS * spread)
            found += [(float(excess[i]), int(members[i])) for i in np.flatnonzero(excess > limit)]
        found.sort(reverse=True)
        return tuple(self.ranks[index] for _, index in found[:_MAX_SUSPECTS])

    def _find_common(self) -> tuple[Int64s, Bools]:
        """Slots of steps that all ranks finished that keep up, in order; and these ranks."""
        rows = self.last_step >= int(self.last_step.max(initial=-1)) - _MAX_LAG_STEPS
        if not rows.any():
            return np.empty(0, dtype=np.int64), rows
        number, taken = self._number[rows], self._taken_ns[rows]
        slots = np.flatnonzero((number == number[0]).all(axis=0) & (taken > 0).all(axis=0))
        return slots[np.argsort(number[0, slots])], rows

    def _own_ns(self) -> tuple[Floats | None, float]:
        """By rank, median over the last steps (NaN for one that is behind); and a step's time."""
        slots, rows = self._find_common()
        slots = slots[: len(slots) - _LATE_STEPS][-_NUM_JUDGED_STEPS:]
        if len(slots) < _NUM_JUDGED_STEPS // 2:
            return None, 0.0
        taken = self._taken_ns[:, slots]
        own = np.median(taken - self._held_ns[:, slots], axis=1)
        return np.where(rows, own, np.nan), float(np.median(taken[rows]))


def _group_by_stage(attempt: Attempt) -> list[Int64s]:
    """Indices of ranks that do as much work: those of one pipeline stage, where it is known."""
    layout = known(attempt.layout)
    stages = [
        layout.coordinates(rank).along(Axis.PP) if layout and rank < layout.world_size else 0
        for rank in attempt.ranks
    ]
    return [np.flatnonzero(np.array(stages) == stage) for stage in sorted(set(stages))]


def _open_tails(attempt: Attempt, table: Table) -> TableTails:
    paths = [live_file(recording.directory, table.name) for recording in attempt]
    return TableTails(paths, num_before=4 * NUM_KEPT_STEPS)
