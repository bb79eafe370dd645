"""Reads the rows of some time windows, or of some steps, out of a table file.

Records stand in the order in which they were written, which is nearly that of their times: what
ends later, or is read back from a device, comes some records late. So a window is found by binary
search and then widened until no record near its borders belongs to it. Only records inside are
checked against their checksums and decoded; damaged ones are left out, and reading the whole
table is what names them.

Wrong where a record stands further from its neighbours in time than the widening reaches
(`MARGIN_RECORDS`), as when a clock was turned back: such rows are missed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import (
    Columns,
    Problem,
    check_records,
    decode_words,
    find_losses,
)
from meshscope.store.read.files import ByteFile
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, Table
from meshscope.store.write.table_file import CLOSE_OFFSET, HEADER_BYTES, VOID_WORD, unpack_slot

MARGIN_RECORDS = 512
"""Records by which a window is widened at a time; more than operations in flight at once."""
WHOLE_BYTES = 4 << 20
"""Files up to this size are read whole: that is faster than searching."""
_PROBE_RECORDS = 16
_NEVER = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeWindows:
    """Intervals of a rank's clock, in order, none overlapping another."""

    start_ns: Int64s
    end_ns: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)

    def contain(self, times: Int64s) -> npt.NDArray[np.bool_]:
        """Which moments lie in one of them, ends included."""
        if not len(self):
            return np.zeros(len(times), dtype=np.bool_)
        index = np.searchsorted(self.start_ns, times, side="right") - 1
        found: npt.NDArray[np.bool_] = (index >= 0) & (times <= self.end_ns[index])
        return found


def _make_word_reader(index: int) -> Callable[[Int64s], Int64s]:
    def read(words: Int64s) -> Int64s:
        return words[:, index]

    return read


def _span_end(words: Int64s) -> Int64s:
    with np.errstate(over="ignore"):
        return words[:, 2] + words[:, 3]


def _last_stamp(words: Int64s) -> Int64s:
    # Column by column: a maximum along short rows is several times slower.
    last = words[:, 1].copy()
    for index in range(2, 7):
        np.maximum(last, words[:, index], out=last)
    return last


TIME_OF: dict[str, Callable[[Int64s], Int64s]] = {
    "phases": _last_stamp,
    "spans": _span_end,
    "device_spans": _make_word_reader(2),
    "collectives": _make_word_reader(3),
    "waits": _make_word_reader(3),
    "actions": _make_word_reader(4),
}
"""The moment by which a row is selected, for the tables that can be read in part."""
TIME_SQL = {
    "phases": "greatest(data_start_host_mono_ns, data_end_host_mono_ns, "
    "forward_start_host_mono_ns, forward_end_host_mono_ns, backward_start_host_mono_ns, "
    "backward_end_host_mono_ns)",
    "spans": "start_host_mono_ns::HUGEINT + duration_ns",
    "device_spans": "host_start_host_mono_ns",
    "collectives": "enqueue_host_mono_ns",
    "waits": "start_host_mono_ns",
    "actions": "begin_host_mono_ns",
    "steps": "step",
}
"""The same in a compacted run."""


class _RecordFile(ByteFile):
    """The records of one table file, read in parts."""

    __slots__ = ("num_records",)

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be opened or is no regular file."""
        super().__init__(path)
        self.num_records = self._count_records()

    def _count_records(self) -> int:
        num_whole = max(self.size_bytes - HEADER_BYTES, 0) // RECORD_BYTES
        page = self.read(0, HEADER_BYTES)
        if len(page) < HEADER_BYTES:
            return 0
        try:
            closed = unpack_slot(page, CLOSE_OFFSET)
        except ValueError:
            closed = None
        return min(num_whole, closed[0]) if closed and closed[0] >= 0 else num_whole

    def read_records(self, first: int, last: int) -> Int64s:
        """Records `first` to `last`, the last one not included; fewer if the file became shorter.

        They are not checked.
        """
        first, last = max(first, 0), min(last, self.num_records)
        if last <= first:
            return np.empty((0, NUM_WORDS), dtype=np.int64)
        size = (last - first) * RECORD_BYTES
        data = self.read(HEADER_BYTES + first * RECORD_BYTES, size)
        count = len(data) // RECORD_BYTES
        words = np.frombuffer(data, dtype="<i8", count=count * NUM_WORDS)
        return words.reshape(-1, NUM_WORDS)


def count_records(path: Path) -> int:
    """How many records a table has: of one that is being written, or was when its process was
    killed, a few more. Raises OSError."""
    with _RecordFile(path) as file:
        return file.num_records


def read_time_windows(
    path: Path, table: Table, windows: TimeWindows, rank: int
) -> tuple[Columns, list[Problem]]:
    """The rows of a table whose moments lie in the windows, and what its head says is lost."""
    bounds = list(zip(windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True))
    with _RecordFile(path) as file:
        page, size = file.read(0, HEADER_BYTES), file.size_bytes
        columns = _read(file, table, TIME_OF[table.name], bounds)
    return columns, find_losses(page, size, table, path=path, rank=rank)


def read_step_windows(path: Path, table: Table, windows: Sequence[tuple[int, int]]) -> Columns:
    """The rows of `steps` with numbers in one of the windows, both ends included."""
    with _RecordFile(path) as file:
        return _read(file, table, _make_word_reader(1), windows)


def read_since(path: Path, table: Table, start_ns: int) -> Columns:
    """The rows of a table whose only moment (`time_host_mono_ns`) is not before `start_ns`."""
    key_of = _make_word_reader(table.column("time_host_mono_ns").word)
    with _RecordFile(path) as file:
        return _read(file, table, key_of, [(start_ns, _NEVER - 1)])


def find_step_extent(path: Path) -> tuple[int, int] | None:
    """The first and the last step number of a file of `steps`; None without a good record."""
    with _RecordFile(path) as file:
        first = _first_good(file, 0, 1)
        last = _first_good(file, file.num_records - 1, -1)
    return None if first is None or last is None else (min(first, last), max(first, last))


def _first_good(file: _RecordFile, start: int, direction: int) -> int | None:
    """The step number of the first good record from `start` on."""
    at = start
    while 0 <= at < file.num_records:
        low, high = (
            (at, at + MARGIN_RECORDS) if direction > 0 else (at - MARGIN_RECORDS + 1, at + 1)
        )
        low = max(low, 0)
        words = file.read_records(low, high)
        good = np.flatnonzero(_is_good(words, low))
        if len(good):
            return int(words[good[0] if direction > 0 else good[-1], 1])
        at += direction * MARGIN_RECORDS
    return None


def _read(
    file: _RecordFile,
    table: Table,
    key_of: Callable[[Int64s], Int64s],
    bounds: Sequence[tuple[int, int]],
) -> Columns:
    if file.num_records * RECORD_BYTES <= WHOLE_BYTES:
        parts = [_select_good(file.read_records(0, file.num_records), 0, key_of, bounds)]
    else:
        parts = _search(file, key_of, bounds)
    words = np.concatenate(parts) if parts else np.empty((0, NUM_WORDS), dtype=np.int64)
    return decode_words(table, words)


def _search(
    file: _RecordFile, key_of: Callable[[Int64s], Int64s], bounds: Sequence[tuple[int, int]]
) -> list[Int64s]:
    parts, done = [], 0
    for begin, end in bounds:
        low = max(_bisect(file, key_of, begin) - MARGIN_RECORDS, done)
        high = _bisect(file, key_of, end + 1) + MARGIN_RECORDS
        low, high = _widen(file, key_of, (low, high), (begin, end), done)
        parts.append(_select_good(file.read_records(low, high), low, key_of, bounds))
        done = max(high, done)
    return parts


def _bisect(file: _RecordFile, key_of: Callable[[Int64s], Int64s], wanted: int) -> int:
    """About the first record whose key is not below `wanted`."""
    low, high = 0, file.num_records
    while high - low > _PROBE_RECORDS:
        middle = (low + high) // 2
        if _key_at(file, key_of, middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _key_at(file: _RecordFile, key_of: Callable[[Int64s], Int64s], at: int) -> int:
    words = file.read_records(at, at + _PROBE_RECORDS)
    good = np.flatnonzero(_is_good(words, at))
    return int(key_of(words[good[:1]])[0]) if len(good) else _NEVER


def _widen(
    file: _RecordFile,
    key_of: Callable[[Int64s], Int64s],
    found: tuple[int, int],
    bounds: tuple[int, int],
    lowest: int,
) -> tuple[int, int]:
    """Moves the borders outwards as long as records next to them belong inside."""
    low, high = found
    while low > lowest and _any_inside(file, key_of, low, bounds):
        low = max(low - MARGIN_RECORDS, lowest)
    while high < file.num_records and _any_inside(file, key_of, high - MARGIN_RECORDS, bounds):
        high += MARGIN_RECORDS
    return low, min(high, file.num_records)


def _any_inside(
    file: _RecordFile, key_of: Callable[[Int64s], Int64s], first: int, bounds: tuple[int, int]
) -> bool:
    first = max(first, 0)
    return bool(
        len(
            _select_good(
                file.read_records(first, first + MARGIN_RECORDS // 2), first, key_of, [bounds]
            )
        )
    )


def _select_good(
    words: Int64s, first: int, key_of: Callable[[Int64s], Int64s], bounds: Sequence[tuple[int, int]]
) -> Int64s:
    """Good records inside the bounds."""
    row = _find_inside(key_of(words), bounds)
    # One piece of the file: a checksum depends on the record's index.
    good = _is_good(words, first)[row] if 4 * len(row) > len(words) else _check(words, row, first)
    picked = words[row[good]]
    is_void = (picked[:, 1:] == VOID_WORD).all(axis=1)
    return picked[~is_void] if is_void.any() else picked


def _find_inside(key: Int64s, bounds: Sequence[tuple[int, int]]) -> Int64s:
    """Rows whose key lies in one of the bounds."""
    inside = np.zeros(len(key), dtype=np.bool_)
    if bool((key[1:] >= key[:-1]).all()):  # nearly always: records are written in order of time
        ends = np.searchsorted(key, [end for _, end in bounds], side="right").tolist()
        begins = np.searchsorted(key, [begin for begin, _ in bounds]).tolist()
        for low, high in zip(begins, ends, strict=True):
            inside[low:high] = True
    else:
        for begin, end in bounds:
            inside |= (key >= begin) & (key <= end)
    return np.flatnonzero(inside)


def _is_good(words: Int64s, first: int) -> npt.NDArray[np.bool_]:
    return check_records(words, first=first)


def _check(words: Int64s, row: Int64s, first: int) -> npt.NDArray[np.bool_]:
    """The same of scattered records, range by range."""
    good = np.zeros(len(row), dtype=np.bool_)
    if not len(row):
        return good
    cuts = np.flatnonzero(np.diff(row) != 1) + 1
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), len(row)], strict=True):
        begin = int(row[low])
        good[low:high] = check_records(words[begin : begin + high - low], first=first + begin)
    return good
