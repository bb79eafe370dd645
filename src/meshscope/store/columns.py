"""Decodes table files into numpy columns, checking every record.

What does not match its checksum is left out and named with file and offset; the rest is read. A
stretch of bad records after the last good one is a torn tail (a killed writer); before it, damage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshscope.errors import SchemaTooNew
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, SCHEMA_VERSION, Column, Table
from meshscope.store.table_file import (
    CHECK_SALT,
    CLOSE_OFFSET,
    HEADER_BYTES,
    STATUS_OFFSET,
    WINDOW_BYTES,
    unpack_header,
    unpack_slot,
)

Columns = dict[str, npt.NDArray[np.generic]]
"""Column name to array, all of one length, as named by a `Table`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something the reader left out or could not find, with the place."""

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


def empty_columns(table: Table) -> Columns:
    """The table's columns with no rows."""
    return decode_words(table, np.empty((0, NUM_WORDS), dtype=np.int64))


def decode_words(table: Table, words: npt.NDArray[np.int64]) -> Columns:
    """Splits checked records (n × 8 words) into the table's columns."""
    return {column.name: _decode_column(column, words) for column in table.columns}


def _decode_column(column: Column, words: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    word = words[:, column.word]
    if column.is_float:
        return np.ascontiguousarray(word).view(np.float64)
    if column.width == 64:
        return np.ascontiguousarray(word)
    dtype = np.uint8 if column.width <= 8 else np.uint16 if column.width <= 16 else np.uint32
    return ((word >> column.shift) & ((1 << column.width) - 1)).astype(dtype)


def check_records(words: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which records match their checksum. The salt makes an unwritten (zero) record fail."""
    unsigned = words.view(np.uint64)
    total = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(CHECK_SALT)
    for word in range(1, NUM_WORDS):
        total += unsigned[:, word]
    good: npt.NDArray[np.bool_] = total == unsigned[:, 0]
    return good


def read_table_file(path: Path, table: Table, rank: int) -> TableRead:
    """Reads one table file. Raises OSError if it cannot be opened, SchemaTooNew if it is later."""
    read = _decode_file(path, table, rank, path.read_bytes())
    if read.is_closed or not any(p.kind is ProblemKind.DAMAGED for p in read.problems):
        return read
    # A file that is being written can show a record before the one in front of it; a second look
    # tells that from damage.
    return _decode_file(path, table, rank, path.read_bytes())


def _decode_file(path: Path, table: Table, rank: int, data: bytes) -> TableRead:
    page = data[:HEADER_BYTES]
    try:
        fields = unpack_header(page)
        closed = unpack_slot(page, CLOSE_OFFSET)
        status = unpack_slot(page, STATUS_OFFSET)
    except ValueError as error:
        problem = Problem(
            kind=ProblemKind.UNREADABLE, text=str(error), rank=rank, path=path, offset=0
        )
        if len(data) < HEADER_BYTES:
            return TableRead(columns=empty_columns(table), problems=(problem,), is_closed=False)
        # The records carry their own checksums, so a bad header page does not condemn them.
        words, problems = _good_records(path, rank, data, closed=None, is_mapped=False)
        return TableRead(
            columns=decode_words(table, words), problems=(problem, *problems), is_closed=False
        )
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise SchemaTooNew(schema_too_new_text(path, version))
    is_mapped = fields.get("sink") == "mapped"
    words, problems = _good_records(path, rank, data, closed=closed, is_mapped=is_mapped)
    num_dropped = max(status[0] if status else 0, closed[1] if closed else 0)
    if num_dropped:
        problems.append(
            Problem(
                kind=ProblemKind.DROPPED,
                rank=rank,
                path=path,
                num_records=num_dropped,
                text=f"{num_dropped} {table.name} were not stored for lack of space",
            )
        )
    return TableRead(
        columns=decode_words(table, words), problems=tuple(problems), is_closed=closed is not None
    )


def schema_too_new_text(path: Path, version: int) -> str:
    """The one sentence for a run from the future."""
    return (
        f"{path} has schema version {version}, this meshscope reads up to {SCHEMA_VERSION}; "
        "upgrade meshscope to read it"
    )


def _good_records(
    path: Path, rank: int, data: bytes, *, closed: tuple[int, ...] | None, is_mapped: bool
) -> tuple[npt.NDArray[np.int64], list[Problem]]:
    num_whole = (len(data) - HEADER_BYTES) // RECORD_BYTES
    words = np.frombuffer(data, dtype="<i8", offset=HEADER_BYTES, count=num_whole * NUM_WORDS)
    words = words.reshape(-1, NUM_WORDS)[: None if closed is None else closed[0]]
    good = check_records(words)
    num_used = len(good)
    if closed is None:  # the writer may have left zeros, or half a record, behind the last one
        num_used = len(good) - int(np.argmax(good[::-1])) if good.any() else 0
    problems = _size_problems(path, rank, data, closed=closed, is_mapped=is_mapped)
    problems += _damage_problems(path, rank, good[:num_used])
    end = HEADER_BYTES + num_used * RECORD_BYTES
    if data[end:].strip(b"\0") and not any(problem.offset == end for problem in problems):
        problems.append(_tail_problem(path, rank, end, is_closed=closed is not None))
    is_whole = bool(good[:num_used].all())
    return (words[:num_used] if is_whole else words[:num_used][good[:num_used]]), problems


def _tail_problem(path: Path, rank: int, offset: int, *, is_closed: bool) -> Problem:
    if is_closed:
        text = f"the bytes from {offset} on, behind the last record, are not empty"
    else:
        text = f"the record at byte {offset} was not finished and is left out"
    kind = ProblemKind.DAMAGED if is_closed else ProblemKind.TORN_TAIL
    return Problem(kind=kind, rank=rank, path=path, offset=offset, text=text)


def _size_problems(
    path: Path, rank: int, data: bytes, *, closed: tuple[int, ...] | None, is_mapped: bool
) -> list[Problem]:
    """A file that is shorter than its writer left it."""
    size = len(data)
    if closed is not None:
        expected = HEADER_BYTES + closed[0] * RECORD_BYTES
        if size >= expected:
            return []
        text = f"the file ends at byte {size}, its {closed[0]} records need {expected}"
        lost = closed[0] - max(0, size - HEADER_BYTES) // RECORD_BYTES
        return [
            Problem(
                kind=ProblemKind.CUT,
                rank=rank,
                path=path,
                offset=size,
                num_records=lost,
                text=text,
            )
        ]
    whole = size == HEADER_BYTES or size % WINDOW_BYTES == 0
    if is_mapped and not whole:
        text = f"the file was cut: {size} bytes is not a whole number of {WINDOW_BYTES}-byte blocks"
        return [Problem(kind=ProblemKind.CUT, rank=rank, path=path, offset=size, text=text)]
    if not is_mapped and (size - HEADER_BYTES) % RECORD_BYTES:
        offset = size - (size - HEADER_BYTES) % RECORD_BYTES
        text = f"the record at byte {offset} was not finished and is left out"
        return [Problem(kind=ProblemKind.TORN_TAIL, rank=rank, path=path, offset=offset, text=text)]
    return []


def _damage_problems(path: Path, rank: int, good: npt.NDArray[np.bool_]) -> list[Problem]:
    """One problem per run of bad records."""
    bad = np.flatnonzero(~good)
    if not len(bad):
        return []
    runs = np.split(bad, np.flatnonzero(np.diff(bad) > 1) + 1)
    return [
        Problem(
            kind=ProblemKind.DAMAGED,
            rank=rank,
            path=path,
            offset=HEADER_BYTES + int(run[0]) * RECORD_BYTES,
            num_records=len(run),
            text=f"{len(run)} record(s) from byte {HEADER_BYTES + int(run[0]) * RECORD_BYTES} do "
            "not match their checksum and are left out",
        )
        for run in runs
    ]


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
