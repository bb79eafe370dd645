"""A process group that can be asked who is in it, and no more."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FakeGroup:
    """Enough to build one tp rank's part of a model in a single process."""

    num_ranks: int
    own_rank: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.own_rank
