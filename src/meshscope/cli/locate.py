"""Finds the run that a path means: RUN may be a run or a folder that holds one; and attempts."""

from pathlib import Path

import click

from meshscope.cli import plain
from meshscope.errors import RunNotFound, UsageError
from meshscope.ingest.kineto.trace_files import begins_like_trace, is_trace_name
from meshscope.store.read.files import fetch_below, find_files, is_file, is_folder
from meshscope.store.read.run import Attempt, Run, has_ranks, is_run_directory, open_run
from meshscope.store.read.run_folders import find_runs

MAX_LISTED = 10


def open_located(path: Path) -> Run:
    """The run at `path` or the only one below it; or the traces there, as a run in memory."""
    if has_traces(path):
        fetch_below(path)
        from meshscope.cli.trace_loading import load_traces  # most runs are recorded

        loaded = load_traces([path])
        for note in loaded.notes:
            click.echo(f"meshscope: {plain(note)}", err=True)
        return loaded.run
    directory = locate_run(path)
    fetch_below(directory)
    return open_run(directory)


def locate_run(path: Path) -> Path:
    """`path` if it is a run (or nothing a run could be below), else the only run below it."""
    try:
        if is_file(path) and is_trace_name(path):
            raise RunNotFound(
                f"{path} is a trace, not a run; use `meshscope trace` or `meshscope report`"
            )
        if not is_folder(path) or has_ranks(path):
            return path
        found = find_runs(path)
        found = [run for run in found if has_ranks(run)] or found
    except PermissionError:
        return path  # opening it says what is wrong
    if len(found) > 1:
        listed = ", ".join(str(run) for run in found[:MAX_LISTED])
        more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
        raise UsageError(f"{path} holds {len(found)} runs; give one of them: {listed}{more}")
    return found[0] if found else path


def has_traces(path: Path) -> bool:
    """Whether it is a trace, whatever its name, or a folder with traces and no run below it."""
    try:
        if not is_folder(path):
            return is_file(path) and (is_trace_name(path) or begins_like_trace(path))
        if is_run_directory(path) or find_runs(path):
            return False
    except PermissionError:
        return False
    return any(map(is_trace_name, find_files(path, "**/*.json*")))


def pick_attempt(run: Run, index: int | None) -> Attempt:
    """The attempt that was asked for, else the last."""
    if index is None:
        return run.last_attempt
    if index >= len(run.attempts):
        known = "only attempt 0" if len(run.attempts) == 1 else f"0 to {len(run.attempts) - 1}"
        raise UsageError(f"{run.path} has no attempt {index}; it has {known}")
    return run.attempts[index]
