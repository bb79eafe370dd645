"""Finds runs below folders, so that RUN may be a run or a folder that holds one; and attempts."""

import os
from pathlib import Path

import click

from meshscope.errors import RunNotFound, UsageError
from meshscope.ingest.kineto.trace_files import is_trace_name
from meshscope.store.read.run import Attempt, Run, is_run_directory, open_run

MAX_DEPTH = 6
MAX_LISTED = 10


def open_located(path: Path) -> Run:
    """The run at `path` or the only one below it; or the traces there, as a run in memory."""
    if _has_traces(path):
        from meshscope.cli.trace_loading import load_traces, plain  # most runs are recorded

        loaded = load_traces([path])
        for note in loaded.notes:
            click.echo(f"meshscope: {plain(note)}", err=True)
        return loaded.run
    return open_run(locate_run(path))


def locate_run(path: Path) -> Path:
    """`path` if it is a run (or nothing a run could be below), else the only run below it."""
    try:
        if path.is_file() and is_trace_name(path):
            raise RunNotFound(
                f"{path} is a trace, not a run; use `meshscope trace` or `meshscope report`"
            )
        if not path.is_dir() or is_run_directory(path):
            return path
    except PermissionError:
        return path  # opening it says what is wrong
    found = find_runs(path)
    if len(found) > 1:
        listed = ", ".join(str(run) for run in found[:MAX_LISTED])
        more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
        raise UsageError(f"{path} holds {len(found)} runs; give one of them: {listed}{more}")
    return found[0] if found else path


def _has_traces(path: Path) -> bool:
    """Whether it is a trace, or a folder with traces and no run below it."""
    try:
        if not path.is_dir():
            return path.is_file() and is_trace_name(path)
        if is_run_directory(path) or find_runs(path):
            return False
    except PermissionError:
        return False
    return any(map(is_trace_name, path.rglob("*.json*")))


def pick_attempt(run: Run, index: int | None) -> Attempt:
    """The attempt that was asked for, else the last."""
    if index is None:
        return run.last_attempt
    if index >= len(run.attempts):
        known = "only attempt 0" if len(run.attempts) == 1 else f"0 to {len(run.attempts) - 1}"
        raise UsageError(f"{run.path} has no attempt {index}; it has {known}")
    return run.attempts[index]


def find_runs(folder: Path) -> list[Path]:
    """Every run at or below `folder`, sorted by path; hidden folders and links are not entered."""
    if not folder.is_dir():
        raise RunNotFound(f"{folder} is not a folder; give a folder with runs below it")
    found: list[Path] = []
    pending = [(folder, 0)]
    while pending:
        here, depth = pending.pop()
        try:
            if is_run_directory(here):
                found.append(here)
            elif depth < MAX_DEPTH:
                pending += [(child, depth + 1) for child in _list_folders(here)]
        except PermissionError:
            continue  # somebody else's folder is no run of ours
    return sorted(found)


def _list_folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [
            folder / entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        ]
