"""Points: what a rank's memory was used for at one moment, and the two files they are written to.

`memory.jsonl` has exact bytes, one object a line: first `header`, then `point`s. `memory.log` is
the same for people: a header, the seconds since construction, a summary in MiB, and on request the
layouts, a line for each node of the tree of modules: dotted path, own MiB, MiB of the subtree.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshscope.core.memory_point import POINTS_NAME, MemoryPoint
from meshscope.core.unavailable import Unavailable
from meshscope.errors import CaptureError
from meshscope.store.write.access import make_folder

_LOG_NAME = "memory.log"
FORMAT_VERSION = 1

CATEGORIES = (
    "parameters",
    "gathered_parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "master_parameters",
    "communication",
    "inputs",
    "activations",
    "outputs",
    "activation_gradients",
    "temporaries",
    "other",
    "libraries",
    "allocator_rounding",
)
"""In the order in which they claim storages."""
MIB = 1 << 20


def choose_categories(text: str | Collection[str]) -> tuple[str, ...]:
    """Categories by name, as a list or with commas between them; `all` is all of them."""
    names = text.split(",") if isinstance(text, str) else text
    wanted = [str(name).strip() for name in names if str(name).strip()]
    if "all" in wanted:
        return CATEGORIES
    unknown = sorted(set(wanted) - set(CATEGORIES))
    if unknown:
        known = ", ".join(CATEGORIES)
        raise CaptureError(f"there is no layout of {', '.join(unknown)}; there are all, {known}")
    return tuple(wanted)


class PointFiles:
    """Writes both files; lines are kept back until `flush`, so that a step writes once."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self._estimate = header.get("estimate_bytes") or {}
        self._lines = [json.dumps({"kind": "header", "version": FORMAT_VERSION, **header})]
        self._log = [f"memory of {header.get('title', 'this process')}", ""]
        self._is_new = True

    def put(self, point: MemoryPoint, layouts: Collection[str]) -> None:
        """Keeps a point for the next `flush`; `memory.log` shows its trees of these categories."""
        self._lines.append(json.dumps(point.to_json()))
        self._log += list(_describe_point(point, self._estimate))
        self._log += list(_describe_layouts(point, layouts))
        self._log.append("")

    def flush(self) -> None:
        """Appends what was kept; the first time, begins both files anew."""
        if not self._lines:
            return
        make_folder(self.folder)
        mode = "w" if self._is_new else "a"
        for name, lines in ((POINTS_NAME, self._lines), (_LOG_NAME, self._log)):
            # A name may hold a lone surrogate: it is written as what it is, escaped.
            with open(self.folder / name, mode, encoding="utf-8", errors="backslashreplace") as out:
                out.write("\n".join(lines) + "\n")
        self._is_new = False
        self._lines, self._log = [], []


def _describe_point(point: MemoryPoint, estimate: Mapping[str, int]) -> Iterator[str]:
    """Formats the lines of `memory.log`."""
    where = "" if point.step < 0 else f", step {point.step}, microbatch {point.microbatch}"
    yield f"--- {point.name}{where} ---"
    yield f"time since construction: {point.seconds:.3f} s"
    if point.during:
        yield f"during: {_one_line(point.during)}"
    yield f"total attributed: {_mib(point.attributed_bytes)}"
    for category in CATEGORIES:
        paths = point.modules_bytes.get(category, {})
        if paths or category in ("parameters", "gradients", "optimizer_state", "activations"):
            planned = estimate.get(category)
            beside = "" if planned is None else f" (estimated {_mib(planned)})"
            yield f"  {category}: {_mib(sum(paths.values()))}{beside}"
    for category, num_bytes in point.elsewhere_bytes.items():
        yield f"  {category} on another device: {_mib(num_bytes)}"
    yield f"allocated: {_mib_or_reason(point.allocated_bytes)}"
    yield f"residual (allocated, not attributed): {_mib_or_reason(point.residual_bytes)}"
    for name, counter in (
        ("reserved", point.reserved_bytes),
        ("peak allocated", point.peak_allocated_bytes),
        ("most allocated after an operator", point.sampled_peak_bytes),
        ("resident", point.rss_bytes),
    ):
        if not isinstance(counter, Unavailable):
            yield f"{name}: {_mib(counter)}"


def _describe_layouts(point: MemoryPoint, layouts: Collection[str]) -> Iterator[str]:
    """A tree of modules for each of these categories that has bytes."""
    for category in CATEGORIES:
        if category in layouts and point.modules_bytes.get(category):
            yield f"layout of {category}: path, own MiB, subtree MiB"
            yield from _describe_tree(point.modules_bytes[category])


def _describe_tree(paths: Mapping[str, int]) -> Iterator[str]:
    """A line for each node, in the order in which paths first came."""
    own: dict[str, int] = {}
    subtree: dict[str, int] = {}
    for path, num_bytes in paths.items():
        parts = path.split(".") if path else []
        for depth in range(len(parts) + 1):
            node = ".".join(parts[:depth])
            own.setdefault(node, 0)
            subtree[node] = subtree.get(node, 0) + num_bytes
        own[path] += num_bytes
    for node, num_bytes in own.items():
        shown = _one_line(node) or "(root)"
        yield f"  {shown}: {num_bytes / MIB:.2f}, {subtree[node] / MIB:.2f}"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f} MiB"


def _mib_or_reason(num_bytes: int | Unavailable) -> str:
    return "n/a" if isinstance(num_bytes, Unavailable) else _mib(num_bytes)
