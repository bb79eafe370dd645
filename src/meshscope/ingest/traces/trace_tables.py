"""What the device's time was spent on: by kernel, and by the operator that launched it.

Times are sums over events, so that what ran at the same time on two streams counts twice; shares
are of the sum over all device events. An operator is found by the id the profiler gives both it
and the work launched for it: of several with one id the innermost; where none has it (older
traces) the innermost around the launching call.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_kernels import KernelClasses, Work
from meshscope.ingest.traces.trace_spans import find_innermost, number_rows, read_arguments
from meshscope.store.read.arrays import Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All launches of one kernel."""

    name: str
    work: Work
    kind: str
    """Of a collective; empty for everything else."""
    count: int
    total_ns: int
    mean_ns: float
    max_ns: int
    share_ratio: float
    """Of the time of all device events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All calls of one operator with the same shapes that launched device work."""

    name: str
    shapes: str
    """As the profiler wrote them; empty when it did not record shapes."""
    types: str
    count: int
    num_kernels: int
    device_ns: int
    host_ns: int
    """Of the calls themselves."""
    share_ratio: float


def tabulate_kernels(trace: Trace, classes: KernelClasses, rows: Int64s) -> tuple[KernelRow, ...]:
    """Every kernel, the one with the most time first."""
    if not len(rows):
        return ()
    events = trace.events
    names, inverse = np.unique(events.name[rows], return_inverse=True)
    duration = events.duration_ns[rows]
    total = np.bincount(inverse, weights=duration).astype(np.int64)
    count = np.bincount(inverse)
    longest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(longest, inverse, duration)
    first = np.zeros(len(names), dtype=np.int64)
    first[inverse[::-1]] = rows[::-1]
    whole = max(int(duration.sum()), 1)
    return tuple(
        KernelRow(
            name=trace.strings[names[place]] if names[place] >= 0 else "",
            work=Work(int(classes.work[first[place]])),
            kind=_kind_of(classes, int(first[place])),
            count=int(count[place]),
            total_ns=int(total[place]),
            mean_ns=float(total[place] / count[place]),
            max_ns=int(longest[place]),
            share_ratio=float(total[place] / whole),
        )
        for place in np.argsort(-total, kind="stable").tolist()
    )


def _kind_of(classes: KernelClasses, row: int) -> str:
    kind = int(classes.kind[row])
    return classes.kinds[kind] if kind >= 0 else ""


def find_operators(trace: Trace, launch: Int64s) -> Int64s:
    """For each device event the row of the operator it was launched for; -1 without one."""
    events = trace.events
    found = np.full(len(events), -1, dtype=np.int64)
    is_work = (events.category >= Category.KERNEL) & (events.category <= Category.MEMSET)
    operators = np.flatnonzero(events.category == Category.CPU_OP)
    if not len(operators):
        return found
    work = np.flatnonzero(is_work & (events.external_id > 0))
    found[work] = _find_by_id(trace, operators, work)
    unknown = np.flatnonzero(is_work & (found < 0) & (launch >= 0))
    if len(unknown):
        found[unknown] = find_innermost(trace, operators, launch[unknown])
    return found


def _find_by_id(trace: Trace, operators: Int64s, work: Int64s) -> Int64s:
    events = trace.events
    keys = events.external_id[operators].astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys, operators = keys[order], operators[order]
    # Of one id the shortest, which is the innermost. Few ids are there twice.
    is_twin = np.zeros(len(keys), dtype=np.bool_)
    is_twin[1:] = keys[1:] == keys[:-1]
    is_twin[:-1] |= is_twin[1:]
    twins = operators[is_twin]
    operators[is_twin] = twins[np.lexsort((-events.duration_ns[twins], keys[is_twin]))]
    wanted = events.external_id[work].astype(np.int64)
    place = np.searchsorted(keys, wanted, side="right") - 1
    is_found = (place >= 0) & (keys[place] == wanted)
    return np.where(is_found, operators[place], -1)


def tabulate_operators(trace: Trace, rows: Int64s, operator_of: Int64s) -> tuple[OperatorRow, ...]:
    """Every operator and shape that launched any of the device events `rows`."""
    if not len(rows):
        return ()
    events = trace.events
    operator = operator_of[rows]
    calls, of_call = np.unique(operator, return_inverse=True)
    said = read_arguments(trace, calls, ("Input Dims", "Input type"), ()).text
    name = np.where(calls >= 0, events.name[calls], -1)
    group, example = number_rows(name, said["Input Dims"], said["Input type"])
    num_groups = len(example)
    inverse = group[of_call]
    duration = events.duration_ns[rows]
    total = np.bincount(inverse, weights=duration, minlength=num_groups).astype(np.int64)
    num_kernels = np.bincount(inverse, minlength=num_groups)
    num_calls = np.bincount(group[calls >= 0], minlength=num_groups)
    host_ns = np.bincount(
        group[calls >= 0], weights=events.duration_ns[calls[calls >= 0]], minlength=num_groups
    ).astype(np.int64)
    whole = max(int(duration.sum()), 1)
    return tuple(
        OperatorRow(
            name=_string(trace, int(name[example[place]])),
            shapes=_string(trace, int(said["Input Dims"][example[place]])),
            types=_string(trace, int(said["Input type"][example[place]])),
            count=int(num_calls[place]),
            num_kernels=int(num_kernels[place]),
            device_ns=int(total[place]),
            host_ns=int(host_ns[place]),
            share_ratio=float(total[place] / whole),
        )
        for place in np.argsort(-total, kind="stable").tolist()
    )


def _string(trace: Trace, place: int) -> str:
    return trace.strings[place] if place >= 0 else ""
