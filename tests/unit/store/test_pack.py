"""All tables of a rank in one file: which extents are whose, as it grows and when it is damaged."""

import os
from pathlib import Path

import pytest

from builders import make_writer, put_step, table_path
from meshscope.store.read.columns import ProblemKind, read_table_file
from meshscope.store.read.files import ByteFile, list_tables, read_file
from meshscope.store.read.run import open_run
from meshscope.store.schema import TABLES
from meshscope.store.write import pack
from meshscope.store.write.pack import (
    FIRST_EXTENT,
    PACK_NAME,
    PackedTable,
    PackIndex,
    PackWriter,
    extent_of,
)
from meshscope.store.write.table_file import HEADER_BYTES, STATUS_OFFSET, TableWriter, unpack_slot

NUM_RECORDS = 70_000
"""4.3 MiB: three directory pages and more."""


def fill(path: Path, count: int, *, mapped: bool = True) -> dict[str, TableWriter]:
    """Two tables that grow in turn, one three times as fast."""
    writer = PackWriter(path, {"rank": 0}, mapped=mapped)
    tables = {
        name: TableWriter(PackedTable(writer, name), TABLES[name], {"rank": 0})
        for name in ("steps", "scalars")
    }
    for number in range(count):
        tables["scalars"].put(64, number, number, 0, -1, 0, 0)
        if number % 3 == 0:
            tables["steps"].put(number, number, number + 1, 1, -1, 0, 0)
    for table in tables.values():
        table.flush()
    return tables


def read_steps(path: Path, name: str) -> list[int]:
    pack._kept.clear()
    read = read_table_file(path / f"{name}.tbl", TABLES[name], 0)
    return read.columns["step"].tolist()


def find_problems(path: Path) -> list[str]:
    with ByteFile(path) as file:
        return [text for _, text in file.find_problems()]


def test_extents_grow_to_a_window_and_leave_no_byte_out() -> None:
    offset, sizes = 0, []
    while offset < 4 << 16:
        begin, end = extent_of(offset)
        assert begin == offset
        assert {extent_of(at) for at in (begin, begin + 1, end - 1)} == {(begin, end)}
        sizes.append(end - begin >> 10)
        offset = end
    assert sizes == [8, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("mapped", [True, False])
def test_tables_that_grow_in_turn_are_told_apart_over_many_directory_pages(
    tmp_path: Path, mapped: bool
) -> None:
    path = tmp_path / PACK_NAME
    tables = fill(path, NUM_RECORDS, mapped=mapped)
    expected = {"scalars": [*range(NUM_RECORDS)], "steps": [*range(0, NUM_RECORDS, 3)]}
    assert {name: read_steps(path, name) for name in expected} == expected
    for table in tables.values():
        table.close()
    assert {name: read_steps(path, name) for name in expected} == expected
    assert find_problems(path) == []


def test_a_directory_is_read_on_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / PACK_NAME
    writer = PackWriter(path, {}, mapped=True)
    places = [PackedTable(writer, name) for name in ("steps", "spans")]
    for place in places:
        place.create(lambda sink: sink.encode().ljust(HEADER_BYTES, b"\0"))
    index = PackIndex()
    for size in range(0, 6 << 20, 1 << 16):
        for place in places:
            place.grow(size, size)
        index.read(writer.fd)
        whole = PackIndex()
        whole.read(writer.fd)
        assert index == whole
        assert [sum(n for _, n, _ in one) for one in index.extents.values()] == [
            extent_of(size)[1]
        ] * 2


def test_a_table_that_grows_while_it_is_read_is_not_taken_for_cut(tmp_path: Path) -> None:
    path = tmp_path / PACK_NAME
    table = fill(path, 100)["scalars"]
    with ByteFile(path / "scalars.tbl") as file:
        for number in range(100, 5000):
            table.put(64, number, number, 0, -1, 0, 0)
        data = file.read_all()
    status = unpack_slot(data, STATUS_OFFSET)
    assert status is not None
    assert status[2] == len(data)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("entry", [0, 5, 31, 40])
def test_one_copy_of_an_entry_is_enough(tmp_path: Path, entry: int, copy: int) -> None:
    path = tmp_path / PACK_NAME
    fill(path, NUM_RECORDS)
    damage_entry(path, entry, [copy])
    assert read_steps(path, "scalars") == [*range(NUM_RECORDS)]
    assert read_steps(path, "steps") == [*range(0, NUM_RECORDS, 3)]
    assert find_problems(path) == ["an entry of the directory does not match its checksum"]


def damage_entry(path: Path, entry: int, copies: list[int]) -> None:
    data = bytearray(path.read_bytes())
    page = HEADER_BYTES
    for _ in range(entry // 32):
        page = int.from_bytes(data[page + 4096 - 64 + 40 :][:8], "little")
    for copy in copies:
        data[page + entry % 32 * 128 + copy * 64 + 20] ^= 0x10
    path.write_bytes(data)


def test_an_extent_whose_entry_is_lost_costs_its_records_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / PACK_NAME
    tables = fill(path, NUM_RECORDS)
    for table in tables.values():
        table.close()
    damage_entry(path, 25, [0, 1])
    lost = set(range(NUM_RECORDS)) - set(read_steps(path, "scalars"))
    lost_steps = set(range(0, NUM_RECORDS, 3)) - set(read_steps(path, "steps"))
    assert bool(lost) != bool(lost_steps)
    assert len(lost or lost_steps) == 1024
    assert find_problems(path)


def test_a_lost_page_of_the_directory_is_told(tmp_path: Path) -> None:
    path = tmp_path / PACK_NAME
    fill(path, NUM_RECORDS)
    damage_entry(path, 31, [0, 1])
    assert len(read_steps(path, "scalars")) < NUM_RECORDS
    assert any("next page is not known" in text for text in find_problems(path))


def test_who_was_interrupted_before_it_knew_of_its_extent_is_given_it_again(tmp_path: Path) -> None:
    """Control-C while a table grows: an extent added twice would hide the records of one."""
    path = tmp_path / PACK_NAME
    writer = pack.PackWriter(path, {}, mapped=True)
    first = writer.add("steps", 0, 8192)
    assert writer.add("steps", 0, 8192) == first
    places = {first, writer.add("spans", 0, 8192), writer.add("steps", 8192, 8192)}
    assert len(places) == 3
    assert writer.sizes == {"steps": 16384, "spans": 8192}
    writer.close()
    with path.open("rb") as file:
        index = pack.find_index(path, file.fileno())[0]
    assert index.problems == []
    assert {name: own.end for name, own in index.extents.items()} == writer.sizes


def test_an_extent_that_was_not_named_before_a_kill_means_nothing(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in range(10):
        put_step(writer, step, 100 * step, 100 * step + 90)
    with (writer.directory / PACK_NAME).open("ab") as file:
        file.write(b"\x55" * 5000)
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert recording.read("steps")["step"].tolist() == [*range(10)]
    assert recording.problems == []


def test_damage_of_the_pack_itself_is_a_problem_of_its_rank(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in range(10):
        put_step(writer, step, 100 * step, 100 * step + 90)
    writer.close(end_host_mono_ns=1000)
    path = writer.directory / PACK_NAME
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert recording.read("steps")["step"].tolist() == [*range(10)]
    recording.read("spans")
    assert [(p.kind, p.path, p.offset) for p in recording.problems] == [
        (ProblemKind.DAMAGED, path, 0)
    ]


def test_tables_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    put_step(writer, 0, 100, 190)
    place = PackedTable(writer._pack, "of-tomorrow")
    place.create(lambda sink: bytes(HEADER_BYTES))
    writer.close(end_host_mono_ns=1000)
    recording = open_run(tmp_path).last_attempt.ranks[0]
    assert recording.read("steps")["step"].tolist() == [0]
    assert recording.problems == []
    assert "of-tomorrow" in list_tables(writer.directory / PACK_NAME)


def test_a_rank_has_three_files_whatever_it_records(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for name in TABLES:
        writer.table(name).put(1, 2, 3, 4, 5, 6, 7)
    assert sorted(os.listdir(writer.directory)) == ["journal.jsonl", PACK_NAME]
    assert {*list_tables(writer.directory / PACK_NAME)} == {*TABLES}
    for name in TABLES:
        assert len(read_file(table_path(writer.directory, name))) == 8192
    assert (writer.directory / PACK_NAME).stat().st_size == FIRST_EXTENT + 8192 * len(TABLES)
