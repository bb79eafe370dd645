"""One job at a time in a checkpoint folder: a second one would remove what the first is writing.

A POSIX lock on a file in the folder: it ends with the process, however that ends, is not inherited
by forked children, and holds between the machines of most network file systems. Where the file
system has no locks, a warning says so and nothing is kept out. Within one process it may be taken
again. The file stays: removing it would let two jobs lock two files of one name.
"""

import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshscope.engine.checkpoint.folder import CheckpointError

LOCK_NAME = ".lock"
_PATIENCE_SECONDS = 2.0
"""A job that was just killed may take a moment to end."""
_RETRY_SECONDS = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    fd: int
    num_holders: int = 1


_held: dict[Path, _Held] = {}
_guard = threading.Lock()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made; CheckpointError when another process does."""
    path = folder.absolute()
    with _guard:
        if path in _held:  # closing a second descriptor would end the first one's lock
            _held[path].num_holders += 1
        else:
            _held[path] = _Held(_lock(path))
    try:
        yield
    finally:
        with _guard:
            held = _held[path]
            held.num_holders -= 1
            if not held.num_holders:
                os.close(held.fd)
                del _held[path]


def _lock(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for_lock(fd, folder)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _wait_for_lock(fd: int, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning(
                    "%s cannot be locked (%s); see that no other job saves there",
                    folder,
                    error.strerror,
                )
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > deadline:
                owner = os.pread(fd, 300, 0).decode(errors="replace")
                who = f"process {owner}" if owner else "another process"
                raise CheckpointError(
                    f"{folder} is in use by {who}, which saves its checkpoints there; wait for its "
                    "end, or choose another folder"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            return
