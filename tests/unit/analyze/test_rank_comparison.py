"""Several ranks' traces: matching, clocks, waits, and exposed communication split by cause."""

import pytest

from made_traces import call, groups, host, kernel, nccl, summarize
from meshscope.analyze.communication.rank_comparison import RankComparison, compare_ranks
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_recording import record_trace
from meshscope.ingest.traces.trace_run import make_run
from trace_builders import MS, RankTrace, write_traces

SHIFT = 5_000.0
"""Rank 1's clock is so far ahead, in µs."""


def compare(tmp_path, by_rank, world_size=2, table=None) -> RankComparison:
    for rank, events in by_rank.items():
        summarize(tmp_path / f"r{rank}.json", events, rank=rank, world_size=world_size, table=table)
    paths = [tmp_path / f"r{rank}.json" for rank in by_rank]
    recordings = [record_trace(read_trace(path), max_spans=10_000) for path in paths]
    found = compare_ranks(Study(make_run(recordings, tmp_path).run.last_attempt).communication)
    assert isinstance(found, RankComparison)
    return found


def all_reduces(times, shift=0.0, late=0.0, **more):
    """From `begin + late`, up to 30 µs after `begin`."""
    return [
        nccl("allreduce", shift + start + late, 30 - late, group="0", ranks=[0, 1], **more)
        for start in times
    ]


def split_of(one):
    found = one.split
    return found.exposed_ns, found.wait_ns, found.transfer_ns, found.unmatched_ns


def test_exposed_communication_is_waiting_or_transfer(tmp_path) -> None:
    """Rank 1 begins 12 late; on rank 0 compute hides 5 of the wait and 4 of the transfer."""
    times = [100, 200, 300]
    hiding = [kernel("gemm", start + at, for_) for start in times for at, for_ in ((2, 5), (20, 4))]
    found = compare(
        tmp_path,
        {0: [*all_reduces(times), *hiding], 1: all_reduces(times, SHIFT, late=12)},
    )
    first, second = found.exposed
    assert split_of(first) == (63_000, 21_000, 42_000, 0)
    assert split_of(second) == (54_000, 0, 54_000, 0)
    assert first.steps == {0: first.split}
    assert found.clocks[1].offset_ns == SHIFT * 1e3


def test_what_is_matched_with_nobody_is_neither(tmp_path) -> None:
    alone = nccl("allreduce", 500, 10, group="9", ranks=[0, 7])
    times = [100, 200, 300]
    found = compare(tmp_path, {0: [*all_reduces(times), alone], 1: all_reduces(times, late=6)})
    assert split_of(found.exposed[0]) == (100_000, 18_000, 72_000, 10_000)
    assert found.num_unmatched == 1


def test_numbers_of_the_group_match_windows_that_do_not_end_together(tmp_path) -> None:
    """Rank 0 saw 1 to 5 and rank 1 3 to 7, all of one size: order alone would be two off."""
    ours = [one for at in range(1, 6) for one in all_reduces([100 * at], Seq=at)]
    theirs = [one for at in range(3, 8) for one in all_reduces([100 * at], SHIFT, late=3, Seq=at)]
    found = compare(tmp_path, {0: ours, 1: theirs})
    assert found.num_matched == 3
    assert found.num_unmatched == 4
    assert found.clocks[1].offset_ns == SHIFT * 1e3
    assert [one.split.wait_ns for one in found.exposed] == [9_000, 0]


def test_several_with_one_number_are_taken_in_order(tmp_path) -> None:
    def coalesced(shift):
        return [
            nccl("_allgather_base", shift + 10 * at, 5, group="0", ranks=[0, 1], Seq=at // 2)
            for at in range(6)
        ]

    found = compare(tmp_path, {0: coalesced(0), 1: coalesced(SHIFT)})
    assert found.num_matched == 6
    assert found.clocks[1].uncertainty_ns == 1_000  # no clock is said to be surer


def pipeline_rank(rank: int):
    """Stages 0, 1 and 2: activations go up, gradients down, sends and receives in other orders."""
    events = all_to_all = [
        nccl("allreduce", 1000 + 100 * at, 10, group="0", ranks=[0, 1, 2]) for at in range(3)
    ]
    messages = [(0, 1, 10), (1, 2, 30), (2, 1, 50), (1, 0, 70)]
    for source, target, start in messages:
        if rank == source:
            events = [*events, nccl("send", start, 10, group="0", Dst_Rank=target, Seq=start)]
        if rank == target:
            # It is there 4 before its sender.
            events = [*events, nccl("recv", start - 4, 14, group="0", Src_Rank=source, Seq=1)]
    assert len(events) > len(all_to_all)
    return events


def test_messages_are_matched_by_sender_and_receiver(tmp_path) -> None:
    table = groups(g0=[0, 1, 2])
    found = compare(tmp_path, {rank: pipeline_rank(rank) for rank in range(3)}, 3, table)
    assert found.num_unmatched == 0
    assert found.late == ()  # who sends is not late
    waits = [one.split.wait_ns for one in found.exposed]
    assert waits == pytest.approx([4_000, 8_000, 4_000], abs=200)  # clocks run unevenly


def batch_rank(rank: int, start: float):
    """Stage 1 of three sends up and down and receives from both in one kernel."""
    peers = {0: [1], 1: [0, 2], 2: [1]}[rank]
    records = [
        {
            **nccl(what, 10 + 2 * at, 1, group="0", **{side: peer}),
            "cat": "cpu_op",
            "name": "record_param_comms",
            "pid": 100,
            "tid": 1,
        }
        for at, (what, side, peer) in enumerate(
            (what, side, peer)
            for peer in peers
            for what, side in (("send", "Dst_Rank"), ("recv", "Src_Rank"))
        )
    ]
    shared = [nccl("allreduce", 500 + 100 * at, 10, group="0") for at in range(3)]
    launched = [
        call("cudaLaunchKernelExC", 30, 77),
        nccl("", start, 100 - start, num_elements=None, correlation=77),
    ]
    return [*records, *launched, *shared]


def test_a_kernel_of_several_messages_waits_for_the_last_of_them(tmp_path) -> None:
    """Ranks 0, 1, 2 begin at 40, 50, 65: 0 waits for 1, 1 waits for 2."""
    table = groups(g0=[0, 1, 2])
    begins = {0: 40.0, 1: 50.0, 2: 65.0}
    by_rank = {rank: batch_rank(rank, start) for rank, start in begins.items()}
    found = compare(tmp_path, by_rank, 3, table)
    waits = [one.split.wait_ns for one in found.exposed]
    assert waits == pytest.approx([10_000, 15_000, 0], abs=200)
    summary = summarize(tmp_path / "x.json", by_rank[1], rank=1, world_size=3, table=table)
    batch = summary.devices[0].collectives[0]
    assert batch.messages == ((1, 0), (0, 1), (1, 2), (2, 1))
    assert batch.size_bytes == 4 * 4_000


def test_ranks_without_a_common_group_are_aligned_through_others(tmp_path) -> None:
    """0 and 1 share a group, 1 and 2 another; clocks 1 and 2 are 100 and 300 ahead."""
    shift = {0: 0.0, 1: 100.0, 2: 300.0}
    members = {"1": [0, 1], "2": [1, 2]}
    by_rank = {
        rank: [
            nccl("allreduce", shift[rank] + 100 * at + 40 * int(name), 10, group=name, ranks=own)
            for name, own in members.items()
            for at in range(4)
            if rank in own
        ]
        for rank in range(3)
    }
    found = compare(tmp_path, by_rank, 4)
    assert [clock.offset_ns for clock in found.clocks] == [0, 100_000, 300_000]
    assert found.unaligned == ()


def test_a_rank_that_shares_nothing_is_left_out_and_said(tmp_path) -> None:
    by_rank = {
        0: all_reduces([100, 200, 300]),
        1: all_reduces([100, 200, 300]),
        2: [nccl("allreduce", 0, 1, group="5", ranks=[2, 3])],
    }
    found = compare(tmp_path, by_rank, 4)
    assert found.unaligned == (2,)
    alone = found.exposed[2].split
    assert (alone.exposed_ns, alone.unmatched_ns) == (1_000, 1_000)


def test_wall_clocks_align_nobody(tmp_path) -> None:
    paths = write_traces(tmp_path, num_ranks=3, num_steps=4)
    alone = RankTrace(1, 3)
    alone.add("user_annotation", "ProfilerStep#5", 100 * MS, 200 * MS)
    alone.launch("gemm", 101 * MS, 110 * MS, 120 * MS)
    alone.write(paths[1])
    recordings = [record_trace(read_trace(path), max_spans=10_000) for path in paths]
    study = Study(make_run(recordings, tmp_path).run.last_attempt)
    found = compare_ranks(study.communication)
    assert isinstance(found, RankComparison)
    assert found.unaligned == (1,)
    assert [clock.rank for clock in found.clocks] == [0, 2]


def test_a_trace_says_no_host(tmp_path) -> None:
    paths = write_traces(tmp_path, num_ranks=2, num_steps=4)
    recordings = [record_trace(read_trace(path), max_spans=10_000) for path in paths]
    study = Study(make_run(recordings, tmp_path).run.last_attempt)
    assert all(isinstance(clock.host, Unavailable) for clock in study.communication.clocks.clocks)


def test_uneven_exchanges_are_matched_whatever_their_sizes(tmp_path) -> None:
    def exchange(rank):
        return [
            *all_reduces([100, 200, 300]),
            nccl("all_to_all", 400, 10, group="0", ranks=[0, 1], num_elements=100 * (rank + 1)),
        ]

    found = compare(tmp_path, {rank: exchange(rank) for rank in range(2)})
    assert (found.num_matched, found.num_unmatched) == (4, 0)


def test_without_groups_operations_are_matched_only_where_all_ranks_have_traces(tmp_path) -> None:
    def unnamed(shift, last):
        return [nccl("allreduce", shift + start, 10) for start in (0, 100, 200, 300, last)]

    ranks = {0: unnamed(0, 400), 1: unnamed(SHIFT, 440)}
    found = compare(tmp_path, ranks, 8)
    # Ranks without a trace may have called others: which belong together would be a guess.
    assert isinstance(found.clocks, Unavailable)
    assert (found.num_matched, found.num_unmatched) == (0, 10)
    assert compare(tmp_path, ranks, 2).num_matched == 5


@pytest.mark.parametrize("ends", [(0, 0), (0, 7)])
def test_gloo_is_matched_on_hosts(tmp_path, ends) -> None:
    """Kind and size tell those of threads apart; rank 1 asks 20 late."""

    def calls(late, shift):
        found = []
        for at in range(4):
            start = shift + 1000 * at
            for thread, size in ((2, 10), (3, 20)):
                dims = {"Input Dims": [[size]], "Input type": ["float"]}
                length = 100 - late
                found.append(
                    host("user_annotation", "gloo:all_reduce", start + late, length, thread, **dims)
                )
        return [host("cpu_op", "aten::mm", shift, 50), *found]

    table = groups(g0=[0, 1])
    found = compare(tmp_path, {0: calls(0, 0.0), 1: calls(20, SHIFT + ends[1])}, table=table)
    assert found.num_matched == 8
    assert found.clocks[1].offset_ns == (SHIFT + ends[1]) * 1e3
    # The operator hides the first 50 of the first; both of a pair run at once and count once.
    assert split_of(found.exposed[0]) == (350_000, 60_000, 290_000, 0)


def test_hosts_with_several_groups_are_not_guessed_at(tmp_path) -> None:
    events = [
        host("user_annotation", name, 10 * at, 5)
        for at, name in enumerate(["gloo:send"] * 4 + ["gloo:all_reduce"] * 4)
    ]
    table = groups(g0=[0, 1, 2, 3], g1=[0, 1])
    found = compare(tmp_path, {0: events, 1: events}, 4, table)
    assert isinstance(found.clocks, Unavailable)
    assert "name no group" in found.clocks.reason
    assert found.num_unmatched == 16
