"""`meshscope train --trace-windows` on two real ranks: the same steps on every chosen one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshscope.analyze.timeline import build_timeline
from meshscope.cli import main
from meshscope.store.reader import Attempt, open_run
from meshscope.store.traces import traces_by_step, windows_of

pytest.importorskip("torch", reason="ranks train")
pytestmark = pytest.mark.gloo

CONFIG = """
num_steps = 12
device = "cpu"
[model]
preset = "llama-tiny"
[parallel]
pp = 2
[batch]
microbatch_size = 1
num_microbatches = 2
"""
WINDOWS = "skip=3,wait=1,warmup=1,active=2,ranks=stages"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    (folder / "train.toml").write_text(CONFIG, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "meshscope", "train", "train.toml", "-o", "run"),
            *("--trace-windows", WINDOWS),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture
def attempt(run: Path) -> Attempt:
    return open_run(run).last_attempt


def test_every_stage_has_a_trace_of_the_same_steps(attempt):
    found = [(w.rank, w.first_step, w.last_step) for w in windows_of(attempt)]
    assert found == [(0, 5, 6), (1, 5, 6)]
    assert sorted(traces_by_step(attempt)) == [5, 6]


def test_folders_carry_rank_and_coordinates(run):
    folders = sorted(path.name for path in (run / "traces").iterdir())
    assert folders == ["rank0_dp0_tp0_pp0", "rank1_dp0_tp0_pp1"]


def test_profiled_steps_are_not_in_the_timeline(attempt):
    timeline = build_timeline(attempt)
    assert timeline.steps.tolist() == [1, 2, 3, *range(8, 12)]
    assert timeline.num_profiled == 4


def test_the_report_leads_to_the_traces_and_they_can_be_read(run):
    report = CliRunner().invoke(main, ["report", str(run), "--no-diagnosis", "--json"])
    assert report.exit_code == 0, report.output
    paths = [trace["path"] for trace in json.loads(report.stdout)["traces"]]
    assert any(path.startswith("traces/rank1_dp0_tp0_pp1/") for path in paths)
    text = CliRunner().invoke(main, ["report", str(run), "--no-diagnosis"]).output
    assert "Traces" in text
    traces = CliRunner().invoke(main, ["trace", str(run / "traces"), "--no-cache"])
    assert traces.exit_code == 0, traces.output
    assert "5: " in traces.output
