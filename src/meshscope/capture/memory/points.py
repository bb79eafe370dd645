"""Points: what a rank's memory was used for at one moment, and the two files they are written to.

`memory.jsonl` has exact bytes, one object a line: first `header`, then `point`s. `memory.log` is
the same for people: a header, the seconds since construction, a summary in MiB, and on wish the
layouts, a line for each node of the tree of modules: dotted path, own MiB, MiB of the subtree.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshscope.store.schema import MISSING

LOG_NAME = "memory.log"
POINTS_NAME = "memory.jsonl"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One moment. Bytes; -1 where there is no such number."""

    name: str
    step: int
    microbatch: int
    seconds: float
    """Since construction, monotonic."""
    categories: Mapping[str, Mapping[str, int]]
    """Category to path to bytes, on the model's device."""
    elsewhere: Mapping[str, int]
    """Category to bytes on other devices."""
    allocated_bytes: int
    reserved_bytes: int = MISSING
    peak_allocated_bytes: int = MISSING
    sampled_peak_bytes: int = MISSING
    """The most that was in use after any operator of this step so far."""
    inactive_split_bytes: int = MISSING
    num_retries: int = MISSING
    num_ooms: int = MISSING
    rss_bytes: int = MISSING
    during: str = ""
    """Of a peak: what ran then."""
    shows_layouts: bool = field(default=False, compare=False)
    """Whether `memory.log` shows its trees."""

    @property
    def attributed_bytes(self) -> int:
        """The sum over all categories."""
        return sum(sum(paths.values()) for paths in self.categories.values())

    @property
    def residual_bytes(self) -> int | None:
        """Allocated and not attributed; None where the allocator is not read."""
        if self.allocated_bytes < 0:
            return None
        return self.allocated_bytes - self.attributed_bytes

    def to_json(self) -> dict[str, Any]:
        """A line of `memory.jsonl`."""
        return {
            "kind": "point",
            "point": self.name,
            "step": self.step,
            "microbatch": self.microbatch,
            "during": self.during,
            "seconds": round(self.seconds, 6),
            "categories_bytes": {k: sum(paths.values()) for k, paths in self.categories.items()},
            "modules_bytes": {k: dict(paths) for k, paths in self.categories.items()},
            "elsewhere_bytes": dict(self.elsewhere),
            "attributed_bytes": self.attributed_bytes,
            "allocated_bytes": self.allocated_bytes,
            "residual_bytes": self.residual_bytes,
            "reserved_bytes": self.reserved_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "sampled_peak_bytes": self.sampled_peak_bytes,
            "inactive_split_bytes": self.inactive_split_bytes,
            "num_retries": self.num_retries,
            "num_ooms": self.num_ooms,
            "rss_bytes": self.rss_bytes,
        }


class PointFiles:
    """Writes both files; lines are kept back until `flush`, so that a step writes once."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self._estimate = header.get("estimate_bytes") or {}
        self._lines = [json.dumps({"kind": "header", "version": FORMAT_VERSION, **header})]
        self._log = [f"memory of {header.get('title', 'this process')}", ""]
        self._is_new = True

    def put(self, point: Point) -> None:
        """Keeps a point for the next `flush`."""
        self._lines.append(json.dumps(point.to_json()))
        self._log += list(describe_point(point, self._estimate))

    def flush(self) -> None:
        """Appends what was kept; the first time, begins both files anew."""
        if not self._lines:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = "w" if self._is_new else "a"
        for name, lines in ((POINTS_NAME, self._lines), (LOG_NAME, self._log)):
            # A name may hold a lone surrogate: it is written as what it is, escaped.
            with open(self.folder / name, mode, encoding="utf-8", errors="backslashreplace") as out:
                out.write("\n".join(lines) + "\n")
        self._is_new = False
        self._lines, self._log = [], []


def describe_point(point: Point, estimate: Mapping[str, int]) -> Iterator[str]:
    """The lines of `memory.log`."""
    where = "" if point.step < 0 else f", step {point.step}, microbatch {point.microbatch}"
    yield f"--- {point.name}{where} ---"
    yield f"time since construction: {point.seconds:.3f} s"
    if point.during:
        yield f"during: {_one_line(point.during)}"
    yield f"total attributed: {_mib(point.attributed_bytes)}"
    for category in CATEGORIES:
        paths = point.categories.get(category, {})
        if paths or category in ("parameters", "gradients", "optimizer_state", "activations"):
            planned = estimate.get(category)
            beside = "" if planned is None else f" (estimated {_mib(planned)})"
            yield f"  {category}: {_mib(sum(paths.values()))}{beside}"
    for category, num_bytes in point.elsewhere.items():
        yield f"  {category} on another device: {_mib(num_bytes)}"
    yield f"allocated: {_mib_or_reason(point.allocated_bytes)}"
    residual = point.residual_bytes
    yield f"residual (allocated, not attributed): {'n/a' if residual is None else _mib(residual)}"
    for name, num_bytes in (
        ("reserved", point.reserved_bytes),
        ("peak allocated", point.peak_allocated_bytes),
        ("most allocated after an operator", point.sampled_peak_bytes),
        ("resident", point.rss_bytes),
    ):
        if num_bytes >= 0:
            yield f"{name}: {_mib(num_bytes)}"
    if point.shows_layouts:
        for category in CATEGORIES:
            if point.categories.get(category):
                yield f"layout of {category}: path, own MiB, subtree MiB"
                yield from describe_tree(point.categories[category])
    yield ""


def describe_tree(paths: Mapping[str, int]) -> Iterator[str]:
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


def _mib_or_reason(num_bytes: int) -> str:
    return "n/a" if num_bytes < 0 else _mib(num_bytes)
