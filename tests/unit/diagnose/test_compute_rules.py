"""CP rules: proportions of phases, utilisation, gaps on devices."""

from pathlib import Path

import pytest

from builders import MS, SECOND
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules.compute import (
    BackwardHeavy,
    HostGap,
    LowUtilisation,
    OptimizerHeavy,
)
from meshscope.store.read.run import Attempt
from timeline_builders import TimedJob, make_dp_run

ALL: tuple[type[Rule], ...] = (BackwardHeavy, OptimizerHeavy, LowUtilisation, HostGap)


def _find(attempt: Attempt) -> list[Finding]:
    context = Context(Study(attempt))
    found = [finding for rule in ALL for finding in rule().run(context)]
    assert context.study.failures == []
    return found


def _work(**phases: float) -> dict[int, dict[str, float]]:
    return {rank: dict(phases) for rank in range(2)}


@pytest.mark.parametrize(
    ("phases", "codes"),
    [
        ({"forward": 10, "backward": 20, "optimizer": 3}, []),
        ({"forward": 10, "backward": 35, "optimizer": 3}, []),  # full recomputation and some more
        ({"forward": 10, "backward": 45, "optimizer": 3}, ["CP001"]),
        ({"forward": 10, "backward": 20, "optimizer": 10}, ["CP002"]),
    ],
)
def test_proportions(tmp_path: Path, phases: dict[str, float], codes: list[str]) -> None:
    found = _find(make_dp_run(tmp_path, _work(**phases), num_steps=12))
    assert [finding.code for finding in found] == codes
    assert all(finding.severity is Severity.LOW for finding in found)


def test_waiting_inside_backward_does_not_make_it_heavy(tmp_path: Path) -> None:
    work = _work(forward=10, backward=20)
    work[1]["backward"] = 25
    assert _find(make_dp_run(tmp_path, work, num_steps=12, transfer_ms=90)) == []


@pytest.mark.parametrize(
    ("model_flops", "title"),
    [
        (2e9, "MFU is low"),
        (2e10, ""),
        (7e10, "MFU is over 1: FLOPs or peak are wrong"),
    ],
)
def test_utilisation(tmp_path: Path, model_flops: float, title: str) -> None:
    job = TimedJob(tmp_path, num_ranks=1)
    job.writers[0].journal.write(
        "update", flops={"model_flops": model_flops, "dtype": "float32", "source": "said"}
    )
    job.writers[0].journal.write("update", peak={"flops_per_s": 1e12, "dtype": "float32"})
    job.train(num_steps=12, work_ms={0: {"forward": 15, "backward": 25}})
    found = _find(job.close())
    assert [finding.title for finding in found] == ([title] if title else [])


def _make_device_run(path: Path, gap_ms: int, *, saving_ms: int = 0) -> Attempt:
    """Every fifth step, the device also waits for the host to save."""
    job = TimedJob(path, num_ranks=1)
    for step in range(15):
        at = 100 * step * MS
        there = (at + (gap_ms + (saving_ms if step % 5 == 4 else 0)) * MS, at + 100 * MS)
        job.device_phase(0, "forward", (at, at + MS), there, offset_ns=SECOND)
        job.own_step(0, step, at, at + 99 * MS)
    return job.close()


def test_devices_that_wait_for_the_host(tmp_path: Path) -> None:
    (finding,) = _find(_make_device_run(tmp_path, 20))

    assert finding.code == "CP004"
    assert finding.severity is Severity.LOW  # nothing says that the device did nothing there
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(20 * MS, rel=0.02)


def test_short_gaps_are_left_alone(tmp_path: Path) -> None:
    assert _find(_make_device_run(tmp_path, 3)) == []


def test_what_comes_once_in_some_steps_is_no_gap_of_every_step(tmp_path: Path) -> None:
    """A checkpoint of 60 ms in every fifth step is 12 % of the time, and TI002's."""
    assert _find(_make_device_run(tmp_path, 3, saving_ms=60)) == []
