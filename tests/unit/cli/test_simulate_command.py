"""`meshscope simulate` on recorded runs."""

import json
from pathlib import Path

import pytest

from builders import make_run
from command_line import invoke
from made_programs import MS, ProgramRun, reduce, work
from made_traces import call, kernel, read, step
from meshscope.core.layout import Layout

HOSTILE = "\x1b[31mfor\u202eward\n"


def record(path: Path) -> Path:
    def make(rank: int, step: int):
        ns = 14 * MS if rank == 1 else 10 * MS
        return [work("data", MS), work(HOSTILE, ns), reduce((0, 1), MS)]

    ProgramRun(make, num_ranks=2, num_steps=6, layout=Layout(dp=2)).record(path)
    return path


def simulate(*arguments: str):
    return invoke("simulate", *arguments)


def test_text_says_slowdown_culprit_path_and_fidelity(tmp_path):
    result = simulate(str(record(tmp_path / "run")))
    assert result.exit_code == 0, result.output
    assert "step 16.0 ms measured, 16.0 ms replayed: 0 % off" in result.stdout
    assert "slowdown 1.1429: 16.0 ms a step, 14.0 ms if all were even" in result.stdout
    assert "by dp: 1 1.1429" in result.stdout
    assert "rank 1 work forward  without it: saves 4.00 ms a step" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout


def test_edits_are_priced_one_by_one(tmp_path):
    run = str(record(tmp_path / "run"))
    edits = ("rank=1:ideal", "rank=1:0.5x", "dp=1:ideal", "phase=data:0", "compute=0.5x",
             "bandwidth.dp=2x", "microbatches=4", "move=1@0->1")  # fmt: skip
    flags = [part for edit in edits for part in ("--edit", edit)]
    result = simulate(run, "--json", *flags)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    gains = {one["edit"]: one["gain"] for one in document["edits"]}
    assert [gains[edit].get("saved_ns") for edit in edits[:6]] == [
        4 * MS, 4 * MS, 2 * MS, MS, 7 * MS, 0.5 * MS
    ]  # fmt: skip
    assert all("unavailable" in gains[edit] for edit in edits[6:])
    assert document["fidelity"]["error_ratio"] == 0


@pytest.mark.parametrize(
    "edit",
    ["rank=9:ideal", "stage=1:ideal", "phase=nothing:0", "bandwidth.pp=2x", "schedule=none", "x"],
)
def test_what_the_run_does_not_have_is_one_line_and_exit_2(tmp_path, edit):
    result = simulate(str(record(tmp_path / "run")), "--edit", edit)
    assert result.exit_code == 2
    assert edit in result.output
    assert "Traceback" not in result.output


def test_a_run_without_communication_and_one_with_a_single_step(tmp_path):
    plain = make_run(tmp_path / "plain", layout=Layout(dp=2))
    assert simulate(str(plain)).exit_code == 0
    short = make_run(tmp_path / "short", num_steps=1)
    result = simulate(str(short), "--edit", "compute=0.5x")
    assert result.exit_code == 0, result.output


def test_nothing_there_is_exit_3(tmp_path):
    assert simulate(str(tmp_path / "none")).exit_code == 3
    assert simulate(str(tmp_path)).exit_code == 3


def test_faster_compute_does_not_shorten_what_a_device_idles(tmp_path):
    """Launch-bound: 10 kernels of 6 µs in a step of 1 ms; half of 6 % is all there is to gain."""
    events = []
    for number in range(1, 7):
        begin = 1000.0 * number
        events.append(step(number, begin, 1000))
        for index in range(10):
            at, correlation = begin + 100 * index, 10 * number + index
            events.append(call("cudaLaunchKernel", at + 1, correlation, 5))
            events.append(kernel("gemm", at + 10, 6, correlation=correlation))
    read(tmp_path / "rank0.json", events, world_size=1)
    result = simulate(str(tmp_path / "rank0.json"), "--edit", "compute=0.5x", "--json")
    assert result.exit_code == 0, result.output
    (edit,) = json.loads(result.stdout)["edits"]
    assert edit["gain"]["saved_ratio"] == pytest.approx(0.03, abs=0.002)
