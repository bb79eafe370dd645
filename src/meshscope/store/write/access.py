"""Who may read a run: its owner and their group. The umask may take more away, never give more.

Folders keep the group's right to write where the umask grants it (002): ranks of several users may
share a run. A folder that was there before keeps its rights. Standard library only.
"""

import os
from pathlib import Path

FILE_MODE = 0o640
FOLDER_MODE = 0o770


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
