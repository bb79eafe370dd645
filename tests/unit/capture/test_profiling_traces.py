"""Trace windows around real steps, with torch's own profiler; one process for all scenarios."""

import gzip
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from ended_process import run_process
from meshscope.store.read.run import open_run
from meshscope.store.read.trace_windows import TraceWindow, windows_of

pytest.importorskip("torch", reason="windows are torch.profiler's")

PROGRAM = Path(__file__).with_name("profiling_program.py")
TENSORBOARD = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(\.gz)?$")
"""How its profiler plugin finds worker and span in a file's name."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for attempt in range(3):
        folder = tmp_path_factory.mktemp(f"windows{attempt}")
        done = run_process([sys.executable, str(PROGRAM), str(folder)], timeout=120)
        # Torch's profiler itself has crashed here (2.13); see `capture/profiling/torch_window`.
        if done.returncode != -signal.SIGSEGV:
            break
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder


def windows(runs: Path, name: str) -> tuple[TraceWindow, ...]:
    return windows_of(open_run(runs / name).last_attempt)


def steps(runs: Path, name: str) -> list[tuple[int | None, int | None]]:
    return [(window.first_step, window.last_step) for window in windows(runs, name)]


def marks(path: Path) -> list[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return sorted(name for name in names if name.startswith("ProfilerStep#"))


def notes(runs: Path, name: str) -> list[str]:
    recording = open_run(runs / name).last_attempt.ranks[0]
    return [str(line["text"]) for line in recording.health if line["where"] == "profiling"]


def test_windows_follow_the_schedule_counted_from_the_first_step(runs):
    found = windows(runs, "schedule")
    assert [(w.disturbed_from_step, w.disturbed_to_step) for w in found] == [(103, 106), (107, 110)]
    assert [(w.first_step, w.last_step) for w in found] == [(104, 105), (108, 109)]
    assert {w.reason for w in found} == {"the schedule"}
    assert all(w.end_host_mono_ns > w.begin_host_mono_ns for w in found)


def test_a_trace_holds_its_steps_and_not_its_warmup(runs):
    first, second = windows(runs, "schedule")
    assert marks(runs / "schedule" / first.path) == ["ProfilerStep#104", "ProfilerStep#105"]
    assert marks(runs / "schedule" / second.path) == ["ProfilerStep#108", "ProfilerStep#109"]


def test_traces_have_the_names_others_look_for(runs):
    for window in windows(runs, "schedule"):
        path = runs / "schedule" / window.path
        assert path.parent.relative_to(runs / "schedule") == Path("traces/rank0_dp0_tp0_pp0")
        match = TENSORBOARD.match(path.name)
        assert match is not None
        assert match[2] is not None
        assert path.stat().st_size == window.num_bytes
    assert not list(runs.glob("*/traces/*/.*")), "nothing half written stays"


def test_a_window_without_warmup_and_without_gzip(runs):
    (window,) = windows(runs, "no_warmup")
    assert (window.disturbed_from_step, window.first_step, window.last_step) == (1, 1, 1)
    assert window.path.endswith(".pt.trace.json")
    assert marks(runs / "no_warmup" / window.path) == ["ProfilerStep#1"]


def test_inferred_steps_are_traced_as_well(runs):
    (window,) = windows(runs, "inferred")
    assert (window.first_step, window.last_step) == (3, 4)
    path = runs / "inferred" / window.path
    assert marks(path) == ["ProfilerStep#3", "ProfilerStep#4"]
    with gzip.open(path) as file:
        operators = [e for e in json.load(file)["traceEvents"] if e.get("name") == "aten::addmm"]
    assert len(operators) == 2, "one forward in each traced step"
    assert all("Input Dims" in operator["args"] for operator in operators)


def test_the_first_trace_over_the_cap_is_the_last(runs):
    assert steps(runs, "capped") == [(3, 3)]
    (note,) = notes(runs, "capped")
    assert "more than the cap of 100" in note


def test_a_window_that_the_end_cuts_short_is_written(runs):
    (window,) = windows(runs, "cut_short")
    assert (window.first_step, window.last_step) == (2, 5)
    assert window.path is not None
    assert "cut short" in window.reason


def test_a_rank_that_was_not_chosen_takes_no_trace(runs):
    assert windows(runs, "not_chosen") == ()
    assert not (runs / "not_chosen" / "traces").exists()


def test_a_loss_that_is_not_finite_asks_once_until_the_cooldown(runs):
    assert steps(runs, "nan") == [(5, 5)]
    assert windows(runs, "nan")[0].reason == "loss is nan, seen at step 3"


def test_a_trigger_file_names_the_steps(runs):
    assert steps(runs, "asked") == [(6, 7)]
    assert windows(runs, "asked")[0].reason == "a trigger file"


def test_the_program_asks_itself(runs):
    assert steps(runs, "program") == [(4, 4)]


def test_a_killed_rank_tells_which_steps_were_disturbed(runs):
    (window,) = windows(runs, "killed")
    assert (window.disturbed_from_step, window.disturbed_to_step) == (1, None)
    assert window.path is None


def test_the_programs_own_profiler_goes_first(runs):
    assert windows(runs, "other") == ()
    assert any("a torch.profiler of its own" in note for note in notes(runs, "other"))


def test_an_error_of_the_profiler_is_written_down_and_training_goes_on(runs):
    assert windows(runs, "failing") == ()
    recording = open_run(runs / "failing").last_attempt.ranks[0]
    assert len(recording.read("steps")["step"]) == 8
    assert any("ModuleNotFoundError" in note for note in notes(runs, "failing"))
    assert any("no further trace windows" in note for note in notes(runs, "failing"))
