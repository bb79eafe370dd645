"""Ranges of a file that has no name, so that nothing of it outlives the process.

    spool = SpoolFile(Path("/scratch"))
    offset = spool.take(len(data))
    spool.write(offset, data)
    ...
    spool.read(offset, buffer)
    spool.give_back(offset, len(data))

The file is opened with O_TMPFILE: the kernel frees it when the process ends, however it ends, so a
crash leaves nothing to clean up. What it takes shows in `df`, not in `ls`. Where a file system has
no O_TMPFILE the file has a name between its creation and its unlinking.

Its length is that of the most that was taken at once, until everything has been given back. Wrong
for sizes that are never the same twice: a range is only used again for the same number of bytes.
"""

import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from meshscope.core.unavailable import Unavailable

_FILE_SYSTEMS_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def _open_nameless(folder: Path) -> int:
    """A descriptor of a new file in `folder` that no name leads to."""
    if hasattr(os, "O_TMPFILE"):
        # Not every file system has it (NFS has not).
        with suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    descriptor, path = tempfile.mkstemp(prefix="activations.", dir=folder)
    os.unlink(path)
    return descriptor


class SpoolFile:
    """Ranges of one nameless file. Several threads may read and write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = -1
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._num_taken = 0
        # A record may be collected, and free its range, inside any of these methods.
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> int:
        """The offset of a free range of exactly that size."""
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = _open_nameless(self.folder)
            self._num_taken += 1
            if self._free.get(num_bytes):
                return self._free[num_bytes].pop()
            self._end += num_bytes
            return self._end - num_bytes

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Frees a range; the last one frees the disk space too."""
        with self._lock:
            self._free.setdefault(num_bytes, []).append(offset)
            self._num_taken -= 1
            if self._num_taken == 0:
                self._free.clear()
                self._end = 0
                if self._descriptor >= 0:
                    os.ftruncate(self._descriptor, 0)

    def write(self, offset: int, data: memoryview) -> None:
        while data:
            num_written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[num_written:], offset + num_written

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into`."""
        while into:
            num_read = os.preadv(self._descriptor, [into], offset)
            if num_read == 0:
                raise OSError("the file ends before the tensor does")
            into, offset = into[num_read:], offset + num_read

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, free gaps included."""
        return self._end

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def find_folder_problems(folder: Path, needed_bytes: int | None = None) -> list[str]:
    """Reasons why a spool file (of that size) cannot be there, one sentence each."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return [f"offload_dir {folder} is not a folder; choose another"]
    try:
        os.close(_open_nameless(existing))
    except OSError as error:
        return [
            f"offload_dir {folder} cannot be written to ({error.strerror}); change its permissions "
            f"or choose another"
        ]
    problems = []
    kind = _find_file_system(existing)
    if kind in _FILE_SYSTEMS_IN_MEMORY:
        problems.append(
            f"offload_dir {folder} is on {kind}, which is memory; choose a folder on a disk"
        )
    status = os.statvfs(existing)
    free_bytes = status.f_bavail * status.f_frsize
    if needed_bytes is not None and free_bytes < needed_bytes:
        problems.append(
            f"offload_dir {folder} has {free_bytes} bytes free, but activations need "
            f"{needed_bytes}; free space there or choose another"
        )
    return problems


def _find_file_system(folder: Path) -> str | Unavailable:
    """The kind of file system, such as ext4, that a folder is on."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return Unavailable(f"the list of mounts cannot be read: {error}")
    resolved = folder.resolve()
    found, longest = "", -1
    for line in lines:
        _, mount, kind, *_ = line.split(" ")
        point = Path(mount.replace("\\040", " "))
        # The last of those mounted at one place hides the others.
        if resolved.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = kind, len(point.parts)
    return found or Unavailable(f"no mount holds {folder}")
