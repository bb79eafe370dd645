"""Finds the runs below a folder."""

from pathlib import Path

from meshscope.errors import RunNotFound
from meshscope.store.read.files import is_folder, list_folders
from meshscope.store.read.run import has_ranks, is_run_directory

MAX_DEPTH = 6


def find_runs(folder: Path) -> list[Path]:
    """Every run at or below `folder`, sorted by path; hidden folders and links are not entered.

    A folder that has a `run.json` and no rank, perhaps another program's, hides nothing below it.
    """
    if not is_folder(folder):
        raise RunNotFound(f"{folder} is not a folder; give a folder with runs below it")
    found: list[Path] = []
    pending = [(folder, 0)]
    while pending:
        here, depth = pending.pop()
        try:
            if is_run_directory(here):
                found.append(here)
            if depth < MAX_DEPTH and not has_ranks(here):
                pending += [(child, depth + 1) for child in list_folders(here)]
        except PermissionError:
            continue  # somebody else's folder is no run of ours
    return sorted(found)
