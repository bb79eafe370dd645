"""A rank's journal: lines survive, damage is placed, anything can be written."""

import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from meshscope.store.write.journal import JournalDamage, JournalWriter, pack_line, read_journal


def write_three(path: Path) -> bytes:
    writer = JournalWriter(path)
    writer.write("header", rank=3)
    writer.write("name", id=64, text="loss")
    writer.write("close")
    writer.close()
    return path.read_bytes()


def test_lines_are_read_back_in_order(tmp_path: Path) -> None:
    lines, damage = read_journal(write_three(tmp_path / "journal.jsonl"))
    assert lines == [
        {"kind": "header", "rank": 3},
        {"kind": "name", "id": 64, "text": "loss"},
        {"kind": "close"},
    ]
    assert damage == []


def test_a_journal_cut_between_two_lines_says_so(tmp_path: Path) -> None:
    data = write_three(tmp_path / "journal.jsonl")
    size = data.rindex(b"\n", 0, len(data) - 1) + 1
    lines, damage = read_journal(data[:size])
    assert [line["kind"] for line in lines] == ["header", "name"]
    assert damage == [JournalDamage(size, is_tail=True, is_cut=True)]


def test_a_torn_last_line_is_the_tail_and_a_bad_one_before_it_is_not(tmp_path: Path) -> None:
    data = write_three(tmp_path / "journal.jsonl")
    start = data.index(b'{"kind":"name"') - 9
    lines, damage = read_journal(data[:start] + data[start:].replace(b"loss", b"lost"))
    assert [line["kind"] for line in lines] == ["header", "close"]
    assert damage == [JournalDamage(start, is_tail=False)]
    _, damage = read_journal(data[:-5])
    assert damage[-1].is_tail


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        "\ud800 lone surrogate",
        "line\nbreak \x1b[31m\0",
        {1: "integer key", (2, 3): "tuple key"},
        object(),
        10**5000,
        b"bytes",
        {"set"},
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_makes_a_line_that_reads(tmp_path: Path, value: object) -> None:
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    writer.write("header")
    writer.write("update", value=value)
    writer.write("close")
    lines, damage = read_journal(path.read_bytes())
    assert [line["kind"] for line in lines] == ["header", "update", "close"]
    assert damage == []


def test_a_value_that_holds_itself_makes_a_line_that_reads(tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    path = tmp_path / "journal.jsonl"
    JournalWriter(path).write("update", value=endless)
    assert [line["kind"] for line in read_journal(path.read_bytes())[0]] == ["update"]


def test_hostile_lines_with_right_checksums_are_left_out() -> None:
    hostile = [b"[" * 100_000, b'{"kind":7}', b"null", b'{"kind":"' + b"9" * 10, b"\xff\xfe"]
    data = b"".join(map(pack_line, [*hostile, b'{"kind":"header"}']))
    lines, damage = read_journal(data)
    assert lines == [{"kind": "header"}]
    assert len(damage) == len(hostile)


def test_threads_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    threads = [
        threading.Thread(target=lambda: [writer.write("x", n=n) for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines, damage = read_journal(path.read_bytes())
    assert len(lines) == 800
    assert damage == []


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    """In a child: the limit is the process's."""
    path = tmp_path / "journal.jsonl"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            writer = JournalWriter(path)
            writer.write("header")
            limit = path.stat().st_size + 30
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                writer.write("update", text="x" * 100)
            except OSError:
                status = 0
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            writer.write("close")
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    lines, damage = read_journal(path.read_bytes())
    assert [line["kind"] for line in lines] == ["header", "close"]
    assert damage == []


@pytest.mark.parametrize("errors", [{}, {"site": {"count": 1, "first": "x" * 3000}}])
def test_the_closing_line_has_room_on_a_full_disk(tmp_path: Path, errors: object) -> None:
    """Without it a rank that ended in order looks killed. In a child, as above."""
    path = tmp_path / "journal.jsonl"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            writer = JournalWriter(path)
            writer.write("header", rank=3)
            writer.write("name", id=64, text="loss")
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, resource.RLIM_INFINITY))
            writer.write_last("close", last_step=7, errors=errors)
            status = int(path.stat().st_size != size)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    lines, damage = read_journal(path.read_bytes())
    assert {line["kind"]: line for line in lines}.keys() == {"header", "name", "close"}
    (close,) = [line for line in lines if line["kind"] == "close"]
    assert close["last_step"] == 7
    assert close.get("errors", {}) in ({}, errors)
    assert damage == []
