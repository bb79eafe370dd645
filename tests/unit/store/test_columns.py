"""Decoding table files: places of damage, limits on what is listed, files that are no files."""

from pathlib import Path

import numpy as np
import pytest

from meshscope.errors import SchemaTooNew
from meshscope.store.read.columns import (
    MAX_DAMAGE_LISTED,
    ProblemKind,
    check_records,
    decode_table,
)
from meshscope.store.schema import SCHEMA_VERSION, TABLES
from meshscope.store.write.table_file import CLOSE_OFFSET, pack_header, pack_record, record_check

SPANS = TABLES["spans"]
PATH = Path("spans.tbl")


def table_bytes(count: int, *, is_closed: bool, fields: dict[str, object] | None = None) -> bytes:
    page = bytearray(pack_header(SPANS, {"rank": 0, "sink": "append", **(fields or {})}))
    if is_closed:
        page[CLOSE_OFFSET:] = pack_record(CLOSE_OFFSET, (count, 0, 1, 0, 0, 0, 0))
    return bytes(page) + b"".join(pack_record(n, (1, n, n, n, -1, 0, 0)) for n in range(count))


def test_the_check_of_many_records_is_the_check_of_each() -> None:
    rng = np.random.default_rng(1)
    words = rng.integers(-(2**63), 2**63 - 1, (9000, 8), dtype=np.int64)
    for slot in range(0, 9000, 7):
        check = record_check(slot, tuple(int(word) for word in words[slot, 1:]))
        words[slot, 0] = np.uint64(check).astype(np.int64)
    assert np.flatnonzero(check_records(words)).tolist() == list(range(0, 9000, 7))


def test_damage_in_the_middle_is_named_with_its_offset() -> None:
    data = bytearray(table_bytes(100, is_closed=True))
    data[4096 + 64 * 40 + 3] ^= 0x10
    data[4096 + 64 * 41 + 3] ^= 0x10
    data[4096 + 64 * 90 + 60] ^= 0x10
    read, _ = decode_table(bytes(data), SPANS, path=PATH, rank=0)
    assert [(p.kind, p.path, p.offset, p.num_records) for p in read.problems] == [
        (ProblemKind.DAMAGED, PATH, 4096 + 64 * 40, 2),
        (ProblemKind.DAMAGED, PATH, 4096 + 64 * 90, 1),
    ]
    expected = [n for n in range(100) if n not in (40, 41, 90)]
    assert read.columns["start_host_mono_ns"].tolist() == expected


def test_a_moved_a_repeated_and_a_zeroed_record_are_seen() -> None:
    data = table_bytes(10, is_closed=True)
    records = [data[4096 + 64 * n : 4160 + 64 * n] for n in range(10)]
    for changed in (
        [*records[:3], records[4], records[3], *records[5:]],
        [*records[:3], records[2], *records[4:]],
        [*records[:3], bytes(64), *records[4:]],
    ):
        read, _ = decode_table(data[:4096] + b"".join(changed), SPANS, path=PATH, rank=0)
        assert read.problems[0].offset == 4096 + 64 * 3


def test_empty_slots_of_killed_threads_are_unfinished_and_more_of_them_are_damage() -> None:
    for count, kind in ((3, ProblemKind.TORN_TAIL), (65, ProblemKind.DAMAGED)):
        data = bytearray(table_bytes(100, is_closed=False))
        data[4096 + 640 : 4096 + 640 + 64 * count] = bytes(64 * count)
        read, _ = decode_table(bytes(data), SPANS, path=PATH, rank=0)
        assert [(p.kind, p.num_records) for p in read.problems] == [(kind, count)]
        assert len(read.columns["depth"]) == 100 - count


def test_damage_everywhere_is_listed_up_to_a_limit() -> None:
    data = bytearray(table_bytes(1000, is_closed=True))
    for n in range(0, 1000, 2):
        data[4096 + 64 * n] ^= 1
    read, _ = decode_table(bytes(data), SPANS, path=PATH, rank=0)
    assert len(read.problems) == MAX_DAMAGE_LISTED + 1
    assert sum(p.num_records or 0 for p in read.problems) == 500


@pytest.mark.parametrize("count", [-1, 1 << 60])
def test_an_impossible_count_with_a_right_checksum_is_told(count: int) -> None:
    data = bytearray(table_bytes(10, is_closed=True))
    data[CLOSE_OFFSET:4096] = pack_record(CLOSE_OFFSET, (count, 0, 1, 0, 0, 0, 0))
    read, _ = decode_table(bytes(data), SPANS, path=PATH, rank=0)
    assert read.problems[0].offset == CLOSE_OFFSET
    assert len(read.columns["depth"]) == 10


def test_a_file_of_another_table_gives_no_rows() -> None:
    read, _ = decode_table(table_bytes(5, is_closed=True), TABLES["steps"], path=PATH, rank=0)
    assert [p.kind for p in read.problems] == [ProblemKind.MISPLACED]
    assert len(read.columns["step"]) == 0


def test_a_file_from_the_future_is_refused() -> None:
    data = table_bytes(5, is_closed=True, fields={"schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(SchemaTooNew, match="upgrade meshscope"):
        decode_table(data, SPANS, path=PATH, rank=0)
