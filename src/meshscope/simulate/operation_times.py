"""When operations of a recorded run were ready and over, in the form that a replay needs.

An operation is modelled if it was found on all ranks, if its members all arrived within one window
of the timeline, and if its dependencies are known. For each row of a modelled operation, `own_ns` =
its end minus the later of its readiness and the moment at which its group was free for it (a
group's operations queue). An end that is only a bound (the program asked late, or its wait returned
at once) is replaced by ready plus the median `own_ns` of exact ends of the same kind, link (a
group; for messages two ranks) and size, but not after the program asked.

A transfer below 0 is a clock error and counts as 0; `Fidelity` then shows it.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.arrivals import EVERYONE, FROM_ROOT, PASSED_ON, TO_ROOT, find_holders
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import (
    OperationRows,
    Operations,
    code_pairs,
    number_values,
)
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import POINT_TO_POINT, EndSource, Kind
from meshscope.simulate.rank_events import find_equal, number_windows
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.schema import OperationFlag

_SHORT_WAIT_NS = 100_000
"""A wait for a handle that returned sooner than this may have found the operation over."""
NONE = -1
_NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationTimes:
    """One entry per row of the timeline's operations."""

    is_modelled: Bools
    window: Int64s
    """In which all members arrived; -1."""
    match: Int64s
    """Index into `Matches`; -1."""
    waits_for_all: Bools
    """It depends on every member."""
    root: Int64s
    """The root of its broadcast or scatter; -1."""
    other: Int64s
    """The one other row that it depends on: sender, receiver, or the last row that held it up where
    data goes from or to a root; -1."""
    before: Int64s
    """The row whose end frees the group for this one; -1."""
    end_ns: Int64s
    """On the reference clock, with bounds replaced."""
    seen_ns: Int64s
    """When the rank can have known that it was over. The host saw it where its wait returned, which
    no earlier hold-up can have waited for; a device's stream may have gone on before a bound."""
    own_ns: Int64s
    """At least 0."""


def find_operation_times(
    timeline: Timeline, communication: Job, asked_ns: Int64s
) -> OperationTimes:
    """`asked_ns` is, per row, when the program first waited for it; very large if it did not."""
    rows, matches = communication.operations.rows, communication.matches
    arrival = communication.times.arrival_ns
    match = np.full(len(rows), NONE, dtype=np.int64)
    match[matches.member] = matches.of_member
    window = _find_windows(timeline, rows, arrival)
    is_modelled = _choose_rows(communication, match, window)
    root = _find_roots(rows, match, is_modelled)
    waits_for_all, other = _find_relations(communication, match, root, is_modelled)
    ready = _find_ready(communication, match, waits_for_all & is_modelled, (root, other))
    end = communication.times.end_ns
    is_bound = is_modelled & ~(rows.has_exact_end & ~_is_short(rows, end, asked_ns))
    before = _find_queue(communication, is_modelled, is_bound)
    free = np.where(before >= 0, end[before], _NEVER)
    own = np.maximum(end - np.maximum(ready, free), 0)
    typical = _find_typical(communication.operations, own, is_modelled & ~is_bound)
    guess = np.minimum(ready + typical, np.maximum(np.minimum(asked_ns, end), ready))
    end = np.where(is_bound, guess, end)
    return OperationTimes(
        is_modelled=is_modelled,
        window=np.where(is_modelled, window, NONE),
        match=np.where(is_modelled, match, NONE),
        waits_for_all=waits_for_all,
        root=root,
        other=other,
        before=np.where(is_bound, NONE, before),
        end_ns=end,
        seen_ns=np.where(rows.has_flag(OperationFlag.DEVICE), end, communication.times.end_ns),
        own_ns=np.where(is_bound, end - ready, own),
    )


def _is_short(rows: OperationRows, end: Int64s, asked_ns: Int64s) -> Bools:
    is_waited = rows.end_source == EndSource.WAIT
    is_short: Bools = is_waited & (end - asked_ns < _SHORT_WAIT_NS)
    return is_short & rows.has_flag(OperationFlag.ASYNC)


def _find_windows(timeline: Timeline, rows: OperationRows, arrival: Int64s) -> Int64s:
    """The window in which each row's rank arrived; -1 outside the kept steps."""
    window = np.full(len(rows), NONE, dtype=np.int64)
    numbers = number_windows(timeline)
    for index, rank in enumerate(timeline.ranks):
        own = find_equal(rows.rank, rank)
        step = np.searchsorted(timeline.period_start_ns[index], arrival[own], side="right") - 1
        inside = (step >= 0) & (arrival[own] <= timeline.period_end_ns[index][step])
        window[own] = np.where(inside, numbers[step], NONE)
    return window


def _choose_rows(communication: Job, match: Int64s, window: Int64s) -> Bools:
    rows, matches = communication.operations.rows, communication.matches
    # A rank without a trace may have been the last: such operations stay as they were.
    is_known = rows.has_end & (rows.kind != Kind.CUSTOM) & communication.row_times.is_split
    is_known &= ~rows.has_flag(OperationFlag.MANUAL) & (window >= 0)
    if not len(matches):
        return np.zeros(len(rows), dtype=np.bool_)
    member_window = window[matches.member]
    low = np.minimum.reduceat(member_window, matches.first)
    high = np.maximum.reduceat(member_window, matches.first)
    has_all = np.logical_and.reduceat(is_known[matches.member], matches.first)
    is_whole = matches.is_usable & has_all & (low == high) & (low >= 0)
    found: Bools = (match >= 0) & is_whole[match]
    return found


def _find_roots(rows: OperationRows, match: Int64s, is_modelled: Bools) -> Int64s:
    """The root's row for each row of a broadcast or scatter; -1 for roots and all others."""
    is_root = rows.peer == rows.rank
    from_root = is_modelled & _is_kind(rows, FROM_ROOT)
    root_of = np.full(int(match.max(initial=-1)) + 1, NONE, dtype=np.int64)
    roots = np.flatnonzero(is_root & from_root)
    root_of[match[roots]] = roots
    found = np.full(len(rows), NONE, dtype=np.int64)
    others = np.flatnonzero(~is_root & from_root)
    found[others] = root_of[match[others]]
    return found


def _find_relations(
    communication: Job, match: Int64s, root: Int64s, is_modelled: Bools
) -> tuple[Bools, Int64s]:
    """Which rows wait for everyone, and which for one other row than the root."""
    rows, matches, times = (
        communication.operations.rows,
        communication.matches,
        communication.times,
    )
    waits_for_all = _is_kind(rows, EVERYONE)
    waits_for_all |= _is_kind(rows, TO_ROOT) & (rows.peer == rows.rank)
    other = np.full(len(rows), NONE, dtype=np.int64)
    holder = find_holders(communication.operations, matches, times)
    is_held = is_modelled & (holder != np.arange(len(rows))) & (holder != root)
    other[is_held] = holder[is_held]
    # What is passed on may have waited for any of them, if the last of all held it up.
    is_last = is_held & (_is_kind(rows, PASSED_ON) | (rows.peer == rows.rank))
    is_last &= times.arrival_ns[holder] >= _find_last_arrivals(communication, match)
    waits_for_all |= is_last
    other[is_last] = NONE
    pair = np.flatnonzero(is_modelled & _is_kind(rows, POINT_TO_POINT))
    # A pair's members stand next to each other: the sum of both rows minus its own.
    first = matches.first[match[pair]]
    partner = (
        matches.member[first]
        + matches.member[np.minimum(first + 1, len(matches.member) - 1)]
        - pair
    )
    # A send that was over before its recv was posted went into a buffer.
    is_free = (rows.kind[pair] == Kind.SEND) & (times.end_ns[pair] <= times.arrival_ns[partner])
    other[pair] = np.where(is_free, NONE, partner)
    return waits_for_all & is_modelled, other


def _find_last_arrivals(communication: Job, match: Int64s) -> Int64s:
    """Arrival of the last member of each row's operation; very early if unknown."""
    matches, arrival = communication.matches, communication.times.arrival_ns
    if not len(matches):
        return np.full(len(match), _NEVER)
    last = np.maximum.reduceat(arrival[matches.member], matches.first)
    return np.where(match >= 0, last[match], _NEVER)


def _is_kind(rows: OperationRows, kinds: frozenset[Kind]) -> Bools:
    return np.isin(rows.kind, [int(kind) for kind in kinds])


def _find_ready(
    communication: Job,
    match: Int64s,
    waits_for_all: Bools,
    others: tuple[Int64s, ...],
) -> Int64s:
    arrival = communication.times.arrival_ns
    ready = arrival.copy()
    for other in others:
        ready = np.where(other >= 0, np.maximum(ready, arrival[other]), ready)
    return np.where(waits_for_all, _find_last_arrivals(communication, match), ready)


def _find_queue(communication: Job, is_modelled: Bools, is_bound: Bools) -> Int64s:
    """The row whose end frees the group: the previous one; with gloo the earlier end of the last
    two."""
    operations, end = communication.operations, communication.times.end_ns
    rows = operations.rows
    before = np.full(len(rows), NONE, dtype=np.int64)
    is_ordered = rows.has_numbered_group & ~_is_kind(rows, POINT_TO_POINT) & is_modelled
    picked = np.flatnonzero(is_ordered)
    key = rows.rank[picked].astype(np.int64) * (len(operations.groups) + 1) + rows.group[picked]
    order = np.argsort(key, kind="stable")
    picked, key = picked[order], key[order]
    one, two = _shift(picked, key, 1), _shift(picked, key, 2)
    is_gloo = np.array(["gloo" in group.backend for group in operations.groups] + [False])
    on_host = is_gloo[rows.group[picked]] & ~rows.has_flag(OperationFlag.DEVICE)[picked]
    earlier = np.where((two >= 0) & (end[two] < end[one]), two, np.where(two >= 0, one, NONE))
    found = np.where(on_host, earlier, one)
    is_usable = (found >= 0) & ~is_bound[found] & (end[found] <= end[picked])
    before[picked] = np.where(is_usable, found, NONE)
    return before


def _shift(values: Int64s, key: Int64s, count: int) -> Int64s:
    moved = np.full(len(values), NONE, dtype=np.int64)
    is_same = key[count:] == key[: len(key) - count]
    moved[count:][is_same] = values[: len(values) - count][is_same]
    return moved


def _find_typical(operations: Operations, own: Int64s, is_exact: Bools) -> Int64s:
    """Median of the exact rows of the same kind, link and size; of the group's for messages over a
    link that has none; 0 if there is none either."""
    rows = operations.rows
    kind = np.where(rows.kind == Kind.SEND, int(Kind.RECV), rows.kind)  # both sides are alike
    _, size = number_values(rows.size_bytes)
    _, alike = number_values((rows.group.astype(np.int64) + 1) * len(Kind) + kind)
    _, of_group = number_values(alike * (int(size.max(initial=0)) + 1) + size)
    # Messages of one group go over as many links as pairs of its ranks: each has its own pace.
    pair = code_pairs(rows.rank, rows.peer, operations.world_size)
    pairs, pair = number_values(np.where(_is_kind(rows, POINT_TO_POINT), pair, NONE))
    _, link = number_values(of_group * len(pairs) + pair)
    usual, count = _find_medians(own, link, is_exact)
    usual_of_group, _ = _find_medians(own, of_group, is_exact)
    return np.where(count > 0, usual, usual_of_group)


def _find_medians(values: Int64s, cell: Int64s, is_counted: Bools) -> tuple[Int64s, Int64s]:
    """[row]: the upper median of what is counted in its cell, 0 if nothing is; and how many."""
    num_cells = int(cell.max(initial=-1)) + 1
    middle = np.zeros(num_cells, dtype=np.int64)
    picked = np.flatnonzero(is_counted)
    order = picked[np.lexsort((values[picked], cell[picked]))]
    count = np.bincount(cell[order], minlength=num_cells)
    has_any = np.flatnonzero(count)
    first = np.cumsum(count) - count
    middle[has_any] = values[order[(first + count // 2)[has_any]]]
    return middle[cell], count[cell]
