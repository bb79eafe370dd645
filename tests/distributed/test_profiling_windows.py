"""Trace windows of two real ranks: `meshscope train` by schedule, `meshscope run` when asked."""

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.cli import main
from meshscope.errors import RunError
from meshscope.store.read.run import Attempt, open_run
from meshscope.store.read.trace_windows import TraceWindow, windows_of

pytest.importorskip("torch", reason="ranks train")
pytestmark = pytest.mark.gloo

PROGRAM = Path(__file__).with_name("asked_windows.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TIMEOUT_S = 120


# --- meshscope train ------------------------------------------------------------------------------

CONFIG = """
num_steps = 16
device = "cpu"
[model]
preset = "llama-tiny"
[parallel]
pp = 2
[batch]
microbatch_size = 1
num_microbatches = 2
"""
WINDOWS = "skip=3,wait=1,warmup=1,active=2,ranks=stages,anomaly,cooldown=2,cooldown_s=0,limit=1"
NAN_STEP = 10
TRACED_STEPS = (5, 6, NAN_STEP + 2, NAN_STEP + 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    (folder / "train.toml").write_text(CONFIG, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "meshscope", "train", "train.toml", "-o", "run"),
            *("--trace-windows", WINDOWS, "--fault", f"nan pp=1 steps={NAN_STEP}"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture
def attempt(run: Path) -> Attempt:
    return open_run(run).last_attempt


def test_every_stage_has_a_trace_of_the_same_steps(attempt):
    scheduled = [w for w in windows_of(attempt) if w.reason == "the schedule"]
    found = [(w.rank, w.first_step, w.last_step) for w in scheduled]
    assert found == [(0, 5, 6), (1, 5, 6)]


def test_a_loss_that_is_not_finite_is_traced_once_where_it_is_known(attempt):
    """Every rank of the engine knows it, the last stage by its own loss; it stays NaN, and the
    limit is one."""
    others = [w for w in windows_of(attempt) if "loss" in w.reason]
    assert [w.rank for w in others] == [0, 1]
    assert [w.reason.removeprefix("own_") for w in others] == [
        f"loss is nan, seen at step {NAN_STEP}"
    ] * 2
    assert {(w.first_step, w.last_step) for w in others} == {(NAN_STEP + 2, NAN_STEP + 3)}
    traced = {s for w in windows_of(attempt) if w.path for s in (w.first_step, w.last_step)}
    assert tuple(sorted(traced)) == TRACED_STEPS


def test_folders_carry_rank_and_coordinates(run):
    folders = sorted(path.name for path in (run / "traces").iterdir())
    assert folders == ["rank0_dp0_tp0_pp0", "rank1_dp0_tp0_pp1"]


def test_profiled_steps_are_not_in_the_timeline(attempt):
    kept = build_timeline(attempt).steps.tolist()
    traced = {w.disturbed_from_step: w.disturbed_to_step for w in windows_of(attempt) if w.path}
    assert traced == {4: 7, 11: 14}
    assert set(kept) >= {8, 9, 10, 15}
    assert not set(kept) & {*range(4, 8), *range(11, 15)}


def test_the_report_leads_to_the_traces_and_they_can_be_read(run):
    report = CliRunner().invoke(main, ["report", str(run), "--no-diagnosis", "--json"])
    assert report.exit_code == 0, report.output
    traces = json.loads(report.stdout)["traces"]
    paths = [trace["path"] for trace in traces if isinstance(trace["path"], str)]
    assert len(paths) == 4
    assert all((run / path).is_file() for path in paths)
    assert any(path.startswith("traces/rank1_dp0_tp0_pp1/") for path in paths)
    found = CliRunner().invoke(main, ["trace", str(run), "--no-cache", "--json"])
    assert found.exit_code == 0, found.output
    read = json.loads(found.stdout)["traces"]
    steps = {(one["rank"], step["step"]) for one in read for step in one["host"]["steps"]}
    assert steps == {(rank, step) for rank in (0, 1) for step in TRACED_STEPS}


EVENT_FIELDS = {
    "X": {"ts": (int, float), "dur": (int, float), "pid": (int, str), "tid": (int, str)},
    "i": {"ts": (int, float), "pid": (int, str), "tid": (int, str)},
    "s": {"ts": (int, float), "id": (int, str), "pid": (int, str), "tid": (int, str)},
    "f": {"ts": (int, float), "id": (int, str), "pid": (int, str), "tid": (int, str)},
    "M": {"pid": (int, str), "args": dict},
}
"""Of the trace-event format that Perfetto and Chrome read: what each phase must have."""


def test_a_trace_follows_the_trace_event_format(run):
    for path in (run / "traces").glob("*/*.pt.trace.json.gz"):
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        assert {event["ph"] for event in events} <= EVENT_FIELDS.keys()
        for event in events:
            assert isinstance(event["name"], str)
            for name, kinds in EVENT_FIELDS[event["ph"]].items():
                assert isinstance(event[name], kinds), event
        marks = {e["name"] for e in events if e["name"].startswith("ProfilerStep#")}
        assert marks in (
            {"ProfilerStep#5", "ProfilerStep#6"},
            {f"ProfilerStep#{NAN_STEP + 2}", f"ProfilerStep#{NAN_STEP + 3}"},
        )


# --- meshscope run around torchrun ----------------------------------------------------------------

ASKED = "triggered,ranks=all,signal,anomaly,cooldown=20,cooldown_s=0,limit=2"
LAST_ANOMALY_STEP = 75


@dataclass(frozen=True)
class AskedRun:
    """A job that was asked for traces while it ran, and has ended."""

    run_dir: Path
    exit_code: int
    output: str
    trigger_output: str

    @property
    def attempt(self) -> Attempt:
        return open_run(self.run_dir).last_attempt

    def windows(self, rank: int) -> list[TraceWindow]:
        return [w for w in windows_of(self.attempt) if w.rank == rank]


def wait_for(job: subprocess.Popen, run_dir: Path, is_there: Callable[[Attempt], bool]) -> None:
    """Until the run shows something; the job must live that long."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        assert job.poll() is None, "the job ended early"
        with contextlib.suppress(RunError):  # no rank has written anything yet
            if is_there(open_run(run_dir).last_attempt):
                return
        time.sleep(0.3)
    raise AssertionError("what the test waits for did not come")


def has_reached(step: int) -> Callable[[Attempt], bool]:
    return lambda attempt: all(len(one.read("steps")["step"]) > step for one in attempt)


def count_traces(reason: str, number: int) -> Callable[[Attempt], bool]:
    def is_there(attempt: Attempt) -> bool:
        return sum(reason in w.reason for w in windows_of(attempt) if w.path) >= number

    return is_there


def ask_for_traces(folder: Path) -> AskedRun:
    """Starts the job, lets it meet its anomalies, then asks by signal, command and file."""
    run_dir, stop_file = folder / "run", folder / "stop"
    options = ["--run-dir", str(run_dir), "--trace-windows", ASKED, "--no-progress"]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", str(PROGRAM), str(stop_file)]
    command = [sys.executable, "-m", "meshscope", "run", *options, "--", *torchrun]
    with (
        open(folder / "output", "w+", encoding="utf-8") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT) as job,
    ):
        try:
            wait_for(job, run_dir, has_reached(LAST_ANOMALY_STEP))
            header = open_run(run_dir).last_attempt.ranks[0].header
            os.kill(int(str(header["pid"])), signal.SIGUSR2)
            wait_for(job, run_dir, count_traces("signal", 1))
            asked = ["trigger", str(run_dir), "--steps", "2", "--ranks", "all"]
            trigger_output = CliRunner().invoke(main, asked).output
            wait_for(job, run_dir, count_traces("trigger", 2))
            (run_dir / "trigger").write_bytes(b"")
            wait_for(job, run_dir, count_traces("trigger", 4))
            stop_file.touch()
            exit_code = job.wait(TIMEOUT_S)
        finally:
            job.terminate()
        output.seek(0)
        return AskedRun(run_dir, exit_code, output.read(), trigger_output)


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> AskedRun:
    """Again, up to three times, when another step was slow: others may have taken the cores."""
    for attempt in range(3):
        done = ask_for_traces(tmp_path_factory.mktemp(f"asked{attempt}"))
        slow = [w.reason.split(" took")[0] for w in done.windows(0) if "median" in w.reason]
        if set(slow) <= {"step 16", "step 34", "step 70"}:  # 16 would be ours
            break
    return done


def test_training_goes_on_while_one_rank_is_traced(asked):
    assert asked.exit_code == 0, asked.output
    numbers = [recording.read("steps")["step"].tolist() for recording in asked.attempt]
    assert numbers[0] == numbers[1] == list(range(len(numbers[0])))
    assert all(recording.closing["num_errors"] == 0 for recording in asked.attempt)


def test_a_lost_loss_is_traced_where_it_is_known_until_the_limit(asked):
    """Again when 20 steps have passed since step 18, the last that the first window disturbed."""
    found = [(w.reason, w.first_step) for w in asked.windows(1) if "loss" in w.reason]
    assert found == [
        ("loss is nan, seen at step 15", 17),
        ("loss is nan, seen at step 39", 41),
    ]


def test_slow_steps_are_traced_but_none_that_a_window_made_slow(asked):
    """34 and 70, not 46: of the cool-down; not 16, in which rank 1 set its profiler up. All of them
    are in the cool-down of rank 1 or past its limit."""
    found = [w for w in asked.windows(0) if "median" in w.reason]
    assert [w.reason.split(" took")[0] for w in found] == ["step 34", "step 70"]
    assert [(w.first_step, w.last_step) for w in found] == [(36, 36), (72, 72)]
    assert not [w for w in asked.windows(1) if "median" in w.reason]


def test_a_signal_is_for_the_rank_that_gets_it(asked):
    (window,) = [w for w in asked.windows(0) if "signal" in w.reason]
    assert window.path is not None
    assert not [w for w in asked.windows(1) if "signal" in w.reason]


def test_files_ask_all_ranks_and_the_command_names_the_steps(asked):
    first_step = int(re.search(r"from step (\d+) on", asked.trigger_output)[1])
    for rank in (0, 1):
        named, touched = [w for w in asked.windows(rank) if w.reason == "a trigger file"]
        assert (named.first_step, named.last_step) == (first_step, first_step + 1)
        assert touched.first_step == touched.last_step > named.last_step


def test_the_cap_ends_windows_on_every_rank(asked):
    for recording in asked.attempt:
        scheduled = [w for w in asked.windows(recording.rank) if w.reason == "the schedule"]
        assert len(scheduled) == 1
        assert scheduled[0].path is not None
        notes = [str(line["text"]) for line in recording.health if line["where"] == "profiling"]
        assert any("more than the cap of 100" in note for note in notes)
