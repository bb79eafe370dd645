"""Some events of a trace at a time: when they end, when any of them runs, what they say.

`TraceEvents.end_ns` and `Trace.text_argument` make a column of the whole trace; these look at the
asked events only, which in a large trace are few.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Trace, ValueKind
from meshscope.numerics.intervals import Intervals, unite
from meshscope.store.read.arrays import Int64s


def find_ends(trace: Trace, rows: Int64s) -> Int64s:
    """When each of the events ends."""
    return trace.events.begin_ns[rows] + trace.events.duration_ns[rows]


def unite_events(trace: Trace, rows: Int64s) -> Intervals:
    """When any of the events runs."""
    return unite(trace.events.begin_ns[rows], find_ends(trace, rows))


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
    found, back = np.unique(rows, return_inverse=True)
    first = np.searchsorted(arguments.event, found, side="left")
    count = np.searchsorted(arguments.event, found, side="right") - first
    owner = np.repeat(np.arange(len(found)), count)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count) + first[owner]
    key, kind, value = arguments.key[place], arguments.kind[place], arguments.value[place]
    is_text = kind >= ValueKind.STRING

    def column(name: str, is_wanted: npt.NDArray[np.bool_]) -> Int64s:
        values = np.full(len(found), -1, dtype=np.int64)
        picked = np.flatnonzero((key == trace.key(name)) & is_wanted)
        values[owner[picked]] = value[picked]
        return values[back]

    return EventArguments(
        text={name: column(name, is_text) for name in texts},
        number={name: column(name, kind == ValueKind.INT) for name in numbers},
    )


def number_rows(*columns: npt.NDArray[np.integer]) -> tuple[Int64s, Int64s]:
    """Rows that are equal in all columns get one number, in order of their values, and the first
    place at which each number stands. Values are at least -1."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    first = np.zeros(min(len(number), 1), dtype=np.int64)
    for column in columns:
        width = int(column.max(initial=0)) + 2
        joined = number * width + (column.astype(np.int64) + 1)
        _, first, number = np.unique(joined, return_index=True, return_inverse=True)
    return number, first
