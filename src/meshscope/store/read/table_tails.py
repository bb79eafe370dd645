"""New records of one table of many ranks, read together: checking a thousand files one by one takes
longer than reading them. Begins near the ends of the files.

A record that is not written yet ends a rank's part of a look; one that stays unfinished while later
ones are whole is passed over, as in `table_tail`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.files import ByteFile
from meshscope.store.read.table_files import read_segment, sealed_path
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES
from meshscope.store.write.places import WINDOW_BYTES
from meshscope.store.write.table_file import CHECK_SALT, HEADER_BYTES, VOID_WORD

_CHUNK_RECORDS = 128
"""Of one rank at a time; those that have more are read again."""
_FILES_AT_ONCE = 2048
_MAX_LOOKS = 3
_UNWRITTEN = WINDOW_BYTES // RECORD_BYTES


class TableTails:
    """Where the files of one table were read to."""

    def __init__(self, paths: Sequence[Path], *, num_before: int) -> None:
        """Gives at least the last `num_before` records that a file has at the first look."""
        self._paths = paths
        self._num_before = num_before
        self._next = np.full(len(paths), -1, dtype=np.int64)
        self._files: list[object] = [0] * len(paths)
        self._segments = [0] * len(paths)
        self._num_looks = np.zeros(len(paths), dtype=np.int64)

    def read(self) -> Iterator[tuple[Int64s, Int64s]]:
        """The index of the file and the words of every record that is new, in parts: those of one
        file in order, and no more at a time than memory should hold."""
        for first in range(0, len(self._paths), _FILES_AT_ONCE):
            asked: Int64s = np.arange(first, min(first + _FILES_AT_ONCE, len(self._paths)))
            while len(asked):
                index, words, asked = self._read_once(asked)
                if len(index):
                    yield index, words

    def _read_once(self, asked: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """One chunk of each file; and the files that have more."""
        parts = [self._read_chunk(index) for index in asked.tolist()]
        counts = np.array([len(part) // RECORD_BYTES for part in parts], dtype=np.int64)
        data = b"".join(
            part[: count * RECORD_BYTES] for part, count in zip(parts, counts.tolist(), strict=True)
        )
        words = np.frombuffer(data, dtype="<i8").reshape(-1, NUM_WORDS)
        owner = np.repeat(np.arange(len(asked)), counts)
        begin = np.concatenate(([0], np.cumsum(counts)))[:-1]
        place = np.arange(len(words)) - begin[owner]
        good = _check(words, self._next[asked][owner] + place)
        num_taken = self._count_taken(good, owner, place, counts, asked)
        self._next[asked] += num_taken
        is_taken = good & (place < num_taken[owner])
        is_taken &= ~(words[:, 1:] == VOID_WORD).all(axis=1)
        more = (num_taken > 0) & (num_taken == counts) & (counts == _CHUNK_RECORDS)
        return asked[owner[is_taken]], words[is_taken], asked[more]

    def _read_chunk(self, index: int) -> bytes:
        try:
            with ByteFile(self._paths[index]) as file:
                if self._files[index] != file.identity:
                    # Another file has the name: a copy, or its table goes on in a new one.
                    segment = read_segment(file)
                    if self._files[index] and segment != self._segments[index]:
                        rest = self._read_sealed(index)
                        if rest:
                            return rest
                        self._next[index] = 0
                    self._files[index], self._segments[index] = file.identity, segment
                if self._next[index] < 0:
                    num_records = max(file.size_bytes - HEADER_BYTES, 0) // RECORD_BYTES
                    # Space is made a window at a time: up to that many are not written yet.
                    self._next[index] = max(num_records - _UNWRITTEN - self._num_before, 0)
                offset = HEADER_BYTES + int(self._next[index]) * RECORD_BYTES
                return file.read(offset, _CHUNK_RECORDS * RECORD_BYTES)
        except OSError:  # not made yet, or just being moved away: there will be a next look
            return b""

    def _read_sealed(self, index: int) -> bytes:
        """What is left of the file that was read so far."""
        try:
            with ByteFile(sealed_path(self._paths[index])) as file:
                if read_segment(file) != self._segments[index]:
                    return b""
                offset = HEADER_BYTES + int(self._next[index]) * RECORD_BYTES
                data = file.read(offset, _CHUNK_RECORDS * RECORD_BYTES)
        except OSError:
            return b""
        return data if data.count(0) < len(data) else b""

    def _count_taken(
        self, good: Bools, owner: Int64s, place: Int64s, counts: Int64s, asked: Int64s
    ) -> Int64s:
        """Records of each file that are done with."""
        first_bad = counts.copy()
        np.minimum.at(first_bad, owner[~good], place[~good])
        first_good = np.full_like(counts, np.iinfo(np.int64).max)
        np.minimum.at(first_good, owner[good], place[good])
        is_held = (first_bad == 0) & (first_good < counts)
        self._num_looks[asked] = np.where(is_held, self._num_looks[asked] + 1, 0)
        is_given_up = is_held & (self._num_looks[asked] >= _MAX_LOOKS)
        return np.where(is_given_up, first_good, first_bad)


def _check(words: Int64s, slot: Int64s) -> Bools:
    """Which records match their checksum, each in its slot."""
    total = (slot.astype(np.uint64) + np.uint64(1)) * np.uint64(CHECK_SALT)
    unsigned = words.view(np.uint64)
    for word in range(1, NUM_WORDS):
        total += unsigned[:, word]
    found: Bools = total == unsigned[:, 0]
    return found
