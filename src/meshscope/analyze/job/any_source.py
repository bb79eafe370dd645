"""Who sent what a rank received from anyone (`dist.recv(tensor)`).

torch records no source there. Of the messages that were sent to a rank from ranks that it does not
name elsewhere, as many as it took from anyone, the one that ended first was taken first: with gloo
a send ends with its recv. Left alone where the numbers differ, where hosts have several clocks, and
where a message would have been taken before it was sent.
"""

from dataclasses import replace

import numpy as np

from meshscope.analyze.job.host_clocks import HostClocks
from meshscope.analyze.job.operations import OperationRows, Operations
from meshscope.core.operations import Kind
from meshscope.store.read.arrays import Int64s

_ANYONE = -1


def find_senders(operations: Operations, clocks: HostClocks) -> Operations:
    """The operations, with the sources and numbers of what was received from anyone."""
    rows = operations.rows
    is_recv = rows.kind == Kind.RECV
    taken = np.flatnonzero(is_recv & (rows.peer == _ANYONE) & rows.has_numbered_group)
    if not len(taken) or not clocks.is_one_clock(operations.ranks):
        return operations
    peer, sequence = rows.peer.copy(), rows.sequence.copy()
    sends = np.flatnonzero(rows.kind == Kind.SEND)
    places = np.stack([rows.group[taken], rows.rank[taken], rows.tag[taken]])
    keys, place = np.unique(places, axis=1, return_inverse=True)
    for index, (group, rank, tag) in enumerate(keys.T.tolist()):
        mine = taken[place.ravel() == index]
        named = rows.peer[is_recv & (rows.group == group) & (rows.rank == rank) & (rows.tag == tag)]
        sent = sends[(rows.group[sends] == group) & (rows.tag[sends] == tag)]
        sent = sent[(rows.peer[sent] == rank) & ~np.isin(rows.rank[sent], named)]
        sent = sent[np.argsort(_last_seen(rows, sent), kind="stable")]
        mine = mine[np.argsort(_last_seen(rows, mine), kind="stable")]
        if len(sent) == len(mine) and bool((rows.start_ns[sent] <= _last_seen(rows, mine)).all()):
            peer[mine], sequence[mine] = rows.rank[sent], rows.sequence[sent]
    return replace(operations, rows=replace(rows, peer=peer, sequence=sequence))


def _last_seen(rows: OperationRows, row: Int64s) -> Int64s:
    """When it ended, or began if that is not known."""
    return np.maximum(rows.end_ns[row], rows.start_ns[row])
