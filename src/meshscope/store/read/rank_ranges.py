"""Sets of ranks as stretches of consecutive numbers: what is missing may be a million of them.

A header says how many ranks there are, and may be wrong: what is kept about missing ranks must
depend on how many recorded something, not on how many are said to exist.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

_MAX_STRETCHES_SHOWN = 8


class RankRanges(Collection[int]):
    """Ranks in ascending order, kept as stretches. Iterating gives them one by one."""

    __slots__ = ("_starts", "stretches")

    def __init__(self, stretches: Iterable[range]) -> None:
        self.stretches = tuple(stretches)
        """Ascending, not empty, not touching each other."""
        self._starts = [stretch.start for stretch in self.stretches]

    @classmethod
    def of(cls, ranks: Iterable[int]) -> "RankRanges":
        """The stretches in some ranks; ascending is quickest."""
        stretches: list[range] = []
        for rank in sorted(ranks):
            if stretches and rank <= stretches[-1].stop:
                stretches[-1] = range(stretches[-1].start, rank + 1)
            else:
                stretches.append(range(rank, rank + 1))
        return cls(stretches)

    @classmethod
    def absent_from(cls, ranks: Iterable[int], world_size: int) -> "RankRanges":
        """The ranks below `world_size` that are not among `ranks`."""
        edges = [-1, *sorted(rank for rank in set(ranks) if rank < world_size), world_size]
        return cls(range(a + 1, b) for a, b in pairwise(edges) if b > a + 1)

    def __len__(self) -> int:
        return sum(len(stretch) for stretch in self.stretches)

    def __iter__(self) -> Iterator[int]:
        for stretch in self.stretches:
            yield from stretch

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        at = bisect_right(self._starts, rank) - 1
        return at >= 0 and rank in self.stretches[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankRanges) and self.stretches == other.stretches

    def __hash__(self) -> int:
        return hash(self.stretches)

    def __repr__(self) -> str:
        return f"RankRanges({self})"

    def __str__(self) -> str:
        """`0-3, 7, 9-11`, cut after a few stretches."""
        shown = self.stretches[:_MAX_STRETCHES_SHOWN]
        texts = [f"{s.start}" if len(s) == 1 else f"{s.start}-{s[-1]}" for s in shown]
        return ", ".join(texts) + (" …" if len(self.stretches) > len(shown) else "")


def abbreviate_ranks(ranks: Iterable[int]) -> str:
    """`0-3, 7, 9-11`, cut after a few stretches."""
    return str(RankRanges.of(ranks))
