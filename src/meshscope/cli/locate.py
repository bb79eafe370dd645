"""Finds runs below folders, so that RUN may be a run or a folder that holds exactly one."""

import os
from pathlib import Path

from meshscope.errors import RunNotFound, UsageError
from meshscope.store.reader import is_run_directory

MAX_DEPTH = 6
MAX_LISTED = 10


def locate_run(path: Path) -> Path:
    """`path` if it is a run (or nothing a run could be below), else the only run below it."""
    if not _is_readable_folder(path) or is_run_directory(path):
        return path  # opening it says what is wrong, if anything is
    found = find_runs(path)
    if not found:
        return path
    if len(found) > 1:
        listed = ", ".join(str(run) for run in found[:MAX_LISTED])
        more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
        raise UsageError(f"{path} holds {len(found)} runs; give one of them: {listed}{more}")
    return found[0]


def find_runs(folder: Path) -> list[Path]:
    """Every run at or below `folder`, sorted by path; hidden folders and links are not entered."""
    if not folder.is_dir():
        raise RunNotFound(f"{folder} is not a folder; give one that has runs below it")
    found: list[Path] = []
    pending = [(folder, 0)]
    while pending:
        here, depth = pending.pop()
        if not _is_readable_folder(here):
            continue
        if is_run_directory(here):
            found.append(here)
        elif depth < MAX_DEPTH:
            with os.scandir(here) as entries:
                pending += [
                    (here / entry.name, depth + 1)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                ]
    return sorted(found)


def _is_readable_folder(path: Path) -> bool:
    try:
        return path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    except OSError:
        return False
