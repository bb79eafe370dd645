"""Who may read a run: its owner and their group. The umask may take more away, never give more.

Folders keep the group's right to write where the umask grants it (002): ranks of several users may
share a run. A folder that was there before keeps its rights. Standard library only.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

FILE_MODE = 0o640
FOLDER_MODE = 0o770

_HERE_FD = -100
_NO_REPLACE = 1
"""AT_FDCWD and RENAME_NOREPLACE of renameat2(2)."""


def make_folder(path: Path) -> None:
    """Makes a folder of a run unless it is there; missing ones above it are the user's own."""
    try:
        path.mkdir(FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(FOLDER_MODE, exist_ok=True)


def create_file(path: Path, flags: int = os.O_WRONLY) -> int:
    """A descriptor of a new file of a run. Raises FileExistsError, and other OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)


@cache
def _find_rename() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def can_rename_new() -> bool:
    """Whether this system has the call that `rename_new` needs."""
    return _find_rename() is not None


def rename_new(old: Path, new: Path) -> None:
    """Renames, but never onto what is there: `os.rename` would replace another process's folder
    that is still empty. Raises FileExistsError, and OSError where the system cannot do that."""
    rename = _find_rename()
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_HERE_FD, os.fsencode(old), _HERE_FD, os.fsencode(new), _NO_REPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(new))
