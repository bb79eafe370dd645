"""Copies a run to a URL, finished or while it is written: what is there already is not sent again.

Every pass reads the files, sends the chunks that the archive lacks, and then replaces its own list.
A pass that is cut off leaves the list before it, whole; the next one begins with the chunks that
arrived. Nothing but the run and the archive is needed to go on: either side may be started anew.
"""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path

from meshscope.errors import StorageError
from meshscope.store.remote.archive_list import (
    CHUNK_BYTES,
    LISTS,
    OBJECTS,
    ArchiveList,
    decode_list,
)
from meshscope.store.remote.storage import Storage

_SENT_AT_ONCE = 4
_MAX_DEPTH = 8


@dataclass(slots=True)
class Passed:
    """What a pass did."""

    num_files: int = 0
    total_bytes: int = 0
    sent_bytes: int = 0
    num_sent: int = 0
    """Chunks."""
    num_removed: int = 0


@dataclass(slots=True)
class Rate:
    """Keeps what is sent below so many bytes a second; None is no limit."""

    bytes_per_s: float | None = None
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, num_bytes: int, is_over: threading.Event) -> None:
        if self.bytes_per_s is None:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + num_bytes / self.bytes_per_s
        is_over.wait(begin - time.monotonic())


class Uploader:
    """Sends one run to one URL."""

    def __init__(self, run_dir: Path, url: str, *, bytes_per_s: float | None = None) -> None:
        """Raises StorageError where the URL cannot be opened."""
        self._run = run_dir
        self._storage = Storage(url)
        self._storage.check()
        self.writer = _name_writer(run_dir)
        self._rate = Rate(bytes_per_s)
        self._lock = threading.Lock()
        self._known: dict[str, int] | None = None
        """Chunks that are there, with their lengths."""
        self._listed: frozenset[str] = frozenset()
        """Chunks of the list that is there."""
        self._hashed: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self.is_over = threading.Event()
        """Set to stop waiting for the rate."""

    def send(self, *, is_final: bool, progress: Callable[[Passed], None] | None = None) -> Passed:
        """One pass. Raises StorageError; OSError for a file that cannot be read."""
        self._look()
        done = Passed()
        files: dict[str, tuple[int, tuple[str, ...]]] = {}

        def send_one(found: tuple[str, Path]) -> None:
            name, path = found
            entry = self._send_file(name, path, done, is_final=is_final)
            if entry is None:  # removed meanwhile
                return
            with self._lock:
                files[name] = entry
                done.num_files += 1
                done.total_bytes += entry[0]
                if progress is not None:
                    progress(done)

        with ThreadPoolExecutor(_SENT_AT_ONCE) as pool:
            for _ in pool.map(send_one, _list_run(self._run)):
                pass
        made = ArchiveList(
            writer=self.writer,
            updated_unix_ns=time.time_ns(),
            is_final=is_final,
            files=files,
        )
        self._storage.write(f"{LISTS}/{self.writer}.json", made.encode())
        self._clean({digest for _, chunks in files.values() for digest in chunks}, done)
        return done

    def verify(self) -> int:
        """Reads the archive back and compares all of it with its checksums; bytes read. Raises
        StorageError that says what does not match."""
        listed = self._read_list()
        if listed is None:
            raise StorageError(f"{self._storage.url}: there is no list of this run")
        wanted = {
            digest: min(CHUNK_BYTES, size - index * CHUNK_BYTES)
            for size, chunks in listed.files.values()
            for index, digest in enumerate(chunks)
        }

        def check(digest: str) -> int:
            try:
                data = self._storage.read(self._object(digest))
            except FileNotFoundError:
                data = b""
            if sha256(data).hexdigest() != digest:
                self._storage.remove([self._object(digest)])
                raise StorageError(
                    f"{self._storage.url}: chunk {digest[:12]} did not arrive as it was sent; "
                    "archive the run again"
                )
            return len(data)

        with ThreadPoolExecutor(_SENT_AT_ONCE) as pool:
            return sum(pool.map(check, wanted))

    # --- one file ---------------------------------------------------------------------------------

    def _send_file(
        self, name: str, path: Path, done: Passed, *, is_final: bool
    ) -> tuple[int, tuple[str, ...]] | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
            before = self._hashed.get(name)
            # A mapped file may change without its time; what is final is read once more.
            if before is not None and before[0] == stamp and not is_final and _is_quiet(status):
                return status.st_size, before[1]
            size = 0
            chunks: list[str] = []
            for data in _read_chunks(fd):
                digest = sha256(data).hexdigest()
                size += len(data)
                chunks.append(digest)
                self._send_chunk(digest, data, done)
        finally:
            os.close(fd)
        self._hashed[name] = (stamp, tuple(chunks))
        return size, tuple(chunks)

    def _send_chunk(self, digest: str, data: bytes, done: Passed) -> None:
        assert self._known is not None
        if self._known.get(digest) == len(data):
            return
        self._rate.wait(len(data), self.is_over)
        self._storage.write(self._object(digest), data)
        with self._lock:
            self._known[digest] = len(data)
            done.num_sent += 1
            done.sent_bytes += len(data)

    # --- the archive ------------------------------------------------------------------------------

    def _object(self, digest: str) -> str:
        return f"{OBJECTS}/{self.writer}/{digest}"

    def _read_list(self) -> ArchiveList | None:
        name = f"{LISTS}/{self.writer}.json"
        try:
            return decode_list(self._storage.read(name), f"{self._storage.url}/{name}")
        except FileNotFoundError:
            return None

    def _look(self) -> None:
        """What the archive has; once, as nobody else writes there."""
        if self._known is not None:
            return
        head = f"{OBJECTS}/{self.writer}/"
        try:
            found = self._storage.list_files()
        except FileNotFoundError:
            found = {}
        self._known = {
            name[len(head) :]: file.size_bytes
            for name, file in found.items()
            if name.startswith(head)
        }
        listed = self._read_list() if f"{LISTS}/{self.writer}.json" in found else None
        if listed is not None:
            self._listed = frozenset(d for _, chunks in listed.files.values() for d in chunks)

    def _clean(self, used: set[str], done: Passed) -> None:
        """Removes chunks that neither this list names nor the one before, which may be read now."""
        assert self._known is not None
        unused = [digest for digest in self._known if digest not in used | self._listed]
        self._storage.remove([self._object(digest) for digest in unused])
        for digest in unused:
            del self._known[digest]
        self._listed = frozenset(used)
        done.num_removed += len(unused)


def _name_writer(run_dir: Path) -> str:
    """The same for the same folder of the same machine, and no other."""
    where = f"{os.uname().nodename}\0{run_dir.resolve()}"
    return blake2b(where.encode(), digest_size=8).hexdigest()


def _is_quiet(status: os.stat_result) -> bool:
    """Whether its time of change is old enough to be believed: the kernel notes writes to mapped
    pages when it writes them back, within a minute."""
    return time.time_ns() - status.st_mtime_ns > 120 * 10**9


def _read_chunks(fd: int) -> Iterator[bytes]:
    offset = 0
    while data := os.pread(fd, CHUNK_BYTES, offset):
        yield data
        if len(data) < CHUNK_BYTES:
            return
        offset += len(data)


def _list_run(folder: Path, head: str = "", depth: int = 0) -> Iterator[tuple[str, Path]]:
    """Regular files of a run by name; neither links nor drafts."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False) and depth < _MAX_DEPTH:
            yield from _list_run(Path(entry.path), f"{head}{entry.name}/", depth + 1)
        elif entry.is_file(follow_symlinks=False):
            yield head + entry.name, Path(entry.path)
