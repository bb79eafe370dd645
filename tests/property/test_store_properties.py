"""Properties of the run store: write → read is the identity; no changed or cut byte goes unseen."""

import re
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshscope.errors import RunError
from meshscope.store.read.columns import (
    Columns,
    Problem,
    TableRead,
    decode_table,
)
from meshscope.store.read.files import ByteFile, read_file
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.schema import TABLES, Column, Table
from meshscope.store.write import pack
from meshscope.store.write.journal import read_journal
from meshscope.store.write.manifest import unseal
from meshscope.store.write.pack import PACK_NAME
from meshscope.store.write.writer import RankWriter

INT64 = st.integers(-(2**63), 2**63 - 1)
WORDS = st.tuples(*[INT64] * 7).filter(
    lambda words: words[0] != -(2**63)
)  # void, see docs/store.md
READ_AS_WRITTEN = sorted(set(TABLES) - {"steps", "aggregates"})
"""Of `aggregates` readers take the rounds whose thinned file is in place: see test_thinning.py."""
HEADER: dict[str, object] = {
    "rank": 0,
    "world_size": 1,
    "start_unix_ns": 1_700_000_000_000_000_000,
    "start_host_mono_ns": 1_000,
}


def write_run(
    directory: Path,
    tables: dict[str, list[tuple[int, ...]]],
    *,
    mapped: bool,
    is_closed: bool,
    names: tuple[str, ...] = (),
) -> RankWriter:
    writer = RankWriter(directory, 0, header=HEADER, mapped=mapped)
    for name in names:
        writer.name_id(name)
    for table, records in tables.items():
        for words in records:
            writer.table(table).put(*words)
    writer.flush()
    if is_closed:
        writer.close(end_host_mono_ns=2_000)
    return writer


def expected_column(column: Column, records: list[tuple[int, ...]]) -> list[int]:
    """The bits of a column, computed one record at a time and without numpy."""
    mask = (1 << column.width) - 1
    values = [(words[column.word - 1] >> column.shift) & mask for words in records]
    if column.width == 64:
        return [value - (1 << 64) if value >> 63 else value for value in values]
    return [value - column.is_stored_plus_one for value in values]


def assert_columns(table: Table, columns: Columns, records: list[tuple[int, ...]]) -> None:
    for column in table.columns:
        found = columns[column.name]
        bits = found.view(np.int64) if column.is_float else found
        assert bits.tolist() == expected_column(column, records), column.name


@settings(max_examples=40, deadline=None)
@given(
    tables=st.dictionaries(
        st.sampled_from(READ_AS_WRITTEN), st.lists(WORDS, max_size=20), max_size=4
    ),
    steps=st.lists(WORDS, max_size=20, unique_by=lambda words: words[0]),
    names=st.lists(st.text(max_size=20), max_size=5),
    mapped=st.booleans(),
    is_closed=st.booleans(),
)
def test_what_is_written_is_read_back(
    tables: dict[str, list[tuple[int, ...]]],
    steps: list[tuple[int, ...]],
    names: list[str],
    mapped: bool,
    is_closed: bool,
) -> None:
    tables = {**tables, "steps": sorted(steps)}
    with tempfile.TemporaryDirectory() as directory:
        writer = write_run(
            Path(directory), tables, mapped=mapped, is_closed=is_closed, names=tuple(names)
        )
        run = open_run(directory)
        recording = run.last_attempt.ranks[0]
        for name, records in tables.items():
            assert_columns(TABLES[name], recording.read_raw(name), records)
        assert recording.problems == []
        assert run.last_attempt.problems == ()
        assert [recording.names[writer.name_id(name)] for name in names] == names
        assert (recording.closing is not None) is is_closed


# --- every byte of a small run ----------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[(m, c) for m in (True, False) for c in (True, False)],
    ids=["mapped-open", "mapped-closed", "append-open", "append-closed"],
)
def small_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    mapped, is_open = request.param
    directory = tmp_path_factory.mktemp("small")
    records = [(number, 10 + number, 20 + number, 1, -1, -1, 0) for number in range(20)]
    write_run(
        directory,
        {"steps": records, "scalars": records},
        mapped=mapped,
        is_closed=not is_open,
        names=("loss", "µ\n\x1b[31m"),
    )
    return directory, not is_open


def read_again(path: Path, data: bytes) -> tuple[list[object], int]:
    """Problems found in a file's bytes, and how many records or lines are still read."""
    if path.name == "run.json":
        try:
            document, is_intact = unseal(data)
        except ValueError as error:
            return [error], 0
        return ([] if is_intact else ["changed"]), len(document)
    if path.name == "journal.jsonl":
        lines, damage = read_journal(data)
        return ([*damage] if lines else [*damage, "no header"]), len(lines)
    pack._kept.clear()  # else its directory is known from before
    path.write_bytes(data)
    with ByteFile(path) as file:
        problems: list[object] = [*file.find_problems()]
    num_read = 0
    for name in ("steps", "scalars"):
        try:
            table = path / f"{name}.tbl"
            read, _ = decode_table(read_file(table), TABLES[name], path=table, rank=0)
        except FileNotFoundError as error:
            problems.append(error)
            continue
        problems += read.problems
        num_read += len(read.columns["step"])
    return problems, num_read


def run_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def interesting_bytes(data: bytes) -> list[int]:
    """Every byte; of a long stretch of zeros its ends and every 97th."""
    found: set[int] = set()
    for run in re.finditer(rb"\0{200,}|.", data, re.DOTALL):
        first, last = run.span()
        found |= {*range(first, last, 97 if last - first > 1 else 1), last - 1}
    return sorted(found)


def test_every_flipped_byte_is_seen_and_costs_at_most_its_record(
    small_run: tuple[Path, bool],
) -> None:
    num_checked = 0
    for path in run_files(small_run[0]):
        data = path.read_bytes()
        problems, num_read = read_again(path, data)
        assert problems == []
        assert num_read > 0
        for offset in interesting_bytes(data):
            for flip in (0x01, 0x80, 0xFF):
                changed = bytearray(data)
                changed[offset] ^= flip
                problems, num_left = read_again(path, bytes(changed))
                assert problems, f"{path.name}: byte {offset} ^ {flip:#x}"
                if path.name == PACK_NAME:
                    assert num_left >= num_read - 1, f"byte {offset} ^ {flip:#x}"
                elif path.suffix == ".jsonl":
                    assert num_left >= num_read - 2  # a changed newline joins two lines
                num_checked += 1
        path.write_bytes(data)
    assert num_checked > 10_000


def test_every_cut_is_seen_and_costs_only_what_was_behind_it(small_run: tuple[Path, bool]) -> None:
    for path in run_files(small_run[0]):
        data = path.read_bytes()
        for size in interesting_bytes(data):
            problems, num_left = read_again(path, data[:size])
            assert problems, f"{path.name} cut at {size}"
            if path.name == PACK_NAME and size > 8192:
                tables = data.find(b"MSHSCOPE"), data.rfind(b"MSHSCOPE")
                whole = [min(max((size - at - 4096) // 64, 0), 20) for at in tables]
                assert num_left == sum(whole), size
        path.write_bytes(data)


# --- larger runs ------------------------------------------------------------------------------


def make_table_bytes(directory: Path, count: int, *, mapped: bool, is_closed: bool) -> bytes:
    records = [(1, n, 2 * n, 3 * n, -1, 0, 0) for n in range(count)]
    write_run(directory, {"spans": records}, mapped=mapped, is_closed=is_closed)
    return read_file(next(directory.rglob(PACK_NAME)) / "spans.tbl")


@pytest.fixture(scope="module")
def large_tables(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], bytes]:
    return {
        (mapped, is_closed): make_table_bytes(
            tmp_path_factory.mktemp("large"), 5000, mapped=mapped, is_closed=is_closed
        )
        for mapped in (True, False)
        for is_closed in (True, False)
    }


def decode(data: bytes) -> TableRead:
    return decode_table(data, TABLES["spans"], path=Path("spans.tbl"), rank=0)[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), mapped=st.booleans(), is_closed=st.booleans())
def test_a_damaged_middle_is_named_and_the_rest_is_read(
    large_tables: dict[tuple[bool, bool], bytes],
    data: st.DataObject,
    mapped: bool,
    is_closed: bool,
) -> None:
    original = large_tables[mapped, is_closed]
    first = data.draw(st.integers(0, 4990), label="first bad record")
    count = data.draw(st.integers(1, 9), label="bad records")
    start = 4096 + first * 64
    noise = data.draw(st.binary(min_size=count * 64, max_size=count * 64))
    bad = {
        first + i
        for i in range(count)
        if noise[i * 64 : i * 64 + 64] != original[start + i * 64 :][:64]
    }
    changed = original[:start] + noise + original[start + count * 64 :]
    read = decode(changed)
    numbers = read.columns["start_host_mono_ns"].tolist()
    assert numbers == [n for n in range(5000) if n not in bad]
    assert {problem.offset for problem in read.problems} >= ({start} if first in bad else set())
    assert sum(problem.num_records or 0 for problem in read.problems) == len(bad)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), mapped=st.booleans(), is_closed=st.booleans())
def test_a_cut_or_a_flip_anywhere_in_a_larger_file_is_seen(
    large_tables: dict[tuple[bool, bool], bytes],
    data: st.DataObject,
    mapped: bool,
    is_closed: bool,
) -> None:
    original = large_tables[mapped, is_closed]
    offset = data.draw(st.integers(0, len(original) - 1))
    bits = data.draw(st.integers(1, 255))
    end = 4096 + 5000 * 64  # behind it a closed table has zeros up to the end of its last extent
    assert decode(original[: min(offset, end - 1)]).problems
    changed = bytearray(original)
    changed[offset] ^= bits
    assert decode(bytes(changed)).problems


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=9000), name=st.sampled_from(("steps.tbl", PACK_NAME, "now.bin")))
def test_any_bytes_at_all_are_read_without_an_error(content: bytes, name: str) -> None:
    decode(content)
    read_journal(content)
    with tempfile.TemporaryDirectory() as directory:
        attempt = Path(directory) / "rank00000" / "attempt000"
        attempt.mkdir(parents=True)
        (attempt / "journal.jsonl").write_bytes(content)
        (attempt / name).write_bytes(content)
        (Path(directory) / "run.json").write_bytes(content)
        try:
            recording = open_run(directory).last_attempt.ranks[0]
        except RunError:  # an object that is no manifest
            return
        recording.read("steps")
        assert recording.problems


def problems_of(recording: Recording) -> list[Problem]:
    for table in TABLES:
        recording.read(table)
    return recording.problems


@settings(max_examples=25, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.floats(allow_nan=True)), max_size=30),
        min_size=1,
        max_size=4,
    )
)
def test_each_attempt_keeps_its_own_records(parts: list[list[tuple[int, float]]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for index, part in enumerate(parts):
            header = {**HEADER, "launch_id": "job", "restart_count": index}
            writer = RankWriter(Path(directory), 0, header={**header, "start_unix_ns": 10 + index})
            for step, value in part:
                bits = struct.unpack("<q", struct.pack("<d", value))[0]
                writer.table("scalars").put(64, step, 1, bits, -1, 0, 0)
            writer.close(end_host_mono_ns=1_000)
        run = open_run(directory)
        assert len(run.attempts) == len(parts)
        for attempt, part in zip(run.attempts, parts, strict=True):
            columns = attempt.ranks[0].read("scalars")
            assert columns["step"].tolist() == [step for step, _ in part]
            np.testing.assert_array_equal(columns["value"], [value for _, value in part])
            assert problems_of(attempt.ranks[0]) == []
