"""Finds traces: a file, or a folder with traces anywhere below it."""

import re
from collections.abc import Iterable
from pathlib import Path

from meshscope.errors import TraceError
from meshscope.ingest.kineto.trace_cache import SUFFIX
from meshscope.store.read.files import exists, find_files, is_folder, list_folders, open_bytes

_TRACE_NAME = re.compile(r"\.json(?:\.gz|\.zst|\.bz2|\.xz|\.lzma)?$")
_NOT_TRACES = frozenset(("run.json", "manifest.json", "package.json"))
_MAX_FILES = 4096
_ZIP_MAGIC = b"PK\x03\x04"
"""No trace, but reading it says so."""
_FIRST_BYTES, _LEADING = 64, b"\xef\xbb\xbf \t\r\n"


def find_traces(paths: Iterable[Path]) -> list[Path]:
    """The files to read, in the order in which they were named, folders by name, in which numbers
    count as numbers: rank 2 comes before rank 10."""
    found: list[Path] = []
    for path in paths:
        if is_folder(path):
            below = [file for file in find_files(path, "**/*.json*") if is_trace_name(file)]
            if not below:
                raise TraceError(
                    f"{path}: no trace below this folder; expected files named *.json, *.json.gz "
                    "or *.json.zst"
                )
            found += sorted(below, key=_natural_order)
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


def find_trace_folders(folder: Path) -> list[Path]:
    """Folders at or below `folder` that hold files which torch.profiler names: `*trace*.json*`.

    What is below a run belongs to it. Other JSON may be anything, and is not looked at.
    """
    # A trace itself needs no reader of runs.
    from meshscope.store.read.run import has_ranks
    from meshscope.store.read.run_folders import MAX_DEPTH

    found: list[Path] = []
    pending = [(folder, 0)]
    while pending:
        here, depth = pending.pop()
        try:
            if has_ranks(here):
                continue
            if list_own_traces(here):
                found.append(here)
            if depth < MAX_DEPTH:
                pending += [(child, depth + 1) for child in list_folders(here)]
        except OSError:
            continue  # not ours, or taken away meanwhile
    return sorted(found)


def list_own_traces(folder: Path) -> list[Path]:
    """Files directly in a folder that torch.profiler names."""
    return sorted(one for one in find_files(folder, "*trace*.json*") if is_trace_name(one))


def _natural_order(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdecimal(), int(part[:18]) if part.isdecimal() else 0, part) for part in parts]


def is_trace_name(path: Path) -> bool:
    """Whether a file in a folder is taken for a trace."""
    return bool(_TRACE_NAME.search(path.name)) and path.name not in _NOT_TRACES


def begins_like_trace(path: Path) -> bool:
    """Whether a file that was named is JSON, or packed: what a run's own files are not."""
    from meshscope.ingest.compressed import MAGICS  # most paths are runs

    if path.name in _NOT_TRACES:
        return False
    with open_bytes(path) as file:
        first = file.read(_FIRST_BYTES)
    return first.startswith((*MAGICS, _ZIP_MAGIC)) or first.lstrip(_LEADING)[:1] in (b"{", b"[")
