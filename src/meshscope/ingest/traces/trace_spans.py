"""Some events of a trace at a time: when they end, nest and run, what they say.

`TraceEvents.end_ns` and `Trace.text_argument` make a column of the whole trace; these look at the
asked events only, which in a large trace are few.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, Trace, TraceEvents, ValueKind
from meshscope.ingest.native import load_library
from meshscope.numerics.intervals import Intervals, unite
from meshscope.store.read.arrays import Bools, Int64s, find_true

_FEW_NAMES = 4
AT_ONCE = 1 << 15
"""Events that are looked at together: what is made of them stays in a processor's cache."""
_MANY = 200
"""Fewer events are united sooner by numpy than by calling a library."""
_EVENTS_A_NAME = 400
"""Events that are looked through in the time that a name takes."""


def find_rows(trace: Trace, *categories: Category) -> Int64s:
    """The events of these categories."""
    if len(categories) == 1:
        found: Int64s = (trace.events.category == int(categories[0])).nonzero()[0]
        return found
    is_wanted = np.zeros(len(trace.events), dtype=np.bool_)
    for category in categories:  # a comparison takes a tenth of a look into a table
        is_wanted |= trace.events.category == int(category)
    return find_true(is_wanted)


def _mark_categories(categories: tuple[Category, ...]) -> Bools:
    is_wanted = np.zeros(256, dtype=np.bool_)
    is_wanted[list(categories)] = True
    return is_wanted


def list_names(trace: Trace, names: npt.NDArray[np.integer]) -> list[int]:
    """The places in `Trace.strings` that are among these, each once and in order, without -1."""
    is_there = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    is_there[names] = True
    found: list[int] = find_true(is_there[:-1]).tolist()
    return found


def match_names(
    trace: Trace, names: npt.NDArray[np.integer], is_wanted: Callable[[str], object]
) -> Bools:
    """Which of these places in `Trace.strings` have a text that is wanted.

    Names are few, events are many: each name is looked at once, up to 400 letters of it, and
    nothing is sorted.
    """
    if not len(names):
        return np.zeros(0, dtype=np.bool_)
    # A name that no event has does no harm: of many events, finding those that have one takes more.
    is_small = _EVENTS_A_NAME * len(trace.strings) < len(names)
    places = range(len(trace.strings)) if is_small else list_names(trace, names)
    is_name = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    is_name[[place for place in places if is_wanted(trace.strings[place][:400])]] = True
    return _are_among(names, is_name, find_true(is_name).tolist())


def _are_among(names: npt.NDArray[np.integer], is_name: Bools, wanted: list[int]) -> Bools:
    """`is_name` of each, where `wanted` are the places at which it is."""
    found: Bools
    if len(wanted) > _FEW_NAMES:
        found = is_name.take(names)
        return found
    found = np.zeros(len(names), dtype=np.bool_)
    for name in wanted:  # a comparison takes a fifth of a look into a table
        found |= names == name
    return found


def mark_names(trace: Trace, is_wanted: Callable[[str], object]) -> Bools:
    """Of each place in `Trace.strings` whether it is an event's name that is wanted; last, for -1,
    False. 400 letters of a name are looked at."""
    events = trace.events
    is_small = _EVENTS_A_NAME * len(trace.strings) < len(events)
    places = range(len(trace.strings)) if is_small else list_names(trace, events.name)
    found = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    found[[place for place in places if is_wanted(trace.strings[place][:400])]] = True
    return found


def find_named(trace: Trace, is_wanted: Callable[[str], object], *categories: Category) -> Int64s:
    """The events of these categories whose name is wanted, in order."""
    events = trace.events
    if len(events) <= AT_ONCE:  # fewer names have to be looked at
        few = find_rows(trace, *categories)
        picked: Int64s = few[match_names(trace, events.name.take(few), is_wanted)]
        return picked
    is_name = mark_names(trace, is_wanted)
    wanted = find_true(is_name).tolist()
    if not wanted:
        return np.empty(0, dtype=np.int64)
    is_category = _mark_categories(categories)
    found = []
    for first in range(0, len(events), AT_ONCE):
        names = events.name[first : first + AT_ONCE]
        rows = first + find_true(_are_among(names, is_name, wanted))
        found.append(rows[is_category.take(events.category.take(rows))])
    return np.concatenate(found)


def number_names(
    trace: Trace, names: npt.NDArray[np.integer]
) -> tuple[Int64s, npt.NDArray[np.int64]]:
    """As `np.unique` with the inverse, for places in `Trace.strings`, of which -1 is one."""
    num_strings = len(trace.strings)
    is_there = np.zeros(num_strings + 1, dtype=np.bool_)
    is_there[names] = True
    found = find_true(is_there)
    found = found[:-1] if is_there[-1] else found
    number = np.zeros(num_strings + 1, dtype=np.int64)
    if is_there[-1]:
        found = np.append(-1, found)
    number[found] = np.arange(len(found))
    return found, number[names]


def find_ends(trace: Trace, rows: Int64s) -> Int64s:
    """When each of the events ends."""
    return trace.events.ends(rows)


def unite_events(trace: Trace, rows: Int64s) -> Intervals:
    """When any of the events runs."""
    events = trace.events
    if len(rows) >= _MANY:
        found = _unite_natively(events, rows)
        if found is not None:
            return found
    return unite(events.begin_ns.take(rows), events.ends(rows))


def _unite_natively(events: TraceEvents, rows: Int64s) -> Intervals | None:
    """None where nothing is compiled, or events are in another order than that of their begins."""
    library = load_library()
    columns = (events.begin_ns, events.duration_ns, rows)
    if library is None or not all(one.flags.c_contiguous for one in columns):
        return None
    edges = np.empty((2, len(rows)), dtype=np.int64)
    count = library.scanner_unite(
        events.begin_ns.ctypes.data,
        events.duration_ns.ctypes.data,
        events.duration_ns.itemsize == 8,
        rows.ctypes.data,
        len(rows),
        edges[0].ctypes.data,
        edges[1].ctypes.data,
    )
    return None if count < 0 else Intervals(edges[0, :count].copy(), edges[1, :count].copy())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventArguments:
    """Arguments of some events; -1 for what an event does not have."""

    text: dict[str, Int64s]
    """Places in `Trace.strings`."""
    number: dict[str, Int64s]


def read_arguments(
    trace: Trace, rows: Int64s, texts: tuple[str, ...], numbers: tuple[str, ...]
) -> EventArguments:
    """Of each of `rows`, in any order; a row of -1 has none."""
    arguments = trace.arguments
    found, back = _unique(rows)
    first = arguments.event.searchsorted(found, side="left")
    count = arguments.event.searchsorted(found, side="right") - first
    if not count.any():
        none = np.full(len(rows), -1, dtype=np.int64)
        return EventArguments(text=dict.fromkeys(texts, none), number=dict.fromkeys(numbers, none))
    owner = np.repeat(np.arange(len(found)), count)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count) + first[owner]
    key, kind, value = arguments.key[place], arguments.kind[place], arguments.value[place]
    is_text, is_number = kind >= int(ValueKind.STRING), kind == int(ValueKind.INT)
    said = set(find_true(np.bincount(key) > 0).tolist())

    def column(name: str, is_wanted: npt.NDArray[np.bool_]) -> Int64s:
        number = trace.key(name)
        values = np.full(len(found), -1, dtype=np.int64)
        if number in said:  # most are not, of a few events
            picked = find_true((key == number) & is_wanted)
            values[owner[picked]] = value[picked]
        return values[back]

    return EventArguments(
        text={name: column(name, is_text) for name in texts},
        number={name: column(name, is_number) for name in numbers},
    )


def _unique(rows: Int64s) -> tuple[Int64s, Int64s | slice]:
    """As `np.unique` with the inverse; rows are most often in order already."""
    if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
        return rows, slice(None)
    found, back = np.unique(rows, return_inverse=True)
    return found, back


def number_rows(*columns: npt.NDArray[np.integer]) -> tuple[Int64s, Int64s]:
    """Rows that are equal in all columns get one number, in order of their values, and the first
    place at which each number stands. Values are at least -1."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    first = np.zeros(min(len(number), 1), dtype=np.int64)
    for column in columns:
        if len(number) and (column == column[0]).all():  # tells nothing apart
            continue
        width = int(column.max(initial=0)) + 2
        joined = number * width + (column.astype(np.int64) + 1)
        first, number = _number_values(joined, len(first) * width)
    return number, first


def _number_values(values: Int64s, after: int) -> tuple[Int64s, Int64s]:
    """As `np.unique` with index and inverse, without the values, which are from 0 to `after`."""
    if after > 2 * len(values):
        _, first, number = np.unique(values, return_index=True, return_inverse=True)
        return first, number
    place = np.full(after, -1, dtype=np.int64)
    place[values[::-1]] = np.arange(len(values) - 1, -1, -1)  # of several what stands last
    is_there = place >= 0
    first = place[is_there]
    place[is_there] = np.arange(len(first))
    return first, place[values]


def find_parents(begin_ns: Int64s, end_ns: Int64s) -> Int64s:
    """For stretches in order of begin, the place of the one around each; -1 without one.

    Stretches that cross each other are damage: the earlier one then counts as around the later
    only if it ends no earlier.
    """
    parent = np.arange(-1, len(begin_ns) - 1, dtype=np.int64)
    while True:
        is_over = (parent >= 0) & (end_ns[parent] < end_ns)
        if not is_over.any():
            return parent
        parent[is_over] = parent[parent[is_over]]


def find_innermost(trace: Trace, rows: Int64s, asked: Int64s) -> Int64s:
    """For each event of `asked` the innermost event of `rows` around its begin on its own track."""
    events = trace.events
    found = np.full(len(asked), -1, dtype=np.int64)
    for track in np.unique(events.track[asked]).tolist():
        own = rows[events.track[rows] == track]
        if not len(own):
            continue
        # Of those that begin together the longest is around the others.
        own = own[np.lexsort((-events.duration_ns[own], events.begin_ns[own]))]
        begin, end = events.begin_ns[own], events.ends(own)
        parent = find_parents(begin, end)
        wanted = find_true(events.track[asked] == track)
        moment = events.begin_ns[asked[wanted]]
        place = np.searchsorted(begin, moment, side="right") - 1
        while True:
            is_over = (place >= 0) & (end[place] <= moment)
            if not is_over.any():
                break
            place[is_over] = parent[place[is_over]]
        found[wanted] = np.where(place >= 0, own[place], -1)
    return found
