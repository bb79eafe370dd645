"""Decodes table files into numpy columns, checking every record.

What does not match its checksum is left out and named with file and offset; the rest is read. A
range of bad records after the last good one is a torn tail (a killed writer); before it, damage,
except for a few empty slots: those were drawn by threads that were killed before they wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshscope.errors import SchemaTooNew
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.files import read_file
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, SCHEMA_VERSION, Column, Table
from meshscope.store.write.table_file import (
    CHECK_SALT,
    CLOSE_OFFSET,
    HEADER_BYTES,
    STATUS_OFFSET,
    VOID_WORD,
    unpack_header,
    unpack_slot,
)

Columns = dict[str, npt.NDArray[np.generic]]
"""Column name to array, all of one length, as named by a `Table`."""


_MAX_UNFINISHED = 64
"""Empty slots in a row before written ones that threads of a killed process may have left."""
MAX_DAMAGE_LISTED = 64
"""Damaged ranges of one file that are listed one by one."""
_NUM_LOOKS = 3
"""How often a file that is being written is read before its errors count as damage."""
_CHUNK_RECORDS = 4096
"""Records checked at a time: 256 KiB, so that they are still in the cache for the next word."""


class ProblemKind(StrEnum):
    """What can be wrong with recorded data."""

    TORN_TAIL = "torn-tail"
    DAMAGED = "damaged"
    CUT = "cut"
    DROPPED = "dropped"
    UNREADABLE = "unreadable"
    MISSING_RANK = "missing-rank"
    SHORT_RANK = "short-rank"
    DUPLICATE_RANK = "duplicate-rank"
    MISPLACED = "misplaced"
    OVERLAPPING_STEPS = "overlapping-steps"
    """Steps of one rank at one time: nothing is damaged, but a time line has room for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something the reader left out or could not find, and where."""

    kind: ProblemKind
    text: str
    rank: int | None = None
    path: Path | None = None
    offset: int | None = None
    num_records: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """One table file as read: its columns, what is wrong with it, whether it was closed."""

    columns: Columns
    problems: tuple[Problem, ...]
    is_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """Where bytes come from, for the problems found in them."""

    path: Path
    rank: int

    def problem(
        self,
        kind: ProblemKind,
        text: str,
        offset: int | None = None,
        num_records: int | None = None,
    ) -> Problem:
        return Problem(
            kind=kind,
            text=text,
            rank=self.rank,
            path=self.path,
            offset=offset,
            num_records=num_records,
        )


def empty_columns(table: Table) -> Columns:
    """The table's columns with no rows."""
    return decode_words(table, np.empty((0, NUM_WORDS), dtype=np.int64))


def decode_words(table: Table, words: Int64s) -> Columns:
    """Splits checked records (n × 8 words) into the table's columns."""
    return {column.name: _decode_column(column, words) for column in table.columns}


def _decode_column(column: Column, words: Int64s) -> npt.NDArray[np.generic]:
    word = words[:, column.word]
    if column.is_float:
        return np.ascontiguousarray(word).view(np.float64)
    if column.width == 64:
        return np.ascontiguousarray(word)
    if column.is_stored_plus_one:
        return ((word >> column.shift) & ((1 << column.width) - 1)) - 1
    if column.width in (8, 16, 32) and column.shift % column.width == 0:
        # The field is a whole element of the record seen as narrower numbers: no arithmetic.
        narrow = words.view(f"<u{column.width // 8}")
        index = (column.word * 64 + column.shift) // column.width
        return np.ascontiguousarray(narrow[:, index])
    dtype = np.uint8 if column.width <= 8 else np.uint16 if column.width <= 16 else np.uint32
    return ((word >> column.shift) & ((1 << column.width) - 1)).astype(dtype)


def encode_words(table: Table, columns: Columns) -> Int64s:
    """Columns as records (n × 8 words) without their checksums: the inverse of `decode_words`."""
    words = np.zeros((len(columns[table.columns[0].name]), NUM_WORDS), dtype=np.int64)
    for column in table.columns:
        values = columns[column.name]
        if column.is_float:
            words[:, column.word] = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
            continue
        stored = values.astype(np.int64) + (1 if column.is_stored_plus_one else 0)
        if column.width < 64:
            stored = (stored & ((1 << column.width) - 1)) << column.shift
        words[:, column.word] |= stored
    return words


def check_records(words: Int64s, *, first: int = 0) -> npt.NDArray[np.bool_]:
    """Which records match their checksum. The salt makes an unwritten (zero) record fail.

    `first`: the index in the file of the first of them.
    """
    unsigned = words.view(np.uint64)
    good = np.empty(len(words), dtype=np.bool_)
    salts = np.arange(1, min(len(words), _CHUNK_RECORDS) + 1, dtype=np.uint64)
    salts *= np.uint64(CHECK_SALT)
    for start in range(0, len(words), _CHUNK_RECORDS):
        chunk = unsigned[start : start + _CHUNK_RECORDS]
        total = salts[: len(chunk)] + np.uint64((first + start) * CHECK_SALT % (1 << 64))
        for word in range(1, NUM_WORDS):
            total += chunk[:, word]
        np.equal(total, chunk[:, 0], out=good[start : start + len(chunk)])
    return good


def read_table_file(path: Path, table: Table, rank: int) -> TableRead:
    """Reads one table file. Raises OSError if it cannot be opened, SchemaTooNew if it is later."""
    read, num_used = decode_table(read_file(path), table, path=path, rank=rank)
    for _ in range(_NUM_LOOKS - 1):
        if read.is_closed or not read.problems:
            break
        # While a file is read it may be written: pages that were read later show more than those
        # read before, and several threads do not finish in order. What stood before the last
        # record of the first look is complete by the second, unless it really is not.
        data = read_file(path)
        read, _ = decode_table(data, table, path=path, rank=rank, max_records=num_used)
    return read


def decode_table(
    data: bytes, table: Table, *, path: Path, rank: int, max_records: int | None = None
) -> tuple[TableRead, int]:
    """A table file's bytes as columns, and how many slots the records take up.

    `max_records` leaves out what a writer may have added behind that many.
    """
    file = _File(path=path, rank=rank)
    if len(data) < HEADER_BYTES:
        text = f"the file ends after {len(data)} bytes, inside its {HEADER_BYTES}-byte header"
        problem = file.problem(ProblemKind.UNREADABLE, text, offset=len(data))
        empty = TableRead(columns=empty_columns(table), problems=(problem,), is_closed=False)
        return empty, 0
    page = data[:HEADER_BYTES]
    problems = _check_header(file, page, table)
    if any(problem.kind is ProblemKind.MISPLACED for problem in problems):
        return TableRead(columns=empty_columns(table), problems=tuple(problems), is_closed=False), 0
    status = _read_slot(file, page, STATUS_OFFSET, problems)
    closed = _read_slot(file, page, CLOSE_OFFSET, problems)
    if closed is not None and not 0 <= closed[0] < 1 << 56:
        problems.append(file.problem(ProblemKind.DAMAGED, "impossible count", CLOSE_OFFSET))
        closed = None
    words, num_used = _good_records(
        file, data, problems, closed=closed, status=status, max_records=max_records
    )
    problems += _find_dropped(file, table, closed=closed, status=status)
    read = TableRead(
        columns=decode_words(table, words), problems=tuple(problems), is_closed=closed is not None
    )
    return read, num_used


def find_losses(page: bytes, size: int, table: Table, *, path: Path, rank: int) -> list[Problem]:
    """What the first page of a file says of records that were not stored, or are no longer there.

    For files that are read in part: `size` is that of the whole file.
    """
    file, ignored = _File(path=path, rank=rank), list[Problem]()
    if len(page) < HEADER_BYTES:
        return []
    status = _read_slot(file, page, STATUS_OFFSET, ignored)
    closed = _read_slot(file, page, CLOSE_OFFSET, ignored)
    if closed is not None and not 0 <= closed[0] < 1 << 56:
        closed = None
    cut = _find_cut(file, size, closed=closed, status=status)
    dropped = _find_dropped(file, table, closed=closed, status=status)
    return dropped if cut is None else [cut, *dropped]


def _find_dropped(
    file: _File, table: Table, *, closed: tuple[int, ...] | None, status: tuple[int, ...] | None
) -> list[Problem]:
    num_dropped = max(status[0] if status else 0, closed[1] if closed else 0)
    if num_dropped <= 0:
        return []
    text = f"{num_dropped} {table.name} were not stored: no room, or not valid numbers"
    return [file.problem(ProblemKind.DROPPED, text, num_records=num_dropped)]


def _check_header(file: _File, page: bytes, table: Table) -> list[Problem]:
    """What is wrong with the header; the records carry their own checksums and are still read."""
    try:
        fields = unpack_header(page)
    except ValueError as error:
        return [file.problem(ProblemKind.UNREADABLE, f"the header: {error}", offset=0)]
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SchemaTooNew(schema_too_new_text(file.path, version))
    if fields.get("table") != table.name:
        text = f"the file holds the table {str(fields.get('table'))[:80]!r}, not {table.name!r}"
        return [file.problem(ProblemKind.MISPLACED, text, offset=0)]
    if fields.get("rank") != file.rank:
        text = f"the file is of rank {str(fields.get('rank'))[:20]}, the folder of {file.rank}"
        return [file.problem(ProblemKind.MISPLACED, text, offset=0)]
    return []


def _read_slot(
    file: _File, page: bytes, offset: int, problems: list[Problem]
) -> tuple[int, ...] | None:
    try:
        return unpack_slot(page, offset)
    except ValueError as error:
        # Written whole while the process lives; a kill in the middle is possible, if unlikely.
        problems.append(file.problem(ProblemKind.TORN_TAIL, str(error), offset=offset))
        return None


def schema_too_new_text(path: Path, version: int) -> str:
    """The one sentence for a run from the future."""
    return (
        f"{path} has schema version {version}, this meshscope reads up to {SCHEMA_VERSION}; "
        "upgrade meshscope to read it"
    )


def _good_records(
    file: _File,
    data: bytes,
    problems: list[Problem],
    *,
    closed: tuple[int, ...] | None,
    status: tuple[int, ...] | None,
    max_records: int | None,
) -> tuple[Int64s, int]:
    num_whole = (len(data) - HEADER_BYTES) // RECORD_BYTES
    words = np.frombuffer(data, dtype="<i8", offset=HEADER_BYTES, count=num_whole * NUM_WORDS)
    words = words.reshape(-1, NUM_WORDS)[: closed[0] if closed else max_records]
    good = check_records(words)
    is_whole = bool(good.all())
    num_used = len(good)
    if closed is None and not is_whole:
        # The writer may have left zeros, or half a record, behind the last one.
        num_used = len(good) - int(np.argmax(good[::-1])) if good.any() else 0
        words, good = words[:num_used], good[:num_used]
        is_whole = bool(good.all())
    end = HEADER_BYTES + num_used * RECORD_BYTES
    size_problem = _find_cut(file, len(data), closed=closed, status=status)
    if size_problem is not None:
        problems.append(size_problem)
    if not is_whole:
        problems += _damage_problems(file, words, good, is_closed=closed is not None)
        words = words[good]
    is_limited = max_records is not None and num_used >= max_records
    if not is_limited and _has_content(data, end):
        problems.append(_tail_problem(file, end, is_closed=closed is not None))
    is_void = words[:, 1] == VOID_WORD
    if is_void.any():
        words = words[~(words[:, 1:] == VOID_WORD).all(axis=1)]
    return words, num_used


def _has_content(data: bytes, start: int) -> bool:
    tail = memoryview(data)[start:]
    return bool(np.frombuffer(tail, dtype=np.uint8).any()) if len(tail) else False


def _tail_problem(file: _File, offset: int, *, is_closed: bool) -> Problem:
    if is_closed:
        text = f"the bytes from {offset} on, behind the last record, are not empty"
        return file.problem(ProblemKind.DAMAGED, text, offset)
    text = f"the record at byte {offset} was not finished and is left out"
    return file.problem(ProblemKind.TORN_TAIL, text, offset)


def _find_cut(
    file: _File, size: int, *, closed: tuple[int, ...] | None, status: tuple[int, ...] | None
) -> Problem | None:
    """A file that is shorter than its writer left it."""
    if closed is not None:
        expected = HEADER_BYTES + closed[0] * RECORD_BYTES
        text = f"the file ends at byte {size}, its {closed[0]} records need {expected}"
        num_lost: int | None = closed[0] - (size - HEADER_BYTES) // RECORD_BYTES
    else:
        expected = status[2] if status else 0
        text = (
            f"the file ends at byte {size}, it was {expected} bytes long: it was cut, or (on a "
            "network file system) the rest has not arrived"
        )
        num_lost = None
    if size >= expected:
        return None
    return file.problem(ProblemKind.CUT, text, offset=size, num_records=num_lost)


def _damage_problems(
    file: _File, words: Int64s, good: npt.NDArray[np.bool_], *, is_closed: bool
) -> list[Problem]:
    """One problem per range of bad records, the first ones one by one."""
    bad = np.flatnonzero(~good)
    ranges = np.split(bad, np.flatnonzero(np.diff(bad) > 1) + 1)
    problems = []
    for bad_range in ranges[:MAX_DAMAGE_LISTED]:
        first, count = int(bad_range[0]), len(bad_range)
        offset = HEADER_BYTES + first * RECORD_BYTES
        is_empty = not words[first : first + count].any()
        if is_empty and not is_closed and count <= _MAX_UNFINISHED:
            kind = ProblemKind.TORN_TAIL
            text = f"{count} record(s) at byte {offset} were not finished and are left out"
        else:
            kind = ProblemKind.DAMAGED
            text = (
                f"{count} record(s) from byte {offset} do not match their checksum and are left out"
            )
        problems.append(file.problem(kind, text, offset, count))
    rest = ranges[MAX_DAMAGE_LISTED:]
    if rest:
        count = sum(len(bad_range) for bad_range in rest)
        text = f"{count} more record(s) in {len(rest)} places do not match their checksum"
        offset = HEADER_BYTES + int(rest[0][0]) * RECORD_BYTES
        problems.append(file.problem(ProblemKind.DAMAGED, text, offset, count))
    return problems


def concatenate_columns(table: Table, parts: list[Columns]) -> Columns:
    """The rows of several reads, one after another."""
    if not parts:
        return empty_columns(table)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def select_rows(
    columns: Mapping[str, npt.NDArray[np.generic]],
    rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64],
) -> Columns:
    """The rows picked by a mask or an index array."""
    return {name: array[rows] for name, array in columns.items()}


def int64_column(columns: Columns, name: str) -> Int64s:
    """A 64-bit column of a table, typed."""
    return columns[name].astype(np.int64, copy=False)
