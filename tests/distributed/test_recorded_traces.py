"""What torch's own profiler records here, through `trace` and `report`, against what is known."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import recorded_traces
import trace_oracle
from ended_process import run_process
from meshscope.cli import main
from recorded_traces import PROGRAMS, Program

_SHAPES = {"aten::addmm": (1, 2), "aten::mm": (0, 1)}
"""Which of an operator's inputs are multiplied."""


def invoke(*arguments: object) -> Any:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (done.exit_code, done.exception) == (0, None), done.output
    return done


def count_flops(rows: list[dict[str, Any]]) -> int:
    found = 0
    for row in rows:
        if row["name"] in _SHAPES:
            first, second = (json.loads(row["shapes"])[place] for place in _SHAPES[row["name"]])
            found += 2 * first[0] * first[1] * second[1] * row["count"]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("program", PROGRAMS, ids=[one.name for one in PROGRAMS])
def test_a_recording_says_what_the_program_did(tmp_path: Path, program: Program) -> None:
    folder = tmp_path / "given"
    command = [sys.executable, recorded_traces.__file__, program.name, str(folder)]
    done = run_process(command, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted(folder.rglob("*.json"))
    assert len(files) == program.num_files
    document = json.loads(invoke("trace", folder, "--json", "--no-cache").stdout)
    hosts = [one["host"] for one in document["traces"]]
    assert {one["step_source"] for one in document["traces"]} == {program.step_source}
    if program.step_numbers is not None:
        numbers = [step["step"] for one in hosts for step in one["steps"]]
        assert sorted(numbers) == sorted(program.step_numbers)
    if program.matmul_flops is not None:
        assert sum(count_flops(one["operators"]) for one in hosts) == program.matmul_flops
    if program.num_collectives is not None:
        assert [len(one["collectives"]) for one in hosts] == [program.num_collectives] * len(hosts)
    for path in files:
        hold_against_the_oracle(path)
    report = json.loads(invoke("report", folder, "--json").stdout)
    phases = {one["phase"] for one in report["phases"]}
    assert (program.phases or frozenset()) <= phases
    screen = invoke("trace", folder, "--no-cache").output
    assert not re.search(r"\bnan\b|\binf\b|-\d+(?:\.\d+)? (?:ns|µs|ms|s)\b", screen)
    assert max(len(line) for line in screen.splitlines() if str(tmp_path) not in line) <= 100


def hold_against_the_oracle(path: Path) -> None:
    said = trace_oracle.answer(path)
    document = json.loads(invoke("trace", path, "--json", "--no-cache").stdout)
    (trace,) = document["traces"]
    assert trace["step_source"] == said["step_source"] or said["step_source"] == "none"
    if said["step_source"] != "none":
        lengths = [step["time"]["total_ns"] for step in trace["host"]["steps"]]
        assert lengths == said["steps_ns"]
