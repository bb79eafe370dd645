"""The budget identity on runs whose every line is known."""

from pathlib import Path

import numpy as np
import pytest

from builders import MS, SECOND, make_run
from meshscope.analyze.budget.budget import Budget, measure_budget
from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.budget.model_flops import RankFlops
from meshscope.analyze.timeline.device_parts import divide_device_time
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from timeline_builders import TimedJob, make_dp_run, timeline_of

UNKNOWN = Unavailable("nobody counted")


def _flops(
    model: float, peak: float | Unavailable = 1e12, hardware: float | Unavailable = UNKNOWN
) -> RankFlops:
    return RankFlops(
        model_flops=model,
        hardware_flops=hardware,
        source="said",
        dtype="float32",
        peak_flops_per_s=peak,
        peak_source="declared",
    )


def _lines(budget: Budget) -> dict[str, float]:
    """Milliseconds per rank and step."""
    means = budget.total_ns() / budget.wall_ns.size / MS
    return {line.name: mean for line, mean in zip(budget.lines, means.tolist(), strict=True)}


def test_lines_sum_to_the_wall_clock(tmp_path: Path) -> None:
    work = {
        0: {"data": 2, "forward": 10, "backward": 20, "logging": 1},
        1: {"data": 8, "forward": 10, "backward": 20, "logging": 1},
    }
    budget = measure_budget(timeline_of(make_dp_run(tmp_path, work, num_steps=4)), UNKNOWN)

    assert _lines(budget) == {
        "compute": 30,
        "exposed transfer dp": 5,
        "exposed wait dp": 3,
        "input stall": 5,
        "logging": 1,
    }
    assert (budget.residual_ns == 0).all()
    assert budget.residual_ratio == 0
    assert budget.share_of(Share.TRANSFER, "dp") == pytest.approx(5 / 44)
    assert budget.share_of(Share.WAIT) == pytest.approx(3 / 44)
    compute = next(line for line in budget.lines if line.share is Share.COMPUTE)
    assert compute.reason == "nobody counted"
    # Per rank and per step the same sums.
    assert (budget.of_ranks_ns().sum(axis=0) == budget.total_ns()).all()


def test_useful_compute_is_flops_at_peak(tmp_path: Path) -> None:
    work = {rank: {"forward": 10, "backward": 20} for rank in range(2)}
    timeline = timeline_of(make_dp_run(tmp_path, work, num_steps=4))
    # 1.4e10 FLOPs at 1e12 FLOP/s: 14 ms of a step of 35 ms.
    flops = {rank: _flops(1.4e10, hardware=2.1e10) for rank in range(2)}
    budget = measure_budget(timeline, flops)

    assert _lines(budget) == {
        "useful compute": 14,
        "kernel inefficiency": 16,
        "exposed transfer dp": 5,
    }
    assert not isinstance(budget.mfu, Unavailable)
    assert not isinstance(budget.hfu, Unavailable)
    assert budget.mfu.ratio == pytest.approx(0.4)
    assert budget.hfu.ratio == pytest.approx(0.6)
    assert budget.mfu.flops_per_step == 2.8e10
    assert budget.mfu.peak_flops_per_s == 2e12
    assert not budget.mfu.is_impossible


def test_mfu_over_one_is_flagged_and_not_cut_off(tmp_path: Path) -> None:
    work = {rank: {"forward": 10, "backward": 20} for rank in range(2)}
    timeline = timeline_of(make_dp_run(tmp_path, work, num_steps=4))
    budget = measure_budget(timeline, {rank: _flops(7e10) for rank in range(2)})

    assert not isinstance(budget.mfu, Unavailable)
    assert budget.mfu.ratio == pytest.approx(2.0)
    assert budget.mfu.is_impossible
    assert _lines(budget)["kernel inefficiency"] == -40
    assert (budget.residual_ns == 0).all()


@pytest.mark.parametrize(
    ("flops", "reason"),
    [
        ({0: _flops(1e9)}, "FLOPs of rank 1 are not known"),
        ({0: _flops(1e9), 1: _flops(1e9, Unavailable("no peak"))}, "no peak"),
    ],
)
def test_ranks_without_flops_or_peak_leave_compute_whole(
    tmp_path: Path, flops: dict[int, RankFlops], reason: str
) -> None:
    work = {rank: {"forward": 10} for rank in range(2)}
    budget = measure_budget(timeline_of(make_dp_run(tmp_path, work)), flops)

    assert budget.mfu == Unavailable(reason)
    assert budget.lines[0].reason == reason


def test_waiting_for_another_stage_is_the_bubble(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(pp=2))
    pair = job.group(range(2), description="mesh_pp")
    world = job.group(range(2), name="world")
    for step in range(3):
        at = 100 * step * MS
        job.action(0, "F", step=step, microbatch=0, stage=0, start_ns=at, end_ns=at + 20 * MS)
        job.message(pair, 0, 1, sent_ns=at + 20 * MS, asked_ns=at, latency_ns=2 * MS, step=step)
        job.action(
            1, "F", step=step, microbatch=0, stage=1, start_ns=at + 22 * MS, end_ns=at + 82 * MS,
            wait_ns=22 * MS,
        )  # fmt: skip
        job.collective(world, {0: at + 22 * MS, 1: at + 82 * MS}, transfer_ns=3 * MS, step=step)
        for rank in range(2):
            job.own_step(rank, step, at, at + 100 * MS)
    budget = measure_budget(timeline_of(job.close()), UNKNOWN)

    lines = _lines(budget)
    assert lines["pipeline bubble"] == (20 + 60) / 2
    assert lines["exposed transfer pp"] == pytest.approx((2 + 2) / 2 + 3)
    assert lines["compute"] == (20 + 60) / 2
    assert sum(lines.values()) == 100


def test_a_devices_time_is_not_split_without_a_kernel_sample(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    for step in range(5):
        at = 100 * step * MS
        job.device_phase(
            0, "forward", (at, at + MS), (at + 10 * MS, at + 90 * MS), offset_ns=SECOND
        )
        job.own_step(0, step, at, at + 95 * MS)
    attempt = job.close()
    timeline = timeline_of(attempt, warmup_steps=1)
    budget = measure_budget(timeline, UNKNOWN, divide_device_time(attempt, timeline))

    lines = {"in phases, not split": 80, "between phases, not split": 20}
    assert _lines(budget) == lines
    assert budget.residual_ratio == 0


def test_a_device_that_falls_behind_its_host_sets_the_pace(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    for step in range(5):
        at = 100 * step * MS
        late = step * 100_000  # the device falls behind by 0.1 ms in every step
        there = (at + 10 * MS + late, at + 90 * MS + late)
        job.device_phase(0, "forward", (at, at + MS), there, offset_ns=SECOND)
        job.own_step(0, step, at, at + 95 * MS)
    budget = measure_budget(timeline_of(job.close(), warmup_steps=1), UNKNOWN)

    assert (budget.wall_ns == 100 * MS + 100_000).all()
    assert (budget.residual_ns == 0).all()
    assert budget.host_ahead_ratio == pytest.approx(0.1 / 100.1)


def test_waiting_of_a_fast_rank_is_not_communication(tmp_path: Path) -> None:
    """pytscope counts it as such: 4.8 % of communication become 35.5 %, 21 ms become 31 ms."""
    work = {0: {"forward": 10.0}, 1: {"forward": 20.0}}
    timeline = timeline_of(make_dp_run(tmp_path, work, num_steps=8, transfer_ms=1))
    budget = measure_budget(timeline, UNKNOWN)

    assert budget.share_of(Share.TRANSFER) == pytest.approx(1 / 21)
    assert budget.wall_ns.mean() == 21 * MS


def test_time_in_no_phase_and_in_phases_of_ones_own_is_there(tmp_path: Path) -> None:
    """pytscope loses both: 219 ms of wall clock become 63 ms, a phase of 1.8 s disappears."""
    make_run(
        tmp_path,
        num_steps=4,
        phases=(("forward", 63 * MS), ("my phase", 1_800 * MS)),
        unattributed_ns=156 * MS,
        gap_ns=0,
    )
    budget = measure_budget(timeline_of(open_run(tmp_path).last_attempt), UNKNOWN)

    assert _lines(budget) == {"compute": 1_863, "other": 156}
    assert budget.wall_ns.mean() == 2_019 * MS


def test_other_traffic_does_not_change_tensor_parallelism(tmp_path: Path) -> None:
    """torsh rates 1 µs of tp traffic 12.5 %, and 100 % once 100 s of other traffic come along."""
    shares = []
    for index, send_ms in enumerate((0, 50)):
        job = TimedJob(tmp_path / str(index), num_ranks=4, layout=Layout(tp=2, pp=2))
        groups = [job.group(ranks, description="mesh_tp") for ranks in ((0, 1), (2, 3))]
        pairs = [job.group(ranks, description="mesh_pp") for ranks in ((0, 2), (1, 3))]
        for step in range(4):
            at = 3_000 * step * MS
            for group, ranks in zip(groups, ((0, 1), (2, 3)), strict=True):
                job.collective(group, dict.fromkeys(ranks, at + MS), transfer_ns=1_000, step=step)
            for group, ranks in zip(pairs, ((0, 2), (1, 3)), strict=True):
                moment = at + 100 * MS
                job.message(
                    group, *ranks, sent_ns=moment, asked_ns=moment, latency_ns=send_ms * MS,
                    step=step,
                )  # fmt: skip
            for rank in range(4):
                job.own_step(rank, step, at, at + 3_000 * MS)
        budget = measure_budget(timeline_of(job.close()), UNKNOWN)
        shares.append(budget.share_of(Share.TRANSFER, "tp"))

    np.testing.assert_allclose(shares, [1e-6 / 3] * 2)
