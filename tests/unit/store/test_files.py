"""The door to bytes: regular files only, and no more of them than a table can have."""

import os
import time
from pathlib import Path

import pytest

from builders import make_run
from command_line import invoke
from meshscope.store.read.files import MAX_FILE_BYTES, open_text, read_file, read_file_end
from meshscope.store.read.run import open_run
from meshscope.store.read.tail import read_last_records
from meshscope.store.write.pack import PACK_NAME


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        for read in (read_file, open_text):
            with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
                read(path)
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_last_records(path, 1)


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    assert read_file(path) == b"abcdef"
    assert read_file(path, 4) == b"abcd"
    assert read_file(path, 10) == b"abcdef"
    assert read_file_end(path, 2) == b"ef"
    assert read_file_end(path, 10) == b"abcdef"


@pytest.mark.parametrize("size_bytes", [MAX_FILE_BYTES + 1, 1 << 30])
def test_a_file_that_is_mostly_a_hole_is_not_read(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "hole"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    for read in (read_file, read_last_records, read_file_end):
        with pytest.raises(OSError, match=f"of its {size_bytes} bytes only 0 are on disk"):
            read(path, 1)


@pytest.mark.parametrize("size_bytes", [8 << 30, 1 << 30])
def test_a_table_that_is_a_hole_is_a_problem_of_its_rank(tmp_path: Path, size_bytes: int) -> None:
    run_dir = make_run(tmp_path / "run", world_size=2)
    table = run_dir / "rank00001" / "attempt000" / PACK_NAME
    with table.open("r+b") as file:
        file.truncate(size_bytes)
    start = time.monotonic()
    result = invoke("report", run_dir, "--all")
    assert isinstance(result.exception, SystemExit | None)
    assert "are on disk" in result.output
    assert time.monotonic() - start < 30


def test_a_table_that_is_no_file_is_a_problem_of_its_rank(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", world_size=2)
    pipe = run_dir / "rank00001" / "attempt000" / PACK_NAME
    pipe.unlink()
    os.mkfifo(pipe)
    attempt = open_run(run_dir).last_attempt
    assert len(attempt.ranks[1].read("steps")["step"]) == 0
    assert [p.text for p in attempt.ranks[1].problems] == [
        "cannot be read: it is not a regular file"
    ]
    assert len(attempt.ranks[0].read("steps")["step"]) > 0
