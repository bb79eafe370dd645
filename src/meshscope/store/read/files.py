"""The one door to bytes for everything that reads runs. Standard library only.

Only regular files are read: a pipe or a device under a table's name would block or never end, and
the zeros of a file that is nearly all hole would fill the memory. Other storage (object stores,
archives) is added here and nowhere else.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, Self, TextIO

MAX_FILE_BYTES = (4 << 30) + (1 << 20)
"""Files read whole: a full table with its header, and some room."""

_MIN_HOLE_BYTES = 64 << 20
_MAX_HOLE_RATIO = 64
"""Bytes for each byte on disk above which a file is a hole; file systems that compress reach less
with records."""


class ByteFile:
    """A regular file, read in parts."""

    __slots__ = ("_fd", "_path", "size_bytes")

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be opened or is no regular file."""
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self._fd)
            _require_regular(status, path)
            _require_no_hole(status, path)
            self.size_bytes = status.st_size
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes from `offset` on; fewer where the file ends."""
        return os.pread(self._fd, num_bytes, offset)

    def read_all(self) -> bytes:
        """The whole file, as long as it is now: it may have grown since it was opened."""
        if self.size_bytes > MAX_FILE_BYTES:
            text = f"it has {self.size_bytes} bytes, more than any table ({MAX_FILE_BYTES})"
            raise OSError(errno.EFBIG, text, str(self._path))
        try:
            with open(self._fd, "rb", buffering=0, closefd=False) as file:
                return file.readall()
        except MemoryError:
            text = f"its {self.size_bytes} bytes do not fit in memory"
            raise OSError(errno.ENOMEM, text, str(self._path)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", str(path))


def _require_no_hole(status: os.stat_result, path: Path) -> None:
    size_bytes, stored_bytes = status.st_size, status.st_blocks * 512
    if size_bytes > max(_MIN_HOLE_BYTES, _MAX_HOLE_RATIO * stored_bytes):
        text = f"of its {size_bytes} bytes only {stored_bytes} are on disk"
        raise OSError(errno.EFBIG, text, str(path))


def read_file(path: Path, max_bytes: int | None = None) -> bytes:
    """The file's bytes, or the first `max_bytes` of them. Raises OSError."""
    with ByteFile(path) as file:
        if max_bytes is not None and file.size_bytes > max_bytes:
            return file.read(0, max_bytes)
        return file.read_all()


def read_file_end(path: Path, max_bytes: int) -> bytes:
    """The last bytes of a file. Raises OSError."""
    with ByteFile(path) as file:
        return file.read(max(0, file.size_bytes - max_bytes), max_bytes)


def open_bytes(path: Path) -> BinaryIO:
    """A regular file as a stream. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(fd), path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def open_text(path: Path) -> TextIO:
    """A text file to be read line by line. Raises OSError."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors="replace")


def file_size(path: Path) -> int:
    """Length in bytes. Raises OSError."""
    return os.stat(path).st_size


def change_time_ns(path: Path) -> int:
    """When a file or folder was last changed, in nanoseconds since 1970. Raises OSError."""
    return os.stat(path).st_mtime_ns


def list_names(folder: Path) -> list[str]:
    """Names of everything in a folder, in no order. Raises OSError."""
    return os.listdir(folder)


def exists(path: Path) -> bool:
    return path.exists()


def is_file(path: Path) -> bool:
    """Whether it is a regular file."""
    return path.is_file()


def is_folder(path: Path) -> bool:
    return path.is_dir()


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Files below a folder whose paths match, sorted."""
    return sorted(folder.glob(pattern))
