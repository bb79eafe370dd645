"""Device time as stacks, for flame graphs: by module, or by the Python that launched it.

A stack of modules goes from the outermost module to the category and the short name of the kernel;
what backward launched is below `backward`, in the module whose gradient it made. A stack of Python
goes from the outermost function that the profiler recorded (`with_stack=True`) to the kernel; what
other threads launched, as autograd's engine does, is below the name of that thread. Lengths are
sums over events, in nanoseconds.
"""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.device.trace_modules import locate_modules
from meshscope.core.kernel_names import shorten_kernel_name
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_spans import find_innermost, find_parents
from meshscope.ingest.traces.trace_tables import categorise_event
from meshscope.ingest.traces.trace_view import TraceView
from meshscope.store.read.arrays import Int64s, find_true

OUTSIDE = "(outside of modules)"
BEFORE = "(launched before the trace, or by a graph)"
MAX_DEPTH = 64
_NO_DEVICE = Unavailable("the trace has no device, and a flame graph is of device time")

Stacks = dict[tuple[str, ...], int]
"""Nanoseconds by stack, outermost first."""


def fold_modules(view: TraceView) -> Stacks | Unavailable:
    """Device time of all devices by module, category and kernel."""
    trace, launch = view.trace, view.launch
    rows = find_true(view.device_of >= 0)
    if not len(rows):
        return _NO_DEVICE
    launched = rows[launch[rows] >= 0]
    found = locate_modules(trace, launched, launch)
    if found is None:
        return Unavailable("no module in the trace; record it with with_stack=True")
    paths, is_backward = found
    stacks: Stacks = {}
    for row, path, is_back in zip(launched.tolist(), paths, is_backward.tolist(), strict=True):
        names = path.split("/") if path else [OUTSIDE]
        _add(stacks, view, row, (*names, "backward") if is_back else tuple(names))
    for row in rows[launch[rows] < 0].tolist():
        _add(stacks, view, row, (BEFORE,))
    return stacks


def fold_python(view: TraceView) -> Stacks | Unavailable:
    """The same by Python's functions; the trace has to be read with them."""
    trace, launch = view.trace, view.launch
    events = trace.events
    calls = find_true(np.isin(events.category, (Category.PYTHON, Category.MODULE)))
    if not len(calls):
        return Unavailable("no Python function in the trace; record it with with_stack=True")
    rows = find_true(view.device_of >= 0)
    if not len(rows):
        return _NO_DEVICE
    launched = rows[launch[rows] >= 0]
    parent = _find_callers(trace, calls)
    inner = find_innermost(trace, calls, launch[launched].astype(np.int64))
    stacks: Stacks = {}
    names: dict[int, tuple[str, ...]] = {}
    for row, place in zip(launched.tolist(), inner.tolist(), strict=True):
        if place < 0:
            track = trace.tracks[events.track[launch[row]]]
            _add(stacks, view, row, (track.thread_name or f"thread {track.thread}",))
            continue
        if place not in names:
            names[place] = _name_stack(trace, parent, place)
        _add(stacks, view, row, names[place])
    for row in rows[launch[rows] < 0].tolist():
        _add(stacks, view, row, (BEFORE,))
    return stacks


def list_folded(stacks: Stacks) -> Iterable[str]:
    """Lines as flame graph tools read them: names separated by semicolons, a blank, nanoseconds."""
    for names, ns in sorted(stacks.items()):
        yield f"{';'.join(map(_plain, names))} {ns}"


def _plain(name: str) -> str:
    kept = "".join(c if c.isprintable() and c != ";" else "_" for c in name[:400])
    return " ".join(kept.split()) or "_"


def _add(stacks: Stacks, view: TraceView, row: int, outer: tuple[str, ...]) -> None:
    trace = view.trace
    name = trace.strings[trace.events.name[row]] if trace.events.name[row] >= 0 else ""
    category = categorise_event(trace, view.classes, row, int(view.operator_of[row]))
    key = (*outer, str(category), shorten_kernel_name(name))
    stacks[key] = stacks.get(key, 0) + int(trace.events.duration_ns[row])


def _find_callers(trace: Trace, calls: Int64s) -> Int64s:
    events = trace.events
    parent = np.full(len(events), -1, dtype=np.int64)
    for track in np.unique(events.track[calls]).tolist():
        own = calls[events.track[calls] == track]
        own = own[np.lexsort((-events.duration_ns[own], events.begin_ns[own]))]
        place = find_parents(events.begin_ns[own], events.ends(own))
        parent[own] = np.where(place >= 0, own[place], -1)
    return parent


def _name_stack(trace: Trace, parent: Int64s, row: int) -> tuple[str, ...]:
    names: list[str] = []
    while row >= 0 and len(names) < MAX_DEPTH:
        names.append(trace.strings[trace.events.name[row]])
        row = int(parent[row])
    return tuple(names[::-1])
