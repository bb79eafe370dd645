"""Device time by module of the model, where the profiler recorded modules (`with_stack`).

A piece of device work belongs to the innermost module whose forward was running on the host's
thread when the work was launched. What backward launches runs outside of any module's forward and
counts as "" here; it is found by operator.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_spans import find_innermost, find_parents
from meshscope.store.read.arrays import Int64s

PREFIX = "nn.Module: "
MAX_PATH = 12
"""Deeper nesting is cut: the outer ones say where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """Device work launched inside one path of modules."""

    path: str
    """Outermost first, separated by slashes; "" for work outside of any."""
    num_events: int
    device_ns: int
    share_ratio: float


def tabulate_modules(trace: Trace, rows: Int64s, launch: Int64s) -> tuple[ModuleRow, ...]:
    """The paths with device time, most first; empty when no module was recorded."""
    events = trace.events
    modules = np.flatnonzero(events.category == Category.MODULE)
    rows = rows[launch[rows] >= 0]
    if not len(modules) or not len(rows):
        return ()
    module = find_innermost(trace, modules, launch[rows])
    found, inverse = np.unique(module, return_inverse=True)
    count = np.bincount(inverse)
    total = np.bincount(inverse, weights=events.duration_ns[rows]).astype(np.int64)
    paths = _name_paths(trace, modules, found)
    sums: dict[str, tuple[int, int]] = {}
    for path, number, ns in zip(paths, count.tolist(), total.tolist(), strict=True):
        before = sums.get(path, (0, 0))
        sums[path] = (before[0] + number, before[1] + ns)
    whole = max(int(total.sum()), 1)
    return tuple(
        ModuleRow(path=path, num_events=number, device_ns=ns, share_ratio=ns / whole)
        for path, (number, ns) in sorted(sums.items(), key=lambda item: -item[1][1])
    )


def _name_paths(trace: Trace, modules: Int64s, wanted: Int64s) -> list[str]:
    """The modules around each, outermost first; "" for -1."""
    events = trace.events
    parent = np.full(len(events), -1, dtype=np.int64)
    for track in np.unique(events.track[modules]).tolist():
        own = modules[events.track[modules] == track]
        own = own[np.lexsort((-events.duration_ns[own], events.begin_ns[own]))]
        place = find_parents(events.begin_ns[own], events.end_ns[own])
        parent[own] = np.where(place >= 0, own[place], -1)
    paths = []
    for row in wanted.tolist():
        names: list[str] = []
        while row >= 0:
            names.append(trace.strings[events.name[row]].removeprefix(PREFIX))
            row = int(parent[row])
        paths.append("/".join(names[::-1][:MAX_PATH]))
    return paths
