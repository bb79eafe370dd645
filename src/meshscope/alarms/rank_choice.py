"""Whom a diagnosis looks at where ranks are too many to look at all of them each time."""

from collections.abc import Iterable

from meshscope.analyze.timeline.peers import group_peers
from meshscope.core.unavailable import known
from meshscope.store.read.run import Attempt

_BLOCK = 8


def choose_ranks(
    attempt: Attempt, wanted: Iterable[int], *, max_ranks: int, turn: int
) -> tuple[int, ...]:
    """All ranks where they are few, else those wanted with their tensor-parallel neighbours, peers
    of theirs, and others in turn, so that every rank has its turn."""
    ranks = sorted(attempt.ranks)
    if len(ranks) <= max_ranks:
        return tuple(ranks)
    size = _block_size(attempt, max_ranks)
    blocks = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    of_rank = {rank: index for index, block in enumerate(blocks) for rank in block}
    num_blocks = max(max_ranks // size, 2)
    chosen = list(dict.fromkeys(of_rank[rank] for rank in wanted if rank in of_rank))
    chosen = chosen[: max(num_blocks // 2, 1)]
    peers = group_peers(attempt.layout, ranks)
    heads = {peers[blocks[index][0]] for index in chosen}
    near = [i for i, block in enumerate(blocks) if peers[block[0]] in heads and i not in chosen]
    begin = turn * num_blocks
    chosen += _rotate(near, begin)[: max(num_blocks // 4, 2)] if chosen else []
    others = [index for index in range(len(blocks)) if index not in chosen]
    chosen += _rotate(others, begin)[: max(num_blocks - len(chosen), 1)]
    return tuple(sorted(rank for index in chosen for rank in blocks[index]))


def _block_size(attempt: Attempt, max_ranks: int) -> int:
    """Ranks that are looked at together: a tensor-parallel group, where it is known and small."""
    layout = known(attempt.layout)
    degree = 1 if layout is None else layout.tp
    return degree if 1 < degree <= max_ranks // 4 else min(_BLOCK, max_ranks // 4)


def _rotate(items: list[int], by: int) -> list[int]:
    by = by % len(items) if items else 0
    return items[by:] + items[:by]
