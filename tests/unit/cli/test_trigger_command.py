"""`meshscope trigger`: what it writes, and when it refuses."""

import json
from pathlib import Path

import pytest

from builders import MS, SECOND, make_writer, put_step
from command_line import invoke
from meshscope.capture.profiling.window_request import parse_request


def make_job(
    path: Path, *, step_ns: int, num_steps: int = 5, listens: bool = True, ended: bool = False
) -> Path:
    writer = make_writer(path)
    for step in range(num_steps):
        put_step(writer, step, step * step_ns + 1, (step + 1) * step_ns)
    if listens:
        writer.journal.write("update", profiling="triggered")
    if ended:
        writer.close(end_host_mono_ns=num_steps * step_ns)
    else:
        writer.flush()
    return path


def trigger(*arguments: str):
    return invoke("trigger", *arguments)


@pytest.mark.parametrize(("step_ns", "first_step"), [(10 * MS, 255), (SECOND, 8), (60 * SECOND, 8)])
def test_ranks_are_told_steps_that_none_has_begun(tmp_path, step_ns, first_step):
    run = make_job(tmp_path / "run", step_ns=step_ns)
    done = trigger(str(run), "--steps", "2", "--ranks", "0,3")
    assert done.exit_code == 0, done.output
    written = (run / "trigger").read_bytes()
    assert json.loads(written) == {"steps": 2, "first_step": first_step, "ranks": "0,3"}
    assert parse_request(written).first_step == first_step
    assert f"from step {first_step} on" in done.output
    assert not list(run.glob(".trigger*"))


def test_without_a_pace_ranks_begin_when_they_see_it(tmp_path):
    run = make_job(tmp_path / "run", step_ns=SECOND, num_steps=1)
    assert trigger(str(run)).exit_code == 0
    assert json.loads((run / "trigger").read_bytes()) == {"steps": 1}


@pytest.mark.parametrize(
    ("job", "arguments", "said"),
    [
        ({"listens": False}, [], "looks for triggers"),
        ({"ended": True}, [], "has ended"),
        ({}, ["--ranks", "first"], "chooses no ranks"),
        ({}, ["--steps", "0"], "0"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, job, arguments, said):
    run = make_job(tmp_path / "run", step_ns=SECOND, **job)
    done = trigger(str(run), *arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert not (run / "trigger").exists()


@pytest.mark.parametrize("command", [["run", "--trace-windows", "fast", "--", "true"]])
def test_a_wrong_text_is_said_before_anything_starts(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    done = invoke(*command)
    assert done.exit_code == 2
    assert "'fast' is no setting" in done.output
    assert list(tmp_path.iterdir()) == []
