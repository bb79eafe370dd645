"""Reads what `Recorder.profile_memory` left: RUN/memory/rank…/memory.jsonl.

A line that is not what it should be costs only itself and is listed in `problems`; a file that is
cut ends where it is cut.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.core.layout import Layout
from meshscope.core.memory_point import COUNTERS, NOT_KNOWN, POINTS_NAME, MemoryPoint
from meshscope.core.trace_names import parse_rank_folder
from meshscope.core.unavailable import Unavailable
from meshscope.errors import LayoutError, RunNotFound
from meshscope.store.read.files import find_files, is_file, is_folder, open_text

MEMORY_FOLDER = "memory"
MAX_FILE_BYTES = 1 << 30
_MAX_LINE_CHARACTERS = 1 << 26
MAX_PROBLEMS = 10
MAX_TEXT = 1000
_MAX_BYTES = 1 << 62
"""No device has more; a larger number is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecording:
    """The points of one profile of one rank."""

    rank: int
    path: Path
    device: str
    allocator: str
    layout: Layout | Unavailable
    estimate_bytes: Mapping[str, int]
    points: tuple[MemoryPoint, ...]
    problems: tuple[str, ...]


def read_memory(run_dir: Path) -> list[MemoryRecording]:
    """The newest profile of every rank, in order of rank."""
    newest: dict[int, Path] = {}
    for path in _find_files(run_dir):
        rank = next((r for r in map(parse_rank_folder, reversed(path.parts)) if r is not None), -1)
        if rank not in newest or _order_profile(path) >= _order_profile(newest[rank]):
            newest[rank] = path
    if not newest:
        raise RunNotFound(
            f"{run_dir} has no memory profile; record one with `meshscope run --profiling` or "
            "`meshscope train --profiling`, or call Recorder.profile_memory in the program"
        )
    return [_read_file(path, rank) for rank, path in sorted(newest.items())]


def _find_files(run_dir: Path) -> Iterable[Path]:
    if is_file(run_dir):
        return [run_dir]
    folder = run_dir / MEMORY_FOLDER
    return find_files(folder if is_folder(folder) else run_dir, f"**/{POINTS_NAME}")


def _order_profile(path: Path) -> tuple[int, str]:
    """Later profiles of a rank are in separate folders."""
    return len(path.parts), path.parent.name


def _read_file(path: Path, rank: int) -> MemoryRecording:
    header: Mapping[str, Any] = {}
    points: list[MemoryPoint] = []
    problems: list[str] = []
    for number, line in enumerate(_read_lines(path, problems), start=1):
        found = _parse(line)
        if found is None:
            problems.append(f"{path.name}, line {number}: not a JSON object")
        elif found.get("kind") == "header":
            header = found
        elif found.get("kind") == "point":
            points.append(_make_point(found))
    return MemoryRecording(
        rank=max(_read_count(header.get("rank")), rank) if rank < 0 else rank,
        path=path,
        device=str(header.get("device", "")),
        allocator=str(header.get("allocator", "")),
        layout=_make_layout(header.get("layout")),
        estimate_bytes=_sizes(header.get("estimate_bytes")),
        points=tuple(points),
        problems=tuple(problems[:MAX_PROBLEMS]),
    )


def _read_lines(path: Path, problems: list[str]) -> Iterator[str]:
    num_bytes = 0
    try:
        with open_text(path) as file:
            while line := file.readline(_MAX_LINE_CHARACTERS):
                num_bytes += len(line)
                if num_bytes > MAX_FILE_BYTES:
                    problems.append(f"{path.name} is longer than {MAX_FILE_BYTES} bytes; cut there")
                    return
                if line.strip():
                    yield line
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror or error}")


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _make_point(found: Mapping[str, Any]) -> MemoryPoint:
    modules = found.get("modules_bytes")
    categories = modules if isinstance(modules, dict) else {}
    seconds, during = found.get("seconds"), found.get("during")
    is_time = isinstance(seconds, (int, float)) and 0 <= seconds < 1e12
    return MemoryPoint(
        name=str(found.get("point", "")),
        step=_read_count(found.get("step")),
        microbatch=_read_count(found.get("microbatch")),
        seconds=float(seconds) if is_time and seconds is not None else 0.0,
        during=during[:MAX_TEXT] if isinstance(during, str) else "",
        modules_bytes={str(name): _sizes(paths) for name, paths in categories.items()},
        elsewhere_bytes=_sizes(found.get("elsewhere_bytes")),
        **{name: _value(found, name) for name in COUNTERS},
    )


def _value(found: Mapping[str, Any], name: str) -> int | Unavailable:
    value = _read_count(found.get(name))
    return value if value >= 0 else NOT_KNOWN


def _read_count(value: object) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and isinstance(value, int) and 0 <= value < _MAX_BYTES else -1


def _sizes(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    return {str(name): size for name, size in value.items() if _read_count(size) >= 0}


def _make_layout(value: object) -> Layout | Unavailable:
    if not isinstance(value, dict):
        return Unavailable("the mesh was not declared")
    try:
        return Layout.from_dict(value)
    except LayoutError as error:
        return Unavailable(str(error))
