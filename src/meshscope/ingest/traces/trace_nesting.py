"""Which call of the host was going on at a moment, by how calls of a thread nest."""

import numpy as np

from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.store.read.arrays import Int64s


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
        begin, end = events.begin_ns[own], events.end_ns[own]
        parent = find_parents(begin, end)
        wanted = np.flatnonzero(events.track[asked] == track)
        moment = events.begin_ns[asked[wanted]]
        place = np.searchsorted(begin, moment, side="right") - 1
        while True:
            is_over = (place >= 0) & (end[place] <= moment)
            if not is_over.any():
                break
            place[is_over] = parent[place[is_over]]
        found[wanted] = np.where(place >= 0, own[place], -1)
    return found
