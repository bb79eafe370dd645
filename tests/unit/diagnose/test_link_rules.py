"""LK001: slow links and late handovers, with what mending them wins."""

from pathlib import Path

import pytest

from builders import MS
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.rules.hardware.links import SlowLinkRule
from meshscope.store.read.run import Attempt
from meshscope.store.schema import OperationFlag
from timeline_builders import TimedJob


def _find(attempt: Attempt) -> list[Finding]:
    return list(SlowLinkRule().run(Context(Study(attempt))))


def _make_pairs(path: Path, transfer_ms: dict[tuple[int, int], float]) -> Attempt:
    """Pairs along dp; all ranks meet at the end of each step."""
    num_ranks = 2 * len(transfer_ms)
    job = TimedJob(path, num_ranks=num_ranks, layout=Layout(dp=2, tp=num_ranks // 2))
    groups = {ranks: job.group(ranks, description="mesh_dp") for ranks in transfer_ms}
    world = job.group(range(num_ranks), name="world")
    at = 0
    for step in range(20):
        for rank in range(num_ranks):
            job.phase(rank, "backward", at, at + 40 * MS)
        begin, met = at, {}
        for ranks, group in groups.items():
            arrived = dict.fromkeys(ranks, at + 40 * MS)
            took = round(transfer_ms[ranks] * MS)
            job.collective(group, arrived, transfer_ns=took, step=step, size_bytes=8 << 20)
            met.update(dict.fromkeys(ranks, at + 40 * MS + took))
        job.collective(world, met, transfer_ns=MS // 2, step=step, size_bytes=64)
        at = max(met.values()) + MS // 2
        job.step(step, begin, at)
    return job.close()


def test_slow_pair_is_named_and_priced(tmp_path: Path) -> None:
    (finding,) = _find(_make_pairs(tmp_path, {(0, 2): 2, (1, 3): 14, (4, 6): 2, (5, 7): 2}))

    assert finding.ranks == (1, 3)
    assert finding.title == "the dp link of ranks 1, 3 is slow"
    assert finding.severity is Severity.HIGH
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(12 * MS, rel=0.02)


def test_equal_links_are_left_alone(tmp_path: Path) -> None:
    assert _find(_make_pairs(tmp_path, {(0, 2): 2, (1, 3): 2, (4, 6): 2, (5, 7): 2})) == []


def test_near_misses_are_left_alone(tmp_path: Path) -> None:
    slower = {(0, 2): 2.0, (1, 3): 2.8, (4, 6): 2.0, (5, 7): 2.0}
    assert _find(_make_pairs(tmp_path / "ratio", slower)) == []
    cheap = {(0, 2): 0.1, (1, 3): 0.4, (4, 6): 0.1, (5, 7): 0.1}
    assert _find(_make_pairs(tmp_path / "cost", cheap)) == []


def test_late_handover_is_named_and_priced(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2, layout=Layout(dp=2))
    group = job.group(range(2), description="mesh_dp")
    for step in range(15):
        at = 60 * step * MS
        for rank in range(2):
            now = at
            for microbatch in range(3):
                length = (25 if microbatch == 2 else 10) * MS
                job.action(
                    rank, "B", step=step, microbatch=microbatch, stage=0, start_ns=now,
                    end_ns=now + length,
                )  # fmt: skip
                now += length
            job.own_step(rank, step, at, at + 60 * MS)
        called = dict.fromkeys(range(2), at + 44 * MS)
        keys = job.collective(
            group,
            called,
            transfer_ns=5 * MS,
            flags=OperationFlag.ASYNC,
            step=step,
            size_bytes=8 << 20,
        )
        for rank in range(2):
            job.wait(rank, keys[rank], at + 45 * MS, 4 * MS, step=step)
    (finding,) = _find(job.close())

    assert finding.ranks == (0, 1)
    assert "dp operations late" in finding.title
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(15 * MS, rel=0.05)


def test_run_without_communication(tmp_path: Path) -> None:
    job = TimedJob(tmp_path, num_ranks=2)
    job.train(num_steps=15, work_ms={0: {"forward": 10}, 1: {"forward": 10}})
    assert _find(job.close()) == []
