"""The runs and folders of traces below the served folders, by id. Only what is listed here can be
asked for."""

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from meshscope.errors import RunNotFound
from meshscope.ingest.kineto.trace_files import find_trace_folders
from meshscope.store.read.files import is_folder, look_again
from meshscope.store.read.run_folders import find_runs

_SCAN_S = 2.0
"""Folders are listed at most this often."""
_SCAN_RATIO = 10.0
"""And listing takes at most one part in so many of the time."""
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._]+")
_MAX_NAME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A run that can be asked for."""

    id: str
    name: str
    """Of its folder."""
    folder: str
    """From the name of the served folder on."""
    path: Path
    is_traces: bool
    """A folder of traces, which are read when somebody asks for them."""


class Runs:
    """Finds runs; ids are resolved by this list alone, never as paths."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises RunNotFound for what is no folder."""
        self.roots = tuple(root.resolve() for root in roots)
        for given, root in zip(roots, self.roots, strict=True):
            if not is_folder(root):
                raise RunNotFound(f"{given} is not a folder; give a folder with runs below it")
        self._lock = Lock()
        self._next_scan = 0.0
        self._by_id: Mapping[str, ServedRun] = {}

    def list_runs(self) -> tuple[ServedRun, ...]:
        """By path."""
        return tuple(self._scan().values())

    def find(self, run_id: str) -> ServedRun | None:
        found = self._by_id.get(run_id)
        return self._scan().get(run_id) if found is None else found

    def _scan(self) -> Mapping[str, ServedRun]:
        with self._lock:
            begun = time.monotonic()
            if begun < self._next_scan:
                return self._by_id
            found: dict[str, ServedRun] = {}
            for root in self.roots:
                try:
                    look_again(root)
                    paths = dict.fromkeys(find_trace_folders(root), True)
                    paths |= dict.fromkeys(find_runs(root), False)
                except (RunNotFound, OSError):  # taken away meanwhile
                    continue
                for path, is_traces in sorted(paths.items()):
                    run = _describe(root, path, is_traces=is_traces)
                    found[run.id] = run
            self._by_id = found
            now = time.monotonic()
            self._next_scan = now + max(_SCAN_S, _SCAN_RATIO * (now - begun))
            return found


def _describe(root: Path, path: Path, *, is_traces: bool) -> ServedRun:
    below = path.relative_to(root)
    folder = Path(root.name) / below if root.name else below
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    plain = _NOT_PLAIN.sub("-", path.name).strip("-.")[:_MAX_NAME]
    return ServedRun(
        id=f"{plain}-{digest}" if plain else digest,
        name=path.name or str(path),
        folder=str(folder),
        path=path,
        is_traces=is_traces,
    )
