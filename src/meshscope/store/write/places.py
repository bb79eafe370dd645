"""Where the bytes of a table are, and what writing them takes. Offsets are those within the table;
what stands where is the business of `table_file`. Standard library only."""

import errno
import mmap
import os
from collections.abc import Callable
from typing import Protocol

from meshscope.store.write.cut_guard import guard

WINDOW_BYTES = 65536
"""Mapped at a time, at most. 64 KiB is a multiple of every page size in use and of the record
size."""

Buffer = mmap.mmap | memoryview


class Place(Protocol):
    """What a table is written into (`pack.PackedTable`).

    Every method but `release` may raise OSError; the place is then as before."""

    @property
    def is_mapped(self) -> bool:
        """Whether bytes may be written through a map; known once it is open."""

    @property
    def is_open(self) -> bool: ...

    def create(self, make_header: Callable[[str], bytes]) -> None:
        """Begins the table with its header page, given its sink, or not at all."""

    def map_head(self, num_bytes: int) -> Buffer:
        """The first bytes, to be written through. ValueError where they cannot be."""

    def read(self, num_bytes: int, offset: int) -> bytes: ...

    def write(self, data: bytes, offset: int) -> None:
        """All of it, where space was made before."""

    def append(self, data: bytes | bytearray, offset: int) -> int:
        """Some of it, at the end; how many bytes."""

    def grow(self, offset: int, num_used: int) -> tuple[int, Buffer]:
        """Makes space up to the end of the window with `offset`, of zeros, and maps that window:
        where it begins. `num_used` bytes were granted before. Also ValueError."""

    def finish(self, num_bytes: int) -> None:
        """The table is complete and that long."""

    def release(self) -> None:
        """In a forked child: lets go of what is the parent's."""


CUT_SHORT = "somebody else cut the file short"


def can_map(fd: int) -> bool:
    """Whether the file system maps files: not all do."""
    try:
        mmap.mmap(fd, mmap.PAGESIZE).close()
    except (OSError, ValueError):
        return False
    return True


def map_bytes(fd: int, offset: int, num_bytes: int) -> Buffer:
    """Bytes of a file that are written through. ValueError where they cannot be mapped."""
    before = offset % mmap.ALLOCATIONGRANULARITY  # not 0 only where pages are larger than 4 KiB
    try:
        found = guard(mmap.mmap(fd, before + num_bytes, offset=offset - before))
    except OSError as error:
        raise ValueError(f"it cannot be mapped: {os.strerror(error.errno or 0)}") from error
    return memoryview(found)[before:] if before else found


def write_all(fd: int, data: bytes | bytearray, offset: int) -> None:
    """`pwrite` until everything is there; a short write is how a full disk first shows."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
        offset += written
