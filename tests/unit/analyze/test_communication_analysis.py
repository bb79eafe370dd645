import dataclasses

import numpy as np
import pytest

from builders import MS, SECOND, START_MONO_NS, make_run
from communication_builders import Job, operation_words
from meshscope.analyze.communication.bandwidth import FitRefused, LatencyFit, size_buckets
from meshscope.analyze.communication.communication import (
    Communication,
    analyze_communication,
    choose_first_step,
)
from meshscope.analyze.communication.last_arrivers import ALL_AXES
from meshscope.analyze.job.job import load_job
from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource, Kind, Outcome, size_bucket
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.schema import OperationFlag

MICROSECOND = 1_000
ASYNC = OperationFlag.ASYNC
ENGINE = OperationFlag.ASYNC | OperationFlag.ENGINE
PARTS = ("exposed_wait_ns", "exposed_transfer_ns", "exposed_unsplit_ns", "overlapped_ns")


def analyze(job, **options) -> Communication:
    found = analyze_communication(load_job(job.close()), **{"first_step": -1, **options})
    assert isinstance(found, Communication)
    assert_parts_sum(found)
    return found


def assert_parts_sum(found):
    sums = [one.total for one in (*found.by_axis_and_kind, *found.by_axis, *found.by_rank)]
    for total in (*sums, found.total):
        assert total.span_ns == total.wait_ns + total.transfer_ns + total.unsplit_ns
        assert total.span_ns == sum(getattr(total, name) for name in PARTS)
        assert min(dataclasses.astuple(total)) >= 0
        assert total.queued_ns <= total.transfer_ns
    for name in ("span_ns", "wait_ns", "overlapped_ns", "num_rank_operations"):
        whole = getattr(found.total, name)
        assert whole == sum(getattr(one.total, name) for one in found.by_axis)
        assert whole == sum(getattr(one.total, name) for one in found.by_rank)
    assert int(found.by_step.exposed_ns.sum()) == found.total.exposed_ns
    for name in ("num_operations", "size_bytes", "wait_ns", "transfer_ns", "overlapped_ns"):
        assert int(getattr(found.by_step, name).sum()) == getattr(found.total, name)
    for total in (one.total for one in found.by_rank):
        assert total.exposed_ns <= found.observed_ns + total.exposed_late_ns


def rank_total(found, rank):
    return next(one.total for one in found.by_rank if one.rank == rank)


def last_arriver(found, rank, axis=ALL_AXES):
    return next((e for e in found.last_arrivers if (e.rank, e.axis) == (rank, axis)), None)


def test_a_late_rank_makes_the_others_wait_and_changes_no_transfer(tmp_path):
    job = Job(tmp_path, num_ranks=4, layout=Layout(dp=4))
    group = job.group(range(4))
    for step in range(20):
        start = step * 100 * MS
        arrivals = dict.fromkeys(range(4), start) | {2: start + 20 * MS}
        job.collective(group, arrivals, transfer_ns=2 * MS, step=step, phase="backward")
    found = analyze(job, first_step=0)
    for rank in range(4):
        total = rank_total(found, rank)
        late = rank == 2
        assert total.wait_ns == total.exposed_wait_ns == (0 if late else 20 * 20 * MS)
        assert total.transfer_ns == total.exposed_transfer_ns == 20 * 2 * MS
        assert total.exposed_late_ns == total.overlapped_ns == 0
    assert [entry.axis for entry in found.by_axis] == ["dp"]
    entry = last_arriver(found, 2, "dp")
    assert (entry.num_last, entry.num_operations, entry.expected_last) == (20, 20, 5.0)
    assert entry.p_value == pytest.approx(0.25**20)
    assert entry.is_beyond_chance
    assert (entry.cost_ns, entry.caused_wait_ns) == (20 * 20 * MS, 3 * 20 * 20 * MS)
    assert entry.phase == "backward"
    assert {e.rank for e in found.last_arrivers} == {2}
    slowest = found.slowest[0]
    assert (slowest.last_rank, slowest.gap_ns, slowest.wait_ns) == (2, 20 * MS, 60 * MS)
    assert (slowest.kind, slowest.phase, slowest.axis) == (Kind.ALL_REDUCE, "backward", "dp")
    assert found.by_step.exposed_wait_ns.tolist() == [
        [0 if rank == 2 else 20 * MS] * 20 for rank in range(4)
    ]


def test_lateness_on_another_host_is_found_through_its_clock(tmp_path):
    random = np.random.default_rng(1)
    job = Job(
        tmp_path,
        num_ranks=4,
        host=lambda rank: f"node{rank // 2}",
        clocks={"node1": (-2 * SECOND, 40.0)},
    )
    group = job.group(range(4))
    for step in range(60):
        start = step * 100 * MS
        arrivals = {rank: start + int(random.exponential(MS / 5)) for rank in range(4)}
        arrivals[3] += 5 * MS
        notice = {rank: int(random.exponential(50 * MICROSECOND)) for rank in range(4)}
        job.collective(group, arrivals, transfer_ns=MS // 2, notice_ns=notice, step=step)
    found = analyze(job)
    entry = last_arriver(found, 3, "world")
    assert entry.num_last == entry.num_operations == 60
    assert entry.cost_ns == pytest.approx(60 * 4.7 * MS, rel=0.05)
    assert rank_total(found, 0).wait_ns == pytest.approx(60 * 5 * MS, rel=0.05)
    assert rank_total(found, 3).wait_ns == 0
    assert found.health.num_clock_errors == 0


def test_lateness_below_the_clocks_uncertainty_is_not_named(tmp_path):
    random = np.random.default_rng(2)
    job = Job(
        tmp_path,
        num_ranks=2,
        host=lambda rank: f"node{rank}",
        clocks={"node1": (3 * SECOND, -30.0)},
    )
    group = job.group(range(2))
    for step in range(200):
        start = step * 100 * MS
        notice = {rank: int(random.exponential(80 * MICROSECOND)) for rank in range(2)}
        arrivals = {0: start, 1: start + 20 * MICROSECOND}
        job.collective(group, arrivals, transfer_ns=MS // 2, notice_ns=notice, step=step)
    found = analyze(job)
    assert found.clocks.clocks[1].uncertainty_ns > 20 * MICROSECOND
    assert found.last_arrivers == ()
    assert found.num_undecided == 200
    assert found.total.wait_ns == 0
    assert isinstance(found.slowest[0].last_rank, Unavailable)


def test_ranks_that_take_turns_at_being_last_are_not_beyond_chance(tmp_path):
    random = np.random.default_rng(3)
    job = Job(tmp_path, num_ranks=4)
    group = job.group(range(4))
    for step in range(200):
        start = step * 100 * MS
        arrivals = {rank: start + int(random.exponential(5 * MS)) for rank in range(4)}
        job.collective(group, arrivals, step=step)
    found = analyze(job)
    assert {entry.rank for entry in found.last_arrivers} == {0, 1, 2, 3}
    assert not any(entry.is_beyond_chance for entry in found.last_arrivers)


def test_lateness_for_several_operations_at_once_costs_its_time_once(tmp_path):
    """Three buckets of one backward pass, for each of which rank 1 is 20 ms late."""
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for step in range(10):
        start = step * 100 * MS
        for bucket in range(3):
            at = start + bucket * MS
            job.collective(group, {0: at, 1: at + 20 * MS}, flags=ENGINE, step=step)
    found = analyze(job)
    entry = last_arriver(found, 1)
    assert entry.num_last == 30
    assert entry.cost_ns == 10 * 22 * MS
    assert (entry.num_steps_worst, entry.num_steps) == (10, 10)


def test_time_before_an_asynchronous_operation_is_waited_for_is_overlapped(tmp_path):
    """Both compute for 6 ms; then rank 0 waits 4 ms for rank 1 and 2 ms for data."""
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    keys = job.collective(group, {0: 0, 1: 10 * MS}, transfer_ns=2 * MS, flags=ASYNC, step=7)
    job.wait(0, keys[0], 6 * MS, 6 * MS + 300 * MICROSECOND, step=8)
    job.wait(1, keys[1], 30 * MS, 5 * MICROSECOND, step=8)
    found = analyze(job)
    early, late = rank_total(found, 0), rank_total(found, 1)
    assert (early.wait_ns, early.transfer_ns) == (10 * MS, 2 * MS)
    assert (early.exposed_wait_ns, early.exposed_transfer_ns) == (4 * MS, 2 * MS)
    assert early.overlapped_ns == 6 * MS
    assert early.exposed_late_ns == 300 * MICROSECOND
    assert (late.overlapped_ns, late.exposed_late_ns) == (2 * MS, 5 * MICROSECOND)
    by_step = found.by_step
    assert by_step.step.tolist() == [7, 8]
    assert by_step.num_operations.tolist() == [1, 0]
    assert by_step.exposed_ns.tolist() == [[0, 6 * MS + 300 * MICROSECOND], [0, 5 * MICROSECOND]]


def test_on_a_device_the_time_the_stream_was_held_up_counts(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2), backend="nccl")
    flags = ASYNC | OperationFlag.DEVICE
    keys = job.collective(group, {0: 0, 1: 0}, transfer_ns=10 * MS, flags=flags)
    job.wait(0, keys[0], MS, 1_000, device_ns=4 * MS)
    found = analyze(job)
    assert rank_total(found, 0).exposed_transfer_ns == 4 * MS
    assert rank_total(found, 0).overlapped_ns == 6 * MS


def test_operations_of_backwards_engine_are_exposed_from_the_last_one_on(tmp_path):
    """Buckets issued at 0, 10 and 20 ms end at 8, 23 and 29 ms: exposed are the last 9 ms."""
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for start, transfer in ((0, 8), (10, 13), (20, 9)):
        arrivals = dict.fromkeys(range(2), start * MS)
        options = {"flags": ENGINE, "step": 3, "size_bytes": start + 1}
        job.collective(group, arrivals, transfer_ns=transfer * MS, **options)
    found = analyze(job)
    for rank in range(2):
        total = rank_total(found, rank)
        assert total.exposed_transfer_ns == 9 * MS
        assert total.overlapped_ns == (8 + 13 + 9 - 9) * MS
    assert found.health.num_engine_outside_steps == 0


def test_engine_operations_outside_of_steps_are_counted_as_unknown(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(group, {0: 0, 1: 0}, flags=ENGINE)
    found = analyze(job)
    assert found.health.num_engine_outside_steps == 2
    assert found.total.exposed_ns == 0


def test_what_the_program_timed_around_an_operation_counts_only_beyond_it(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    manual = job.group(range(2))
    job.collective(group, {0: 2 * MS, 1: 2 * MS}, transfer_ns=5 * MS)
    job.collective(
        manual,
        {0: 0, 1: 0},
        transfer_ns=10 * MS,
        kind=Kind.CUSTOM,
        flags=OperationFlag.MANUAL,
        end_source=EndSource.CALL,
    )
    found = analyze(job)
    total = rank_total(found, 0)
    assert total.exposed_transfer_ns == 5 * MS
    assert total.exposed_unsplit_ns == 5 * MS
    assert total.exposed_ns == 10 * MS
    assert found.health.num_recognised == found.health.num_rank_operations


@pytest.mark.parametrize(("backend", "queued_ms"), [("gloo", [0, 0, 4]), ("nccl", [0, 4, 8])])
def test_operations_behind_others_of_their_group_are_queued(tmp_path, backend, queued_ms):
    """gloo runs two at a time, NCCL one."""
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2), backend=backend)
    ends = (4, 8, 12)
    for index, end in enumerate(ends):
        options = {"flags": ASYNC, "size_bytes": 1 << 10 + 2 * index}
        job.collective(group, {0: index, 1: index}, transfer_ns=end * MS - index, **options)
    found = analyze(job)
    buckets = {row.size_bucket_bytes: row for row in found.bandwidth}
    for index, (end, queued) in enumerate(zip(ends, queued_ms, strict=True)):
        transfer_ns = buckets[1 << 10 + 2 * index].median_transfer_ns
        assert transfer_ns == pytest.approx((end - queued) * MS, abs=5)
    assert found.total.queued_ns == pytest.approx(2 * sum(queued_ms) * MS, abs=20)


def test_in_a_broadcast_receivers_wait_for_the_root_only(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    # Rank 2 comes last; the root sends at 10 ms, and is done at 11 ms.
    job.collective(
        group,
        {0: 10 * MS, 1: 0, 2: 30 * MS},
        kind=Kind.BROADCAST,
        root=0,
        transfer_ns=2 * MS,
        overrides={
            0: {"end_ns": job.local_ns(0, 11 * MS)},
            1: {"end_ns": job.local_ns(1, 13 * MS)},
        },
    )
    found = analyze(job)
    waits = [rank_total(found, rank).wait_ns for rank in range(3)]
    transfers = [rank_total(found, rank).transfer_ns for rank in range(3)]
    assert waits == [0, 10 * MS, 0]
    assert transfers == [MS, 3 * MS, 2 * MS]
    assert found.last_arrivers == ()


def test_in_a_broadcast_the_root_waits_for_those_who_came_before_its_end(tmp_path):
    job = Job(tmp_path, num_ranks=4)
    group = job.group(range(4))
    # Rank 1 holds the root up until 12 ms; it is gone when rank 3 comes, who holds rank 2 up.
    ends = {0: 13 * MS, 1: 14 * MS}
    job.collective(
        group,
        {0: 0, 1: 12 * MS, 2: 2 * MS, 3: 30 * MS},
        kind=Kind.BROADCAST,
        root=0,
        transfer_ns=2 * MS,
        overrides={rank: {"end_ns": job.local_ns(rank, end)} for rank, end in ends.items()},
    )
    found = analyze(job)
    assert [rank_total(found, rank).wait_ns for rank in range(4)] == [12 * MS, 0, 28 * MS, 0]
    transfers = [rank_total(found, rank).transfer_ns for rank in range(4)]
    assert transfers == [MS, 2 * MS, 2 * MS, 2 * MS]


@pytest.mark.parametrize(("backend", "wait_ms"), [("gloo", 30), ("nccl", 0)])
def test_a_late_look_at_a_broadcast_does_not_show_who_held_the_root_up(tmp_path, backend, wait_ms):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2), backend=backend)
    job.collective(
        group,
        {0: 0, 1: 30 * MS},
        kind=Kind.BROADCAST,
        root=0,
        flags=OperationFlag.ASYNC,
        end_source=EndSource.WAIT_LATE,
    )
    assert rank_total(analyze(job), 0).wait_ns == wait_ms * MS


def test_in_a_reduce_the_root_waits_for_everyone(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    # Rank 2 is done at 3 ms.
    done = {2: {"end_ns": job.local_ns(2, 3 * MS)}}
    job.collective(group, {0: 0, 1: 8 * MS, 2: 2 * MS}, kind=Kind.REDUCE, root=0, overrides=done)
    found = analyze(job)
    assert [rank_total(found, rank).wait_ns for rank in range(3)] == [8 * MS, 0, 0]


def test_in_a_reduce_others_wait_for_those_who_came_before_their_end(tmp_path):
    """What rank 2 passes on to the root comes from rank 1."""
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    job.collective(group, {0: 0, 1: 8 * MS, 2: 2 * MS}, kind=Kind.REDUCE, root=0)
    found = analyze(job)
    assert [rank_total(found, rank).wait_ns for rank in range(3)] == [8 * MS, 0, 6 * MS]


def test_in_a_reduce_others_wait_for_a_late_root(tmp_path):
    """What it takes from rank 2 only leaves when it is there."""
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    job.collective(group, {0: 8 * MS, 1: 0, 2: 2 * MS}, kind=Kind.REDUCE, root=0)
    found = analyze(job)
    assert [rank_total(found, rank).wait_ns for rank in range(3)] == [0, 8 * MS, 6 * MS]


def test_in_a_gather_others_wait_for_the_root_alone(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    done = {1: {"end_ns": job.local_ns(1, 5 * MS)}}
    arrivals = {0: 4 * MS, 1: 0, 2: 8 * MS}
    job.collective(group, arrivals, kind=Kind.GATHER, root=0, overrides=done)
    found = analyze(job)
    assert [rank_total(found, rank).wait_ns for rank in range(3)] == [4 * MS, 4 * MS, 0]


def test_in_a_scatter_others_wait_for_the_root_alone(tmp_path):
    job = Job(tmp_path, num_ranks=3)
    group = job.group(range(3))
    # Rank 1 has its part at 9 ms, after rank 2 came for another.
    done = {1: {"end_ns": job.local_ns(1, 9 * MS)}}
    arrivals = {0: 4 * MS, 1: 0, 2: 8 * MS}
    job.collective(group, arrivals, kind=Kind.SCATTER, root=0, overrides=done)
    found = analyze(job)
    assert [rank_total(found, rank).wait_ns for rank in range(3)] == [4 * MS, 4 * MS, 0]


def test_messages_by_pair(tmp_path):
    job = Job(tmp_path, num_ranks=3, layout=Layout(pp=3))
    group = job.group(range(3), description="mesh_pp")
    for step in range(5):
        start = step * 100 * MS
        job.message(group, 0, 1, sent_ns=start + 3 * MS, asked_ns=start, size_bytes=100)
        job.message(group, 1, 2, sent_ns=start, asked_ns=start + MS, latency_ns=2 * MS)
    found = analyze(job)
    first, second = found.messages
    assert (first.source, first.target, first.num_messages, first.size_bytes) == (0, 1, 5, 500)
    assert (first.mean_latency_ns, first.mean_wait_ns) == (MS, 3 * MS)
    assert (second.mean_latency_ns, second.mean_wait_ns) == (2 * MS, 0)
    assert (first.is_across_hosts, first.uncertainty_ns) == (False, 0)
    by_kind = {one.kind: one.total for one in found.by_axis_and_kind}
    assert by_kind[Kind.SEND].num_operations == by_kind[Kind.RECV].num_operations == 10
    assert found.by_axis[0].axis == "pp"


def test_latency_and_bandwidth_are_recovered(tmp_path):
    """50 µs + 2 ns per byte, noise on top: all-reduce of 4 ranks moves 1.5 times the size."""
    random = np.random.default_rng(4)
    job = Job(tmp_path, num_ranks=4, layout=Layout(tp=4))
    group = job.group(range(4))
    for step in range(120):
        size = 1 << (10 + 2 * (step % 6))
        job.collective(
            group,
            {rank: step * 100 * MS + int(random.exponential(MS)) for rank in range(4)},
            transfer_ns=50 * MICROSECOND + 2 * size,
            notice_ns={rank: int(random.exponential(3 * MICROSECOND)) for rank in range(4)},
            size_bytes=size,
            step=step,
        )
    found = analyze(job)
    (fit,) = found.fits
    assert isinstance(fit, LatencyFit)
    assert (fit.axis, fit.kind, fit.num_ranks, fit.num_sizes) == ("tp", Kind.ALL_REDUCE, 4, 6)
    assert fit.latency_ns == pytest.approx(52_000, rel=0.1)
    assert fit.ns_per_byte == pytest.approx(2, rel=0.02)
    assert fit.ns_per_byte_low <= 2 <= fit.ns_per_byte_high
    assert fit.bus_bytes_per_s == pytest.approx(1.5 * 0.5e9, rel=0.02)
    assert [row.size_bucket_bytes for row in found.bandwidth] == [1 << 10 + 2 * k for k in range(6)]
    largest = found.bandwidth[-1]
    assert (largest.num_operations, largest.num_samples) == (20, 80)
    assert largest.algorithm_bytes_per_s == pytest.approx((1 << 20) / 2.15e6 * 1e9, rel=0.02)
    assert largest.bus_bytes_per_s == pytest.approx(1.5 * largest.algorithm_bytes_per_s)
    assert not largest.is_across_hosts


def test_a_fit_is_refused_with_too_few_sizes_and_says_so(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for step in range(10):
        job.collective(group, dict.fromkeys(range(2), step * 10 * MS), size_bytes=64 << step % 2)
    (fit,) = analyze(job).fits
    assert isinstance(fit, FitRefused)
    assert fit.reason.reason == "2 sizes occurred, a fit needs 3"


def test_ends_that_are_only_bounds_give_no_bandwidth(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(group, {0: 0, 1: 0}, end_source=EndSource.WAIT_LATE)
    found = analyze(job)
    assert found.bandwidth == ()
    assert found.health.num_inexact_ends == found.total.num_inexact_ends == 2


def test_bandwidth_tells_groups_inside_a_host_from_those_across(tmp_path):
    job = Job(tmp_path, num_ranks=4, host=lambda rank: f"node{rank // 2}")
    inside = [job.group([0, 1], description="mesh_tp"), job.group([2, 3], description="mesh_tp")]
    across = [job.group([0, 2], description="mesh_dp"), job.group([1, 3], description="mesh_dp")]
    for step in range(30):
        start = step * 100 * MS
        for group, ranks in zip(inside, ([0, 1], [2, 3]), strict=True):
            job.collective(group, dict.fromkeys(ranks, start), transfer_ns=MS)
        for group, ranks in zip(across, ([0, 2], [1, 3]), strict=True):
            job.collective(group, dict.fromkeys(ranks, start + 50 * MS), transfer_ns=5 * MS)
    rows = {row.axis: row for row in analyze(job).bandwidth}
    assert (rows["tp"].is_across_hosts, rows["tp"].num_operations) == (False, 60)
    assert rows["dp"].is_across_hosts
    assert rows["dp"].median_transfer_ns == pytest.approx(5 * MS, rel=0.05)


def test_warm_up_is_left_out_and_counted(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(group, {0: 0, 1: 0})
    for step in range(5):
        job.collective(group, {0: (step + 1) * SECOND, 1: (step + 1) * SECOND}, step=step)
    attempt = job.close()
    default = analyze_communication(load_job(attempt))
    assert (default.first_step, default.total.num_operations) == (1, 4)
    assert default.health.num_warmup == 4
    assert analyze_communication(load_job(attempt), first_step=3).total.num_operations == 2
    assert analyze_communication(load_job(attempt), first_step=-1).total.num_operations == 6


def test_few_steps_are_all_taken_in():
    assert choose_first_step(np.array([-1, 0, 1, 2]), None) == -1
    assert choose_first_step(np.array([-1, 7, 8, 9, 10]), None) == 8
    assert choose_first_step(np.array([-1, -1]), None) == -1
    assert choose_first_step(np.array([0, 1]), 1) == 1


def test_operations_that_cannot_be_compared_are_not_split(tmp_path):
    """Rank 1 stopped after the first: of rank 0's second it is not known for whom it waited."""
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(group, {0: 0, 1: 0}, transfer_ns=MS)
    job.collective(group, {0: 10 * MS}, transfer_ns=3 * MS)
    found = analyze(job)
    total = rank_total(found, 0)
    assert (total.transfer_ns, total.unsplit_ns) == (MS, 3 * MS)
    assert total.exposed_unsplit_ns == 3 * MS
    health = found.health
    assert (health.num_matched, health.num_unmatched, health.num_stopped) == (1, 1, 1)


def test_a_disagreement_is_part_of_the_result(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for index in range(4):
        wrong = {1: {"size_bytes": 1}} if index == 2 else {}
        job.collective(group, {0: index * MS * 10, 1: index * MS * 10}, overrides=wrong)
    found = analyze(job)
    assert found.num_desynchronised == 1
    assert found.desynchronisations[0].sequence == 2
    assert found.health.num_untrusted == 2
    assert found.total.unsplit_ns == 4 * MS


def test_a_rank_that_recorded_nothing_is_flagged(tmp_path):
    job = Job(tmp_path, num_ranks=3, missing=[2])
    group = job.group(range(3))
    job.collective(group, dict.fromkeys(range(3), 0))
    (partial,) = analyze(job).health.partial_groups
    assert partial.missing_ranks == (2,)


def test_health_counts_what_went_wrong(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group, alone = job.group(range(2)), job.group([0])
    job.collective(group, {0: 0, 1: 0})
    unfinished = {rank: {"outcome": Outcome.UNFINISHED, "end_ns": -1} for rank in range(2)}
    job.collective(group, {0: SECOND, 1: SECOND}, overrides=unfinished)
    keys = job.collective(
        group, {0: 2 * SECOND, 1: 2 * SECOND}, overrides={1: {"outcome": Outcome.ERROR}}
    )
    job.note_error(1, keys[1], "RuntimeError: connection reset")
    job.collective(group, {0: 3 * SECOND, 1: 3 * SECOND}, kind=Kind.CUSTOM)
    job.collective(alone, {0: 4 * SECOND})
    unknown = operation_words(enqueue_ns=START_MONO_NS + 5 * SECOND, group_id=99)
    job.writers[0].table("collectives").put(*unknown)
    job.wait(0, 12345, 0, 7 * MS)
    health = analyze(job).health
    assert (health.num_rank_operations, health.num_recognised) == (10, 8)
    assert (health.num_unfinished, health.num_failed) == (2, 1)
    assert health.failures[0].message == "RuntimeError: connection reset"
    assert (health.num_single_rank, health.num_unknown_group) == (1, 1)
    assert (health.num_unknown_waits, health.unknown_wait_ns) == (1, 7 * MS)


def test_an_end_long_before_the_last_arrival_is_an_error_of_the_clock(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    for index in range(30):
        job.collective(group, dict.fromkeys(range(2), index * SECOND))
    wrong = {0: {"end_ns": job.local_ns(0, 40 * SECOND + MS)}}
    job.collective(group, {0: 40 * SECOND, 1: 40 * SECOND + 30 * MS}, overrides=wrong)
    found = analyze(job)
    assert found.health.num_clock_errors == 1
    total = rank_total(found, 0)
    assert total.transfer_ns == 30 * MS
    assert total.wait_ns == MS


def test_what_a_killed_rank_was_in_is_unfinished(tmp_path):
    job = Job(tmp_path, num_ranks=2)
    group = job.group(range(2))
    job.collective(group, {0: 0, 1: 0})
    job.collective(group, {0: SECOND}, overrides={0: {"end_ns": -1, "outcome": 0}})
    found = analyze(job)
    assert found.health.num_unfinished == 1
    assert found.health.num_stopped == 1


def test_without_operations_nothing_is_said(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2))
    found = analyze_communication(load_job(open_run(tmp_path).last_attempt))
    assert isinstance(found, Unavailable)
    assert "no communication was recorded" in found.reason


def test_groups_of_one_rank_are_nothing_to_analyse(tmp_path):
    job = Job(tmp_path, num_ranks=1)
    job.collective(job.group([0]), {0: 0})
    found = analyze_communication(load_job(job.close()))
    assert found == Unavailable("every operation was of a group with one rank")


def test_size_buckets_are_those_of_the_vocabulary():
    sizes = [0, 1, 2, 3, 4, 5, 15, 16, 17, 4095, 4096, 1 << 20, (1 << 22) - 1, 1 << 40]
    assert size_buckets(np.array(sizes)).tolist() == [size_bucket(size) for size in sizes]


def random_word(random):
    extremes = [-1, 0, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63)]
    if random.random() < 0.5:
        return extremes[random.integers(0, len(extremes))]
    return START_MONO_NS + int(random.integers(0, SECOND))


def random_operation(random, index, num_ranks):
    enqueue_ns = START_MONO_NS + index * MS + int(random.integers(0, MS))
    return list(
        operation_words(
            kind=int(random.choice([*range(12), 200])),
            outcome=int(random.integers(0, 6)),
            end_source=int(random.integers(0, 8)),
            flags=int(random.integers(0, 32)),
            group_id=int(random.choice([0, 1, 2, 60_000])),
            phase_id=int(random.integers(0, 100)),
            sequence=index,
            peer=int(random.integers(-1, num_ranks + 1)),
            enqueue_ns=enqueue_ns,
            end_ns=enqueue_ns + int(random.integers(-MS, 10 * MS)),
            step=int(random.integers(-1, 6)),
            dtype=int(random.integers(0, 30)),
            tag=int(random.choice([0, 127])),
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_record_can_break_the_analysis(tmp_path, seed):
    random = np.random.default_rng(seed)
    job = Job(tmp_path, num_ranks=3, host=lambda rank: f"node{rank % 2}", layout=Layout(dp=3))
    for ranks in (range(3), [0, 2], [0]):
        job.group(ranks)
    for writer in job.writers.values():
        calibration = dict.fromkeys(("offset_ns", "uncertainty_ns"), random_word(random))
        calibration |= {"reference_rank": 1, "at_host_mono_ns": random_word(random)}
        writer.journal.write("update", clock_calibration=calibration)
        writer.journal.write("group", id=-4, name="x", ranks=[0, 99_999])
        writer.table("clocks").put(random_word(random), random_word(random), 0, 0, 0, 0, 0)
        for index in range(60):
            words = random_operation(random, index, 3)
            if random.random() < 0.3:
                words[random.integers(0, 7)] = random_word(random)
            writer.table("collectives").put(*words)
            duration = random_word(random) if random.random() < 0.3 else MS
            writer.table("waits").put(1, words[2], random_word(random), duration, -1, 0, 3)
    analyze(job)
