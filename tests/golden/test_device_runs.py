"""Runs recorded on an H200 (torch 2.11, NCCL 2.28; of DDP four ranks that share it under MPS), held
against kernels that torch.profiler saw in the same processes, and against what faults cost when
timed without the recorder (`benchmarks/nccl_truth.py`, `benchmarks/nccl_faults.py`)."""

import json
import statistics
import tarfile
from pathlib import Path

import pytest

from meshscope.analyze.study import Study
from meshscope.core.unavailable import need
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.runner import diagnose
from meshscope.store.read.run import open_run

ARCHIVES = [
    Path(__file__).parent / "runs" / f"{name}.tar.xz" for name in ("device_runs", "device_waits")
]
MAX_POINTS = 0.03


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("device")
    for name in ARCHIVES:
        with tarfile.open(name) as archive:
            archive.extractall(path, filter="data")
    return path


def study_of(path: Path) -> Study:
    return Study(open_run(path / "run").last_attempt)


def sum_lines(study: Study) -> dict[str, float]:
    """Shares of the wall clock, in the parts that kernels are counted in."""
    budget = need(study.budget)
    parts = dict.fromkeys(("compute", "exposed", "idle"), 0.0)
    for line, total in zip(budget.lines, budget.total_ns().tolist(), strict=True):
        name = line.name
        part = "idle" if name.startswith(("idle", "input")) else name.split()[0]
        if name != "exposed copies":
            parts[part] = parts.get(part, 0.0) + total / budget.total_wall_ns
    return parts


@pytest.mark.parametrize("name", ["ddp", "host_bound", "single_25ms", "loader"])
def test_the_budget_is_what_kernels_did(folder: Path, name: str) -> None:
    """A profiler slows hosts: idle time is between that of its window and that of free steps."""
    path = folder / "truth" / name
    truth = json.loads((path / "truth.json").read_text())
    said = sum_lines(study_of(path))
    rows = list(zip(truth["kernels_ms"], truth["plain_ms"], strict=True))
    for part, key in (("compute", "compute"), ("exposed", "exposed_beside_copies")):
        ends = [statistics.fmean(row[key] / row["wall"] for row, _ in rows)]
        ends.append(statistics.fmean(row[key] / min(row["wall"], ms) for row, ms in rows))
        assert min(ends) - MAX_POINTS <= said[part] <= max(ends) + MAX_POINTS, part
    assert sum(said.values()) == pytest.approx(1, abs=0.02)


def find(folder: Path, name: str):
    """Findings above low of a fault's recording, and what the fault costs, in ms a step."""
    path = folder / "faults" / name
    study = study_of(path)
    found = diagnose(Context(study)).findings
    urgent = {one.code: one for one in found if one.severity > Severity.LOW}
    rounds = json.loads((path / "times.json").read_text()).get("times_ms", [])
    pairs = [[statistics.fmean(values) for values in zip(*ranks, strict=True)] for ranks in rounds]
    return urgent, statistics.median(slow - clean for clean, slow in pairs) if pairs else 0.0


@pytest.mark.parametrize("name", ["launches_graphs", "single_clean", "ddp_light", "balanced_clean"])
def test_healthy_programs_are_left_alone(folder: Path, name: str) -> None:
    assert find(folder, name)[0] == {}


@pytest.mark.parametrize(
    ("name", "code"),
    [("one_host_bound", "CP004"), ("one_evaluation", "TI002"), ("one_slow_loader", "IN002")],
)
def test_a_fault_is_named_and_priced(folder: Path, name: str, code: str) -> None:
    found, cost_ms = find(folder, name)
    assert list(found) == [code]
    assert need(found[code].gain).saved_ns / 1e6 == pytest.approx(cost_ms, rel=0.15)


@pytest.mark.parametrize(
    "name", ["one_item_each_step", "one_item_each_layer", "one_copies_each_step"]
)
def test_a_host_that_waits_for_its_device_is_named_and_priced(folder: Path, name: str) -> None:
    """Few steps are marked there, and samples make the host half as slow again."""
    found, cost_ms = find(folder, name)
    assert list(found) == ["CP005"]
    # Paired blocks of one_item_each_layer differ by 0.96 ms: 17 % of what it costs.
    assert need(found["CP005"].gain).saved_ns / 1e6 == pytest.approx(cost_ms, rel=0.2)


def test_the_end_of_a_sample_is_no_part_of_a_steps_cost(folder: Path) -> None:
    health = study_of(folder / "faults" / "balanced_clean").health
    assert need(need(health.overhead).lost_ratio) < 0.002
    assert 100e6 < need(health.sampling_cost_ns) < 400e6


def test_the_rank_with_a_slow_input_is_named(folder: Path) -> None:
    found, _ = find(folder, "ddp_slow_input")
    assert "rank 2" in found["IN001"].title
    # The replay takes 38 ms for it, the timed twin 28: the other ranks' kernels are faster while
    # rank 2 has none on the device that they share.
    assert "Ranks 0-3 share its device" in found["IN001"].summary
