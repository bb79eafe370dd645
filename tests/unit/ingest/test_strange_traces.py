"""Every strange trace through the commands that read traces: numbers, words, no traceback."""

import errno
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshscope.cli import main
from strange_traces import CASES, Case, Known

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
_MAX_SECONDS = 60


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """What hangs fails instead."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"hangs: more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def find_misses(case: Case, path: Path) -> list[str]:
    """What is not as known."""
    told = invoke("trace", path, "--json", "--no-cache")
    if told.exit_code != case.exit_code:
        return [f"exit {told.exit_code} instead of {case.exit_code}: {told.output[-300:]!r}"]
    screen = invoke("trace", path, "--no-cache")
    misses = _read_as_a_person(case, screen)
    if case.exit_code:
        return misses
    document = json.loads(told.stdout)
    devices = [
        (device, verdict)
        for one, verdict in zip(document["traces"], document["verdicts"], strict=True)
        for device in one["devices"]
    ]
    sources = [one["step_source"] for one in document["traces"] for _ in one["devices"]]
    if len(devices) != len(case.known):
        return [*misses, f"{len(devices)} devices instead of {len(case.known)}"]
    for place, ((device, verdict), source, known) in enumerate(
        zip(devices, sources, case.known, strict=True)
    ):
        found = _compare(device, verdict, source, known)
        misses += [f"device {place}: {text}" for text in found]
    return misses


def _read_as_a_person(case: Case, screen: Result) -> list[str]:
    misses = []
    text = screen.output
    if case.exit_code:
        lines = screen.stderr.splitlines()
        if len(lines) != 1 or not lines[0].startswith("meshscope:") or screen.stdout:
            misses.append(f"not one sentence on stderr: {screen.output!r}")
    misses += [f"{word!r} is not said" for word in case.says if word.lower() not in text.lower()]
    misses += [f"{word!r} gets through" for word in case.never if word in text]
    found = _CONTROLS.search(text)
    if found:
        misses.append(f"{found[0]!r} gets through")
    return misses


def _compare(
    device: dict[str, Any], verdict: dict[str, Any], source: str, known: Known
) -> list[str]:
    time = device["breakdown"]["time"]
    categories = {row["category"]: row["total_ns"] for row in device["categories"]}
    numbers = tuple(one["step"] for one in device["breakdown"]["steps"])
    pairs: list[tuple[str, Any, Any]] = [
        ("step source", known.step_source, source),
        ("steps", known.step_numbers, numbers),
        ("kernels", known.num_kernels, time["num_kernels"]),
        ("collectives", known.num_collectives, time["num_collectives"]),
    ]
    pairs += [
        (part, None if us is None else round(us * 1000), time[f"{part}_ns"])
        for part, us in (
            ("compute", known.compute_us),
            ("communication", known.communication_us),
            ("exposed", known.exposed_us),
            ("exposed_copy", known.exposed_copy_us),
            ("idle", known.idle_us),
        )
    ]
    pairs += [(name, round(us * 1000), categories.get(name)) for name, us in known.categories_us]
    misses = [
        f"{name} {got!r}, not {expected!r}"
        for name, expected, got in pairs
        if expected is not None and got != expected
    ]
    if known.verdicts is not None and verdict.get("cause") not in known.verdicts:
        misses.append(f"verdict {verdict!r}, not of {known.verdicts}")
    return misses


def as_parameter(case: Case) -> Any:
    marks = [pytest.mark.xfail(reason=case.missed, strict=True)] if case.missed else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [as_parameter(case) for case in CASES])
def test_a_strange_trace_is_read_right(tmp_path: Path, case: Case) -> None:
    path = case.write(tmp_path / "given")
    with no_longer_than(_MAX_SECONDS):
        assert find_misses(case, path) == []


READABLE = [one for one in CASES if not one.exit_code and one.is_one_run]


@pytest.mark.parametrize("case", READABLE, ids=[case.name for case in READABLE])
def test_the_other_commands_take_it_too(tmp_path: Path, case: Case) -> None:
    path = case.write(tmp_path / "given")
    page = tmp_path / "page.html"
    table = tmp_path / "kernels.csv"
    with no_longer_than(_MAX_SECONDS):
        for arguments in (
            ("report", path, "--html", page),
            ("report", path, "--json"),
            ("report", path, "--all"),
            ("trace", path, "--against", path, "--no-cache"),
            ("sql", path, "SELECT * FROM trace_kernels"),
            ("export", path, "--table", "trace_kernels", "-o", table),
        ):
            done = invoke(*arguments)
            assert (done.exit_code, done.exception) == (0, None), (arguments[0], done.output)
            assert not _CONTROLS.search(done.output), arguments[0]
    assert "<script>alert(1)" not in page.read_text(encoding="utf-8")
    assert table.stat().st_size


def test_what_changed_is_said_first(tmp_path: Path) -> None:
    """Rank 1 of these computes 140 µs more in a step and waits that much less."""
    by_name = {case.name: case for case in CASES}
    before = by_name["plain"].write(tmp_path / "before")
    late = by_name["a rank that comes late"].write(tmp_path / "now") / "rank1.json"
    same = invoke("trace", before, "--against", before, "--no-cache").output
    other = invoke("trace", late, "--against", before, "--no-cache").output
    assert same.startswith("A device's step takes as long as before (890 µs).\n")
    assert "Most of the difference" not in same
    assert other.startswith("A device's step takes as long as before (890 µs).\n")
    assert "  Most of the difference: compute +140 µs.\n" in other
    server = by_name["a server without marks"].write(tmp_path / "server")
    shown = invoke("trace", late, "--against", server, "--no-cache").output
    assert shown.startswith("A device's step takes 3.3 % less time: 890 µs, 920 µs before.\n")
    assert "  Most of the difference: idle -720 µs.\n" in shown


@pytest.mark.parametrize("command", ["trace", "report", "simulate", "sql", "import"])
def test_a_trace_that_may_not_be_read_is_no_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The tests may run as root, who may read everything: opening it is refused here."""
    path = {case.name: case for case in CASES}["plain"].write(tmp_path)

    def refuse(place: Any, mode: int, **more: Any) -> bool:
        return Path(os.fsdecode(place)) != path and may(place, mode, **more)

    def open_nothing(place: Path, *more: Any, **named: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    may = os.access
    monkeypatch.setattr(os, "access", refuse)
    monkeypatch.setattr("meshscope.ingest.compressed.open_bytes", open_nothing)
    monkeypatch.setattr("meshscope.ingest.kineto.trace_cache.open_bytes", open_nothing)
    more = {"import": ("-o", tmp_path / "run"), "sql": ("SELECT * FROM trace_kernels",)}
    done = invoke(command, path, *more.get(command, ()))
    assert done.exit_code == 3
    assert done.stderr == f"meshscope: {path}: Permission denied\n"
