"""Keeps a rank's files within a size: thins what is old, never what is newest.

A round: begin a new pack; complete the one before; sum up and count what has become old; decide
which windows of steps stay whole; write the thinned pack anew, of all tables and with the sums, and
rename it into place. Operations and spans are thinned first, tables of steps when they take a share
of the size by themselves; of sums, blocks are joined then. All other tables are copied.
docs/store.md has the rule and why a kill at any moment loses nothing else. Standard library only,
in slices, called from a thread that rests between them.
"""

import os
import struct
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from operator import add
from pathlib import Path
from typing import Protocol

from meshscope.core.operations import Outcome
from meshscope.store.retention_tables import (
    DETAIL_TABLES,
    STEP_TABLES,
    WINDOW_STEPS,
    KeptReason,
    is_kept,
)
from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, TABLES
from meshscope.store.write.pack import (
    FIRST_EXTENT_BYTES,
    OLD_PACK,
    PACK_SUFFIX,
    SEALED_PACK,
    PackDraft,
    PackFile,
)
from meshscope.store.write.places import WINDOW_BYTES
from meshscope.store.write.record_sums import RecordSums, Words, merge_rows
from meshscope.store.write.step_windows import StepWindows
from meshscope.store.write.table_file import (
    CLOSE_OFFSET,
    HEADER_BYTES,
    VOID_WORD,
    Put,
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
_MIN_SEGMENT_BYTES = 3 * WINDOW_BYTES
_SEGMENT_SHARE = 16
_KEPT_SHARE = 0.3
"""Of the size that operations and spans are left, what is kept of them; with all other tables never
more than `_OLD_SHARE` of the whole size. The thinned pack and its draft, the segment that is being
thinned and the newest fit in together."""
_OLD_SHARE = 0.375
_STEPS_SHARE = 0.2
"""Of the whole size, from which on tables of steps are thinned."""
_KEPT_STEPS_SHARE = 0.15
_SUMS_SHARE = 0.05
"""Of the whole size, from which on sums are joined to longer blocks, until they take half of it."""
_MIN_SUMS_BYTES = 2 * WINDOW_BYTES
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
    """What is known of one table in the thinned pack."""

    __slots__ = ("first_undecided", "last_decided", "num_bytes")

    def __init__(self) -> None:
        self.last_decided = -1
        """The last window that is summed up, and thinned."""
        self.first_undecided = 0
        """No record before this slot is of a later window."""
        self.num_bytes = 0


class Segments(Protocol):
    """The files of a rank, as far as thinning has to do with them."""

    @property
    def directory(self) -> Path: ...

    @property
    def segment(self) -> int: ...

    def put_into(self, name: str) -> Put: ...

    def live_sizes(self) -> dict[str, int]: ...

    def roll(self) -> bool: ...

    def seal(self) -> None: ...


class Thinner:
    """Of one rank's tables."""

    def __init__(
        self,
        segments: Segments,
        fields: Mapping[str, object],
        max_bytes: int,
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._segments = segments
        self._fields = fields
        self._max_bytes = max_bytes
        self._grace_seconds = grace_seconds
        self._windows: StepWindows | None = None
        self._thinned: dict[str, _Thinned] = {}
        self._sealed_sizes: dict[str, int] = {}
        self._num_records: dict[str, dict[int, int]] = {_DETAIL: {}, _STEPS: {}}
        """Of windows that are kept, all tables of a kind together."""
        self._ordinals: dict[int, int] = {}
        """Of noteworthy windows that are still kept."""
        self._num_noteworthy = 0
        self._levels = {_DETAIL: 0, _STEPS: 0}
        self._noteworthy_level = 0
        self._sums_level = 0
        self._round = 0
        self._are_steps_thinned = False
        self._pending: list[Words] | None = None
        """Sums of a round whose pack is not written yet."""
        self._bound = -1
        """The last window that this round thins."""
        self._next_bound = -1
        """The last window that the next round may thin: it was complete when the segment before
        the newest began."""
        self.excess_bytes = 0
        """By how much the size is exceeded by what is kept whole."""

    # --- when -----------------------------------------------------------------------------------

    def _sum_old(self, names: Callable[[str], bool]) -> int:
        """Bytes of tables in the thinned pack and in the one to be thinned."""
        old = sum(one.num_bytes for name, one in self._thinned.items() if names(name))
        return old + sum(size for name, size in self._sealed_sizes.items() if names(name))

    def _room_bytes(self) -> int:
        """What operations and spans are left of the size."""
        room_bytes = self._max_bytes - self._sum_old(lambda name: name not in DETAIL_TABLES)
        with os.scandir(self._segments.directory) as entries:
            for entry in entries:
                if not (entry.name.startswith(".") or entry.name.endswith(PACK_SUFFIX)):
                    room_bytes -= entry.stat(follow_symlinks=False).st_size
        self.excess_bytes = max(-room_bytes, 0)
        return max(room_bytes, 0)

    @property
    def segment_bytes(self) -> int:
        """At which size the next segment begins."""
        return max(_MIN_SEGMENT_BYTES, self._max_bytes // _SEGMENT_SHARE)

    def is_due(self) -> bool:
        """Whether the newest segment has reached its size."""
        sizes = self._segments.live_sizes()
        # A table's first extent is there from the begin.
        used_bytes = sum(sizes.values()) - FIRST_EXTENT_BYTES * len(sizes)
        return used_bytes >= self.segment_bytes

    # --- a round ----------------------------------------------------------------------------------

    def work(self) -> Generator[float]:
        """One round, slice by slice; each says how long to rest at least. Raises OSError where a
        file cannot be written: what was there is then still there, and the next round tries
        again."""
        windows = self._windows
        if windows is None:
            windows = self._windows = StepWindows(self._segments.directory)
        if self._pending is None:
            yield from self._begin_round(windows)
        if self._pending is not None:
            yield from self._rewrite(self._pending, windows)
            self._pending = None

    def _begin_round(self, windows: StepWindows) -> Iterator[float]:
        while windows.read():
            yield 0.0
        bound, self._next_bound = self._next_bound, windows.last_judged
        self._bound = max(bound, self._bound)
        sizes = self._segments.live_sizes()
        if self._segments.roll():
            self._sealed_sizes = sizes
        elif not (self._segments.directory / SEALED_PACK).exists():
            return  # else an error ended the round before
        yield self._grace_seconds
        self._segments.seal()
        yield 0.0
        while windows.read():  # the end of the steps that were sealed, before they are thinned
            yield 0.0
        self._round += 1
        steps_bytes = self._sum_old(lambda name: name in STEP_TABLES)
        if steps_bytes >= self._max_bytes * _STEPS_SHARE:
            self._are_steps_thinned = True
        rows: list[Words] = []
        with self._open_packs() as packs:
            for name in self._list_thinned():
                sums = RecordSums(name)
                yield from self._sum_up(name, packs, windows, sums)
                rows += sums.rows(self._round)
                yield 0.0
        self._choose_levels(windows)
        # From here on the round cannot be begun again: what is summed up is counted once.
        self._pending = rows

    def _list_thinned(self) -> tuple[str, ...]:
        return DETAIL_TABLES + (STEP_TABLES if self._are_steps_thinned else ())

    def _open_packs(self) -> "_Packs":
        return _Packs(self._segments.directory)

    def _sum_up(
        self, name: str, packs: "_Packs", windows: StepWindows, sums: RecordSums
    ) -> Iterator[float]:
        """Counts and sums what becomes old in this round."""
        before = self._thinned.get(name) or _Thinned()
        key_of, is_operation = _KEY_OF[name], name == "collectives"
        counts = self._num_records[_kind_of(name)]
        # Of the thinned pack, what earlier rounds left undecided; of the segment, all.
        for pack, first, last_done in (
            (packs.old, before.first_undecided, before.last_decided),
            (packs.sealed, 0, -1),
        ):
            for chunk in _read_checked(pack, name, first):
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
                self._segments.put_into("kept_windows")(
                    window * WINDOW_STEPS, ordinal, reason, 0, 0, 0, 0
                )
        room_bytes = self._room_bytes()
        others_bytes = self._max_bytes - room_bytes
        kept_bytes = min(room_bytes * _KEPT_SHARE, self._max_bytes * _OLD_SHARE - others_bytes)
        self._raise_levels(_DETAIL, max(int(kept_bytes), 0) // RECORD_BYTES)
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

    # --- the thinned pack -------------------------------------------------------------------------

    def _rewrite(self, sums: list[Words], windows: StepWindows) -> Iterator[float]:
        """Writes the thinned pack anew, without windows that are not kept."""
        directory = self._segments.directory
        through = self._segments.segment - 1
        thinned: dict[str, _Thinned] = {}
        path = directory / f".{OLD_PACK}.{os.getpid()}"
        try:
            with self._open_packs() as packs, PackDraft(path, self._describe_pack(through)) as file:
                for name in packs.tables:
                    if name == "aggregates":
                        continue
                    after = thinned[name] = _Thinned()
                    if name in self._list_thinned():
                        before = self._thinned.get(name) or after
                        after.last_decided = max(self._bound, before.last_decided)
                        file.begin(TABLES[name], self._describe(after, through, _kind_of(name)))
                        yield from self._thin(name, packs, windows, after, file)
                    else:
                        file.begin(TABLES[name], self._describe_pack(through))
                        for slot, words in packs.read_words(name):
                            file.append(words, slot)
                            yield 0.0
                    after.num_bytes = file.end(packs.count_dropped(name))
                after = thinned["aggregates"] = _Thinned()
                file.begin(TABLES["aggregates"], self._describe_pack(through))
                yield from self._write_sums(packs, sums, file)
                after.num_bytes = file.end(0)
                file.complete()
            os.replace(path, directory / OLD_PACK)
        finally:
            path.unlink(missing_ok=True)
        self._thinned = thinned
        self._sealed_sizes = {}
        (directory / SEALED_PACK).unlink()

    def _thin(
        self,
        name: str,
        packs: "_Packs",
        windows: StepWindows,
        after: _Thinned,
        file: PackDraft,
    ) -> Iterator[float]:
        first_undecided = None
        for slot, words in packs.read_words(name):
            for begin, end, is_undecided in self._choose(name, words, windows, after.last_decided):
                if is_undecided and first_undecided is None:
                    first_undecided = file.num_records
                file.append(words[begin * NUM_WORDS : end * NUM_WORDS], slot + begin)
            yield 0.0
        after.first_undecided = file.num_records if first_undecided is None else first_undecided

    def _describe_pack(self, through: int) -> dict[str, object]:
        return {**self._fields, "sink": "append", "through": through}

    def _describe(self, after: _Thinned, through: int, kind: str) -> dict[str, object]:
        return {
            **self._describe_pack(through),
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

    def _write_sums(self, packs: "_Packs", sums: list[Words], file: PackDraft) -> Iterator[float]:
        """Those of earlier rounds and of this one; joined to longer blocks where they take too
        much."""
        before = self._thinned.get("aggregates") or _Thinned()
        if before.num_bytes + len(sums) * RECORD_BYTES < self._most_sums_bytes():
            for slot, words in packs.read_words("aggregates"):
                file.append(words, slot)
                yield 0.0
        else:
            rows: list[Words] = []
            for chunk in _read_checked(packs.old, "aggregates", 0):
                rows += chunk
                yield 0.0
            limit = self._most_sums_bytes() // 2 // RECORD_BYTES
            sums = merge_rows(rows + sums, self._sums_level)
            while len(sums) > limit and self._sums_level < _MAX_LEVEL:
                yield 0.0
                self._sums_level += 1
                sums = merge_rows(sums, self._sums_level)
        for index, one in enumerate(sums):
            file.append(array("q", pack_record(0, one)), 0)
            if index % _COPIED_RECORDS == 0:
                yield 0.0

    def _most_sums_bytes(self) -> int:
        return max(int(self._max_bytes * _SUMS_SHARE), _MIN_SUMS_BYTES)


def _kind_of(name: str) -> str:
    return _DETAIL if name in DETAIL_TABLES else _STEPS


class _Packs(ExitStack):
    """The packs that a round reads, old records first; either may not be there."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.old, self.sealed = (self._open(directory / one) for one in (OLD_PACK, SEALED_PACK))

    def _open(self, path: Path) -> PackFile | None:
        try:
            return self.enter_context(PackFile(path))
        except FileNotFoundError:
            return None

    def __enter__(self) -> "_Packs":
        return self

    @property
    def tables(self) -> list[str]:
        """Names of all that are in them, in a fixed order."""
        found = {name for pack in (self.old, self.sealed) if pack for name in pack.tables}
        return [name for name in TABLES if name in found]

    def read_words(self, name: str) -> Iterator[tuple[int, "array[int]"]]:
        """Records as they are, some at a time, each with the slot that the first has."""
        for pack in (self.old, self.sealed):
            for slot, data in _read_chunks(pack, name, 0, _COPIED_RECORDS):
                yield slot, array("q", data)

    def count_dropped(self, name: str) -> int:
        return sum(_read_close(pack, name)[1] for pack in (self.old, self.sealed))


def _read_close(pack: PackFile | None, name: str) -> tuple[int, int]:
    """How many records a table has in a pack that is complete, and how many it dropped."""
    page = b"" if pack is None else pack.read(name, HEADER_BYTES, 0)
    try:
        closed = unpack_slot(page, CLOSE_OFFSET) if len(page) == HEADER_BYTES else None
    except ValueError:
        closed = None
    return (0, 0) if closed is None else (closed[0], closed[1])


def _read_chunks(
    pack: PackFile | None, name: str, first: int, num_records: int
) -> Iterator[tuple[int, bytes]]:
    """Records from slot `first` on, some at a time; none where there is no pack."""
    if pack is None:
        return
    last = _read_close(pack, name)[0]
    for slot in range(first, last, num_records):
        num_bytes = min(num_records, last - slot) * RECORD_BYTES
        yield slot, pack.read(name, num_bytes, HEADER_BYTES + slot * RECORD_BYTES)


def _read_checked(pack: PackFile | None, name: str, first: int) -> Iterator[list[Words]]:
    """Good records that are not void."""
    for slot, data in _read_chunks(pack, name, first, _SUMMED_RECORDS):
        found = []
        for index, (check, *rest) in enumerate(_RECORD.iter_unpack(data)):
            words: Words = tuple(rest)
            if check == record_check(slot + index, words) and words[0] != VOID_WORD:
                found.append(words)
        yield found
