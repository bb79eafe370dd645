"""One table of one rank as a file: a 4 KiB header page, then 64-byte records, append-only.

A record is written by one `pack_into` straight into a mapped window of the file, so whatever has
been recorded is in the page cache at once and outlives the process: SIGKILL loses nothing. Space
for a window is written with zeros before it is mapped; a full disk therefore shows as an OSError
here and never as SIGBUS in the training process. Where mapping is unsafe (network and FUSE file
systems) the same bytes are collected and written with `pwrite` at least every 0.2 s.

Checksum of a record: the sum of its seven payload words and of (slot + 1) times an odd 64-bit
constant, modulo 2**64. Any change confined to one word, hence any flipped byte, changes it; the
slot term makes zeroed, moved or repeated records fail; and a reader can check millions at once.
"""

import errno
import itertools
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from meshscope.store.schema import MAX_DETAIL_BYTES, RECORD_BYTES, SCHEMA_VERSION, Table

MAGIC = b"MSHSCOPE"
HEADER_BYTES = 4096
WINDOW_BYTES = 65536
"""Mapped at a time. 64 KiB is a multiple of every page size in use and of the record size."""

_HEAD = struct.Struct("<8sII")
"""Magic, length of the JSON text, CRC-32 of the text and the padding after it."""
_TEXT_BYTES = HEADER_BYTES - _HEAD.size - 128
STATUS_OFFSET = HEADER_BYTES - 128
CLOSE_OFFSET = HEADER_BYTES - 64
_SLOT = struct.Struct("<Q7q")

CHECK_SALT = 0x9E3779B97F4A7C15
CHECK_MASK = (1 << 64) - 1

RETRY_SECONDS = 5.0
"""How long a table that could not grow waits before it tries again."""
_APPEND_BUFFER_BYTES = 32768

Put = Callable[[int, int, int, int, int, int, int], None]


def record_check(slot: int, words: tuple[int, ...]) -> int:
    """The checksum of the record in `slot` with these seven payload words."""
    return (sum(words) + (slot + 1) * CHECK_SALT) & CHECK_MASK


def pack_record(slot: int, words: tuple[int, ...]) -> bytes:
    """The 64 bytes of one record."""
    return _SLOT.pack(record_check(slot, words), *words)


def pack_header(table: Table, fields: dict[str, object]) -> bytes:
    """The header page: what the file is, readable without this package."""
    text = json.dumps(
        {
            "table": table.name,
            "schema_version": SCHEMA_VERSION,
            "record_bytes": RECORD_BYTES,
            "window_bytes": WINDOW_BYTES,
            "columns": [column.name for column in table.columns],
            **fields,
        }
    ).encode()
    body = text.ljust(_TEXT_BYTES, b"\0")
    return (_HEAD.pack(MAGIC, len(text), zlib.crc32(body)) + body).ljust(HEADER_BYTES, b"\0")


def unpack_header(page: bytes) -> dict[str, object]:
    """The header's fields; ValueError says what is wrong with the page."""
    if len(page) < HEADER_BYTES:
        raise ValueError(f"the file ends after {len(page)} bytes, inside its 4096-byte header")
    magic, length, checksum = _HEAD.unpack_from(page)
    if magic != MAGIC:
        raise ValueError(f"it starts with {magic!r}, not with {MAGIC!r}")
    body = page[_HEAD.size : _HEAD.size + _TEXT_BYTES]
    if zlib.crc32(body) != checksum or length > _TEXT_BYTES:
        raise ValueError("the header's checksum does not match")
    fields: dict[str, object] = json.loads(body[:length])
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
    """Appends records of one table. `put` never raises for a full disk: it counts and goes on."""

    __slots__ = (
        "_base",
        "_buffer",
        "_buffer_start",
        "_fd",
        "_head",
        "_lock",
        "_max_bytes",
        "_retry_at",
        "_slots",
        "_window",
        "error",
        "num_dropped",
        "path",
        "put",
        "table",
    )

    def __init__(
        self,
        path: Path,
        table: Table,
        fields: dict[str, object],
        *,
        mapped: bool = True,
        max_detail_bytes: int = MAX_DETAIL_BYTES,
    ) -> None:
        self.path = path
        self.table = table
        self.num_dropped = 0
        self.error = ""
        self._max_bytes = max_detail_bytes if table.is_detail else 1 << 62
        self._lock = threading.RLock()
        self._retry_at = 0.0
        self._slots = itertools.count()
        self._buffer = bytearray()
        self._buffer_start = HEADER_BYTES
        self._window: mmap.mmap | None = None
        self._head: mmap.mmap | None = None
        self._base = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        header = pack_header(table, {**fields, "sink": "mapped" if mapped else "append"})
        _write_all(self._fd, header, 0)
        self.put: Put = self._put_appended
        if mapped:
            self._head = mmap.mmap(self._fd, HEADER_BYTES)
            self._base = -WINDOW_BYTES - HEADER_BYTES  # no window yet: the first record maps one
            self.put = self._put_mapped

    def _put_mapped(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        # next() on a C iterator hands every thread its own slot without a lock.
        slot = next(self._slots)
        offset = slot * 64 - self._base
        if offset >= WINDOW_BYTES and (offset := self._map_window(slot)) < 0:
            self._drop()
            return
        if offset < 0:  # another thread has mapped the next window since this slot was drawn
            self._write_behind(slot, (a, b, c, d, e, f, g))
            return
        _SLOT.pack_into(
            self._window,  # type: ignore[arg-type]  # mapped whenever offset is inside it
            offset,
            (a + b + c + d + e + f + g + (slot + 1) * CHECK_SALT) & CHECK_MASK,
            a,
            b,
            c,
            d,
            e,
            f,
            g,
        )

    def _map_window(self, slot: int) -> int:
        """Maps the window that holds `slot`; its offset there, or -1 when there is no room."""
        with self._lock:
            position = HEADER_BYTES + slot * RECORD_BYTES
            start = position // WINDOW_BYTES * WINDOW_BYTES
            if start + WINDOW_BYTES > self._max_bytes:
                self._lose(slot, f"the table reached its limit of {self._max_bytes} bytes")
                return -1
            try:
                size = os.fstat(self._fd).st_size
                if size < start + WINDOW_BYTES:
                    _write_all(self._fd, bytes(start + WINDOW_BYTES - size), size)
                self._window = mmap.mmap(self._fd, WINDOW_BYTES, offset=start)
            except (OSError, ValueError) as error:
                self._lose(slot, describe_os_error(error))
                return -1
            self._base = start - HEADER_BYTES
            return position - start

    def _write_behind(self, slot: int, words: tuple[int, ...]) -> None:
        try:
            _write_all(self._fd, pack_record(slot, words), HEADER_BYTES + slot * RECORD_BYTES)
        except OSError as error:
            self.error = self.error or describe_os_error(error)
            self._drop()

    def _put_appended(self, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
        with self._lock:
            if self._buffer_start + len(self._buffer) >= self._max_bytes:
                self._lose(next(self._slots), f"reached its limit of {self._max_bytes} bytes")
                self._drop()
                return
            self._buffer += pack_record(next(self._slots), (a, b, c, d, e, f, g))
            if len(self._buffer) >= _APPEND_BUFFER_BYTES:
                self.flush()

    def _put_dropped(self, *words: int) -> None:
        """Stands in for `put` while the disk is full; tries again every few seconds."""
        if time.monotonic() >= self._retry_at and self._resume():
            self.put(*words)
        else:
            self._drop()

    def _put_nothing(self, *words: int) -> None:
        """Stands in for `put` in a forked child, whose records are not this rank's."""

    def _lose(self, slot: int, reason: str) -> None:
        """From `slot` on there is no room; the slot stays free for the first record that fits."""
        self.error = self.error or reason
        self._slots = itertools.count(slot)
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self.put = self._put_dropped

    def _resume(self) -> bool:
        with self._lock:
            if self.put != self._put_dropped:
                return True
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if self._head is None:
                if not self._flush_buffer():
                    return False
                self.put = self._put_appended
                return True
            slot = next(self._slots)
            self._slots = itertools.count(slot)
            if self._base <= slot * RECORD_BYTES < self._base + WINDOW_BYTES:
                self.put = self._put_mapped
                return True
            if self._map_window(slot) < 0:
                return False
            self.put = self._put_mapped
            return True

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1
            words = (self.num_dropped, time.monotonic_ns(), 0, 0, 0, 0, 0)
            self._write_slot(STATUS_OFFSET, words)

    def _write_slot(self, offset: int, words: tuple[int, ...]) -> None:
        record = _SLOT.pack(record_check(offset, words), *words)
        if self._head is not None:
            self._head[offset : offset + RECORD_BYTES] = record
            return
        try:
            os.pwrite(self._fd, record, offset)
        except OSError as error:
            self.error = self.error or describe_os_error(error)

    def flush(self) -> None:
        """Hands over what the append sink has collected; the mapped sink holds nothing back."""
        with self._lock:
            if self._buffer and not self._flush_buffer():
                self._lose(self._next_slot(), self.error)

    def _flush_buffer(self) -> bool:
        try:
            _write_all(self._fd, bytes(self._buffer), self._buffer_start)
        except OSError as error:
            self.error = self.error or describe_os_error(error)
            return False
        self._buffer_start += len(self._buffer)
        self._buffer.clear()
        return True

    def _next_slot(self) -> int:
        slot = next(self._slots)
        self._slots = itertools.count(slot)
        return slot

    def close(self) -> int:
        """Cuts the file to its records and marks it complete; the number of records in it."""
        with self._lock:
            if self._fd < 0:
                return 0
            self.flush()
            num_records = self._next_slot()
            if self._head is None:
                num_records = (self._buffer_start - HEADER_BYTES) // RECORD_BYTES
                self.num_dropped += len(self._buffer) // RECORD_BYTES
            self.put = self._put_nothing
            # Unmapped before the file is cut: nothing may touch a page beyond its end.
            self._window = None
            words = (num_records, self.num_dropped, time.monotonic_ns(), 0, 0, 0, 0)
            self._write_slot(CLOSE_OFFSET, words)
            try:
                os.ftruncate(self._fd, HEADER_BYTES + num_records * RECORD_BYTES)
            except OSError as error:
                self.error = self.error or describe_os_error(error)
            self._head = None
            os.close(self._fd)
            self._fd = -1
            return num_records

    def disarm(self) -> None:
        """After a fork, in the child: write nothing more, leave the parent's file alone."""
        self._lock = threading.RLock()  # the parent may have held it at the moment of the fork
        self.put = self._put_nothing
        self._window = self._head = None
        self._buffer = bytearray()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def describe_os_error(error: OSError | ValueError) -> str:
    """One phrase for a report: `No space left on device (ENOSPC)`."""
    code = getattr(error, "errno", None)
    if code is None:
        return str(error)
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """`pwrite` until everything is there; a short write is how a full disk first shows."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
        offset += written
