"""One table of one rank as a file: a 4 KiB header page, then 64-byte records, append-only.

A record is written by one `pack_into` straight into a mapped window of the file. It is in the page
cache at once and outlives the process: SIGKILL loses nothing. Space
for a window is written with zeros before it is mapped; a full disk therefore shows as an OSError
here and never as SIGBUS in the training process. Where mapping is unsafe (network, FUSE and
copy-on-write file systems) the same bytes are collected and written with `pwrite` at least every
0.2 s.

Checksum of a record: the sum of its seven payload words and of (slot + 1) times an odd 64-bit
constant, modulo 2**64. Any change confined to one word, hence any flipped byte, changes it; the
slot term makes zeroed, moved or repeated records fail; and a reader can check millions at once.

Needs CPython with its global lock: without it `put` would have to take a lock.
"""

import contextlib
import errno
import itertools
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from meshscope.store.schema import (
    LIMIT_WORDS,
    MAX_DETAIL_BYTES,
    RECORD_BYTES,
    SCHEMA_VERSION,
    Table,
)
from meshscope.store.write.native import load_native
from meshscope.store.write.places import WINDOW_BYTES, Buffer, Place

MAGIC = b"MSHSCOPE"
HEADER_BYTES = 4096

_HEAD = struct.Struct("<8sII")
"""Magic, length of the JSON text, CRC-32 of the text and the padding after it."""
_TEXT_BYTES = HEADER_BYTES - _HEAD.size - 128
STATUS_OFFSET = HEADER_BYTES - 128
CLOSE_OFFSET = HEADER_BYTES - 64
_SLOT = struct.Struct("<Q7q")
_PACK_INTO = _SLOT.pack_into

CHECK_SALT = 0x9E3779B97F4A7C15
CHECK_MASK = (1 << 64) - 1
EPOCH = 1 << 64
VOID_WORD = -(1 << 63)
_VOID_WORDS = (VOID_WORD,) * 7
"""Payload of a slot that was drawn but got no record; readers skip it."""

RETRY_SECONDS = 1.0
"""How long a table that could not grow waits before it tries again."""
_LATE_SECONDS = 1.0
"""How long closing waits for a thread that is in the middle of a put."""
_LATE_RECORDS = 1 << 18
INLINE_FLUSH_BYTES = 256 << 10
"""Collected by the append sink before `put` itself writes; before that the flush thread does."""
MAX_HELD_BYTES = 4 << 20
"""Held by the append sink while the file cannot be written; beyond it records are dropped."""

Put = Callable[[int, int, int, int, int, int, int], None]
Mapping = tuple[int, Buffer, int]
"""Number of bytes from the first record to the window, the window, and its length."""

_NOWHERE: Mapping = (1 << 200, None, 0)  # type: ignore[assignment]  # beyond any slot: never touched


def record_check(slot: int, words: tuple[int, ...]) -> int:
    """The checksum of the record in `slot` with these seven payload words."""
    return (sum(words) + (slot + 1) * CHECK_SALT) & CHECK_MASK


def pack_record(slot: int, words: tuple[int, ...]) -> bytes:
    """The 64 bytes of one record."""
    return _SLOT.pack(record_check(slot, words), *words)


def is_good_record(slot: int, record: bytes) -> bool:
    """Whether 64 bytes are a record of that slot."""
    check, *words = _SLOT.unpack(record)
    return bool(check == record_check(slot, tuple(words)))


def pack_header(table: Table, fields: dict[str, object]) -> bytes:
    """The header page of an empty table: what it is, readable without this package."""
    about = {
        "table": table.name,
        "schema_version": SCHEMA_VERSION,
        "record_bytes": RECORD_BYTES,
        "window_bytes": WINDOW_BYTES,
        "columns": [column.name for column in table.columns],
        **fields,
    }
    status = pack_record(STATUS_OFFSET, (0, time.monotonic_ns(), HEADER_BYTES, 0, 0, 0, 0))
    return pack_text(MAGIC, about) + status + bytes(RECORD_BYTES)


def pack_text(magic: bytes, fields: dict[str, object]) -> bytes:
    """The part of a header page that is never written again."""
    text = json.dumps(fields).encode()
    if len(text) > _TEXT_BYTES:
        raise ValueError(f"the header text has {len(text)} bytes, at most {_TEXT_BYTES} fit")
    body = text.ljust(_TEXT_BYTES, b"\0")
    return _HEAD.pack(magic, len(text), zlib.crc32(body)) + body


def unpack_header(page: bytes, expected: bytes = MAGIC) -> dict[str, object]:
    """The header's fields; ValueError says what is wrong with the page."""
    if len(page) < HEADER_BYTES:
        raise ValueError(f"the file ends after {len(page)} bytes, inside its 4096-byte header")
    magic, length, checksum = _HEAD.unpack_from(page)
    if magic != expected:
        raise ValueError(f"it starts with {magic!r}, not with {expected!r}")
    body = page[_HEAD.size : _HEAD.size + _TEXT_BYTES]
    if zlib.crc32(body) != checksum or length > _TEXT_BYTES:
        raise ValueError("the header's checksum does not match")
    try:
        fields = json.loads(body[:length])
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("the header is not a JSON object")
    return fields


def unpack_slot(page: bytes, offset: int) -> tuple[int, ...] | None:
    """The seven words of the status or close slot; None when it was never written.

    ValueError when the slot is damaged.
    """
    check, *words = _SLOT.unpack_from(page, offset)
    if not check and not any(words):
        return None
    if check != record_check(offset, tuple(words)):
        raise ValueError(f"the slot at byte {offset} does not match its checksum")
    return tuple(words)


class TableWriter:
    """Appends records of one table. `put` never raises for a full disk: it counts and goes on.

    Mapped: a slot is drawn from a counter, so that threads need no lock, and belongs to the thread
    that drew it. Slots are granted a window at a time. When a window cannot be had, the slots
    drawn beyond the last granted one are void and the table is lost until it can grow again; it
    then counts on from there in a new epoch, slot numbers that are higher by 2**64. Offsets and
    checksums are the same modulo 2**64, and a thread that still holds a slot of an earlier epoch is
    recognised, however long it slept.
    """

    __slots__ = (
        "_buffer",
        "_ends",
        "_fields",
        "_head",
        "_io_lock",
        "_is_closed",
        "_is_lost",
        "_lock",
        "_mapping",
        "_max_bytes",
        "_native",
        "_num_collected",
        "_num_granted",
        "_outgoing",
        "_place",
        "_retry_at",
        "_slots",
        "_status_is_due",
        "_written",
        "error",
        "num_dropped",
        "put",
        "table",
    )

    def __init__(
        self,
        place: Place,
        table: Table,
        fields: dict[str, object],
        *,
        max_detail_bytes: int = MAX_DETAIL_BYTES,
    ) -> None:
        self._place = place
        self.table = table
        self.num_dropped = 0
        self.error = ""
        self._fields = fields
        self._max_bytes = max_detail_bytes if table.is_detail else 1 << 62
        self._lock = threading.RLock()
        self._is_closed = self._is_lost = False
        self._retry_at = 0.0
        self._head: Buffer | None = None
        # Mapped sink.
        self._native = load_native("meshscope.store.write._record_slots_native")
        self._ends: list[int] = []  # for each past epoch, the slots it was granted
        self._slots: Iterator[int] = self._count_slots(0)
        self._mapping: Mapping = _NOWHERE
        self._num_granted = 0
        # Append sink. The second lock is held while writing, so that `put` need not wait for it.
        self._io_lock = threading.Lock()
        self._num_collected = 0
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._written = HEADER_BYTES
        self._status_is_due = False
        self.put: Put = self._put_nothing
        if self._create():
            self.put = self._choose_put()
        else:
            self._lose(self.error)

    def _create(self) -> bool:
        """Begins the table with its header; False, and nothing, when that is not possible now."""
        try:
            self._place.create(lambda sink: pack_header(self.table, {**self._fields, "sink": sink}))
            if self._place.is_mapped:
                with contextlib.suppress(ValueError):  # of so many maps, this one cannot be had
                    self._head = self._place.map_head(HEADER_BYTES)
        except OSError as error:
            self._note(error)
            return False
        return True

    def _choose_put(self) -> Put:
        if self._head is None:
            return self._put_appended
        slots: Any = self._slots
        return self._put_mapped if self._native is None else slots.put

    # --- mapped ---------------------------------------------------------------------------

    def _count_slots(self, first: int) -> Iterator[int]:
        """Slots of this epoch. The compiled counter also writes, where a record is an usual one."""
        epoch = len(self._ends) * EPOCH
        if self._native is None:
            return itertools.count(epoch + first)
        counter: Iterator[int] = self._native.RecordSlots(epoch, first, self._put_mapped)
        return counter

    def _set_mapping(self, mapping: Mapping) -> None:
        """From here on records of this epoch go into that window."""
        self._mapping = mapping
        if self._native is not None:
            start, window, _ = mapping
            epoch_start = len(self._ends) * EPOCH * RECORD_BYTES
            slots: Any = self._slots
            slots.map(0 if window is None else start - epoch_start, window)

    def make_room(self) -> None:
        """Maps the first window ahead of the first record, which then costs what later ones do."""
        with self._lock:
            if self._head is not None and self._mapping is _NOWHERE and not self._is_lost:
                self._set_mapping(self._grow(0, 0) or _NOWHERE)

    def _put_mapped(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        # A `for` and not `next()`: at a call CPython may switch threads or run a
        # signal handler, and from here to the end of pack_into there is none. So a thread rarely
        # leaves a slot empty while others fill later ones.
        for slot in self._slots:  # noqa: B007  # used below
            break
        mapping = self._mapping  # read once: another thread may map the next window
        offset = slot * 64 - mapping[0]
        if offset < mapping[2] and offset >= 0:
            try:
                check = (a + b + c + d + e + f + g + (slot + 1) * CHECK_SALT) & CHECK_MASK
                _PACK_INTO(mapping[1], offset, check, a, b, c, d, e, f, g)
            except Exception:
                self._give_up(slot)
                raise
            except BaseException:
                self._give_up(slot, unless_written=True)
                raise
        else:
            try:
                self._put_outside(slot, pack_record(slot, (a, b, c, d, e, f, g)))
            except Exception:
                self._give_up(slot)
                raise
            except BaseException:
                self._give_up(slot, unless_written=True)
                raise

    def _give_up(self, slot: int, *, unless_written: bool = False) -> None:
        """Marks a drawn slot void: what was put is no 64-bit integer, or an interrupt came."""
        with self._lock:
            if not self._place.is_open:
                return
            record_index = slot % EPOCH
            found = self._place.read(RECORD_BYTES, HEADER_BYTES + record_index * RECORD_BYTES)
            if (
                unless_written
                and len(found) == RECORD_BYTES
                and is_good_record(record_index, found)
            ):
                return
            self._put_outside(slot, pack_record(record_index, _VOID_WORDS))
            self._drop()

    def _put_outside(self, slot: int, record: bytes) -> None:
        """Writes a record whose slot is not in the mapped window, mapping the next if need be."""
        epoch, record_index = divmod(slot, EPOCH)
        with self._lock:
            mapping = None
            if not self._is_granted(epoch, record_index):
                is_current = epoch == len(self._ends) and not (self._is_lost or self._is_closed)
                mapping = self._grow(epoch, record_index) if is_current else None
                if mapping is None:
                    if not self._is_closed:  # what comes after the end is not a loss
                        self._drop()
                    return
            try:
                self._place.write(record, HEADER_BYTES + record_index * RECORD_BYTES)
            except OSError as error:
                self._note(error)
                self._drop()
            # Only now may other threads write behind this record.
            if mapping is not None:
                self._set_mapping(mapping)

    def _is_granted(self, epoch: int, record_index: int) -> bool:
        end = self._ends[epoch] if epoch < len(self._ends) else self._num_granted
        return record_index < end and self._place.is_open

    def _grow(self, epoch: int, record_index: int) -> Mapping | None:
        """Grows the table and maps the window with that record; None when there is no room."""
        offset = HEADER_BYTES + record_index * RECORD_BYTES
        if offset // WINDOW_BYTES * WINDOW_BYTES + WINDOW_BYTES > self._max_bytes:
            self._lose(f"{LIMIT_WORDS} of {self._max_bytes} bytes")
            return None
        try:
            granted = HEADER_BYTES + self._num_granted * RECORD_BYTES
            start, window = self._place.grow(offset, granted)
        except (OSError, ValueError) as error:
            self._lose(describe_os_error(error))
            return None
        self._num_granted = (start + len(window) - HEADER_BYTES) // RECORD_BYTES
        self._write_status()
        return (epoch * EPOCH * RECORD_BYTES + start - HEADER_BYTES, window, len(window))

    # --- full disk ------------------------------------------------------------------------

    def _lose(self, reason: str) -> None:
        self.error = self.error or reason
        self._is_lost = True
        self._set_mapping(_NOWHERE)
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self.put = self._put_dropped

    def _put_dropped(self, *words: int) -> None:
        """Stands in for `put` while there is no room; tries again every RETRY_SECONDS."""
        if time.monotonic() >= self._retry_at and self._resume():
            self.put(*words)
        else:
            self._drop()

    def _resume(self) -> bool:
        with self._lock:
            if self._is_closed or not self._is_lost:
                return not self._is_closed
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._place.is_open and not self._create():
                return False
            if self._head is not None:
                first = self._num_granted
                mapping = self._grow(len(self._ends) + 1, first)
                if mapping is None:
                    return False
                self._ends.append(first)
                self._slots = self._count_slots(first)
                self._set_mapping(mapping)
            self._is_lost = False
            self.put = self._choose_put()
            return True

    def _put_nothing(self, *words: int) -> None:
        """Stands in for `put` after the end, and in a forked child: not this rank's records."""

    def _drop(self) -> None:
        with self._lock:
            if self._is_closed and not self._place.is_open:
                return
            self.num_dropped += 1
            if self._head is not None:
                self._write_status()
            self._status_is_due = True

    def _note(self, error: OSError | ValueError) -> None:
        self.error = self.error or describe_os_error(error)

    def _write_status(self) -> None:
        extent = self._written
        if self._head is not None:
            extent = HEADER_BYTES + self._num_granted * RECORD_BYTES
        words = (self.num_dropped, time.monotonic_ns(), extent, 0, 0, 0, 0)
        self._write_slot(STATUS_OFFSET, words)

    def _write_slot(self, offset: int, words: tuple[int, ...]) -> None:
        record = pack_record(offset, words)
        if self._head is not None:
            self._head[offset : offset + RECORD_BYTES] = record
            return
        try:
            self._place.write(record, offset)
        except OSError as error:
            self._note(error)

    # --- append ---------------------------------------------------------------------------

    def _put_appended(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        num_held = len(self._buffer) + len(self._outgoing)
        if num_held >= INLINE_FLUSH_BYTES and time.monotonic() >= self._retry_at:
            self._try_hand_over()
        with self._lock:
            if self._is_closed:
                return
            end = HEADER_BYTES + (self._num_collected + 1) * RECORD_BYTES
            if end > self._max_bytes:
                self.error = self.error or f"{LIMIT_WORDS} of {self._max_bytes} bytes"
                self._drop()
            elif len(self._buffer) + len(self._outgoing) >= MAX_HELD_BYTES:
                self._drop()
            else:
                self._buffer += pack_record(self._num_collected, (a, b, c, d, e, f, g))
                self._num_collected += 1

    def _try_hand_over(self) -> None:
        """Writes unless another thread is writing: `put` does not wait for a slow disk twice."""
        if self._io_lock.acquire(blocking=False):
            try:
                self._hand_over()
            finally:
                self._io_lock.release()

    def flush(self) -> None:
        """Hands over what the append sink has collected; the mapped sink holds nothing back."""
        if self._head is None and self._place.is_open:
            with self._io_lock:
                self._hand_over()

    def _hand_over(self) -> None:
        """Writes what was collected, or as much as fits; the rest is kept. Holds `_io_lock`."""
        with self._lock:
            if not self._place.is_open:
                return
            self._outgoing += self._buffer
            self._buffer = bytearray()
            has_news = bool(self._outgoing) or self._status_is_due
            self._status_is_due = False
        try:
            while self._outgoing:
                written = self._place.append(self._outgoing, self._written)
                if written <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._written += written
                del self._outgoing[:written]
        except OSError as error:
            self._note(error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        if has_news:
            self._write_status()

    # --- the end --------------------------------------------------------------------------

    def close(self) -> int:
        """Cuts the file to its records and marks it complete; the number of records in it."""
        with self._lock:
            if self._is_closed:
                return 0
            self._is_closed = True
            self.put = self._put_nothing
            self._set_mapping(_NOWHERE)  # from here on a late put finds no window and no grant
            if not self._place.is_open:
                return 0
            if self._head is not None:
                drawn = self._num_granted if self._is_lost else next(self._slots) % EPOCH
                num_records = self._num_granted = min(drawn, self._num_granted)
        if self._head is not None:
            self._wait_for_late_records(num_records)
        else:
            num_records = self._finish_appending()
        with self._lock:
            words = (num_records, self.num_dropped, time.monotonic_ns(), 0, 0, 0, 0)
            self._write_slot(CLOSE_OFFSET, words)
            try:
                self._place.finish(HEADER_BYTES + num_records * RECORD_BYTES)
            except OSError as error:
                self._note(error)
            self._head = None
        return num_records

    def _wait_for_late_records(self, num_records: int) -> None:
        """Gives threads that drew a slot the time to fill it; marks void what stays empty."""
        if threading.active_count() == 1:
            return
        deadline = time.monotonic() + _LATE_SECONDS
        while empty := self._find_empty_slots(num_records):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        for slot in empty:
            self._put_outside(len(self._ends) * EPOCH + slot, pack_record(slot, _VOID_WORDS))
            self._drop()

    def _find_empty_slots(self, num_records: int) -> list[int]:
        """Slots without a record among the last ones; no thread lags behind more than that."""
        first = max(0, num_records - _LATE_RECORDS)
        size = (num_records - first) * RECORD_BYTES
        data = self._place.read(size, HEADER_BYTES + first * RECORD_BYTES)
        nothing = bytes(RECORD_BYTES)
        empty = []
        position = data.find(nothing)
        while position >= 0:
            position = -(-position // RECORD_BYTES) * RECORD_BYTES  # a run may begin in a record
            if data[position : position + RECORD_BYTES] == nothing:
                empty.append(first + position // RECORD_BYTES)
                position += RECORD_BYTES
            position = data.find(nothing, position)
        return empty

    def _finish_appending(self) -> int:
        with self._io_lock:
            self._hand_over()
            num_records = (self._written - HEADER_BYTES) // RECORD_BYTES
            self.num_dropped += self._num_collected - num_records
            return num_records

    def disarm(self) -> None:
        """After a fork, in the child: write nothing more, leave the parent's file alone."""
        self._lock = threading.RLock()  # the parent may have held them at the moment of the fork
        self._io_lock = threading.Lock()
        self._is_closed = True
        self.put = self._put_nothing
        self._set_mapping(_NOWHERE)
        self._head = None
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._place.release()


def describe_os_error(error: OSError | ValueError) -> str:
    """One phrase for a report: `No space left on device (ENOSPC)`."""
    code = getattr(error, "errno", None)
    if not code:
        return str(getattr(error, "strerror", None) or error)
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"
