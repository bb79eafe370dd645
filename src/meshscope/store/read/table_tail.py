"""New records of a table that is being written, each given once.

A live file ends in zeros: space is made some records at a time, and filled from the front. Each
look reads from the first slot that was not yet given; what is new is checked against its checksum.
A slot that is empty or torn while a later one is whole was drawn by a thread that has not written
it yet: it is waited for during some looks, and passed over then. Where the table goes on in a new
file, what is left of the one before is given first.
"""

from functools import cache
from pathlib import Path

import numpy as np

from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import Columns, check_records, decode_words, empty_columns
from meshscope.store.read.files import ByteFile
from meshscope.store.read.table_files import read_segment, sealed_path
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, Table
from meshscope.store.write.table_file import HEADER_BYTES, VOID_WORD

_CHUNK_RECORDS = 64
"""Read at first: 4 KiB. More where all of them are new."""
_MAX_CHUNK_RECORDS = 16_384
_MAX_LOOKS = 3
"""At an unfinished record before a finished one."""


@cache
def _empty(table: Table) -> Columns:
    return empty_columns(table)


class TableTail:
    """Where one table file was read to."""

    __slots__ = ("_file", "_next", "_num_looks", "_path", "_segment", "_table")

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table
        self._file: object = 0
        self._segment = 0
        self._next = 0
        self._num_looks = 0

    def read(self) -> Columns:
        """The rows that were added since the last call; none where there is no file."""
        try:
            with ByteFile(self._path) as file:
                parts = self._change_file(file) if self._file != file.identity else []
                parts += self._read_parts(file)
        except OSError:  # not made yet, or just being moved away: there will be a next look
            parts = []
        if not any(map(len, parts)):  # most looks: decoding nothing takes longer than reading it
            return _empty(self._table)
        return decode_words(self._table, np.concatenate(parts))

    def _change_file(self, file: ByteFile) -> list[Int64s]:
        """Another file has the name now. A new copy of the same one is read on; where the table
        goes on in it, this is the rest of the one before."""
        is_first, self._file = self._file == 0, file.identity
        before, self._segment = self._segment, read_segment(file)
        if is_first or before == self._segment:
            return []
        try:
            with ByteFile(sealed_path(self._path)) as sealed:
                return self._read_parts(sealed) if read_segment(sealed) == before else []
        except OSError:  # thinned by now
            return []
        finally:
            self._next = self._num_looks = 0

    def _read_parts(self, file: ByteFile) -> list[Int64s]:
        parts: list[Int64s] = []
        num_records = _CHUNK_RECORDS
        while True:
            offset = HEADER_BYTES + self._next * RECORD_BYTES
            data = file.read(offset, num_records * RECORD_BYTES)
            if data.count(0) == len(data):  # most looks: nothing was written since the last one
                self._num_looks = 0
                return parts
            count = len(data) // RECORD_BYTES
            words = np.frombuffer(data, dtype="<i8", count=count * NUM_WORDS)
            words = words.reshape(-1, NUM_WORDS)
            good = check_records(words, first=self._next)
            num_taken, is_passed_over = self._count_taken(good)
            taken = words[:num_taken][good[:num_taken]]
            parts.append(taken[~(taken[:, 1:] == VOID_WORD).all(axis=1)])
            self._next += num_taken
            if num_taken < num_records and not is_passed_over:
                return parts
            num_records = min(num_records * 4, _MAX_CHUNK_RECORDS)

    def _count_taken(self, good: Bools) -> tuple[int, bool]:
        """Slots that are done with, and whether they are unfinished ones that are given up."""
        first_bad = len(good) if good.all() else int(np.argmin(good))
        later = np.flatnonzero(good[first_bad:])
        if first_bad or not len(later):
            self._num_looks = 0
            return first_bad, False
        self._num_looks += 1
        if self._num_looks < _MAX_LOOKS:
            return 0, False
        self._num_looks = 0
        return int(later[0]), True
