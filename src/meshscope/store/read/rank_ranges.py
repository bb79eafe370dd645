"""Sets of ranks as ranges of consecutive numbers: a million ranks may be missing.

A header says how many ranks there are, and may be wrong: what is kept about missing ranks must
depend on how many recorded something, not on how many are said to exist.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

_MAX_RANGES_SHOWN = 8


class RankRanges(Collection[int]):
    """Ranks in ascending order, kept as ranges. Iterating gives them one by one."""

    __slots__ = ("_starts", "ranges")

    def __init__(self, ranges: Iterable[range]) -> None:
        self.ranges = tuple(ranges)
        """Ascending, not empty, not touching each other."""
        self._starts = [part.start for part in self.ranges]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> "RankRanges":
        """From some ranks; ascending is quickest."""
        ranges: list[range] = []
        for rank in sorted(ranks):
            if ranges and rank <= ranges[-1].stop:
                ranges[-1] = range(ranges[-1].start, rank + 1)
            else:
                ranges.append(range(rank, rank + 1))
        return cls(ranges)

    @classmethod
    def absent_from(cls, ranks: Iterable[int], world_size: int) -> "RankRanges":
        """The ranks below `world_size` that are not among `ranks`."""
        edges = [-1, *sorted(rank for rank in set(ranks) if rank < world_size), world_size]
        return cls(range(a + 1, b) for a, b in pairwise(edges) if b > a + 1)

    def __len__(self) -> int:
        return sum(len(part) for part in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges:
            yield from part

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        at = bisect_right(self._starts, rank) - 1
        return at >= 0 and rank in self.ranges[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankRanges) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        return f"RankRanges({self})"

    def __str__(self) -> str:
        """`0-3, 7, 9-11`, cut after a few ranges."""
        shown = self.ranges[:_MAX_RANGES_SHOWN]
        texts = [f"{s.start}" if len(s) == 1 else f"{s.start}-{s[-1]}" for s in shown]
        return ", ".join(texts) + (" …" if len(self.ranges) > len(shown) else "")


def abbreviate_ranks(ranks: Iterable[int]) -> str:
    """`0-3, 7, 9-11`, cut after a few ranges."""
    return str(RankRanges.of(ranks))
