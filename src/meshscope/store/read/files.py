"""The one door to bytes for everything that reads runs. Standard library only.

Only regular files are read: a pipe or a device under a table's name would block or never end, and
the zeros of a file that is nearly all hole would fill the memory. A path that stands for something
elsewhere (`store.remote.mirror`: object stores, archives) is fetched before it is opened, and what
is there is what its storage lists; all other paths are the file system's own.

A table in a rank's pack (`store.write.pack`) has a path below it, `tables.pack/steps.tbl`, and is
read as a file of that table alone would be: offsets are those within the table.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, Self, TextIO

from meshscope.errors import StorageError
from meshscope.store.remote.mirror import find_mount
from meshscope.store.write.pack import (
    FIRST_EXTENT,
    PACK_MAGIC,
    PACK_SUFFIX,
    Extents,
    PackIndex,
    find_index,
)
from meshscope.store.write.table_file import HEADER_BYTES, STATUS_OFFSET, unpack_header

KEPT_SUFFIX = ".meshscope"
"""Of files that are kept beside a trace for speed; beside a copy of a trace, too."""
MAX_FILE_BYTES = (4 << 30) + (1 << 20)
"""Files read whole: a full table with its header, and some room."""

_MIN_HOLE_BYTES = 64 << 20
_MAX_HOLE_RATIO = 64
"""Bytes for each byte on disk above which a file is a hole; file systems that compress reach less
with records."""


_UNREADABLE = "unreadable"


class ByteFile:
    """A regular file, or a table in a pack, read in parts."""

    __slots__ = ("_extents", "_fd", "_path", "identity", "size_bytes")

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be opened or is no regular file."""
        self._path = path
        pack = pack_of(path)
        self._fd = os.open(fetched(pack or path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self._fd)
            _require_regular(status, path)
            _require_no_hole(status, path)
            self.size_bytes = status.st_size
            self.identity: object = status.st_ino
            self._extents: Extents | None = None
            if pack is not None:
                index, self.identity = find_index(pack, self._fd)
                self._extents = index.extents.get(path.stem)
                if self._extents is None:
                    raise FileNotFoundError(errno.ENOENT, "the pack has no such table", str(path))
                # As of now: what the directory names is in the file before.
                self.size_bytes = index.size_of(path.stem, os.fstat(self._fd).st_size)
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes from `offset` on; fewer where the file ends."""
        if self._extents is None:
            return os.pread(self._fd, num_bytes, offset)
        return self._extents.read(self._fd, offset, min(offset + num_bytes, self.size_bytes))

    def look_again(self) -> None:
        """Takes in what was added since it was opened."""
        pack = pack_of(self._path)
        if pack is None:
            self.size_bytes = os.fstat(self._fd).st_size
        else:
            index, _ = find_index(pack, self._fd)
            self._extents = index.extents[self._path.stem]
            self.size_bytes = index.size_of(self._path.stem, os.fstat(self._fd).st_size)

    def read_all(self) -> bytes:
        """The whole file, as long as it is now: it may have grown since it was opened."""
        if self.size_bytes > MAX_FILE_BYTES:
            text = f"it has {self.size_bytes} bytes, more than any table ({MAX_FILE_BYTES})"
            raise OSError(errno.EFBIG, text, str(self._path))
        try:
            if self._extents is not None:
                # What the first page says of the length was true when it was read, or before.
                head = self.read(0, HEADER_BYTES)
                self.look_again()
                return head + self.read(len(head), self.size_bytes)
            with open(self._fd, "rb", buffering=0, closefd=False) as file:
                return file.readall()
        except MemoryError:
            text = f"its {self.size_bytes} bytes do not fit in memory"
            raise OSError(errno.ENOMEM, text, str(self._path)) from None

    def list_tables(self) -> list[str]:
        """Of a pack that was opened itself."""
        return list(find_index(self._path, self._fd)[0].extents)

    def find_problems(self) -> list[tuple[int, str]]:
        """What is wrong with a pack apart from its tables: where, and what."""
        page = self.read(0, HEADER_BYTES)
        found: list[tuple[int, str]] = []
        fields: dict[str, object] = {}
        try:
            fields = unpack_header(page, PACK_MAGIC)
        except ValueError as error:
            found.append((0, f"the header: {error}"))
        if any(page[STATUS_OFFSET:]):
            found.append((STATUS_OFFSET, "the bytes behind the header are not empty"))
        index = PackIndex()
        index.read(self._fd)
        found += index.problems
        size = os.fstat(self._fd).st_size
        if size < (index.end if fields.get("sink") == "mapped" else FIRST_EXTENT):
            text = f"the file ends at byte {size}, its tables need {index.end}: it was cut"
            found.append((size, text))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def pack_of(path: Path) -> Path | None:
    """The pack that a table is in, by its path; None of a file."""
    parent = path.parent
    return parent if parent.name.endswith(PACK_SUFFIX) else None


def list_tables(pack: Path) -> list[str]:
    """Names of the tables in a pack. Raises OSError."""
    with ByteFile(pack) as file:
        return file.list_tables()


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
    fd = os.open(fetched(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(fd), path)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def open_text(path: Path) -> TextIO:
    """A text file to be read line by line. Raises OSError."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8", errors="replace")


def fetched(path: Path) -> Path:
    """The same path, of a file that is here now. Raises OSError."""
    mounted = find_mount(path)
    if mounted is not None and not path.name.endswith(KEPT_SUFFIX):
        mounted[0].fetch(mounted[1])
    return path


def fetch_below(folder: Path) -> None:
    """Fetches all that is in a folder, many files at once; nothing to do for local ones."""
    mounted = find_mount(folder)
    if mounted is not None:
        mounted[0].fetch_all(mounted[0].names_below(mounted[1]))


def look_again(path: Path) -> None:
    """Asks the storage what is there now; a local folder is always looked at. Raises OSError."""
    mounted = find_mount(path)
    if mounted is not None:
        try:
            mounted[0].refresh()
        except StorageError as error:
            raise OSError(errno.EIO, str(error), str(path)) from error


def file_size(path: Path) -> int:
    """Length in bytes. Raises OSError."""
    if pack_of(path) is not None:
        with ByteFile(path) as file:
            return file.size_bytes
    mounted = find_mount(path)
    return os.stat(path).st_size if mounted is None else mounted[0].size_of(mounted[1])


def change_time_ns(path: Path) -> int:
    """When a file or folder was last changed, in nanoseconds since 1970; of storage without such
    a time, a number that is another one then. Raises OSError."""
    path = pack_of(path) or path
    mounted = find_mount(path)
    return os.stat(path).st_mtime_ns if mounted is None else mounted[0].change_number(mounted[1])


def sign_file(path: Path) -> tuple[int, int]:
    """Other numbers when a file has changed; those of none where there is none."""
    try:
        return file_size(path), change_time_ns(path)
    except OSError:
        return -1, -1


def identify(path: Path) -> object:
    """Another value where another file has the name; None where there is none."""
    if pack_of(path) is not None:
        try:
            with ByteFile(path) as file:
                return file.identity
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # it is there: reading it says what is wrong
            return _UNREADABLE
    mounted = find_mount(path)
    if mounted is not None:
        return 0 if mounted[0].has_file(mounted[1]) else None
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def file_stamp(path: Path) -> tuple[int, ...]:
    """Numbers that are others when a file's content is: length, times of change of content and of
    anything else, and which file of which file system it is. Raises OSError.

    Who writes the same length and puts the time of change back cannot put that of anything else
    back.
    """
    found = os.stat(fetched(pack_of(path) or path))
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def list_names(folder: Path) -> list[str]:
    """Names of everything in a folder, in no order. Raises OSError."""
    mounted = find_mount(folder)
    return os.listdir(folder) if mounted is None else mounted[0].list_names(mounted[1])


def list_folders(folder: Path) -> list[Path]:
    """Folders in a folder; no links, none that is hidden. Raises OSError."""
    if find_mount(folder) is not None:
        found = [folder / name for name in list_names(folder) if not name.startswith(".")]
        return [one for one in found if is_folder(one)]
    with os.scandir(folder) as entries:
        return [
            folder / entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        ]


def exists(path: Path) -> bool:
    if pack_of(path) is not None:
        return identify(path) is not None
    return path.exists() if find_mount(path) is None else is_file(path) or is_folder(path)


def is_file(path: Path) -> bool:
    """Whether it is a regular file."""
    mounted = find_mount(path)
    return path.is_file() if mounted is None else mounted[0].has_file(mounted[1])


def is_folder(path: Path) -> bool:
    mounted = find_mount(path)
    return path.is_dir() if mounted is None else mounted[0].has_folder(mounted[1])


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Files below a folder whose paths match, sorted."""
    mounted = find_mount(folder)
    if mounted is None:
        return sorted(folder.glob(pattern))
    mount, name = mounted
    return [mount.folder / one for one in mount.find_files(name, pattern)]
