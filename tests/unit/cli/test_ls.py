import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from builders import START_UNIX_NS, Faults, flip_byte, make_run
from meshscope.cli import main
from meshscope.core.layout import Layout


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def invoke(*arguments):
    return CliRunner().invoke(main, ["ls", *map(str, arguments)])


def test_runs_are_listed_with_when_ranks_steps_and_state(tmp_path):
    make_run(tmp_path / "good", layout=Layout(dp=2), num_steps=7)
    make_run(tmp_path / "deep" / "er" / "killed", num_steps=5, faults=Faults(killed={0: 3}))
    make_run(tmp_path / "short", layout=Layout(dp=3), faults=Faults(missing=frozenset({1})))
    (tmp_path / "bad" / "rank00000").mkdir(parents=True)
    lines = invoke(tmp_path).stdout.splitlines()
    assert lines[0].split() == [
        "RUN", "ID", "STARTED", "RANKS", "STEPS", "PACE", "GOODPUT", "RANK-H", "STATE",
    ]  # fmt: skip
    rows = {line.split()[0].removeprefix(f"{tmp_path}/"): line for line in lines[1:]}
    assert list(rows) == ["bad", "deep/er/killed", "good", "short"]
    assert "unreadable: " in rows["bad"]
    # 7 steps of 100 ms and 1 ms between; 500 ms before, 10 ms after: 1,216 ms on 2 ranks.
    assert rows["good"].split()[2:] == [
        "2025-11-15", "09:46:40", "UTC", "2", "7", "9.9/s", "58", "%", "0.000676", "finished",
    ]  # fmt: skip
    assert rows["deep/er/killed"].split()[5:7] == ["1", "3"]
    assert rows["deep/er/killed"].endswith("still running or killed")
    assert rows["short"].split()[5:7] == ["2/3", "5"]
    assert rows["short"].endswith("finished, 1 missing")


PROGRAM = """
import signal, sys, meshscope
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
recorder = meshscope.start(sys.argv[1], provenance=False)
with recorder.step():
    pass
{end}
"""


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("raise ValueError('no: more')", "ended with ValueError"),
        ("signal.raise_signal(signal.SIGINT)", "interrupted"),
        ("sys.exit(0)", "finished"),
    ],
)
def test_how_a_run_ended_is_said(tmp_path, end, state):
    code = PROGRAM.format(end=end)
    subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=False, capture_output=True)
    (found,) = json.loads(invoke(tmp_path, "--json").stdout)["runs"]
    assert found["state"] == state


def test_the_list_as_json(tmp_path):
    make_run(tmp_path / "good", num_steps=7)
    (found,) = json.loads(invoke(tmp_path, "--json").stdout)["runs"]
    assert (found["num_steps"], found["state"]) == (7, "finished")
    assert found["run_id"]


def test_no_run_is_said(tmp_path):
    result = invoke(tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no run at or below" in result.stderr
    assert json.loads(invoke(tmp_path, "--json").stdout)["runs"] == []


def test_a_folder_that_is_not_there(tmp_path):
    assert invoke(tmp_path / "nowhere").exit_code == 3


def test_a_rank_without_a_header_does_not_hide_when_the_run_began(tmp_path):
    make_run(tmp_path / "run", layout=Layout(dp=2))
    journal = tmp_path / "run" / "rank00001" / "attempt000" / "journal.jsonl"
    flip_byte(journal, journal.read_bytes().index(b'"header"'))
    (found,) = json.loads(invoke(tmp_path, "--json").stdout)["runs"]
    assert found["started_unix_ns"] == START_UNIX_NS
    assert (found["num_ranks"], found["num_attempts"]) == (2, 1)


def test_a_foreign_manifest_hides_nothing_below_it(tmp_path):
    make_run(tmp_path / "theirs" / "runs" / "ours", num_steps=7)
    (tmp_path / "theirs" / "run.json").write_text('{"tool": "another"}', encoding="utf-8")
    lines = invoke(tmp_path).stdout.splitlines()[1:]
    rows = {line.split()[0].removeprefix(f"{tmp_path}/"): line for line in lines}
    assert list(rows) == ["theirs", "theirs/runs/ours"]
    assert "unreadable: " in rows["theirs"]
    assert "finished" in rows["theirs/runs/ours"]
    report = CliRunner().invoke(main, ["report", str(tmp_path / "theirs")])
    assert "7 steps on 1 rank" in report.stdout
