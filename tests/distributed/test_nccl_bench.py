"""The bench of NCCL ranks runs where there is no GPU, and its judges read what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import nccl_faults
import nccl_truth
import pytest
from nccl_bench import choose
from nccl_kernels import measure_kernels
from nccl_overhead import compare
from nccl_parcel import unpack

from meshscope.store.read.run import open_run

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / script), "--device", "cpu"]
    subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=150)


def event(category: str, name: str, start: float, end: float) -> dict[str, object]:
    return {"cat": category, "name": name, "ts": start, "dur": end - start}


@pytest.mark.gloo
def test_programs_are_recorded_timed_and_unpacked(tmp_path: Path) -> None:
    parcel, output = tmp_path / "truth.tar", tmp_path / "truth.json"
    run(
        "nccl_truth.py", "--only", "ddp2", "--steps", "6", "--timed-steps", "2",
        "--parcel", str(parcel), "--output", str(output),
    )  # fmt: skip
    (folder,) = unpack([parcel], tmp_path)
    truth = json.loads((folder / nccl_truth.TRUTH_FILE).read_text(encoding="utf-8"))
    assert truth["caught"] == [{}, {}]
    assert truth["kernels_ms"] == [None, None]
    ranks = open_run(folder / "run").last_attempt.ranks
    assert {rank: len(one.read("steps")["step"]) for rank, one in ranks.items()} == {0: 6, 1: 6}
    assert all(len(one.read("collectives")["kind"]) >= 6 for one in ranks.values())
    assert nccl_truth.judge(folder)["failed"] == "no kernels were traced"
    assert list(json.loads(output.read_text(encoding="utf-8"))["programs"]) == ["ddp2"]


@pytest.mark.gloo
def test_faults_are_recorded_beside_their_twin_and_judged(tmp_path: Path) -> None:
    parcel, output = tmp_path / "faults.tar", tmp_path / "verdicts.json"
    run(
        "nccl_faults.py", "--only", "one_slow_loader", "one_leak", "--steps", "6", "--blocks", "2",
        "--timed-steps", "2", "--parcel", str(parcel),
    )  # fmt: skip
    nccl_faults.judge_all([parcel], output)
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert list(rows) == ["single_clean", "one_slow_loader", "one_leak"]
    assert rows["one_slow_loader"]["cost_ms"] > 0


def test_kernels_are_united_by_what_they_are() -> None:
    events = [
        event("kernel", "gemm", 0, 4000),
        event("kernel", "ncclDevKernel_AllReduce", 3000, 8000),
        event("kernel", "gemm", 3500, 5000),
        event("gpu_memcpy", "Memcpy HtoD", 7000, 9000),
        event("cpu_op", "aten::mm", 0, 20000),
    ]
    assert measure_kernels(events, 12.0, 2) == {
        "compute": 2.5,
        "compute_with_copies": 3.5,
        "communication": 2.5,
        "overlapped": 1.0,
        "exposed": 1.5,
        "exposed_beside_copies": 1.0,
        "copies": 1.0,
        "copies_alone": 0.5,
        "wall": 6.0,
        "idle": 1.5,
    }


def test_a_window_that_slows_the_host_makes_the_truth_a_range() -> None:
    kernels = {"compute": 4.0, "exposed": 1.0, "copies_alone": 0.0, "wall": 10.0}
    truth = {"kernels_ms": [kernels], "plain_ms": [8.0], "phases_ms": {"eval": [2.0]}}
    assert nccl_truth.find_ranges(truth, 0) == {
        "compute": (pytest.approx(4 / 12), 0.4),
        "exposed": (pytest.approx(1 / 12), 0.1),
        "copies_alone": (0.0, 0.0),
        "idle": (0.3, pytest.approx(5 / 12)),
        "eval": (pytest.approx(2 / 12), 0.2),
    }


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("kernel inefficiency", "compute"),
        ("exposed wait dp", "exposed"),
        ("exposed copies", "copies_alone"),
        ("exposed, nothing queued tp", "exposed"),
        ("something new", "something new"),
    ],
)
def test_lines_of_the_budget_have_a_part_of_the_truth(line: str, part: str) -> None:
    assert nccl_truth.find_part(line) == part


def test_a_block_is_as_long_as_on_its_slowest_rank() -> None:
    times = [[[10.0, 14.0], [10.0, 16.0]], [[11.0, 13.0], [10.0, 17.0]]]
    cost = nccl_faults.measure_cost(times)
    assert cost == nccl_faults.Cost(clean_ms=10.5, faulty_ms=15.5, lost_ms=5.0, scatter_ms=2.0)


def test_costs_are_of_blocks_of_the_same_round() -> None:
    found = compare([(100.0, 101.0), (200.0, 202.0), (50.0, 50.5)])
    assert (found["median_ratio"], found["low_ratio"], found["high_ratio"]) == (0.01, 0.01, 0.01)


def test_a_whole_name_means_only_itself() -> None:
    names = ["ddp", "ddp_graphs", "pp4"]
    assert choose(names, ["ddp"]) == ["ddp"]
    assert choose(names, ["dd"]) == ["ddp", "ddp_graphs"]
    assert choose(names, []) == names
