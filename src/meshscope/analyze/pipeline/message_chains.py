"""Which ranks form a pipeline, inferred from who sends to whom if no layout was declared.

In every step the first message of a pipeline goes from its first stage to the second, and each
stage's first send after its first receive continues in that direction. So a head is a rank whose
first message of a step is a send; the chain follows each rank's first send to a rank other than the
one it first received from. A step counts only if it gives whole chains; the most common result is
taken. Stages have their first inputs before their backward begins, and gradients come back over
every link: sums of gradients that ranks hand on, batches that one rank draws for others and a
teacher's outputs are no pipelines.

Wrong where ranks exchange messages outside the pipeline at the start of a step.
"""

from collections import Counter
from itertools import pairwise

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s

Chains = tuple[tuple[int, ...], ...]
"""Global ranks of each pipeline, first stage first."""

MAX_STEPS = 20
"""Steps examined."""
_BACKWARD = "backward"
_NEVER = np.iinfo(np.int64).max
_NO_PIPELINE = "no pipeline was declared, and ranks send each other no messages in a chain"


def find_message_chains(timeline: Timeline) -> Chains | Unavailable:
    """The pipelines, ordered by their first rank."""
    if timeline.communication is None:
        return Unavailable("no layout was declared, and no communication was recorded")
    rows = timeline.communication.operations.rows
    row = np.flatnonzero(np.isin(rows.kind, (Kind.SEND, Kind.RECV)) & (rows.peer >= 0))
    step = find_periods(timeline, row)
    row, step = row[step >= 0], step[step >= 0]
    called_ns = timeline.communication.times.enqueue_ns
    begun_ns = _find_backward(timeline)[np.searchsorted(timeline.ranks, rows.rank[row]), step]
    is_early = called_ns[row] < begun_ns
    found: Counter[Chains] = Counter()
    for index in range(min(len(timeline.steps), MAX_STEPS)):
        here = row[is_early & (step == index)]
        here = here[np.argsort(called_ns[here], kind="stable")]
        messages = zip(
            rows.rank[here].tolist(),
            (rows.kind[here] == Kind.SEND).tolist(),
            rows.peer[here].tolist(),
            strict=True,
        )
        chains = follow_messages(list(messages))
        sent = row[(step == index) & (rows.kind[row] == Kind.SEND)]
        links = set(zip(rows.rank[sent].tolist(), rows.peer[sent].tolist(), strict=True))
        if chains and all(link in links for chain in chains for link in pairwise(chain[::-1])):
            found[chains] += 1
    if not found:
        return Unavailable(_NO_PIPELINE)
    return found.most_common(1)[0][0]


def find_periods(timeline: Timeline, row: Int64s) -> Int64s:
    """The step whose period, with the gap before it, holds each operation; -1 for none.

    Not the recorded step number: an inferred step starts with its first forward, after the message
    that this forward waited for.
    """
    assert timeline.communication is not None, "checked by who asks"
    rank = timeline.communication.operations.rows.rank[row]
    at_ns = timeline.communication.times.enqueue_ns[row]
    step = np.full(len(row), -1, dtype=np.int64)
    for index, one in enumerate(timeline.ranks):
        mine = np.flatnonzero(rank == one)
        ends, starts = timeline.period_end_ns[index], timeline.period_start_ns[index]
        found = np.searchsorted(ends, at_ns[mine], side="right")
        is_inside = found < len(ends)
        found = np.where(is_inside, found, 0)
        is_inside &= at_ns[mine] >= starts[found]
        step[mine] = np.where(is_inside, found, -1)
    return step


def _find_backward(timeline: Timeline) -> Int64s:
    """[rank, step]: when the rank's backward begins; very late where none was recorded."""
    begun_ns = np.full((len(timeline.ranks), len(timeline.steps)), _NEVER)
    pieces = timeline.pieces
    is_backward = np.array([name == _BACKWARD for name in timeline.phases])
    own = np.flatnonzero(is_backward[pieces.phase] & ~pieces.is_between)
    rank = np.searchsorted(timeline.ranks, pieces.rank[own])
    np.minimum.at(begun_ns, (rank, pieces.step[own]), pieces.start_ns[own])
    return begun_ns


def follow_messages(messages: list[tuple[int, bool, int]]) -> Chains:
    """Chains from (rank, is send, peer) in each rank's own order; empty if there are none."""
    heads: list[int] = []
    source: dict[int, int] = {}
    target: dict[int, int] = {}
    for rank, is_send, peer in messages:
        if rank not in source and rank not in target and is_send:
            heads.append(rank)
        if not is_send:
            source.setdefault(rank, peer)
        elif rank not in target and source.get(rank) != peer:
            target[rank] = peer
    chains = [_follow(head, target, source) for head in heads]
    ranks = [rank for chain in chains for rank in chain]
    is_whole = len(set(ranks)) == len(ranks) and set(ranks) >= set(source)
    lengths = {len(chain) for chain in chains}
    if not is_whole or len(lengths) != 1 or lengths == {1}:
        return ()
    return tuple(sorted(chains))


def _follow(head: int, target: dict[int, int], source: dict[int, int]) -> tuple[int, ...]:
    chain = [head]
    while (after := target.get(chain[-1])) is not None and source.get(after) == chain[-1]:
        if after in chain:
            break
        chain.append(after)
    return tuple(chain)
