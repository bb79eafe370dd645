import numpy as np
import pytest

from builders import MS, SECOND
from communication_builders import Job, operation_words
from meshscope.analyze.job.host_clocks import find_host_clocks
from meshscope.analyze.job.matching import match_operations
from meshscope.analyze.job.operations import load_operations
from meshscope.core.operations import Kind


def match(job):
    attempt = job.close()
    operations = load_operations(attempt)
    return operations, match_operations(operations, find_host_clocks(attempt))


def run_steps(job, group, num, *, start=0, skip=(), sizes=(4096,), period_ns=10 * MS, seed=0):
    """`num` all-reduces; ranks in `skip` do not record the first ones."""
    random = np.random.default_rng(seed)
    ranks = job.ranks
    for index in range(num):
        moment = start + index * period_ns + int(random.integers(0, period_ns // 2))
        arrivals = {rank: moment + int(random.integers(0, MS)) for rank in ranks}
        recorded = {rank: at for rank, at in arrivals.items() if index >= dict(skip).get(rank, 0)}
        end = max(arrivals.values())
        job.collective(
            group,
            recorded,
            transfer_ns=end - max(recorded.values()) + MS // 2,
            size_bytes=sizes[index % len(sizes)],
        )


def test_operations_are_found_on_all_ranks(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    world, pair = job.group(range(3)), job.group([0, 2])
    for index in range(4):
        job.collective(world, dict.fromkeys(range(3), index * 10 * MS))
        job.collective(pair, {0: index * 10 * MS + 5, 2: index * 10 * MS + 7})
    operations, matches = match(job)
    assert len(matches) == 8
    assert matches.is_usable.all()
    assert matches.size.tolist() == [3] * 4 + [2] * 4
    for index in range(len(matches)):
        rows = matches.member[matches.of_member == index]
        assert set(operations.rows.sequence[rows].tolist()) == {int(matches.sequence[index])}
        assert set(operations.rows.group[rows].tolist()) == {int(matches.group[index])}


def test_a_disagreement_is_shown_with_both_sides_and_ends_trust_in_that_group_only(tmp_path):
    job = Job(tmp_path, num_ranks=4)
    world, pair = job.group(range(4)), job.group([0, 1])
    for index in range(6):
        wrong = {2: {"size_bytes": 8192, "kind": int(Kind.REDUCE_SCATTER)}} if index == 3 else {}
        arrivals = dict.fromkeys(range(4), index * 10 * MS)
        job.collective(world, arrivals, step=index, phase="backward", overrides=wrong)
        job.collective(pair, {0: index * 10 * MS + 5, 1: index * 10 * MS + 5})
    _, matches = match(job)
    (found,) = matches.desynchronisations
    assert (found.sequence, found.num_untrusted, found.group.ranks) == (3, 3, (0, 1, 2, 3))
    assert [
        (side.ranks, side.kind, side.size_bytes, side.dtype, side.step, side.phase)
        for side in found.sides
    ] == [
        ((0, 1, 3), Kind.ALL_REDUCE, 4096, "float32", 3, "backward"),
        ((2,), Kind.REDUCE_SCATTER, 8192, "float32", 3, "backward"),
    ]
    assert matches.is_trusted.tolist() == [True] * 3 + [False] * 3 + [True] * 6
    assert matches.num_desynchronised == 1


@pytest.mark.parametrize(
    ("kind", "change", "is_wrong"),
    [
        (Kind.ALL_REDUCE, {"size_bytes": 1}, True),
        (Kind.ALL_REDUCE, {"dtype": 4}, True),
        (Kind.ALL_REDUCE, {"dtype": 0}, False),
        (Kind.ALL_REDUCE, {"size_bytes": -1}, False),
        (Kind.ALL_TO_ALL, {"size_bytes": 1}, False),
        (Kind.GATHER, {"size_bytes": 1}, False),
        (Kind.BROADCAST, {"peer": 1}, True),
        (Kind.BROADCAST, {"peer": -1}, False),
        (Kind.BROADCAST, {"size_bytes": 1}, True),
        (Kind.CUSTOM, {"size_bytes": 1}, False),
    ],
)
def test_what_must_agree_depends_on_the_kind(tmp_path, kind, change, is_wrong):
    job = Job(tmp_path, num_ranks=2)
    group = job.group([0, 1])
    job.collective(group, {0: 0, 1: 0}, kind=kind, root=0, overrides={1: change})
    _, matches = match(job)
    assert bool(matches.desynchronisations) == is_wrong


def test_ranks_that_stopped_leave_operations_incomplete_and_no_disagreement(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    for index in range(5):
        ranks = range(3) if index < 3 else range(2)
        job.collective(group, dict.fromkeys(ranks, index * 10 * MS))
    _, matches = match(job)
    assert matches.is_complete.tolist() == [True] * 3 + [False] * 2
    assert matches.is_trusted.all()
    assert (matches.num_stopped, matches.num_lost) == (2, 0)
    assert matches.desynchronisations == ()


def test_a_record_lost_in_the_middle_is_counted_as_such(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for index in range(5):
        job.collective(group, {0: index * 10 * MS} | ({} if index == 2 else {1: index * 10 * MS}))
        if index == 2:
            job.next_sequence(group, 1)
    _, matches = match(job)
    assert matches.is_complete.tolist() == [True, True, False, True, True]
    assert (matches.num_stopped, matches.num_lost) == (0, 1)


def test_without_a_rank_that_recorded_nothing_the_others_are_matched(tmp_path):
    job = Job(tmp_path, num_ranks=3, missing=[1])
    group = job.group(range(3))
    job.collective(group, dict.fromkeys(range(3), 0))
    _, matches = match(job)
    assert matches.is_usable.tolist() == [True]
    assert matches.num_present.tolist() == [2]


def test_groups_of_one_rank_and_operations_of_unknown_groups_are_not_matched(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    alone = job.group([0])
    job.collective(alone, {0: 0})
    job.writers[1].table("collectives").put(*operation_words(enqueue_ns=5, group_id=77))
    _, matches = match(job)
    assert len(matches) == 0


def test_sends_find_their_recvs_by_source_target_tag_and_number(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    for index in range(3):
        start = index * 10 * MS
        job.message(group, 0, 1, sent_ns=start, asked_ns=start + 5)
        job.message(group, 1, 0, sent_ns=start, asked_ns=start + 7)
        job.message(group, 0, 1, sent_ns=start + 9, asked_ns=start + 9, tag=3, size_bytes=8)
        job.message(group, 1, 2, sent_ns=start, asked_ns=start)
    operations, matches = match(job)
    assert len(matches) == 12
    assert matches.is_usable.all()
    assert matches.is_point_to_point.all()
    for index in range(len(matches)):
        one, two = matches.member[matches.of_member == index].tolist()
        rows = operations.rows
        assert {int(rows.kind[one]), int(rows.kind[two])} == {Kind.SEND, Kind.RECV}
        assert rows.peer[one] == rows.rank[two]
        assert rows.tag[one] == rows.tag[two]


def test_messages_of_different_size_disagree_and_one_without_a_recv_is_incomplete(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.message(group, 0, 1, sent_ns=0, asked_ns=0)
    words = operation_words(
        kind=Kind.SEND, peer=1, enqueue_ns=job.local_ns(0, SECOND), sequence=1, size_bytes=8
    )
    job.writers[0].table("collectives").put(*words)
    words = operation_words(
        kind=Kind.RECV, peer=0, enqueue_ns=job.local_ns(1, SECOND), sequence=1, size_bytes=16
    )
    job.writers[1].table("collectives").put(*words)
    job.writers[0].table("collectives").put(
        *operation_words(kind=Kind.SEND, peer=1, enqueue_ns=job.local_ns(0, 2 * SECOND), sequence=2)
    )
    _, matches = match(job)
    (found,) = matches.desynchronisations
    assert [(side.kind, side.size_bytes) for side in found.sides] == [
        (Kind.SEND, 8),
        (Kind.RECV, 16),
    ]
    assert matches.is_complete.tolist() == [True, True, False]
    assert matches.num_stopped == 1


def test_tags_too_large_to_be_told_apart_are_not_matched_by_guess(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for index in range(2):  # two tags above 127, both recorded as 127 with number 0
        for rank, kind in ((0, Kind.SEND), (1, Kind.RECV)):
            enqueue_ns = job.local_ns(rank, index * MS)
            words = operation_words(
                kind=kind, peer=1 - rank, enqueue_ns=enqueue_ns, end_ns=enqueue_ns + 5, tag=127
            )
            job.writers[rank].table("collectives").put(*words)
    assert group == 0
    _, matches = match(job)
    assert matches.num_ambiguous == 1
    assert not matches.is_usable.any()
    assert matches.desynchronisations == ()


@pytest.mark.parametrize("sizes", [(4096,), (4096, 8, 4096, 512)])
def test_a_recorder_that_began_later_is_found_by_signatures_and_times(tmp_path, sizes):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    run_steps(job, group, 60, skip={1: 17}.items(), sizes=sizes)
    operations, matches = match(job)
    (shift,) = matches.shifts
    assert (shift.rank, shift.shift, shift.group) == (1, 17, operations.groups[0])
    assert matches.desynchronisations == ()
    assert np.count_nonzero(matches.is_usable) == 60 - 17
    assert (matches.num_stopped, matches.num_lost) == (17, 0)


def test_a_shift_is_found_between_hosts_whose_wall_clocks_are_a_little_apart(tmp_path):
    job = Job(
        tmp_path,
        num_ranks=2,
        host=lambda rank: f"node{rank}",
        clocks={"node1": (40 * SECOND, 30.0)},
        wall_clock_error_ns={"node1": 20 * MS},
    )
    group = job.group(range(2))
    run_steps(job, group, 400, skip={1: 300}.items(), sizes=(4096, 8, 16))
    _, matches = match(job)
    assert [(shift.rank, shift.shift) for shift in matches.shifts] == [(1, 300)]


def test_what_no_shift_explains_stays_a_disagreement(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    random = np.random.default_rng(3)
    for index in range(40):
        sizes = {1: {"size_bytes": int(random.integers(1, 9))}}
        job.collective(group, {0: index * 10 * MS, 1: index * 10 * MS}, overrides=sizes)
    _, matches = match(job)
    assert matches.shifts == ()
    assert len(matches.desynchronisations) == 1
