"""Device time by module of the model, where the profiler recorded modules (`with_stack`).

A piece of device work belongs to the innermost module whose forward was running on the host's
thread when the work was launched. What backward launches belongs to the module in whose forward the
operator ran that autograd now takes the gradient of: both carry the same sequence number. Work that
neither tells counts as "".
"""

import re
from dataclasses import dataclass

import numpy as np

from meshscope.ingest.kineto.trace_columns import Category, Trace, ValueKind
from meshscope.ingest.traces.trace_kernels import name_has
from meshscope.ingest.traces.trace_spans import find_innermost, find_parents
from meshscope.store.read.arrays import Bools, Int32s, Int64s, find_true

PREFIX = "nn.Module: "
MAX_PATH = 12
"""Deeper nesting is cut: the outer ones say where."""
_INSTANCE = re.compile(r"_\d+$")
_ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """Device work launched inside one path of modules."""

    path: str
    """Outermost first, separated by slashes; "" for work outside of any."""
    num_events: int
    device_ns: int
    """Of its own: what modules inside of it launched is theirs."""
    backward_ns: int
    """Of that, launched by backward."""
    share_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleClassRow:
    """All modules of one class below one parent class."""

    name: str
    parent: str
    """"" at the top."""
    depth: int
    """0 at the top."""
    num_modules: int
    """Paths; calls of one module count once."""
    num_events: int
    device_ns: int
    """With the modules inside of them; nested ones of the same class count once."""
    own_ns: int
    backward_ns: int
    """Of `device_ns`."""
    share_ratio: float


def tabulate_modules(trace: Trace, rows: Int64s, launch: Int32s) -> tuple[ModuleRow, ...]:
    """The paths with device time, most first; empty when no module was recorded."""
    rows = rows[launch[rows] >= 0]
    found = locate_modules(trace, rows, launch)
    if found is None:
        return ()
    paths, is_backward = found
    duration = trace.events.duration_ns[rows]
    sums: dict[str, list[int]] = {}
    places, inverse = np.unique(paths, return_inverse=True)
    whole = max(int(duration.sum()), 1)
    for place, path in enumerate(places.tolist()):
        own = inverse == place
        sums[path] = [
            int(np.count_nonzero(own)),
            int(duration[own].sum()),
            int(duration[own & is_backward].sum()),
        ]
    return tuple(
        ModuleRow(
            path=path, num_events=number, device_ns=ns, backward_ns=back, share_ratio=ns / whole
        )
        for path, (number, ns, back) in sorted(sums.items(), key=lambda item: -item[1][1])
    )


def locate_modules(
    trace: Trace, rows: Int64s, launch: Int32s
) -> tuple[np.ndarray[tuple[int], np.dtype[np.object_]], Bools] | None:
    """For each of the launched events its path of modules, and whether backward launched it; None
    when no module was recorded."""
    modules = find_true(trace.events.category == int(Category.MODULE))
    if not len(modules) or not len(rows):
        return None
    module = find_innermost(trace, modules, launch[rows].astype(np.int64))
    outside = find_true(module < 0)
    forward = _find_forward(trace, launch[rows[outside]].astype(np.int64))
    is_known = forward >= 0
    module[outside[is_known]] = find_innermost(trace, modules, forward[is_known])
    is_backward = np.zeros(len(rows), dtype=np.bool_)
    is_backward[outside[is_known]] = True
    found, inverse = np.unique(module, return_inverse=True)
    paths = np.array(_name_paths(trace, modules, found), dtype=object)
    return paths[inverse], is_backward


def _find_forward(trace: Trace, calls: Int64s) -> Int64s:
    """For calls of backward the operator of forward whose gradient they are for; -1."""
    events = trace.events
    operators = find_true(events.category == int(Category.CPU_OP))
    engine = operators[name_has(trace, operators, _ENGINE)]
    found = np.full(len(calls), -1, dtype=np.int64)
    if not len(engine) or not len(calls):
        return found
    numbers = np.full(len(events), -1, dtype=np.int64)
    at = trace.argument_rows("Sequence number")
    at = at[trace.arguments.kind[at] == int(ValueKind.INT)]
    numbers[trace.arguments.event[at]] = trace.arguments.value[at]
    function = find_innermost(trace, engine, calls)
    others = np.setdiff1d(operators[numbers[operators] >= 0], engine)
    others = others[~name_has(trace, others, "backward")]
    # Several operators carry one number: the first is the one that made the graph's node.
    order = others[np.lexsort((events.begin_ns[others], numbers[others]))]
    keys = numbers[order]
    wanted = np.where(function >= 0, numbers[function], -1)
    place = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    is_found = (wanted >= 0) & (len(keys) > 0)
    if len(keys):
        is_found &= keys[place] == wanted
        found[is_found] = order[place[is_found]]
    return found


def roll_up(modules: tuple[ModuleRow, ...]) -> tuple[ModuleClassRow, ...]:
    """By class and parent class, in the order of a tree: parents before what is in them."""
    cells: dict[tuple[str, ...], _Sum] = {}
    whole = max(sum(row.device_ns for row in modules), 1)
    for row in modules:
        if not row.path:
            continue
        names = row.path.split("/")
        classes = tuple(_INSTANCE.sub("", name) for name in names)
        for depth in range(1, len(classes) + 1):
            cell = cells.setdefault(classes[:depth], _Sum(set(), [0, 0, 0, 0]))
            cell.paths.add("/".join(names[:depth]))
            is_own = depth == len(classes)
            for place, amount in enumerate(
                (row.num_events, row.device_ns, row.device_ns if is_own else 0, row.backward_ns)
            ):
                cell.amounts[place] += amount
    return tuple(
        ModuleClassRow(
            name=key[-1],
            parent=key[-2] if len(key) > 1 else "",
            depth=len(key) - 1,
            num_modules=len(cell.paths),
            num_events=cell.amounts[0],
            device_ns=cell.amounts[1],
            own_ns=cell.amounts[2],
            backward_ns=cell.amounts[3],
            share_ratio=cell.amounts[1] / whole,
        )
        for key, cell in _order_tree(cells)
    )


@dataclass(frozen=True, slots=True)
class _Sum:
    paths: set[str]
    amounts: list[int]


def _order_tree(cells: dict[tuple[str, ...], _Sum]) -> list[tuple[tuple[str, ...], _Sum]]:
    def key(item: tuple[tuple[str, ...], _Sum]) -> list[tuple[int, str]]:
        path = item[0]
        return [
            (-cells[path[:depth]].amounts[1], path[depth - 1]) for depth in range(1, len(path) + 1)
        ]

    return sorted(cells.items(), key=key)


def _name_paths(trace: Trace, modules: Int64s, wanted: Int64s) -> list[str]:
    """The modules around each, outermost first; "" for -1."""
    events = trace.events
    parent = np.full(len(events), -1, dtype=np.int64)
    for track in np.unique(events.track[modules]).tolist():
        own = modules[events.track[modules] == track]
        own = own[np.lexsort((-events.duration_ns[own], events.begin_ns[own]))]
        place = find_parents(events.begin_ns[own], events.ends(own))
        parent[own] = np.where(place >= 0, own[place], -1)
    paths = []
    for row in wanted.tolist():
        names: list[str] = []
        while row >= 0:
            names.append(trace.strings[events.name[row]].removeprefix(PREFIX))
            row = int(parent[row])
        paths.append("/".join(names[::-1][:MAX_PATH]))
    return paths
