"""Slow links in runs whose transfers are known."""

from pathlib import Path

import numpy as np
import pytest

from builders import MS
from meshscope.analyze.communication.links import find_slow_links, shorten_transfers
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource, Kind
from timeline_builders import TimedJob, timeline_of

STEP_NS = 100 * MS


def make_mesh_run(
    path: Path,
    transfer_ms: dict[tuple[int, ...], float],
    *,
    num_steps: int = 20,
    noise: float = 0.1,
    late_ms: float = 0,
    size_bytes: int = 4096,
    other_size_bytes: int = 64,
    world_ms: float = 0.5,
) -> Timeline:
    """Pairs along dp, one all-reduce each per step, and a small one over all ranks.

    One rank of each pair comes late by a random time up to `late_ms`.
    """
    num_ranks = 2 * len(transfer_ms)
    job = TimedJob(path, num_ranks=num_ranks, layout=Layout(dp=2, pp=num_ranks // 2))
    groups = {ranks: job.group(ranks, description="mesh_dp") for ranks in transfer_ms}
    world = job.group(range(num_ranks), name="world")
    rng = np.random.default_rng(3)
    for step in range(num_steps):
        at = step * STEP_NS
        for ranks, group in groups.items():
            late = round(rng.uniform(0, late_ms) * MS) if late_ms else 0
            took = transfer_ms[ranks] * rng.lognormal(0, noise)
            job.collective(
                group,
                {ranks[0]: at + 10 * MS, ranks[1]: at + 10 * MS + late},
                transfer_ns=round(took * MS),
                step=step,
                size_bytes=size_bytes,
            )
        job.collective(
            world,
            dict.fromkeys(range(num_ranks), at + 80 * MS),
            transfer_ns=round(world_ms * MS),
            step=step,
            size_bytes=other_size_bytes,
        )
        for rank in range(num_ranks):
            job.own_step(rank, step, at, at + STEP_NS)
    return timeline_of(job.close())


def test_one_slow_pair_of_many(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(2 * k, 2 * k + 1): 2.0 for k in range(6)}
    timeline = make_mesh_run(tmp_path, {**pairs, (4, 5): 12.0})
    found = find_slow_links(timeline)

    assert [(link.axis, link.ranks, link.is_whole_axis) for link in found] == [
        ("dp", (4, 5), False)
    ]
    part = found[0].parts[0]
    assert part.num_slow_steps == part.num_steps == 20
    assert part.usual_ns == pytest.approx(1.8 * MS, rel=0.15)
    assert found[0].cost_ns == pytest.approx(10 * MS, rel=0.2)


def test_slow_half_of_the_links(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {
        (2 * k, 2 * k + 1): (2.0 if k % 2 else 8.0) for k in range(6)
    }
    found = find_slow_links(make_mesh_run(tmp_path, pairs))
    assert sorted(link.ranks for link in found) == [(0, 1), (4, 5), (8, 9)]


def test_healthy_links_are_not_slow(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(2 * k, 2 * k + 1): 2.0 for k in range(6)}
    assert find_slow_links(make_mesh_run(tmp_path, pairs, noise=0.3)) == []


def test_near_miss_is_not_slow(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(2 * k, 2 * k + 1): 2.0 for k in range(6)}
    assert find_slow_links(make_mesh_run(tmp_path, {**pairs, (4, 5): 2.6}, noise=0.05)) == []


def test_late_ranks_do_not_make_a_link_slow(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(2 * k, 2 * k + 1): 2.0 for k in range(4)}
    assert find_slow_links(make_mesh_run(tmp_path, pairs, late_ms=60)) == []


def test_few_steps_say_nothing(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(2 * k, 2 * k + 1): 2.0 for k in range(6)}
    assert find_slow_links(make_mesh_run(tmp_path, {**pairs, (4, 5): 12.0}, num_steps=6)) == []


def test_whole_axis_is_judged_by_another(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(0, 1): 15.0, (2, 3): 15.0}
    found = find_slow_links(make_mesh_run(tmp_path, pairs))

    assert [(link.axis, link.ranks, link.is_whole_axis) for link in found] == [
        ("dp", (0, 1, 2, 3), True)
    ]


def test_other_operations_of_a_slow_axis_are_slow_as_well_if_not_quite_as_far_off(
    tmp_path: Path,
) -> None:
    """An all-reduce of four ranks goes over twice as many hops as their all-to-all."""
    job = TimedJob(tmp_path, num_ranks=4, layout=Layout(ep=4))
    group = job.group(range(4), description="mesh_ep")
    for step in range(20):
        at = step * STEP_NS
        for moment, kind in ((10, Kind.ALL_TO_ALL), (30, Kind.ALL_TO_ALL), (50, Kind.ALL_REDUCE)):
            job.collective(
                group,
                dict.fromkeys(range(4), at + moment * MS),
                transfer_ns=5 * MS,
                step=step,
                kind=kind,
            )
        job.step(step, at, at + STEP_NS)
    (link,) = find_slow_links(timeline_of(job.close()))
    found = {part.times.link_class.kind: part.usual_ns / MS for part in link.parts}
    assert (link.axis, found) == ("ep", {Kind.ALL_TO_ALL: 0.3, Kind.ALL_REDUCE: 0.6})


def test_large_operations_of_an_axis_may_take_long(tmp_path: Path) -> None:
    pairs: dict[tuple[int, ...], float] = {(0, 1): 15.0, (2, 3): 15.0}
    assert find_slow_links(make_mesh_run(tmp_path, pairs, size_bytes=100 << 20)) == []


def test_only_axis_is_judged_by_what_any_network_does(tmp_path: Path) -> None:
    for name, took, expected in (("slow", 2.5, [(0, 1)]), ("usual", 0.9, [])):
        job = TimedJob(tmp_path / name, num_ranks=2, layout=Layout(tp=2))
        group = job.group(range(2), description="mesh_tp")
        for step in range(20):
            at = step * STEP_NS
            for index in range(5):
                moment = at + (10 + 10 * index) * MS
                job.collective(
                    group, {0: moment, 1: moment}, transfer_ns=round(took * MS), step=step
                )
            job.step(step, at, at + STEP_NS)
        found = find_slow_links(timeline_of(job.close()))
        assert [link.ranks for link in found] == expected


def test_slow_pair_of_a_pipeline(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=4, layout=Layout(pp=4))
    group = job.group(range(4), description="mesh_pp")
    for step in range(20):
        at = step * STEP_NS
        for hop in range(3):
            moment = at + 20 * hop * MS
            job.message(
                group,
                hop,
                hop + 1,
                sent_ns=moment + 5 * MS,
                asked_ns=moment,
                latency_ns=6 * MS if hop == 1 else MS // 2,
                step=step,
                # A few ends nobody saw: these messages went over the slow link all the same.
                end_source=EndSource.WAIT_LATE if step % 9 == 4 else EndSource.WAIT,
            )
        job.step(step, at, at + STEP_NS)
    timeline = timeline_of(job.close())
    found = find_slow_links(timeline)

    assert [(link.axis, link.ranks) for link in found] == [("pp", (1, 2))]
    assert len(found[0].parts[0].times.match) == 18
    shorter = shorten_transfers(timeline, found[0])
    communication = timeline.communication
    assert communication is not None
    rows, measured = communication.operations.rows, communication.row_times.transfer_ns
    is_slow = np.isin(rows.rank, (1, 2)) & np.isin(rows.peer, (1, 2))
    assert set(shorter[is_slow].tolist()) == {MS // 2}
    assert (shorter[~is_slow] == measured[~is_slow]).all()
