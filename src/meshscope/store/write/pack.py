"""All tables of one rank in one file: a header page, then extents, each of them of one table.

    bytes 0-4095        header: what the file is, as a table's header page
    bytes 4096-8191     the first directory page: 32 entries, each there twice, in a row
    from byte 8192 on   extents, and further directory pages

An entry is a record whose seven words are a table's name (four), where in the file the extent
begins, which byte of the table is its first, and its length. The last entry of a directory page
names the next page. The extents of a table, in order, are what a file of this table alone would be:
its header page and its records (`table_file`). Entries are only ever added, after the extent's
bytes are in the file, so that a kill leaves none without its extent. Standard library only.
"""

import contextlib
import errno
import os
import struct
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from meshscope.store.schema import NUM_WORDS, RECORD_BYTES, SCHEMA_VERSION
from meshscope.store.table import Table
from meshscope.store.write.access import create_file
from meshscope.store.write.manifest import link_into_place
from meshscope.store.write.places import (
    CUT_SHORT,
    WINDOW_BYTES,
    Buffer,
    can_map,
    map_bytes,
    write_all,
)
from meshscope.store.write.table_file import (
    CHECK_MASK,
    CHECK_SALT,
    CLOSE_OFFSET,
    HEADER_BYTES,
    is_good_record,
    pack_header,
    pack_record,
    pack_text,
)

PACK_NAME = "tables.pack"
SEALED_PACK = "tables.sealed.pack"
"""Complete and not yet thinned (`thinning`)."""
OLD_PACK = "tables.old.pack"
"""Thinned."""
PACK_SUFFIX = ".pack"
PACK_MAGIC = b"MSHSPACK"
_ENTRY_BYTES = 2 * RECORD_BYTES
_PAGE_BYTES = 4096
FIRST_EXTENT = HEADER_BYTES + _PAGE_BYTES
"""Where it begins."""
FIRST_EXTENT_BYTES = 8192
_LINK = "(directory)"
_NAME_BYTES = 32
_NAME = struct.Struct("<4q")
_ENTRY = struct.Struct("<7q")


def extent_of(offset: int) -> tuple[int, int]:
    """Begin and end of the extent that has this byte of a table: 8 KiB, then as much again as
    there is, up to 64 KiB."""
    if offset >= WINDOW_BYTES:
        begin = offset // WINDOW_BYTES * WINDOW_BYTES
        return begin, begin + WINDOW_BYTES
    begin = 0 if offset < FIRST_EXTENT_BYTES else 1 << offset.bit_length() - 1
    return begin, max(2 * begin, FIRST_EXTENT_BYTES)


def _number_of(begin: int) -> int:
    """Which of a table's extents begins there."""
    if begin >= WINDOW_BYTES:
        return begin // WINDOW_BYTES + 3
    return max(begin // FIRST_EXTENT_BYTES, 0).bit_length()


def _pack_entry(at: int, name: str, offset: int, table_offset: int, num_bytes: int) -> bytes:
    words = _NAME.unpack(name.encode().ljust(_NAME_BYTES, b"\0"))
    entry = (*words, offset, table_offset, num_bytes)
    return pack_record(at, entry) + pack_record(at + RECORD_BYTES, entry)


def _describe(fields: Mapping[str, object]) -> dict[str, object]:
    # A number that no other pack has: readers that know one do not take it for another.
    return {"schema_version": SCHEMA_VERSION, **fields, "id": os.urandom(6).hex()}


# --- writing --------------------------------------------------------------------------------------


class PackWriter:
    """The file of one rank's tables. Threads may share it."""

    def __init__(self, path: Path, fields: dict[str, object], *, mapped: bool) -> None:
        """The file is made when the first table is."""
        self.path = path
        self.is_mapped = mapped
        self._fields = fields
        self._lock = threading.Lock()
        self.fd = -1
        self._state: tuple[int, int, dict[str, tuple[int, int]]] = HEADER_BYTES, FIRST_EXTENT, {}
        """Where the next entry goes; the end of all extents and pages; and the last extent of each
        table: its first byte, and where it is. One value, replaced at once: a handler of a signal
        may raise between any two statements."""
        self._is_over = False
        self.sizes: dict[str, int] = {}
        """Bytes by table."""

    def add(self, name: str, table_offset: int, num_bytes: int, content: bytes = b"") -> int:
        """Adds an extent of zeros that begins with `content`; where it is. Raises OSError, and
        the file is then as before. One that is there already, because who asked for it was
        interrupted before it knew, is given again."""
        with self._lock:
            self._open()
            at, end, lasts = self._state
            last_offset, last_begin = lasts.get(name, (-1, 0))
            if last_offset == table_offset:
                return last_begin
            if self.is_mapped and os.fstat(self.fd).st_size < end:
                raise OSError(0, CUT_SHORT)
            is_last = (at + _ENTRY_BYTES) % _PAGE_BYTES == 0
            begin = end + (_PAGE_BYTES if is_last else 0)
            self._write_extent(begin, num_bytes, content)
            if is_last:
                link = _pack_entry(at, _LINK, end, 0, _PAGE_BYTES)
                entry = _pack_entry(end, name, begin, table_offset, num_bytes)
                # The entry first: a page that is named has one.
                write_all(self.fd, entry, end)
                write_all(self.fd, link, at)
                at = end
            else:
                write_all(self.fd, _pack_entry(at, name, begin, table_offset, num_bytes), at)
            last = {name: (table_offset, begin)}
            self._state = at + _ENTRY_BYTES, begin + num_bytes, lasts | last
            self.sizes[name] = table_offset + num_bytes
            return begin

    def open(self) -> None:
        """Makes the file unless it is there. Raises OSError."""
        with self._lock:
            self._open()

    def _open(self) -> None:
        if self._is_over:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.fd < 0:
            self._create()

    def _write_extent(self, begin: int, num_bytes: int, content: bytes) -> None:
        if not self.is_mapped:  # what is not written is a hole, or not there yet
            write_all(self.fd, content, begin)
            return
        end = self._state[1]
        data = bytes(begin - end) + content
        try:
            write_all(self.fd, data.ljust(begin + num_bytes - end, b"\0"), end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, end)
            raise

    def _create(self) -> None:
        """The file gets its name when its first pages are in it: a killed process leaves no shorter
        one behind."""
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fd = create_file(draft, os.O_RDWR)
        try:
            write_all(fd, bytes(FIRST_EXTENT), 0)
            self.is_mapped = self.is_mapped and can_map(fd)
            fields = {**self._fields, "sink": "mapped" if self.is_mapped else "append"}
            write_all(fd, pack_text(PACK_MAGIC, _describe(fields)), 0)
            link_into_place(draft, self.path)
        except OSError:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        self.fd = fd

    def close(self) -> None:
        """After all tables were completed."""
        with self._lock:
            self._release()

    def disarm(self) -> None:
        """In a forked child, where the lock may be held by a thread that is not there."""
        self._lock = threading.Lock()
        self._release()

    def _release(self) -> None:
        self._is_over = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PackedTable:
    """The place of one table in a pack."""

    def __init__(self, pack: PackWriter, name: str) -> None:
        self._pack = pack
        self._name = name
        self._places = array("q")
        """Where in the file each extent begins."""
        self._end = 0
        """Of the last one, within the table."""
        self._is_open = False

    @property
    def is_mapped(self) -> bool:
        return self._pack.is_mapped

    @property
    def is_open(self) -> bool:
        return self._is_open and self._pack.fd >= 0

    def create(self, make_header: Callable[[str], bytes]) -> None:
        """The extent is named when the header is in it: a killed process leaves none without."""
        self._pack.open()
        if not self._end:
            self._add(make_header("mapped" if self._pack.is_mapped else "append"))
        self._is_open = True

    def _add(self, content: bytes = b"") -> None:
        begin, end = extent_of(self._end)
        place = self._pack.add(self._name, begin, end - begin, content)
        del self._places[_number_of(begin) :]  # of a call that was interrupted here
        self._places.append(place)
        self._end = end

    def map_head(self, num_bytes: int) -> Buffer:
        return map_bytes(self._pack.fd, self._places[0], num_bytes)

    def _find(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """The parts that such bytes are in: which of them, how many, and where in the file."""
        done = 0
        while done < num_bytes and offset + done < self._end:
            begin, end = extent_of(offset + done)
            count = min(end - offset - done, num_bytes - done)
            yield done, count, self._places[_number_of(begin)] + offset + done - begin
            done += count

    def read(self, num_bytes: int, offset: int) -> bytes:
        found = [os.pread(self._pack.fd, n, at) for _, n, at in self._find(offset, num_bytes)]
        return b"".join(found)

    def write(self, data: bytes, offset: int) -> None:
        for first, count, at in self._find(offset, len(data)):
            write_all(self._pack.fd, data[first : first + count], at)

    def append(self, data: bytes | bytearray, offset: int) -> int:
        while self._end <= offset:
            self._add()
        begin, end = extent_of(offset)
        part = memoryview(data)[: end - offset]
        return os.pwrite(self._pack.fd, part, self._places[_number_of(begin)] + offset - begin)

    def grow(self, offset: int, num_used: int) -> tuple[int, Buffer]:
        while self._end <= offset:
            self._add()
        start, end = extent_of(offset)
        return start, map_bytes(self._pack.fd, self._places[_number_of(start)], end - start)

    def finish(self, num_bytes: int) -> None:
        """The rest of its last extent stays, of zeros."""
        self._is_open = False

    def release(self) -> None:
        self._is_open = False


class PackDraft:
    """A pack that is written as a whole, table by table, and has no name that readers know yet."""

    def __init__(self, path: Path, fields: Mapping[str, object]) -> None:
        path.unlink(missing_ok=True)
        self._file = open(create_file(path), "wb")  # noqa: SIM115  # closed by `__exit__`
        page = pack_text(PACK_MAGIC, _describe(fields))
        self._file.write(page.ljust(FIRST_EXTENT, b"\0"))
        self._entries = b""
        self._begin = 0
        self._page = b""
        self.num_records = 0
        """Of the table that is being written."""

    def begin(self, table: Table, fields: dict[str, object]) -> None:
        self._begin = self._file.tell()
        self._name = table.name
        self._page = pack_header(table, fields)
        self._file.write(self._page)
        self.num_records = 0

    def append(self, words: "array[int]", slot: int) -> None:
        """Records from `slot` on of another pack. A checksum is moved, not made: what is damaged
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

    def end(self, num_dropped: int) -> int:
        """Completes the table; its length."""
        end = self._file.tell()
        self._file.seek(self._begin + CLOSE_OFFSET)
        words = (self.num_records, num_dropped, time.monotonic_ns(), 0, 0, 0, 0)
        self._file.write(pack_record(CLOSE_OFFSET, words))
        self._file.seek(end)
        at = HEADER_BYTES + len(self._entries)
        self._entries += _pack_entry(at, self._name, self._begin, 0, end - self._begin)
        return end - self._begin

    def complete(self) -> None:
        if len(self._entries) > _PAGE_BYTES - _ENTRY_BYTES:
            raise ValueError(f"{len(self._entries)} bytes of entries do not fit in a page")
        self._file.seek(HEADER_BYTES)
        self._file.write(self._entries)
        self._file.flush()
        # It replaces records that the disk has had for long.
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


# --- reading --------------------------------------------------------------------------------------

_MAX_PROBLEMS = 64


class Extents:
    """Those of one table, in order."""

    __slots__ = ("_counts", "_firsts", "_offsets")

    def __init__(self) -> None:
        # A pack of a gigabyte has 16,000.
        self._firsts, self._counts, self._offsets = array("q"), array("q"), array("q")

    @property
    def end(self) -> int:
        """The first byte of the table that is in none."""
        return self._firsts[-1] + self._counts[-1] if self._firsts else 0

    def add(self, first: int, count: int, offset: int) -> None:
        """One more: its first byte, how many, and where in the file."""
        if self._firsts and first == self.end and offset == self._offsets[-1] + self._counts[-1]:
            self._counts[-1] += count
            return
        self._firsts.append(first)
        self._counts.append(count)
        self._offsets.append(offset)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self._firsts, self._counts, self._offsets, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # it grows

    def cut_to(self, file_bytes: int) -> int:
        """Bytes of the table up to where the first of its extents is cut off."""
        for first, count, offset in self:
            if offset + count > file_bytes:
                return first + max(file_bytes - offset, 0)
        return self.end

    def read(self, fd: int, begin: int, end: int) -> bytes:
        """Bytes of the table; fewer where the file was cut. Where the directory is damaged,
        zeros."""
        parts: list[bytes] = []
        at, end = begin, min(end, self.end)
        for index in range(max(bisect_right(self._firsts, begin) - 1, 0), len(self._firsts)):
            first = self._firsts[index]
            if first >= end:
                break
            if first > at:
                parts.append(bytes(first - at))
                at = first
            wanted = min(first + self._counts[index], end) - at
            if wanted > 0:
                parts.append(os.pread(fd, wanted, self._offsets[index] + at - first))
                at += wanted
                if len(parts[-1]) < wanted:
                    break
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(slots=True)
class PackIndex:
    """Which parts of a pack are of which table, as far as its directory has been read."""

    extents: dict[str, Extents] = field(default_factory=dict)
    """By table."""
    problems: list[tuple[int, str]] = field(default_factory=list)
    """Where, and what is wrong there."""
    _next: int = HEADER_BYTES
    """The entry that comes next."""
    _num_damaged: int = 0
    end: int = FIRST_EXTENT
    """Of the extents that are known."""

    def read(self, fd: int) -> None:
        """Takes in what was added to the directory. Raises OSError."""
        while True:
            rest = _PAGE_BYTES - self._next % _PAGE_BYTES
            page = os.pread(fd, rest, self._next).ljust(rest, b"\0")
            begin = self._next
            for offset in range(0, rest, _ENTRY_BYTES):
                if not self._take(page[offset : offset + _ENTRY_BYTES], begin + offset):
                    if any(page[offset:]):
                        self._note(self._next, "the bytes behind the directory are not empty")
                    return
                if self._next != begin + offset + _ENTRY_BYTES:
                    break  # another page
            else:
                text = "the directory's next page is not known: what came after it is not read"
                self._note(self._next, text)
                self._next -= _ENTRY_BYTES
                return

    def _take(self, both: bytes, at: int) -> bool:
        """One entry; False where there is none yet."""
        copies = both[:RECORD_BYTES], both[RECORD_BYTES:]
        good = [
            copy
            for index, copy in enumerate(copies)
            if is_good_record(at + index * RECORD_BYTES, copy)
        ]
        if not good and not any(map(any, copies)):
            return False
        if len(good) < len(copies):
            self._note(at, "an entry of the directory does not match its checksum")
        self._next = at + _ENTRY_BYTES
        if good:
            *name, offset, first, count = _ENTRY.unpack(good[0][8:])
            self._add(_NAME.pack(*name).rstrip(b"\0"), offset, first, count, at)
        else:
            self._num_damaged += 1
        return True

    def _add(self, name: bytes, offset: int, first: int, count: int, at: int) -> None:
        if name == _LINK.encode():
            if offset > at and offset % _PAGE_BYTES == 0:
                self._next = offset
            return
        own = self.extents.setdefault(name.decode("ascii", "replace"), Extents())
        # A gap is as long as the extents whose entries are damaged, at most.
        is_possible = 0 <= first - own.end <= self._num_damaged * WINDOW_BYTES
        if is_possible and 0 < count < 1 << 48 and HEADER_BYTES < offset < 1 << 48:
            own.add(first, count, offset)
            self.end = max(self.end, offset + count)
        else:
            self._note(at, "an entry of the directory cannot be right")

    def size_of(self, name: str, file_bytes: int) -> int:
        """Bytes of a table that are in the file."""
        own = self.extents[name]
        return own.end if file_bytes >= self.end else own.cut_to(file_bytes)

    def _note(self, at: int, text: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS and (at, text) not in self.problems:
            self.problems.append((at, text))


_MAX_KEPT = 20_000
_HEAD_BYTES = 16
"""Of a pack: they have the checksum of its number, which no other pack has."""
Kept = dict[Path, tuple[object, PackIndex]]
_kept: Kept = {}
_kept_lock = threading.Lock()


def find_index(path: Path, fd: int, kept: Kept = _kept) -> tuple[PackIndex, object]:
    """What is where in an open pack, as of now; and what is another value for another pack.

    Directories that were read are kept, the last one of each path: a pack is opened once for each
    of its tables, and again and again while it grows.
    """
    status = os.fstat(fd)
    identity = (status.st_dev, status.st_ino, os.pread(fd, _HEAD_BYTES, 0))
    with _kept_lock:
        before, index = kept.get(path, (None, PackIndex()))
        if before != identity:
            index = PackIndex()
            if len(kept) >= _MAX_KEPT:
                kept.clear()
            kept[path] = identity, index
        index.read(fd)
    return index, identity


class PackFile:
    """A pack that is read by the rank that wrote it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._index, self.identity = find_index(path, self._fd)

    @property
    def tables(self) -> list[str]:
        return list(self._index.extents)

    def read(self, name: str, num_bytes: int, offset: int) -> bytes:
        """Bytes of a table; fewer where it ends, none where there is none."""
        extents = self._index.extents.get(name)
        return extents.read(self._fd, offset, offset + num_bytes) if extents else b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
