import os
import subprocess
import sys

import click
import pytest

from builders import make_run
from command_line import invoke
from ended_process import run_process
from meshscope import __version__
from meshscope.cli import COMMANDS, main
from meshscope.errors import LayoutError, RunEmpty, UsageError
from screens import find_widest

BOOT = [sys.executable, "-m", "meshscope"]


def run(*arguments, **env):
    return subprocess.run(
        [*BOOT, *map(str, arguments)],
        capture_output=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", **env},
    )


@pytest.fixture
def failing(monkeypatch):
    """Makes `meshscope report` raise what a test asks for."""

    def arrange(error: BaseException) -> None:
        @click.command("report")
        def command() -> None:
            raise error

        monkeypatch.setattr(main, "get_command", lambda ctx, name: command)

    return arrange


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (UsageError("bad flag"), 2, "meshscope: bad flag\n"),
        (LayoutError("bad layout"), 2, "meshscope: bad layout\n"),
        (RunEmpty("no\nrank"), 3, "meshscope: no rank\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (
            ModuleNotFoundError("No module named 'torch.x'", name="torch.x"),
            4,
            "meshscope: this command needs torch, which is not installed; "
            "pip install 'meshscope[torch]'\n",
        ),
    ],
)
def test_errors_become_one_line_and_an_exit_code(failing, error, exit_code, text):
    failing(error)
    result = invoke("report")
    assert (result.exit_code, result.stderr) == (exit_code, text)


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), ModuleNotFoundError(name="mine")])
def test_what_nobody_expected_keeps_its_traceback(failing, error):
    failing(error)
    result = invoke("report")
    assert result.exception is error


@pytest.mark.parametrize("arguments", [["nonsense"], ["report"], ["report", "x", "--warmup", "-1"]])
def test_usage_errors_exit_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


def test_version():
    assert invoke("--version").stdout == f"meshscope, version {__version__}\n"


def test_help_lists_every_command_and_the_exit_codes():
    text = invoke("--help").stdout
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in text
        assert line in text
    for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "130 "):
        assert f"    {code}" in text


@pytest.mark.parametrize("command", ["import meshscope", "from meshscope.cli import main"])
def test_imports_stay_light(command):
    code = f"{command}\nimport sys\nprint(sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = run_process([sys.executable, "-c", code], check=True)
    loaded = set(eval(done.stdout))
    assert not loaded & {"torch", "duckdb", "numpy", "rich", "msgspec"}


def test_help_imports_little_and_nothing_heavy():
    done = run_process(
        [sys.executable, "-X", "importtime", "-m", "meshscope", "--help"], check=True
    )
    rows = [line.split("|") for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {row[2].strip() for row in rows[1:]}
    assert not names & {"torch", "duckdb", "numpy", "rich", "msgspec"}
    # What it costs is the number of modules, whatever else the machine is doing.
    assert len(names) < 160


def test_a_reader_that_goes_away_is_not_talked_about(tmp_path):
    make_run(tmp_path / "run", world_size=40, num_steps=1)
    process = subprocess.Popen(
        [*BOOT, "report", str(tmp_path / "run"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (141, b"")


def test_colour_follows_the_terminal_and_the_environment(tmp_path):
    make_run(tmp_path, num_steps=2)
    assert b"\x1b[" not in run("report", tmp_path).stdout
    assert b"\x1b[" in run("report", tmp_path, FORCE_COLOR="1").stdout
    assert b"\x1b[" not in run("report", tmp_path, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert b"\x1b[" not in run("--no-color", "report", tmp_path, FORCE_COLOR="1").stdout


def test_width_and_encoding_follow_the_environment(tmp_path):
    make_run(tmp_path, num_steps=2)
    narrow = run("report", tmp_path, COLUMNS="60").stdout.decode()
    assert find_widest(narrow, but=tmp_path) <= 60
    assert run("report", tmp_path, PYTHONIOENCODING="ascii").stdout.isascii()
