"""`meshscope doctor`: what it says of an installation, and that nothing stops it."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from command_line import invoke
from meshscope.report.doctor import installed, machine, run_folder
from meshscope.report.doctor.check import State
from meshscope.report.doctor.examine import examine
from meshscope.store.write import writer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder first on the path, for distributions that are not installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # by tests before

    def add_torch(version, toolkit=""):
        (tmp_path / "torch").mkdir()
        text = f"from typing import Optional\n__version__ = '{version}'\n{toolkit}\n"
        (tmp_path / "torch" / "version.py").write_text(text)
        (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")

    return add_torch


def find(examination, name):
    return next(check for check in examination.checks if check.name == name)


def test_the_text_has_every_check_and_the_document_the_same(tmp_path):
    shown = invoke("doctor", tmp_path)
    written = invoke("doctor", tmp_path, "--json")
    assert (shown.exit_code, written.exit_code) == (0, 0)
    document = json.loads(written.stdout)
    assert (document["document"], document["can_record"], document["can_read"]) == (
        "meshscope-doctor",
        True,
        True,
    )
    names = [c["name"] for part in ("installed", "recorded", "folder") for c in document[part]]
    assert all(name in shown.stdout for name in names)
    assert shown.stdout.startswith(f"meshscope {document['meshscope_version']} on Python")


def test_packages_that_read_are_those_the_project_depends_on():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {entry.partition(">")[0].strip() for entry in project["dependencies"]}
    assert names == set(installed.READER_PACKAGES)


def test_a_missing_package_has_its_command_and_the_exit_code(monkeypatch, tmp_path):
    known = installed.find_version
    monkeypatch.setattr(
        installed, "find_version", lambda name: None if name == "duckdb" else known(name)
    )
    shown = invoke("doctor", tmp_path)
    assert shown.exit_code == 1
    assert "recording works, reading does not work" in shown.stdout
    assert "→ pip install duckdb" in shown.stdout


@pytest.mark.parametrize(
    ("version", "toolkit", "state", "words"),
    [
        ("2.10.1+cu128", "cuda: Optional[str] = '12.8'", State.LIMITED, "older than 2.11"),
        ("2.11.0+cu128", "cuda: Optional[str] = '12.8'", State.OK, "built for CUDA 12.8"),
        ("2.12.0", "cuda: Optional[str] = None\nhip: Optional[str] = '7.0'", State.OK, "ROCm 7.0"),
        ("3.0.0a0+git1", "cuda: Optional[str] = None", State.OK, "built for CPUs"),
    ],
)
def test_torch_is_judged_by_its_files_and_not_imported(site, version, toolkit, state, words):
    site(version, toolkit)
    check = installed.check_torch()
    assert (check.state, version in check.found, words in check.found) == (state, True, True)


def test_without_torch_runs_can_still_be_read(monkeypatch):
    monkeypatch.setattr(installed, "_find_torch_version", lambda: None)
    check = installed.check_torch()
    assert (check.state, check.command) == (State.ABSENT, "pip install 'meshscope[torch]'")


def test_compiled_parts_that_are_switched_off_say_so(monkeypatch):
    monkeypatch.setenv("MESHSCOPE_NATIVE", "0")
    check = installed.check_compiled_recorder()
    assert (check.state, check.command) == (State.LIMITED, "unset MESHSCOPE_NATIVE")


def test_a_library_of_another_machine_has_its_reason(monkeypatch, tmp_path):
    broken = tmp_path / "_scanner_native.so"
    broken.write_bytes(b"\x7fELF of something else")
    monkeypatch.setattr(installed, "_PACKAGE", tmp_path)
    monkeypatch.setattr(installed, "COMPILED_LIBRARIES", (broken.name,))
    assert "does not load" in installed.check_compiled_readers().found
    broken.unlink()
    assert "was not compiled" in installed.check_compiled_readers().found


def test_a_file_in_place_of_the_folder_breaks_recording(tmp_path):
    (tmp_path / "runs").write_text("")
    examination = examine(tmp_path / "runs" / "more")
    assert (examination.can_record, examination.can_read) == (False, True)
    assert "is not a folder" in find(examination, "permission").found
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_a_network_file_system_is_limited(monkeypatch, tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text("1 1 0:1 / / rw - nfs4 server:/home rw\n")
    monkeypatch.setattr(run_folder, "is_mappable", lambda path: writer.is_mappable(path, mounts))
    monkeypatch.setattr(
        run_folder, "file_system_type", lambda path: writer.file_system_type(path, mounts)
    )
    check = run_folder.check_file_system(tmp_path)
    assert (check.state, check.found) == (State.LIMITED, "nfs4: records are appended every 0.2 s")


def test_a_check_that_raises_stops_no_other(monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("\x1b[31mbroken")

    monkeypatch.setattr(run_folder.shutil, "disk_usage", fail)
    shown = invoke("doctor", tmp_path)
    assert shown.exit_code == 0
    assert "cannot be found out: RuntimeError:" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_a_python_that_does_not_start_is_not_reached(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert machine.check_launcher().state == State.LIMITED
    assert machine.ask_torch().state == State.LIMITED
