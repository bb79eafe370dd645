"""CO rules: exposed transfers and small operations, over a network and inside a host."""

from pathlib import Path

import pytest

from builders import MS
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules.communication.transfers import (
    ExposedDataParallel,
    ExposedTensorParallel,
    SmallOperations,
)
from meshscope.store.read.run import Attempt
from timeline_builders import TimedJob, make_dp_run

ALL: tuple[type[Rule], ...] = (ExposedDataParallel, ExposedTensorParallel, SmallOperations)


def _find(attempt: Attempt) -> list[Finding]:
    context = Context(Study(attempt))
    found = [finding for rule in ALL for finding in rule().run(context)]
    assert context.study.failures == []
    return found


def _make_run(
    path: Path, *, transfer_ms: float, axis: str = "dp", num_hosts: int = 2, late_ms: float = 0
) -> Attempt:
    layout = Layout(dp=2) if axis == "dp" else Layout(tp=2)
    job = TimedJob(path, num_ranks=2, layout=layout, host=lambda rank: f"node{rank % num_hosts}")
    group = job.group(range(2), description=f"mesh_{axis}")
    work: dict[int, dict[str, float]] = {0: {"backward": 40}, 1: {"backward": 40 + late_ms}}
    job.train(num_steps=20, work_ms=work, transfer_ms=transfer_ms, group=group, size_bytes=64 << 20)
    return job.close()


def test_exposed_dp_transfer_over_a_network(tmp_path: Path) -> None:
    (finding,) = _find(_make_run(tmp_path, transfer_ms=20))

    assert finding.code == "CO001"
    assert finding.severity is Severity.CRITICAL
    assert not isinstance(finding.gain, Unavailable)
    assert finding.gain.saved_ns == pytest.approx(20 * MS, rel=0.02)


def test_exposed_tp_transfer_over_a_network(tmp_path: Path) -> None:
    (finding,) = _find(_make_run(tmp_path, transfer_ms=20, axis="tp"))
    assert (finding.code, finding.severity) == ("CO002", Severity.CRITICAL)


def test_inside_one_host_without_accelerators_nothing_could_hide_it(tmp_path: Path) -> None:
    (finding,) = _find(_make_run(tmp_path, transfer_ms=20, num_hosts=1))
    assert finding.severity is Severity.LOW


@pytest.mark.parametrize(("axis", "transfer_ms"), [("dp", 3), ("tp", 8)])
def test_what_is_hidden_or_small_is_left_alone(
    tmp_path: Path, axis: str, transfer_ms: float
) -> None:
    assert _find(_make_run(tmp_path, transfer_ms=transfer_ms, axis=axis)) == []


def test_waiting_for_a_slow_rank_is_not_communication(tmp_path: Path) -> None:
    assert _find(_make_run(tmp_path, transfer_ms=2, late_ms=40)) == []


def _make_small(
    path: Path,
    num_operations: int,
    size_bytes: int,
    *,
    axis: str = "dp",
    num_hosts: int = 2,
    num_broadcasts: int = 0,
    every_ns: int = MS,
) -> Attempt:
    layout = Layout(dp=2) if axis == "dp" else Layout(tp=2)
    job = TimedJob(path, num_ranks=2, layout=layout, host=lambda rank: f"node{rank % num_hosts}")
    group = job.group(range(2), description=f"mesh_{axis}")
    for step in range(12):
        at = 100 * step * MS
        for place in range(num_operations + num_broadcasts):
            moment = at + 20 * MS + place * every_ns
            job.collective(
                group,
                {0: moment, 1: moment},
                transfer_ns=MS // 5,
                step=step,
                size_bytes=size_bytes,
                kind=Kind.ALL_REDUCE if place < num_operations else Kind.BROADCAST,
            )
        job.step(step, at, at + 100 * MS)
    return job.close()


def test_many_small_operations(tmp_path: Path) -> None:
    found = _find(_make_small(tmp_path, 40, 1024))
    assert [finding.code for finding in found] == ["CO003"]
    assert found[0].severity is Severity.MEDIUM
    assert not isinstance(found[0].gain, Unavailable)
    assert found[0].gain.saved_ns == pytest.approx(39 * MS / 5, rel=0.02)


def test_calls_that_go_away_are_priced_too(tmp_path: Path) -> None:
    """Between two operations of 0.2 ms each, 0.05 ms pass; not what takes longer than they do."""
    (found,) = _find(_make_small(tmp_path, 40, 1024, every_ns=MS // 4))
    assert not isinstance(found.gain, Unavailable)
    assert found.gain.saved_ns == pytest.approx(39 * MS / 4, rel=0.02)


@pytest.mark.parametrize(("axis", "severity"), [("dp", Severity.MEDIUM), ("tp", Severity.LOW)])
def test_inside_a_host_only_what_can_be_combined_is_graded(
    tmp_path: Path, axis: str, severity: Severity
) -> None:
    """Gradients can be; sums along tp lie between two layers."""
    found = _find(_make_small(tmp_path, 40, 1024, axis=axis, num_hosts=1))
    assert [(one.code, one.severity) for one in found] == [("CO003", severity)]


def test_many_sums_are_graded_whatever_is_sent_beside_them(tmp_path: Path) -> None:
    """As by an optimizer that sends what each rank has updated."""
    found = _find(_make_small(tmp_path, 40, 1024, num_hosts=1, num_broadcasts=8))
    assert [(one.code, one.severity) for one in found] == [("CO003", Severity.MEDIUM)]
    assert not isinstance(found[0].gain, Unavailable)
    assert found[0].gain.saved_ns == pytest.approx(39 * MS / 5, rel=0.02)


@pytest.mark.parametrize(("num_operations", "size_bytes"), [(20, 1024), (40, 1 << 20)])
def test_few_or_large_operations_are_left_alone(
    tmp_path: Path, num_operations: int, size_bytes: int
) -> None:
    assert _find(_make_small(tmp_path, num_operations, size_bytes)) == []


def test_runs_without_communication(tmp_path: Path) -> None:
    assert _find(make_dp_run(tmp_path, {0: {"forward": 10}}, num_steps=12)) == []
