"""Who arrived when at each operation, who waited for whom, and how long the transfer took.

All times are on the aligned clock. For a rank r of an operation, arrival is when r entered it, and
ready is when every rank that r depends on has arrived; wait = ready - arrival, transfer = end -
ready. In an all-reduce, all-gather, reduce-scatter, barrier or all-to-all every rank depends on
every other; in a broadcast or scatter on the root; in a reduce or gather the root depends on all;
a recv and its send depend on each other, unless the send ended before.

With gloo each send waits for its receiver; with NCCL only data that fits no buffer waits. In a
broadcast and in a reduce data goes from rank to rank, so a late rank, the root too, holds up those
that send to it; in a scatter the root sends to all, in a gather all send to the root. The times
show which of these held r up: a rank that arrived after r's end, beyond the clocks' uncertainty,
did not, and r is ready when the last of the others has arrived. This takes at most r's transfer
for a wait. An end that is only a bound shows nothing: with gloo r then depends on all of these
ranks that arrived before it, else in a broadcast on the root alone, and in a reduce or gather on
nobody.

A wait shorter than the uncertainty between the two clocks counts as transfer. A group's operations
run in order, one at a time (two with gloo): the part of a transfer during an earlier operation is
`queued`.

Wrong where a rank that took part recorded nothing: it may have been the last. Runs made of traces
often have only a few ranks; there such operations are not split.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.clocks import ClockAlignment
from meshscope.analyze.job.matching import Matches
from meshscope.analyze.job.operations import OperationRows, Operations, slice_runs
from meshscope.core.operations import POINT_TO_POINT, SYMMETRIC, EndSource, Kind
from meshscope.store.read.arrays import Bools, Int32s, Int64s, Uint8s
from meshscope.store.schema import OperationFlag

_CLOCK_ERROR_NS = 10_000_000
"""A transfer that ends this long before it can start is an error of the clocks (OSDI'25)."""
_NEVER = -(1 << 62)

EVERYONE = frozenset((*SYMMETRIC, Kind.ALL_TO_ALL))
"""Kinds in which every rank waits for every other."""
FROM_ROOT = frozenset((Kind.BROADCAST, Kind.SCATTER))
TO_ROOT = frozenset((Kind.REDUCE, Kind.GATHER))
PASSED_ON = frozenset((Kind.BROADCAST, Kind.REDUCE))
"""Of both, kinds in which data goes over other ranks from or to the root."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlignedTimes:
    enqueue_ns: Int64s
    arrival_ns: Int64s
    end_ns: Int64s
    """The arrival if no end is known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTimes:
    """The time of each operation on each rank by what it was; one entry per row."""

    span_ns: Int64s
    """From arrival to end; 0 without an end. `wait_ns` + `transfer_ns` where `is_split`."""
    is_split: Bools
    """The operation was found on all ranks, so wait and transfer can be separated."""
    ready_ns: Int64s
    """On the reference clock."""
    wait_ns: Int64s
    transfer_ns: Int64s
    """`queued_ns` included."""
    queued_ns: Int64s
    pure_transfer_ns: Int64s
    """From the last arrival, whatever the clocks' uncertainty, and without the queue; for
    bandwidths. Negative where clocks are off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Who arrived last at operations in which every rank waits for every other."""

    match: Int64s
    """Index in `Matches`."""
    row: Int64s
    """The row of the last to arrive."""
    rank: Int32s
    """The last to arrive."""
    is_decided: Bools
    """It is later than every other by more than the clocks' uncertainty."""
    last_ns: Int64s
    """When it arrived, on the reference clock."""
    gap_ns: Int64s
    """Last minus second-to-last arrival: what this rank alone cost."""
    wait_ns: Int64s
    """The wait of all ranks together for the last."""


def align_rows(rows: OperationRows, alignment: ClockAlignment) -> AlignedTimes:
    """Brings the times of all rows onto the reference clock."""
    enqueue, arrival = np.empty_like(rows.enqueue_ns), np.empty_like(rows.start_ns)
    end = np.empty_like(rows.end_ns)
    for rank, part in slice_runs(rows.rank):
        enqueue[part] = alignment.to_reference(rank, rows.enqueue_ns[part])
        arrival[part] = alignment.to_reference(rank, rows.start_ns[part])
        end[part] = alignment.to_reference(rank, rows.end_ns[part])
    end = np.minimum(end, _find_later_calls(rows, enqueue, arrival))
    # Rounding may put an end a nanosecond before its start.
    end = np.where(rows.has_end, np.maximum(end, arrival), arrival)
    return AlignedTimes(enqueue_ns=enqueue, arrival_ns=arrival, end_ns=end)


def _find_later_calls(rows: OperationRows, enqueue_ns: Int64s, arrival_ns: Int64s) -> Int64s:
    """[row]: when what backward's engine waited for must have been over, although torch called
    back later: the rank's next call, if it came from another phase; else very late."""
    is_late = rows.has_flag(OperationFlag.ENGINE) & (rows.end_source == EndSource.FUTURE)
    is_free = ~rows.has_flag(OperationFlag.ENGINE | OperationFlag.DEVICE)
    found = np.full(len(rows), np.iinfo(np.int64).max)
    if not is_late.any():
        return found
    for _, part in slice_runs(rows.rank):
        late = np.flatnonzero(is_late[part]) + part.start
        calls = np.flatnonzero(is_free[part]) + part.start
        calls = calls[np.argsort(enqueue_ns[calls], kind="stable")]
        at = np.searchsorted(enqueue_ns[calls], arrival_ns[late], side="right")
        late, call = late[at < len(calls)], calls[at[at < len(calls)]]
        is_other = rows.phase[call] != rows.phase[late]
        found[late[is_other]] = enqueue_ns[call[is_other]]
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Members:
    """Members of the operations that are complete and trusted, those of one next to each other."""

    match: Int64s
    """The operations, as indices in `Matches`."""
    first: Int64s
    """Where each operation's members start."""
    index: Int64s
    """Each member's operation, counted from 0."""
    row: Int64s
    rank: Int32s
    kind: Uint8s
    arrival: Int64s
    last: Int64s
    """For each operation the member that arrived last."""


def measure_arrivals(
    operations: Operations, matches: Matches, times: AlignedTimes, alignment: ClockAlignment
) -> tuple[RowTimes, Arrivals, int]:
    """Waits and transfers of all rows, the last arrivers, and how many ends contradict clocks."""
    rows = operations.rows
    members = _collect_members(rows, matches, times)
    row, arrival = members.row, members.arrival
    has_end, end = rows.has_end[row], times.end_ns[row]
    unsure = alignment.uncertainty_between(members.rank, members.rank[members.last][members.index])
    holder = _find_holders(operations, members, end + unsure.astype(np.int64))
    ready, blocker = _find_ready(rows, members, holder)
    if operations.is_from_traces:
        ready, blocker = _join_batches(rows, members, times, ready, blocker)
    is_early = has_end & (end - ready <= -_CLOCK_ERROR_NS) & (members.kind != Kind.SEND)
    is_split = np.zeros(len(rows), dtype=np.bool_)
    is_split[row] = has_end & (members.kind != Kind.CUSTOM) & _is_whole(operations, row)
    last_ns, ready_ns = times.arrival_ns.copy(), times.arrival_ns.copy()
    last_ns[row] = ready
    unsure = alignment.uncertainty_between(members.rank, blocker)
    known = np.where(ready - arrival <= unsure, arrival, ready)
    ready_ns[row] = np.where(has_end, np.minimum(known, end), known)
    span = times.end_ns - times.arrival_ns
    free_ns = _find_free_times(operations, times)
    begun_ns = times.arrival_ns
    if operations.is_from_traces:
        # Their operations arrive with their data: what passes before their turn is no wait.
        begun_ns = np.clip(free_ns, times.arrival_ns, times.end_ns)
    wait = np.where(is_split, np.maximum(ready_ns - begun_ns, 0), 0)
    transfer = np.where(is_split, span - wait, 0)
    queued = np.clip(free_ns - ready_ns, 0, transfer)
    if operations.is_from_traces:
        queued = np.where(is_split, begun_ns - times.arrival_ns, 0)
    pure = times.end_ns - last_ns
    row_times = RowTimes(
        span_ns=span,
        is_split=is_split,
        ready_ns=ready_ns,
        wait_ns=wait,
        transfer_ns=transfer,
        queued_ns=queued,
        pure_transfer_ns=pure - np.clip(free_ns - last_ns, 0, np.maximum(pure, 0)),
    )
    is_whole = _is_whole(operations, row[members.first])
    arrivals = _rank_arrivals(members, begun_ns[row], alignment, is_whole)
    return row_times, arrivals, int(np.count_nonzero(is_early))


def _is_whole(operations: Operations, row: Int64s) -> Bools:
    """Rows of groups with no absent member; only for traces."""
    if not operations.is_from_traces:
        return np.ones(len(row), dtype=np.bool_)
    rows = operations.rows
    is_whole = np.array([not group.missing_ranks for group in operations.groups] + [False])
    found: Bools = is_whole[rows.group[row]] | _is_kind(rows.kind[row], POINT_TO_POINT)
    return found


def _collect_members(rows: OperationRows, matches: Matches, times: AlignedTimes) -> _Members:
    is_chosen = matches.is_usable
    row = matches.member[is_chosen[matches.of_member]]
    size = matches.size[is_chosen]
    first = np.cumsum(size) - size
    index = np.repeat(np.arange(len(size)), size)
    arrival = times.arrival_ns[row]
    return _Members(
        match=np.flatnonzero(is_chosen),
        first=first,
        index=index,
        row=row,
        rank=rows.rank[row],
        kind=rows.kind[row],
        arrival=arrival,
        last=_find_last(arrival, first, index),
    )


def _find_ready(rows: OperationRows, members: _Members, holder: Int64s) -> tuple[Int64s, Int32s]:
    """When every rank that a member depends on had arrived, and the last of those."""
    arrival, rank, kind = members.arrival, members.rank, members.kind
    is_root = rows.peer[members.row] == rank
    on_all = _is_kind(kind, EVERYONE | POINT_TO_POINT) | (_is_kind(kind, TO_ROOT) & is_root)
    holder = np.where(on_all, members.last[members.index], holder)
    ready = np.maximum(arrival[holder], arrival)
    return ready, rank[holder]


def _join_batches(
    rows: OperationRows, members: _Members, times: AlignedTimes, ready: Int64s, blocker: Int32s
) -> tuple[Int64s, Int32s]:
    """One kernel that sends and receives several messages is ready when the last of them is."""
    own = np.flatnonzero(rows.has_flag(OperationFlag.COALESCED)[members.row])
    if not len(own):
        return ready, blocker
    keys = (ready[own], times.end_ns[members.row[own]], members.arrival[own], members.rank[own])
    own = own[np.lexsort(keys)]
    is_last = np.ones(len(own), dtype=np.bool_)
    alike = np.stack([members.rank[own], members.arrival[own], times.end_ns[members.row[own]]])
    is_last[:-1] = (alike[:, 1:] != alike[:, :-1]).any(axis=0)
    last = own[np.flatnonzero(is_last)[np.cumsum(is_last) - is_last]]
    ready, blocker = ready.copy(), blocker.copy()
    ready[own], blocker[own] = ready[last], blocker[last]
    return ready, blocker


def find_holders(operations: Operations, matches: Matches, times: AlignedTimes) -> Int64s:
    """For each row of a broadcast, scatter, reduce or gather, but the last two's root, the row of
    the last rank it depends on; for all other rows the row itself."""
    rows = operations.rows
    members = _collect_members(rows, matches, times)
    holder = _find_holders(operations, members, times.end_ns[members.row])
    found = np.arange(len(rows))
    found[members.row] = members.row[holder]
    return found


def _find_holders(operations: Operations, members: _Members, until: Int64s) -> Int64s:
    """The same by index of members, without those that arrived after `until`."""
    rows, index, arrival = operations.rows, members.index, members.arrival
    holder = np.arange(len(index))
    rooted = np.flatnonzero(_is_kind(members.kind, FROM_ROOT | TO_ROOT))
    if not len(rooted):
        return holder
    is_root = rows.peer[members.row] == members.rank
    is_from_root = _is_kind(members.kind, FROM_ROOT)
    root = _find_roots(is_root, members)[index]
    root = np.where(root >= 0, root, holder)
    # Who may have held it up: all that came before its end, or of these the root alone.
    latest = holder.copy()
    latest[rooted] = rooted[_find_latest(index[rooted], arrival[rooted], until[rooted])]
    is_any = _is_kind(members.kind, PASSED_ON) | is_root
    latest = np.where(is_any, latest, np.where(arrival[root] <= until, root, holder))
    is_told = rows.has_exact_end[members.row] | _is_gloo(operations, members.row)
    found = np.where(is_from_root, root, holder)
    found = np.where(is_told & (arrival[latest] > arrival[found]), latest, found)
    holder[rooted] = np.where(is_root & ~is_from_root, holder, found)[rooted]
    return holder


def _find_latest(index: Int64s, arrival: Int64s, until: Int64s) -> Int64s:
    """For each member the last of its operation that arrived no later than `until`."""
    count = len(index)
    is_until = np.repeat([False, True], count)
    order = np.lexsort((is_until, np.append(arrival, until), np.tile(index, 2)))
    turn = np.where(order < count, np.arange(2 * count), 0)
    before = order[np.maximum.accumulate(turn)]
    latest = np.empty(2 * count, dtype=np.int64)
    latest[order] = before
    return latest[count:]


def _is_kind(kind: np.ndarray, kinds: frozenset[Kind]) -> Bools:
    return np.isin(kind, [int(k) for k in kinds])


def _find_last(arrival: Int64s, first: Int64s, index: Int64s) -> Int64s:
    """For each operation the member that arrived last; the lowest rank of several."""
    if not len(first):
        return np.empty(0, dtype=np.int64)
    latest = np.maximum.reduceat(arrival, first)
    found = np.flatnonzero(arrival == latest[index])
    owner = index[found]
    return np.asarray(found[np.append(True, owner[1:] != owner[:-1])], dtype=np.int64)


def _find_roots(is_root: Bools, members: _Members) -> Int64s:
    """For each operation the member that is its root; -1 where none is recorded."""
    root = np.full(len(members.first), -1, dtype=np.int64)
    found = np.flatnonzero(is_root)
    root[members.index[found]] = found
    return root


def _find_free_times(operations: Operations, times: AlignedTimes) -> Int64s:
    """For each row, on the reference clock, when its group was free for it on this rank.

    That is the end of the previous operation; with gloo, which runs two at a time, the earlier of
    the two previous ends. Only exact ends count: others are too late.
    """
    rows = operations.rows
    free = np.full(len(rows), _NEVER, dtype=np.int64)
    is_ordered = rows.has_numbered_group & ~_is_kind(rows.kind, POINT_TO_POINT)
    picked = np.flatnonzero(is_ordered)
    key = rows.rank[picked].astype(np.int64) * (len(operations.groups) + 1) + rows.group[picked]
    order = np.argsort(key, kind="stable")
    picked, key = picked[order], key[order]
    end = np.where(rows.has_exact_end[picked], times.end_ns[picked], _NEVER)
    before = _shift(end, key, 1)
    on_host = _is_gloo(operations, picked)
    free[picked] = np.where(on_host, np.minimum(before, _shift(end, key, 2)), before)
    return free


def _is_gloo(operations: Operations, row: Int64s) -> Bools:
    rows = operations.rows
    is_gloo = np.array(["gloo" in group.backend for group in operations.groups] + [False])
    found: Bools = is_gloo[rows.group[row]] & ~rows.has_flag(OperationFlag.DEVICE)[row]
    return found


def _shift(values: Int64s, key: Int64s, count: int) -> Int64s:
    """The value `count` entries before, if it has the same key."""
    moved = np.full(len(values), _NEVER, dtype=np.int64)
    is_same = key[count:] == key[: len(key) - count]
    moved[count:][is_same] = values[: len(values) - count][is_same]
    return moved


def _rank_arrivals(
    members: _Members, begun_ns: Int64s, alignment: ClockAlignment, is_whole: Bools
) -> Arrivals:
    """`begun_ns` is, per member, from when it waited for others."""
    first, last, index = members.first, members.last, members.index
    kept = np.flatnonzero(_is_kind(members.kind[first], EVERYONE) & is_whole)
    if not len(kept):
        return _no_arrivals()
    is_last = np.zeros(len(members.row), dtype=np.bool_)
    is_last[last] = True
    behind = members.arrival[last][index] - begun_ns
    unsure = alignment.uncertainty_between(members.rank, members.rank[last][index])
    margin = np.where(is_last, np.inf, behind - unsure)
    gap = np.where(is_last, -_NEVER, behind)
    waited = np.where((behind > unsure) & ~is_last, behind, 0)
    return Arrivals(
        match=members.match[kept],
        row=members.row[last][kept],
        rank=members.rank[last][kept],
        is_decided=(np.minimum.reduceat(margin, first) > 0)[kept],
        last_ns=members.arrival[last][kept],
        gap_ns=np.minimum.reduceat(gap, first)[kept],
        wait_ns=np.add.reduceat(waited, first)[kept],
    )


def _no_arrivals() -> Arrivals:
    none = np.empty(0, dtype=np.int64)
    return Arrivals(
        match=none,
        row=none,
        rank=none.astype(np.int32),
        is_decided=none > 0,
        last_ns=none,
        gap_ns=none,
        wait_ns=none,
    )
