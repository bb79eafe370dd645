"""Sets of moments as sorted intervals that do not touch: union, difference, intersection.

A set is a pair of int64 columns (start, end), half open. All is exact and costs one sort at most.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meshscope.store.read.arrays import Int64s


def sort_distinct(moments_ns: Int64s) -> Int64s:
    """Each once, ascending: as `np.unique`, whose table of hashes is slower than sorting."""
    ordered: Int64s = np.sort(moments_ns)
    is_other = np.append(True, ordered[1:] != ordered[:-1])
    found: Int64s = ordered[is_other[: len(ordered)]]
    return found


_FEW = 8
"""Times as many intervals as a set has: then those that touch it are looked up first."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    start_ns: Int64s
    end_ns: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        return int((self.end_ns - self.start_ns).sum())

    def until(self, moment_ns: Int64s) -> Int64s:
        """How much of the set lies before each moment."""
        if not len(self):
            return np.zeros(len(moment_ns), dtype=np.int64)
        total = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.end_ns - self.start_ns, out=total[1:])
        index = self.start_ns.searchsorted(moment_ns, side="right")
        beyond = np.maximum(self.end_ns.take(index - 1) - moment_ns, 0)
        return np.where(index > 0, total.take(index) - beyond, 0)

    def within(self, start_ns: Int64s, end_ns: Int64s) -> Int64s:
        """How much of the set lies in each interval."""
        if not len(self):
            return np.zeros(len(start_ns), dtype=np.int64)
        if _FEW * len(self) > len(start_ns) or (start_ns[1:] < end_ns[:-1]).any():
            return self.until(end_ns) - self.until(start_ns)
        # Few moments in many intervals that follow each other: most have none of them.
        place = _meeting(start_ns, end_ns, self)
        found = np.zeros(len(start_ns), dtype=np.int64)
        found[place] = self.until(end_ns[place]) - self.until(start_ns[place])
        return found


def _meeting(start_ns: Int64s, end_ns: Int64s, few: Intervals) -> Int64s:
    """Places of the intervals, in order, that touch any of a few."""
    first = end_ns.searchsorted(few.start_ns, side="right")
    after = start_ns.searchsorted(few.end_ns, side="left")
    count = np.maximum(after - first, 0)
    place = np.arange(int(count.sum())) + np.repeat(first - np.cumsum(count) + count, count)
    return sort_distinct(place)


EMPTY = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def unite(start_ns: Int64s, end_ns: Int64s) -> Intervals:
    """The moments in any of the intervals; empty intervals are allowed."""
    if not len(start_ns):
        return EMPTY
    is_any = end_ns > start_ns
    if not is_any.all():  # places cost a third of what a mask does
        place = np.flatnonzero(is_any)
        start_ns, end_ns = start_ns.take(place), end_ns.take(place)
    if not len(start_ns):
        return EMPTY
    if (start_ns[1:] < start_ns[:-1]).any():  # events are in order most often
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns = start_ns[order], end_ns[order]
    start, furthest = start_ns, np.maximum.accumulate(end_ns)
    is_apart = start[1:] > furthest[:-1]
    if is_apart.all():
        return Intervals(start, furthest)
    last = np.append(np.flatnonzero(is_apart), len(start) - 1)
    first = np.append(0, last[:-1] + 1)
    return Intervals(start.take(first), furthest.take(last))


def join(*sets: Intervals) -> Intervals:
    """The moments in any of the sets."""
    sets = tuple(one for one in sets if len(one))
    if len(sets) < 2:
        return sets[0] if sets else EMPTY
    start_ns = np.concatenate([one.start_ns for one in sets])
    end_ns = np.concatenate([one.end_ns for one in sets])
    if all(one.end_ns[-1] < other.start_ns[0] for one, other in pairwise(sets)):
        return Intervals(start_ns, end_ns)
    return unite(start_ns, end_ns)


def complement(one: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """The moments from start to end that are not in the set."""
    edges = np.empty((2, len(one) + 1), dtype=np.int64)
    edges[0, 0], edges[0, 1:], edges[1, :-1], edges[1, -1] = (
        start_ns,
        one.end_ns,
        one.start_ns,
        end_ns,
    )
    np.maximum(edges, start_ns, out=edges)
    np.minimum(edges, end_ns, out=edges)
    return unite(edges[0], edges[1])


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """The moments of the first that are not in the second."""
    if not len(one) or not len(other):
        return one
    return intersect(one, complement(other, int(one.start_ns[0]), int(one.end_ns[-1])))


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The moments in both."""
    if not len(one) or not len(other):
        return EMPTY
    first = np.searchsorted(other.end_ns, one.start_ns, side="right")
    after = np.searchsorted(other.start_ns, one.end_ns, side="left")
    count = np.clip(after - first, 0, None)
    mine = np.repeat(np.arange(len(one)), count)
    offset = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count, count)
    theirs = first[mine] + offset
    start = np.maximum(one.start_ns.take(mine), other.start_ns.take(theirs))
    end = np.minimum(one.end_ns.take(mine), other.end_ns.take(theirs))
    return unite(start, end)


def own_moments(start_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, Int64s]:
    """For each of the intervals, in order of their start, the moments that no earlier one has.

    What an interval has so is one interval, empty where an earlier one lasts as long.
    """
    start = start_ns.copy()
    if len(start):
        start[1:] = np.maximum(start_ns[1:], np.maximum.accumulate(end_ns)[:-1])
    return start, np.maximum(start, end_ns)
