"""What the device's time was spent on: by kernel, and by the operator that launched it.

Times are sums over events, so that what ran at the same time on two streams counts twice; shares
are of the sum over all device events. An operator is found by the id the profiler gives both it
and the work launched for it: of several with one id the innermost; where none has it (older
traces) the innermost around the launching call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.core.kernel_names import KernelCategory, categorise_kernel, shorten_kernel_name
from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_kernels import KernelClasses, Work, name_has
from meshscope.ingest.traces.trace_spans import (
    find_innermost,
    number_names,
    number_rows,
    read_arguments,
)
from meshscope.store.read.arrays import Bools, Int32s, Int64s, find_true


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All launches of one kernel."""

    name: str
    short_name: str
    """For people; kernels of one template may share it."""
    category: KernelCategory
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
class CategoryRow:
    """All device events of one category."""

    category: KernelCategory
    count: int
    total_ns: int
    mean_ns: float
    share_ratio: float
    """Of the time of all device events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All calls of one operator with the same shapes that launched device work."""

    name: str
    shapes: str
    """As the profiler wrote them; empty when it did not record shapes."""
    types: str
    values: str
    """Of a convolution its numbers, which decide its size; else empty."""
    count: int
    num_kernels: int
    """Kernels, copies and fills."""
    device_ns: int
    link_ns: int
    """Of that, on links: communication, and copies between host and device."""
    host_ns: int
    """Of the calls themselves."""
    share_ratio: float
    kernel: str = ""
    """The longest of what it launched: its name tells types that the profiler leaves out."""


def tabulate_kernels(
    trace: Trace, classes: KernelClasses, rows: Int64s, operator_of: Int32s | None = None
) -> tuple[KernelRow, ...]:
    """Every kernel, the one with the most time first; `operator_of` helps to tell what it is."""
    if not len(rows):
        return ()
    events = trace.events
    names, inverse = number_names(trace, events.name.take(rows))
    duration = events.duration_ns.take(rows)
    total = np.bincount(inverse, weights=duration).astype(np.int64)
    count = np.bincount(inverse)
    longest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(longest, inverse, duration)
    first = np.zeros(len(names), dtype=np.int64)
    first[inverse[::-1]] = rows[::-1]
    whole = max(int(duration.sum()), 1)
    operator = np.full(len(names), -1) if operator_of is None else operator_of[first]
    texts = [trace.strings[name] if name >= 0 else "" for name in names.tolist()]
    return tuple(
        KernelRow(
            name=texts[place],
            short_name=shorten_kernel_name(texts[place]),
            category=categorise_event(trace, classes, int(first[place]), int(operator[place])),
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


def tabulate_categories(kernels: Sequence[KernelRow]) -> tuple[CategoryRow, ...]:
    """The same time by category, the most first."""
    sums: dict[KernelCategory, tuple[int, int]] = {}
    for row in kernels:
        count, total = sums.get(row.category, (0, 0))
        sums[row.category] = (count + row.count, total + row.total_ns)
    whole = max(sum(total for _, total in sums.values()), 1)
    return tuple(
        CategoryRow(
            category=category,
            count=count,
            total_ns=total,
            mean_ns=total / count,
            share_ratio=total / whole,
        )
        for category, (count, total) in sorted(sums.items(), key=lambda item: -item[1][1])
    )


def categorise_event(
    trace: Trace, classes: KernelClasses, row: int, operator: int
) -> KernelCategory:
    """What a device event is for; `operator` launched it, -1 where that is not known.
    Communication and copies are as `trace_kernels` tells them; fills are copies here."""
    events = trace.events
    work = classes.work[row]
    if work == int(Work.COMMUNICATION) or classes.is_symmetric[row]:
        return KernelCategory.COMMUNICATION
    if work == int(Work.COPY) or events.category[row] == int(Category.MEMSET):
        return KernelCategory.COPY
    caller = _string(trace, int(events.name[operator])) if operator >= 0 else ""
    return categorise_kernel(_string(trace, int(events.name[row])), caller)


def _kind_of(classes: KernelClasses, row: int) -> str:
    kind = int(classes.kind[row])
    return classes.kinds[kind] if kind >= 0 else ""


def find_operators(trace: Trace, launch: Int32s) -> Int32s:
    """For each device event the row of the operator it was launched for; -1 without one."""
    events = trace.events
    found = np.full(len(events), -1, dtype=np.int32)
    is_work = (events.category >= int(Category.KERNEL)) & (events.category <= int(Category.MEMSET))
    operators = find_true(events.category == int(Category.CPU_OP))
    if not len(operators):
        return found
    work = find_true(is_work & (events.external_id > 0))
    found[work] = _find_by_id(trace, operators, work)
    unknown = find_true(is_work & (found < 0) & (launch >= 0))
    if len(unknown):
        found[unknown] = find_innermost(trace, operators, launch[unknown].astype(np.int64))
    return found


def _find_by_id(trace: Trace, operators: Int64s, work: Int64s) -> Int64s:
    events = trace.events
    keys = events.external_id.take(operators)
    if (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
        keys, operators = keys.take(order), operators.take(order)
        del order
    # Of one id the shortest, which is the innermost. Few ids are there twice.
    second = find_true(keys[1:] == keys[:-1]) + 1
    if len(second):
        twin = np.union1d(second, second - 1)
        twins = operators[twin]
        operators[twin] = twins[np.lexsort((-events.duration_ns[twins], keys[twin]))]
    wanted = events.external_id.take(work)
    place = np.searchsorted(keys, wanted, side="right") - 1
    is_found = (place >= 0) & (keys.take(place) == wanted)
    return np.where(is_found, operators.take(place), -1)


def tabulate_operators(
    trace: Trace, classes: KernelClasses, rows: Int64s, operator_of: Int32s
) -> tuple[OperatorRow, ...]:
    """Every operator and shape that launched any of the device events `rows`."""
    if not len(rows):
        return ()
    events = trace.events
    operator = operator_of.take(rows)
    calls, of_call = _unique_rows(operator, len(events))
    keys = ("Input Dims", "Input type", "Concrete Inputs")
    said = read_arguments(trace, calls, keys, ()).text
    name = np.where(calls >= 0, events.name.take(calls), -1)
    is_convolution = calls >= 0
    is_convolution[is_convolution] = name_has(trace, calls[is_convolution], "conv")
    values = np.where(is_convolution, said["Concrete Inputs"], -1)
    group, example = number_rows(name, said["Input Dims"], said["Input type"], values)
    num_groups = len(example)
    inverse = group.take(of_call)
    duration = events.duration_ns.take(rows)
    total = np.bincount(inverse, weights=duration, minlength=num_groups).astype(np.int64)
    is_link = _uses_links(trace, classes, rows)
    on_links = np.bincount(inverse[is_link], weights=duration[is_link], minlength=num_groups)
    num_kernels = np.bincount(inverse, minlength=num_groups)
    num_calls = np.bincount(group[calls >= 0], minlength=num_groups)
    host_ns = np.bincount(
        group[calls >= 0], weights=events.duration_ns[calls[calls >= 0]], minlength=num_groups
    ).astype(np.int64)
    most = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(most, inverse, duration)
    is_longest = duration == most[inverse]
    longest = np.empty(num_groups, dtype=np.int64)
    longest[inverse[is_longest]] = rows[is_longest]
    kernel = events.name[longest]
    whole = max(int(duration.sum()), 1)
    return tuple(
        OperatorRow(
            name=_string(trace, int(name[example[place]])),
            shapes=_string(trace, int(said["Input Dims"][example[place]])),
            types=_string(trace, int(said["Input type"][example[place]])),
            values=_string(trace, int(values[example[place]])),
            count=int(num_calls[place]),
            num_kernels=int(num_kernels[place]),
            device_ns=int(total[place]),
            link_ns=int(on_links[place]),
            host_ns=int(host_ns[place]),
            share_ratio=float(total[place] / whole),
            kernel=_string(trace, int(kernel[place])),
        )
        for place in np.argsort(-total, kind="stable").tolist()
    )


def _unique_rows(rows: Int32s, num_events: int) -> tuple[Int64s, Int32s]:
    """As `np.unique` with the inverse, for places of events, of which -1 is one, without sorting:
    most of them are there more than once."""
    is_there = np.zeros(num_events + 1, dtype=np.bool_)
    is_there[rows] = True
    found = find_true(is_there[:-1])
    if is_there[-1]:
        found = np.append(-1, found)
    number = np.empty(num_events + 1, dtype=np.int32)
    number[found] = np.arange(len(found), dtype=np.int32)
    return found, number.take(rows)


def _uses_links(trace: Trace, classes: KernelClasses, rows: Int64s) -> Bools:
    is_copy = classes.work[rows] == int(Work.COPY)
    found: Bools = classes.work[rows] == int(Work.COMMUNICATION)
    found[is_copy] = name_has(trace, rows[is_copy], "htod", "dtoh", "hosttodevice", "devicetohost")
    return found


def _string(trace: Trace, place: int) -> str:
    return trace.strings[place] if place >= 0 else ""
