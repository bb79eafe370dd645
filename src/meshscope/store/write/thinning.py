"""Keeps a rank's files within a size: thins what is old, never what is newest.

A round: begin new segments; complete the ones before; sum up and count what has become old; decide
which windows of steps stay whole; write each table's thinned file anew and rename it into place.
docs/store.md has the rule and why a kill at any moment loses nothing else. Standard library only,
in slices, called from a thread that rests between them.
"""

import os
import struct
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from operator import add
from pathlib import Path

from meshscope.core.operations import Outcome
from meshscope.store.retention_tables import (
    WINDOW_STEPS,
    KeptReason,
    is_kept,
)
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES
from meshscope.store.table import Table
from meshscope.store.write.access import create_file
from meshscope.store.write.record_sums import RecordSums, Words
from meshscope.store.write.segments import SegmentedTable
from meshscope.store.write.step_windows import StepWindows
from meshscope.store.write.table_file import (
    CHECK_MASK,
    CHECK_SALT,
    CLOSE_OFFSET,
    HEADER_BYTES,
    VOID_WORD,
    WINDOW_BYTES,
    pack_header,
    pack_record,
    record_check,
    unpack_slot,
)

GRACE_SECONDS = 2.0
"""From the begin of a segment until the one before is completed: threads that are about to write
into it have done so by then."""
_RECORD = struct.Struct("<Q7q")
_SUMMED_RECORDS = 128
_COPIED_RECORDS = 1024
"""At a time: about 0.3 ms of work."""
_MIN_ROLLED_BYTES = 2 * WINDOW_BYTES
_MIN_SEGMENT_BYTES = 3 * WINDOW_BYTES
_SEGMENT_SHARE = 10
_KEPT_SHARE = 0.3
"""Of the size that is left for thinned tables. With a tenth in each segment, the thinned file and
its draft, the segment being thinned and the newest fit in together."""
_MAX_LEVEL = 40
_FAILED = (Outcome.ERROR, Outcome.TIMEOUT)

_KEYS: Mapping[str, Callable[["array[int]"], "array[int] | list[int]"]] = {
    "collectives": lambda words: words[3::NUM_WORDS],
    "waits": lambda words: words[3::NUM_WORDS],
    "spans": lambda words: list(map(add, words[2::NUM_WORDS], words[3::NUM_WORDS])),
    "device_spans": lambda words: words[2::NUM_WORDS],
    "actions": lambda words: words[4::NUM_WORDS],
}
"""The moment by which a record belongs to a window."""
_KEY_OF: Mapping[str, Callable[[Words], int]] = {
    "collectives": lambda words: words[2],
    "waits": lambda words: words[2],
    "spans": lambda words: words[1] + words[2],
    "device_spans": lambda words: words[1],
    "actions": lambda words: words[3],
}
"""The same, of one record's seven words."""


class _Thinned:
    """What is known of one table's thinned file."""

    __slots__ = ("first_undecided", "last_decided", "through")

    def __init__(self) -> None:
        self.through = -1
        """The last segment that is in it."""
        self.last_decided = -1
        """The last window that is summed up, and thinned."""
        self.first_undecided = 0
        """No record before this slot is of a later window."""


class Thinner:
    """Of one rank's tables."""

    def __init__(
        self,
        tables: Callable[[], Mapping[str, SegmentedTable]],
        write: Callable[..., None],
        directory: Callable[[], Path],
        fields: Mapping[str, object],
        max_bytes: int,
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """`tables` gives those that exist by now; `write` puts a record into a table by name."""
        self._tables = tables
        self._write = write
        self._directory = directory
        self._fields = fields
        self._max_bytes = max_bytes
        self._grace_seconds = grace_seconds
        self._windows: StepWindows | None = None
        self._thinned: dict[str, _Thinned] = {}
        self._num_records: dict[int, int] = {}
        """Of windows that are kept, all tables together."""
        self._ordinals: dict[int, int] = {}
        """Of noteworthy windows."""
        self._level = self._noteworthy_level = 0
        self._round = 0
        self._pending: dict[str, SegmentedTable] = {}
        """Tables that are summed up in this round and not rewritten yet."""
        self._bound = -1
        """The last window that this round thins."""
        self._next_bound = -1
        """The last window that the next round may thin: it was complete when the segment before
        the newest began."""
        self.excess_bytes = 0
        """By how much the size is exceeded by what is kept whole."""

    # --- when -----------------------------------------------------------------------------------

    def _room_bytes(self) -> int:
        """What is left for thinned tables."""
        thinned = set(self._tables())
        whole_bytes = 0
        with os.scandir(self._directory()) as entries:
            for entry in entries:
                if entry.name.split(".")[0] not in thinned and not entry.name.startswith("."):
                    whole_bytes += entry.stat(follow_symlinks=False).st_size
        room_bytes = self._max_bytes - whole_bytes
        self.excess_bytes = max(-room_bytes, 0)
        return max(room_bytes, 0)

    def is_due(self) -> bool:
        """Whether the newest segments have reached their size."""
        live_bytes = sum(table.live_bytes() for table in self._tables().values())
        if live_bytes < _MIN_SEGMENT_BYTES:
            return False
        return live_bytes >= self._room_bytes() // _SEGMENT_SHARE

    # --- a round ----------------------------------------------------------------------------------

    def work(self) -> Generator[float]:
        """One round, slice by slice; each says how long to rest at least. Raises OSError where a
        file cannot be written: what was there is then still there, and the next round tries
        again."""
        windows = self._windows
        if windows is None:
            windows = self._windows = StepWindows(self._directory() / "steps.tbl")
        if not self._pending:
            yield from self._begin_round(windows)
        for name, table in list(self._pending.items()):
            yield from self._rewrite(name, table, windows)
            del self._pending[name]

    def _begin_round(self, windows: StepWindows) -> Iterator[float]:
        while windows.read():
            yield 0.0
        bound, self._next_bound = self._next_bound, windows.last_judged
        self._bound = max(bound, self._bound)
        for table in self._tables().values():
            if table.live_bytes() >= _MIN_ROLLED_BYTES:
                table.roll()
                yield 0.0
        yield self._grace_seconds
        for table in self._tables().values():
            table.seal()
            yield 0.0
        touched = {
            name: table
            for name, table in self._tables().items()
            if name in self._thinned or table.sealed_path.exists()
        }
        self._round += 1
        sums: list[RecordSums] = []
        for name, table in touched.items():
            sums.append(RecordSums(name))
            yield from self._sum_up(name, table, windows, sums[-1])
        self._choose_levels(windows)
        # From here on the round cannot be begun again: the sums are written down once.
        self._pending = touched
        for one in sums:
            for index, row in enumerate(one.rows(self._round)):
                self._write("aggregates", *row)
                if index % _SUMMED_RECORDS == 0:
                    yield 0.0

    def _sum_up(
        self, name: str, table: SegmentedTable, windows: StepWindows, sums: RecordSums
    ) -> Iterator[float]:
        """Counts and sums what becomes old in this round."""
        before = self._thinned.get(name) or _Thinned()
        key_of, is_operation = _KEY_OF[name], name == "collectives"
        # Of the thinned file, what earlier rounds left undecided; of the segment, all.
        for path, first, last_done in (
            (table.old_path, before.first_undecided, before.last_decided),
            (table.sealed_path, 0, -1),
        ):
            for chunk in _read_checked(path, first):
                for words in chunk:
                    window = windows.find(key_of(words))
                    if last_done < window <= self._bound:
                        sums.add(window, words)
                        self._num_records[window] = self._num_records.get(window, 0) + 1
                        if is_operation and words[0] >> 8 & 0xFF in _FAILED:
                            windows.note(window, KeptReason.FAILED)
                yield 0.0

    def _choose_levels(self, windows: StepWindows) -> None:
        for window in sorted(windows.reasons):
            reason = windows.reasons.pop(window)
            if window not in self._ordinals:
                self._ordinals[window] = len(self._ordinals)
                first_step = window * WINDOW_STEPS
                self._write("kept_windows", first_step, self._ordinals[window], reason, 0, 0, 0, 0)
        limit = int(self._room_bytes() * _KEPT_SHARE) // RECORD_BYTES
        while self._level < _MAX_LEVEL and self._count_kept() > limit:
            if 2 * self._count_noteworthy() > limit and self._noteworthy_level < _MAX_LEVEL:
                self._noteworthy_level += 1
            else:
                self._level += 1
        self._num_records = {
            window: count for window, count in self._num_records.items() if self._is_kept(window)
        }

    def _is_kept(self, window: int) -> bool:
        return is_kept(window, self._ordinals.get(window), self._level, self._noteworthy_level)

    def _count_kept(self) -> int:
        return sum(n for window, n in self._num_records.items() if self._is_kept(window))

    def _count_noteworthy(self) -> int:
        """Records of windows that are kept for that reason alone."""
        return sum(
            n
            for window, n in self._num_records.items()
            if window % (1 << self._level) and self._is_kept(window)
        )

    # --- the thinned file -------------------------------------------------------------------------

    def _rewrite(self, name: str, table: SegmentedTable, windows: StepWindows) -> Iterator[float]:
        """Writes the thinned file anew, without windows that are not kept."""
        before = self._thinned.get(name) or _Thinned()
        after = _Thinned()
        has_sealed = table.sealed_path.exists()
        after.through = table.segment - 1 if has_sealed else before.through
        after.last_decided = max(self._bound, before.last_decided)
        draft = table.old_path.with_name(f".{table.old_path.name}.{os.getpid()}")
        try:
            with _Draft(draft, table.table, self._describe(after)) as file:
                first_undecided = None
                for path in (table.old_path, table.sealed_path):
                    file.num_dropped += _read_num_dropped(path)
                    for slot, words in _read_words(path):
                        runs = self._choose(_KEYS[name](words), windows, after.last_decided)
                        for begin, end, is_undecided in runs:
                            if is_undecided and first_undecided is None:
                                first_undecided = file.num_records
                            file.append(words[begin * NUM_WORDS : end * NUM_WORDS], slot + begin)
                        yield 0.0
                after.first_undecided = (
                    file.num_records if first_undecided is None else first_undecided
                )
                file.complete()
            os.replace(draft, table.old_path)
        finally:
            draft.unlink(missing_ok=True)
        self._thinned[name] = after
        if has_sealed:
            table.sealed_path.unlink()

    def _describe(self, after: _Thinned) -> dict[str, object]:
        return {
            **self._fields,
            "sink": "append",
            "through": after.through,
            "round": self._round,
            "window_steps": WINDOW_STEPS,
            "first_undecided_step": (after.last_decided + 1) * WINDOW_STEPS,
            "level": self._level,
            "noteworthy_level": self._noteworthy_level,
        }

    def _choose(
        self, keys: "array[int] | list[int]", windows: StepWindows, last_decided: int
    ) -> Iterator[tuple[int, int, bool]]:
        """Runs of records that stay: begin, end, and whether they are not decided on."""
        first, last = windows.find(min(keys)), windows.find(max(keys))
        if first == last:
            if first > last_decided or self._is_kept(first):
                yield 0, len(keys), first > last_decided
            return
        begin, is_open, was_undecided = 0, False, False
        for index, key in enumerate(keys):
            window = windows.find(key)
            is_undecided = window > last_decided
            stays = is_undecided or self._is_kept(window)
            if is_open and (not stays or is_undecided != was_undecided):
                yield begin, index, was_undecided
                is_open = False
            if stays and not is_open:
                begin, is_open, was_undecided = index, True, is_undecided
        if is_open:
            yield begin, len(keys), was_undecided


class _Draft:
    """A thinned file that has no name that readers know yet."""

    def __init__(self, path: Path, table: Table, fields: dict[str, object]) -> None:
        path.unlink(missing_ok=True)
        self._file = open(create_file(path), "wb")  # noqa: SIM115  # closed by `__exit__`
        self._file.write(pack_header(table, fields))
        self.num_records = 0
        self.num_dropped = 0

    def append(self, words: "array[int]", slot: int) -> None:
        """Records from `slot` on of another file. A checksum is moved, not made: what is damaged
        stays so."""
        shift = (self.num_records - slot) * CHECK_SALT
        if shift:
            data = array("Q", words.tobytes())
            data[::NUM_WORDS] = array(
                "Q", [(check + shift) & CHECK_MASK for check in data[::NUM_WORDS]]
            )
            self._file.write(data.tobytes())
        else:
            self._file.write(words.tobytes())
        self.num_records += len(words) // NUM_WORDS

    def complete(self) -> None:
        self._file.seek(CLOSE_OFFSET)
        words = (self.num_records, self.num_dropped, time.monotonic_ns(), 0, 0, 0, 0)
        self._file.write(pack_record(CLOSE_OFFSET, words))
        self._file.flush()
        # It replaces records that the disk has had for long.
        os.fsync(self._file.fileno())

    def __enter__(self) -> "_Draft":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read_chunks(path: Path, first: int, num_records: int) -> Iterator[tuple[int, bytes]]:
    """Records from slot `first` on, some at a time; none where there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        slot = first
        while True:
            data = os.pread(fd, num_records * RECORD_BYTES, HEADER_BYTES + slot * RECORD_BYTES)
            count = len(data) // RECORD_BYTES
            if not count:
                return
            yield slot, data[: count * RECORD_BYTES]
            slot += count
    finally:
        os.close(fd)


def _read_words(path: Path) -> Iterator[tuple[int, "array[int]"]]:
    for slot, data in _read_chunks(path, 0, _COPIED_RECORDS):
        yield slot, array("q", data)


def _read_checked(path: Path, first: int) -> Iterator[list[Words]]:
    """Good records that are not void."""
    for slot, data in _read_chunks(path, first, _SUMMED_RECORDS):
        found = []
        for index, (check, *rest) in enumerate(_RECORD.iter_unpack(data)):
            words: Words = tuple(rest)
            if check == record_check(slot + index, words) and words[0] != VOID_WORD:
                found.append(words)
        yield found


def _read_num_dropped(path: Path) -> int:
    try:
        with path.open("rb") as file:
            closed = unpack_slot(file.read(HEADER_BYTES), CLOSE_OFFSET)
    except (OSError, ValueError):
        return 0
    return closed[1] if closed else 0
