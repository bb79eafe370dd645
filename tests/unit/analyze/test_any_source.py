"""Messages that were received from anyone, told by when they ended."""

from dataclasses import replace

import numpy as np
import pytest

from builders import MS
from communication_builders import Job
from meshscope.analyze.job.any_source import find_senders
from meshscope.analyze.job.host_clocks import find_host_clocks
from meshscope.analyze.job.operations import load_operations
from meshscope.core.operations import Kind
from meshscope.store.read.run import open_run


def load(path, host):
    """Ranks 1 to 3 send to rank 0, in another order in each round, and it answers."""
    job = Job(path, num_ranks=4, host=host)
    group = job.group(range(4))
    for number, order in enumerate([(1, 2, 3), (3, 1, 2), (2, 3, 1)]):
        at = 20 * number * MS
        for place, source in enumerate(order):
            sent = at + (4 - place) * MS // 2 if place == 0 else at + place * MS * 4
            job.message(group, source, 0, sent_ns=sent, asked_ns=at + place * 4 * MS)
        for source in order:
            job.message(group, 0, source, sent_ns=at + 15 * MS, asked_ns=at + 14 * MS)
    job.close()
    attempt = open_run(path).last_attempt
    return load_operations(attempt), find_host_clocks(attempt)


def forget(operations):
    """What torch records of a recv without a source: no peer, and numbers of its own."""
    rows = operations.rows
    taken = np.flatnonzero((rows.kind == Kind.RECV) & (rows.rank == 0))
    peer, sequence = rows.peer.copy(), rows.sequence.copy()
    peer[taken], sequence[taken] = -1, np.arange(len(taken))
    return replace(operations, rows=replace(rows, peer=peer, sequence=sequence))


def test_senders_are_those_whose_messages_ended_in_this_order(tmp_path):
    operations, clocks = load(tmp_path / "run", lambda rank: "node")
    found = find_senders(forget(operations), clocks).rows
    assert found.peer.tolist() == operations.rows.peer.tolist()
    assert found.sequence.tolist() == operations.rows.sequence.tolist()


@pytest.mark.parametrize("is_short", [True, False])
def test_nothing_is_guessed(tmp_path, is_short):
    """A message is missing, or hosts have clocks of their own."""
    hosts = (lambda rank: "node") if is_short else (lambda rank: f"node{rank}")
    operations, clocks = load(tmp_path / "run", hosts)
    operations = forget(operations)
    if is_short:
        rows = operations.rows
        is_send = (rows.kind == Kind.SEND) & (rows.peer == 0)
        peer = rows.peer.copy()
        peer[np.flatnonzero(is_send)[0]] = 2
        operations = replace(operations, rows=replace(rows, peer=peer))
    assert find_senders(operations, clocks).rows.peer.tolist() == operations.rows.peer.tolist()
