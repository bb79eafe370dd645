"""Keeps a rank's files within a size: thins what is old, never what is newest.

A round: begin new segments; complete the ones before; sum up and count what has become old; decide
which windows of steps stay whole; write each table's thinned file anew and rename it into place.
Operations and spans are thinned first. Tables of steps are in one file until they take a share of
the size by themselves; so are the sums, of which blocks are then joined.
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
    DETAIL_TABLES,
    STEP_TABLES,
    THINNED_TABLES,
    WINDOW_STEPS,
    KeptReason,
    is_kept,
)
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES
from meshscope.store.table import Table
from meshscope.store.write.access import create_file
from meshscope.store.write.record_sums import RecordSums, Words, merge_rows
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
_STEPS_SHARE = 0.2
"""Of the whole size, from which on tables of steps are thinned."""
_KEPT_STEPS_SHARE = 0.15
_STEPS_SEGMENT_SHARE = 0.03
_SUMS_SHARE = 0.05
"""Of the whole size, from which on sums are joined to longer blocks, until they take half of it."""
_MAX_LEVEL = 40
_FAILED = (Outcome.ERROR, Outcome.TIMEOUT)
_DETAIL, _STEPS = "detail", "steps"
"""The two kinds of tables, each with a level of its own."""

_KEYS: Mapping[str, Callable[["array[int]"], "array[int] | list[int]"]] = {
    "collectives": lambda words: words[3::NUM_WORDS],
    "waits": lambda words: words[3::NUM_WORDS],
    "spans": lambda words: list(map(add, words[2::NUM_WORDS], words[3::NUM_WORDS])),
    "device_spans": lambda words: words[2::NUM_WORDS],
    "actions": lambda words: words[4::NUM_WORDS],
    "steps": lambda words: words[3::NUM_WORDS],
    "phases": lambda words: list(map(max, *(words[n::NUM_WORDS] for n in range(1, 7)))),
    "scalars": lambda words: words[3::NUM_WORDS],
    "memory": lambda words: words[2::NUM_WORDS],
    "allocator": lambda words: words[2::NUM_WORDS],
    "operation_notes": lambda words: words[2::NUM_WORDS],
    "kernels": lambda words: words[2::NUM_WORDS],
    "hardware": lambda words: words[2::NUM_WORDS],
    "stacks": lambda words: words[3::NUM_WORDS],
}
"""The moment by which a record belongs to a window."""
_KEY_OF: Mapping[str, Callable[[Words], int]] = {
    "collectives": lambda words: words[2],
    "waits": lambda words: words[2],
    "spans": lambda words: words[1] + words[2],
    "device_spans": lambda words: words[1],
    "actions": lambda words: words[3],
    "steps": lambda words: words[2],
    "phases": lambda words: max(words[:6]),
    "scalars": lambda words: words[2],
    "memory": lambda words: words[1],
    "allocator": lambda words: words[1],
    "operation_notes": lambda words: words[1],
    "kernels": lambda words: words[1],
    "hardware": lambda words: words[1],
    "stacks": lambda words: words[2],
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
        self._num_records: dict[str, dict[int, int]] = {_DETAIL: {}, _STEPS: {}}
        """Of windows that are kept, all tables of a kind together."""
        self._ordinals: dict[int, int] = {}
        """Of noteworthy windows that are still kept."""
        self._num_noteworthy = 0
        self._levels = {_DETAIL: 0, _STEPS: 0}
        self._noteworthy_level = 0
        self._sums_level = 0
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

    def _measure_files(self) -> dict[str, int]:
        """Bytes by table, and of other files by name."""
        found: dict[str, int] = {}
        with os.scandir(self._directory()) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    name = entry.name.split(".")[0]
                    found[name] = found.get(name, 0) + entry.stat(follow_symlinks=False).st_size
        return found

    def _room_bytes(self) -> int:
        """What is left for operations and spans."""
        sizes = self._measure_files()
        room_bytes = self._max_bytes
        room_bytes -= sum(size for name, size in sizes.items() if name not in DETAIL_TABLES)
        self.excess_bytes = max(-room_bytes, 0)
        return max(room_bytes, 0)

    def _live(self, names: tuple[str, ...]) -> dict[str, SegmentedTable]:
        return {name: table for name, table in self._tables().items() if name in names}

    def _list_due(self) -> dict[str, SegmentedTable]:
        """Tables whose newest segments have reached their size."""
        due: dict[str, SegmentedTable] = {}
        detail, steps = self._live(DETAIL_TABLES), self._live(STEP_TABLES)
        live_bytes = _sum_live(detail)
        if live_bytes >= max(_MIN_SEGMENT_BYTES, self._room_bytes() // _SEGMENT_SHARE):
            due |= detail
        live_bytes = _sum_live(steps)
        if live_bytes >= max(_MIN_SEGMENT_BYTES, int(self._max_bytes * _STEPS_SEGMENT_SHARE)):
            sizes = self._measure_files()
            steps_bytes = sum(sizes.get(name, 0) for name in STEP_TABLES)
            if steps_bytes >= self._max_bytes * _STEPS_SHARE:
                due |= steps
        return due

    def is_due(self) -> bool:
        """Whether the newest segments have reached their size."""
        return bool(self._list_due())

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
        yield from self._join_sums()

    def _begin_round(self, windows: StepWindows) -> Iterator[float]:
        while windows.read():
            yield 0.0
        bound, self._next_bound = self._next_bound, windows.last_judged
        self._bound = max(bound, self._bound)
        for table in self._list_due().values():
            if table.live_bytes() >= _MIN_ROLLED_BYTES:
                table.roll()
                yield 0.0
        yield self._grace_seconds
        for table in self._live(THINNED_TABLES).values():
            table.seal()
            yield 0.0
        while windows.read():  # the end of the steps that were sealed, before they are thinned
            yield 0.0
        touched = {
            name: table
            for name, table in self._live(THINNED_TABLES).items()
            if (name in self._thinned and name in DETAIL_TABLES) or table.sealed_path.exists()
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
        counts = self._num_records[_kind_of(name)]
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
                        counts[window] = counts.get(window, 0) + 1
                        if is_operation and words[0] >> 8 & 0xFF in _FAILED:
                            windows.note(window, KeptReason.FAILED)
                yield 0.0

    def _choose_levels(self, windows: StepWindows) -> None:
        for window in sorted(windows.reasons):
            reason = windows.reasons.pop(window)
            if window not in self._ordinals:
                ordinal, self._num_noteworthy = self._num_noteworthy, self._num_noteworthy + 1
                if not is_kept(1, ordinal, _MAX_LEVEL, self._noteworthy_level):
                    continue  # one of too many: it would not be kept, now or later
                self._ordinals[window] = ordinal
                self._write("kept_windows", window * WINDOW_STEPS, ordinal, reason, 0, 0, 0, 0)
        self._raise_levels(_DETAIL, int(self._room_bytes() * _KEPT_SHARE) // RECORD_BYTES)
        self._raise_levels(_STEPS, int(self._max_bytes * _KEPT_STEPS_SHARE) // RECORD_BYTES)
        self._ordinals = {
            window: ordinal
            for window, ordinal in self._ordinals.items()
            if is_kept(1, ordinal, _MAX_LEVEL, self._noteworthy_level)
        }
        for kind, counts in self._num_records.items():
            self._num_records[kind] = {
                window: count for window, count in counts.items() if self._is_kept(window, kind)
            }

    def _raise_levels(self, kind: str, limit: int) -> None:
        """Until what is kept of a kind of tables is at most so many records."""
        while self._levels[kind] < _MAX_LEVEL and self._count_kept(kind) > limit:
            if 2 * self._count_noteworthy(kind) > limit and self._noteworthy_level < _MAX_LEVEL:
                self._noteworthy_level += 1
            else:
                self._levels[kind] += 1

    def _is_kept(self, window: int, kind: str) -> bool:
        return is_kept(
            window, self._ordinals.get(window), self._levels[kind], self._noteworthy_level
        )

    def _count_kept(self, kind: str) -> int:
        counts = self._num_records[kind]
        return sum(n for window, n in counts.items() if self._is_kept(window, kind))

    def _count_noteworthy(self, kind: str) -> int:
        """Records of windows that are kept for that reason alone."""
        return sum(
            n
            for window, n in self._num_records[kind].items()
            if window % (1 << self._levels[kind]) and self._is_kept(window, kind)
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
            with _Draft(draft, table.table, self._describe(after, _kind_of(name))) as file:
                first_undecided = None
                for path in (table.old_path, table.sealed_path):
                    file.num_dropped += _read_num_dropped(path)
                    for slot, words in _read_words(path):
                        runs = self._choose(name, words, windows, after.last_decided)
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

    def _describe(self, after: _Thinned, kind: str) -> dict[str, object]:
        return {
            **self._fields,
            "sink": "append",
            "through": after.through,
            "round": self._round,
            "window_steps": WINDOW_STEPS,
            "first_undecided_step": (after.last_decided + 1) * WINDOW_STEPS,
            "level": self._levels[kind],
            "noteworthy_level": self._noteworthy_level,
        }

    def _choose(
        self, name: str, words: "array[int]", windows: StepWindows, last_decided: int
    ) -> Iterator[tuple[int, int, bool]]:
        """Runs of records that stay: begin, end, and whether they are not decided on."""
        keys, kind = _KEYS[name](words), _kind_of(name)
        first, last = windows.find(min(keys)), windows.find(max(keys))
        if first == last:
            if first > last_decided or self._is_kept(first, kind):
                yield 0, len(keys), first > last_decided
            return
        begin, is_open, was_undecided = 0, False, False
        for index, key in enumerate(keys):
            window = windows.find(key)
            is_undecided = window > last_decided
            stays = is_undecided or self._is_kept(window, kind)
            if is_open and (not stays or is_undecided != was_undecided):
                yield begin, index, was_undecided
                is_open = False
            if stays and not is_open:
                begin, is_open, was_undecided = index, True, is_undecided
        if is_open:
            yield begin, len(keys), was_undecided

    # --- the sums ---------------------------------------------------------------------------------

    def _join_sums(self) -> Iterator[float]:
        """Joins blocks of `aggregates` where they take too much. All of them are of rounds that are
        over."""
        table = self._tables().get("aggregates")
        if table is None or self._measure_files().get("aggregates", 0) < self._most_sums_bytes():
            return
        table.roll()
        table.seal()
        rows: list[Words] = []
        for path in (table.old_path, table.sealed_path):
            for chunk in _read_checked(path, 0):
                rows += chunk
                yield 0.0
        limit = self._most_sums_bytes() // 2 // RECORD_BYTES
        merged = merge_rows(rows, self._sums_level)
        while len(merged) > limit and self._sums_level < _MAX_LEVEL:
            yield 0.0
            self._sums_level += 1
            merged = merge_rows(merged, self._sums_level)
        after = _Thinned()
        after.through = table.segment - 1
        draft = table.old_path.with_name(f".{table.old_path.name}.{os.getpid()}")
        try:
            with _Draft(draft, table.table, self._describe(after, _STEPS)) as file:
                for slot, words in enumerate(merged):
                    file.append(array("q", pack_record(slot, words)), slot)
                    if slot % _COPIED_RECORDS == 0:
                        yield 0.0
                file.complete()
            os.replace(draft, table.old_path)
        finally:
            draft.unlink(missing_ok=True)
        table.sealed_path.unlink(missing_ok=True)

    def _most_sums_bytes(self) -> int:
        return max(int(self._max_bytes * _SUMS_SHARE), _MIN_ROLLED_BYTES)


def _kind_of(name: str) -> str:
    return _DETAIL if name in DETAIL_TABLES else _STEPS


def _sum_live(tables: Mapping[str, SegmentedTable]) -> int:
    """Bytes of segments that are long enough to end."""
    sizes = (table.live_bytes() for table in tables.values())
    return sum(size for size in sizes if size >= _MIN_ROLLED_BYTES)


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
