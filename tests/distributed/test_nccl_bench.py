"""The bench of NCCL ranks runs where there is no GPU, and its judges read what it writes."""

import itertools
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nccl_faults
import nccl_overhead
import nccl_truth
import pytest
import torch
from nccl_bench import Place, choose
from nccl_faults import CASES
from nccl_kernels import measure_kernels
from nccl_parcel import unpack
from nccl_programs import Fault, Moment

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
        "nccl_truth.py", "--only", "ddp2", "--steps", "6", "--timed-steps", "1",
        "--warmup-steps", "1", "--parcel", str(parcel), "--output", str(output),
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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """One rank in this process."""
    monkeypatch.setattr(nccl_faults, "KEPT", nccl_faults.Kept())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path / "job"
    yield Place(rank=0, num_ranks=1, device=torch.device("cpu"), folder=folder, store=None)
    torch.set_num_threads(num_threads)


def test_faults_are_recorded_beside_their_twin_and_judged(tmp_path: Path, place: Place) -> None:
    parcel, output = tmp_path / "faults.tar", tmp_path / "verdicts.json"
    options = Namespace(parcel=parcel, steps=3, blocks=2, timed_steps=1, warmup_steps=1)
    for name in ("one_slow_loader", "one_leak"):
        nccl_faults.record(place, name, options)
    # Few steps: what is said of them does not matter here.
    nccl_faults.judge_all([parcel], output)
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert {name: "cost_ms" in row for name, row in rows.items()} == {
        "single_clean": False,
        "one_slow_loader": True,
        "one_leak": False,
    }


def test_a_healthy_variant_is_recorded_without_a_price(tmp_path: Path, place: Place) -> None:
    parcel, output = tmp_path / "faults.tar", tmp_path / "verdicts.json"
    options = Namespace(parcel=parcel, steps=6, blocks=1, timed_steps=1, warmup_steps=1)
    nccl_faults.record(place, "healthy_photos_start", options)
    nccl_faults.judge_all([parcel], output)
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert {name: (row["set"], row.get("is_healthy")) for name, row in rows.items()} == {
        "photos_clean": ("more", None),
        "healthy_photos_start": ("more", True),
    }


def test_a_fault_has_its_steps() -> None:
    fault = Fault(moment=Moment.FETCH, act=lambda _: None, since=4, until=9, every=2)
    assert [step for step in range(12) if fault.strikes(step)] == [5, 7]


def test_a_fault_that_begins_later_is_timed_at_work(tmp_path: Path, place: Place) -> None:
    struck: list[int] = []
    fault = Fault(
        moment=Moment.BEFORE_FORWARD,
        act=lambda training: struck.append(training.num_steps),
        since=4,
        every=2,
    )
    clean = replace(CASES["photos_evaluated"].clean, name="clean")
    case = replace(CASES["photos_evaluated"], clean=clean, faults=(fault,))
    training = clean.build(place)
    options = Namespace(timed_steps=2, blocks=3)
    times = nccl_faults.time_twins(case, training, training, options)
    # One step is not timed, then two are, of which every second has it; and so in each block.
    assert (len(times), struck) == (3, [5, 5, 5])


def test_a_late_fault_costs_its_part_of_the_steps() -> None:
    times = [[[10.0, 14.0], [10.0, 18.0]]]
    cost = nccl_faults.measure_cost(times, 0.5)
    assert cost == nccl_faults.Cost(clean_ms=10.0, faulty_ms=13.0, lost_ms=3.0, scatter_ms=1.0)


def test_of_two_faults_each_is_named_and_their_prices_add_up() -> None:
    case = CASES["mixer_fsdp4_two_faults"]
    wanted, culprits = (case.expected, *case.also), {0, 3}

    def find(code: str, ranks: tuple[int, ...], title: str, ms: float) -> SimpleNamespace:
        return SimpleNamespace(
            code=code, ranks=ranks, title=title, summary="", saved_ns=round(ms * 1e6)
        )

    first = find("ST001", (0,), "rank 0 is slow in backward", 12)
    again = find("ST004", (0,), "rank 0 has more to do in backward", 5)
    second = find("ST001", (3,), "rank 3 is slow in optimizer", 16)
    both = find("ST001", (0, 3), "slow in backward and optimizer", 28)
    other = find("ST001", (0, 1), "slow in backward", 9)

    def answer(*findings: SimpleNamespace) -> tuple[list[bool], float | None]:
        answers = [
            [one for one in findings if nccl_faults.is_about(one, each, culprits)]
            for each in wanted
        ]
        has = list(map(nccl_faults.has_culprits, answers, wanted))
        return has, nccl_faults.add_prices(answers)

    assert answer(first, again, second) == ([True, True], 28.0)
    assert answer(first) == ([True, False], 12.0)
    assert answer(both) == ([True, True], 28.0)
    assert answer(other) == ([False, False], None)


def test_cases_with_the_same_clean_program_stand_together() -> None:
    for set_name in nccl_faults.SETS:
        cases = [case for case in CASES.values() if case.set_name == set_name]
        runs = [name for name, _ in itertools.groupby(case.clean.name for case in cases)]
        assert len(runs) == len(set(runs))
    programs = {(case.clean.name, id(case.clean)) for case in CASES.values()}
    assert len({name for name, _ in programs}) == len(programs)
    assert not {name for name, _ in programs} & set(CASES)


def test_blocks_take_turns_and_are_summarized(place: Place) -> None:
    options = Namespace(
        rounds=4,
        steps=1,
        settle=(1,),
        warmup_steps=1,
        long_rounds=0,
        seconds=600,
        profiled_rounds=1,
        traces=1,
        ways=(),
        ways_period=3,
        blocks=1,
    )
    result = nccl_overhead.measure(place, "host_bound", options)
    nccl_overhead.show("host_bound", result)
    ways = result["summary"]["ways"]
    assert {way: ways[way]["num_blocks"] for way in ("bare", "recorded", "torch.profiler")} == {
        "bare": 5,  # the profiler's round comes last and has one of its own
        "recorded": 4,
        "torch.profiler": 1,
    }
    assert ways["bare"]["median_ratio"] == 0


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
    truth = {
        "kernels_ms": [kernels],
        "plain_ms": [8.0],
        "phases_ms": {"eval": [2.0]},
        "recorded_ms": [10.0],
    }
    assert nccl_truth.find_ranges(truth, 0) == {
        "compute": (pytest.approx(4 / 12), 0.4),
        "exposed": (pytest.approx(1 / 12), 0.1),
        "copies_alone": (0.0, 0.0),
        "idle": (0.3, pytest.approx(5 / 12)),
        "eval": (pytest.approx(2 / 12), 0.2),
    }
    # Twice as slow when it was recorded.
    slower = nccl_truth.find_ranges(truth | {"recorded_ms": [12.0]}, 0)
    assert slower["eval"] == (pytest.approx(4 / 14), pytest.approx(4 / 12))


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
    found = nccl_overhead.compare([[(100.0, 101.0), (200.0, 202.0)], [(50.0, 50.5)]])
    assert found["num_blocks"] == 3
    assert (found["median_ratio"], found["low_ratio"], found["high_ratio"]) == (0.01, 0.01, 0.01)


def test_a_whole_name_means_only_itself() -> None:
    names = ["ddp", "ddp_graphs", "pp4"]
    assert choose(names, ["ddp"]) == ["ddp"]
    assert choose(names, ["dd"]) == ["ddp", "ddp_graphs"]
    assert choose(names, []) == names
