"""Finds traces: a file, or a folder with traces anywhere below it."""

import re
from collections.abc import Iterable
from pathlib import Path

from meshscope.errors import TraceError
from meshscope.ingest.kineto.trace_cache import SUFFIX
from meshscope.store.read.files import exists, find_files, is_folder

_TRACE_NAME = re.compile(r"\.json(?:\.gz|\.zst|\.bz2|\.xz)?$")
_NOT_TRACES = frozenset(("run.json", "manifest.json", "package.json"))
_MAX_FILES = 4096


def find_traces(paths: Iterable[Path]) -> list[Path]:
    """The files to read, in the order in which they were named, folders by name."""
    found: list[Path] = []
    for path in paths:
        if is_folder(path):
            below = [file for file in find_files(path, "**/*.json*") if is_trace_name(file)]
            if not below:
                raise TraceError(
                    f"{path}: no trace below this folder; expected files named *.json, *.json.gz "
                    "or *.json.zst"
                )
            found += below
        elif exists(path):
            if not path.name.endswith(SUFFIX):  # what a shell's pattern took in
                found.append(path)
        else:
            raise TraceError(f"{path}: there is no such file or folder")
    if not found:
        raise TraceError("none of these is a trace: *.meshscope files are kept for speed only")
    if len(found) > _MAX_FILES:
        raise TraceError(f"{len(found):,} traces are more than {_MAX_FILES:,}: name fewer")
    return list(dict.fromkeys(found))


def is_trace_name(path: Path) -> bool:
    """Whether a file in a folder is taken for a trace."""
    return bool(_TRACE_NAME.search(path.name)) and path.name not in _NOT_TRACES
