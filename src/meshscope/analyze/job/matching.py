"""Finds the same operation on all ranks that took part in it.

Collectives are matched by group and sequence number, a send and a recv by group, source,
destination, tag and number. The ranks must agree on an operation's kind, number format, root, and
size, except where ranks may pass different amounts. A disagreement is a `Desynchronisation`, and
later operations of that group are not trusted. An operation that a rank lacks because it stopped,
or started to record later, is incomplete, which is no disagreement.

Wrong when a rank omits a collective and all later ones look the same: torch pairs them up in the
same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.group_axes import JobGroup
from meshscope.analyze.job.host_clocks import WALL_CLOCK_UNCERTAINTY_NS, HostClocks
from meshscope.analyze.job.operations import (
    OperationRows,
    Operations,
    dtype_label,
    known_phase,
    known_size,
    known_step,
    slice_runs,
)
from meshscope.analyze.job.sequence_shift import MIN_OVERLAP, ChannelRows, find_shift
from meshscope.core.operations import POINT_TO_POINT, ROOTED, SYMMETRIC, Kind
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int32s, Int64s

MAX_FINDINGS = 64
"""Desynchronisations listed one by one."""
_SAME_CLOCK_TOLERANCE_NS = 1_000_000
"""On one clock, times further apart than this contradict each other."""
_MAX_TAG = 127
"""Larger tags are recorded as this one."""

_ANY_SIZE = frozenset((Kind.ALL_TO_ALL, Kind.GATHER, Kind.SCATTER, Kind.CUSTOM))
"""Kinds whose ranks may know different sizes."""

Shifts = Mapping[tuple[int, int], int]
"""By group and rank: what is added to the rank's sequence numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSide:
    """An operation as some of its ranks describe it."""

    ranks: tuple[int, ...]
    kind: Kind
    size_bytes: int | Unavailable
    dtype: str | Unavailable
    root: int | None
    """None for kinds without one, or if none was recorded."""
    step: int | Unavailable
    """The first of these ranks' step."""
    phase: str | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Desynchronisation:
    """The first operation of a group, or of a pair of ranks, on which ranks disagree."""

    group: JobGroup
    sequence: int
    sides: tuple[OperationSide, ...]
    num_untrusted: int
    """Operations from there on, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShift:
    """A rank whose recorder started later or earlier than the others', and by how much."""

    group: JobGroup
    rank: int
    shift: int
    """Added to the rank's sequence numbers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matches:
    """Operations and their members, ordered by channel and sequence number."""

    member: Int64s
    """Rows of `Operations.rows`, those of one operation next to each other, by rank."""
    of_member: Int64s
    """The operation of each member."""
    first: Int64s
    """Where each operation's members start."""
    size: Int64s
    """Number of members."""
    group: Int32s
    sequence: Int64s
    """With shifts applied."""
    is_point_to_point: Bools
    is_complete: Bools
    """It has every rank that recorded anything in the group, or both send and recv."""
    is_trusted: Bools
    """Ranks agreed on everything up to and including it."""
    num_present: Int64s
    """Per group, the ranks with collectives in it."""
    desynchronisations: tuple[Desynchronisation, ...]
    num_desynchronised: int
    """Channels with a disagreement; more than are listed when there are very many."""
    shifts: tuple[SequenceShift, ...]
    num_stopped: int
    """Operations some rank lacks because it stopped before, or started to record after."""
    num_lost: int
    """Operations some rank lacks in the middle: records were dropped or damaged."""
    num_ambiguous: int
    """Operations a rank recorded twice under one number, as with tags above 127."""

    @property
    def is_usable(self) -> Bools:
        """Complete and trusted."""
        return self.is_complete & self.is_trusted

    def __len__(self) -> int:
        return len(self.first)


def match_operations(operations: Operations, clocks: HostClocks) -> Matches:
    """Matches an attempt's operations, with shifted sequence numbers where needed."""
    matches = _match(operations, {})
    suspects = _find_suspects(operations, matches, clocks)
    if not suspects:
        return matches
    shifts: dict[tuple[int, int], int] = {}
    for group in suspects:
        shifts.update(_find_group_shifts(operations, group, clocks))
    return _match(operations, shifts) if shifts else matches


def _match(operations: Operations, shifts: Shifts) -> Matches:
    rows = operations.rows
    member, channel, num_collective = _find_channels(operations)
    sequence = _shifted_sequence(rows, shifts)[member]
    key = channel * (1 << 34) + (sequence + (1 << 32))
    order = np.argsort(key, kind="stable")
    member, key = member[order], key[order]
    starts = np.ones(len(key), dtype=np.bool_)
    starts[1:] = key[1:] != key[:-1]
    first = np.flatnonzero(starts)
    of_member = np.cumsum(starts) - 1
    size = np.diff(np.append(first, len(key)))
    channel, sequence = channel[order][first], sequence[order][first]
    is_point_to_point = channel >= num_collective
    group = rows.group[member[first]]
    num_present = _count_present(operations)
    expected = np.where(is_point_to_point, 2, num_present[group])
    is_ambiguous = _find_repeated(rows.rank[member], starts, of_member, len(first))
    is_bad = _find_disagreements(rows, member, first, size, is_point_to_point) & ~is_ambiguous
    stop = _find_stops(channel, sequence, is_bad)
    matches = Matches(
        member=member,
        of_member=of_member,
        first=first,
        size=size,
        group=group,
        sequence=sequence,
        is_point_to_point=is_point_to_point,
        is_complete=(size == expected) & (expected > 1) & ~is_ambiguous,
        is_trusted=(sequence < stop[channel]) & ~is_ambiguous,
        num_present=num_present,
        desynchronisations=(),
        num_desynchronised=0,
        shifts=tuple(
            SequenceShift(group=operations.groups[index], rank=rank, shift=shift)
            for (index, rank), shift in shifts.items()
        ),
        num_stopped=0,
        num_lost=0,
        num_ambiguous=int(np.count_nonzero(is_ambiguous)),
    )
    is_first_bad = is_bad & (sequence == stop[channel])
    return _with_findings(operations, matches, np.flatnonzero(is_first_bad), channel)


def _find_repeated(rank: Int32s, starts: Bools, of_member: Int64s, num_matches: int) -> Bools:
    """Operations that a rank recorded twice under one number."""
    is_repeated = ~starts
    is_repeated[1:] &= rank[1:] == rank[:-1]
    found = np.zeros(num_matches, dtype=np.bool_)
    found[of_member[is_repeated]] = True
    return found


def _find_stops(channel: Int64s, sequence: Int64s, is_bad: Bools) -> Int64s:
    """For each channel the number of its first bad operation; the largest number without one."""
    stop = np.full(int(channel.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    bad = np.flatnonzero(is_bad)[::-1]  # the first one is written last
    stop[channel[bad]] = sequence[bad]
    return stop


def _with_findings(
    operations: Operations, matches: Matches, bad: Int64s, channel: Int64s
) -> Matches:
    """Adds the problems; `bad` are the first bad operations of their channels."""
    num_untrusted = np.bincount(channel[~matches.is_trusted], minlength=1)
    num_stopped, num_lost = _count_incomplete(operations, matches)
    return replace(
        matches,
        desynchronisations=tuple(
            _describe(operations, matches, match, int(num_untrusted[channel[match]]))
            for match in bad[:MAX_FINDINGS].tolist()
        ),
        num_desynchronised=len(bad),
        num_stopped=num_stopped,
        num_lost=num_lost,
    )


def _find_channels(operations: Operations) -> tuple[Int64s, Int64s, int]:
    """Rows that can be matched, the channel of each, and how many channels are of collectives."""
    rows = operations.rows
    num_groups, world_size = len(operations.groups), operations.world_size
    is_shared = np.array([len(group.ranks) > 1 for group in operations.groups] + [False])
    is_pair = np.isin(rows.kind, [int(kind) for kind in POINT_TO_POINT])
    has_peer = (rows.peer >= 0) & (rows.peer < world_size) & (rows.peer != rows.rank)
    is_usable = is_shared[rows.group] & (~is_pair | has_peer)
    member = np.flatnonzero(is_usable)
    channel = rows.group[member].astype(np.int64)
    pair = np.flatnonzero(is_pair[member])
    if len(pair):
        row = member[pair]
        is_send = rows.kind[row] == Kind.SEND
        rank = rows.rank[row].astype(np.int64)
        source = np.where(is_send, rank, rows.peer[row])
        target = np.where(is_send, rows.peer[row], rank)
        _, start = np.unique(channel[pair] * world_size + source, return_inverse=True)
        code = (start * world_size + target) * (_MAX_TAG + 1) + np.minimum(rows.tag[row], _MAX_TAG)
        _, index = np.unique(code, return_inverse=True)
        channel[pair] = num_groups + index
    return member, channel, num_groups


def _shifted_sequence(rows: OperationRows, shifts: Shifts) -> Int64s:
    if not shifts:
        return rows.sequence
    sequence = rows.sequence.copy()
    is_collective = ~np.isin(rows.kind, [int(kind) for kind in POINT_TO_POINT])
    for (group, rank), shift in shifts.items():
        sequence[(rows.group == group) & (rows.rank == rank) & is_collective] += shift
    return sequence


def _count_present(operations: Operations) -> Int64s:
    """Per group, how many ranks recorded collectives in it."""
    rows = operations.rows
    is_collective = ~np.isin(rows.kind, [int(kind) for kind in POINT_TO_POINT])
    mask = is_collective & rows.has_numbered_group
    num_groups = len(operations.groups)
    size = num_groups * operations.world_size
    if size <= 4 * len(rows) + 1024:
        cell = rows.group[mask].astype(np.int64) * operations.world_size + rows.rank[mask]
        present = np.bincount(cell, minlength=size) > 0
        by_group = present.reshape(num_groups, operations.world_size)
        return np.asarray(by_group.sum(axis=1), dtype=np.int64)
    cells = np.unique(rows.group[mask].astype(np.int64) * operations.world_size + rows.rank[mask])
    return np.bincount(cells // operations.world_size, minlength=num_groups).astype(np.int64)


def _find_disagreements(
    rows: OperationRows, member: Int64s, first: Int64s, size: Int64s, is_point_to_point: Bools
) -> Bools:
    """Operations with a member that differs from the first in what must be equal."""
    if not len(first):
        return np.zeros(0, dtype=np.bool_)

    def pair(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = column[member]
        return own, np.repeat(own[first], size)

    kind, first_kind = pair(rows.kind)
    dtype, first_dtype = pair(rows.dtype)
    amount, first_amount = pair(rows.size_bytes)
    root, first_root = pair(rows.peer)
    is_bad = (kind != first_kind) & ~np.repeat(is_point_to_point, size)
    is_bad |= (dtype != first_dtype) & (dtype != 0) & (first_dtype != 0)
    is_sized = ~np.isin(kind, [int(free) for free in _ANY_SIZE])
    is_bad |= is_sized & (amount != first_amount) & (amount >= 0) & (first_amount >= 0)
    is_rooted = np.isin(kind, [int(rooted) for rooted in ROOTED])
    is_bad |= is_rooted & (root != first_root) & (root >= 0) & (first_root >= 0)
    return np.logical_or.reduceat(is_bad, first)


def _describe(
    operations: Operations, matches: Matches, match: int, num_untrusted: int
) -> Desynchronisation:
    rows = operations.rows
    start = int(matches.first[match])
    members = matches.member[start : start + int(matches.size[match])].tolist()
    sides: dict[tuple[int, int, int, int], list[int]] = {}
    for row in members:
        root = int(rows.peer[row]) if rows.kind[row] in ROOTED else -1
        key = (int(rows.kind[row]), int(rows.size_bytes[row]), int(rows.dtype[row]), root)
        sides.setdefault(key, []).append(row)
    return Desynchronisation(
        group=operations.groups[matches.group[match]],
        sequence=int(matches.sequence[match]),
        sides=tuple(
            OperationSide(
                ranks=tuple(int(rows.rank[row]) for row in found),
                kind=Kind(kind),
                size_bytes=known_size(size_bytes),
                dtype=dtype_label(dtype),
                root=root if root >= 0 else None,
                step=known_step(int(rows.step[found[0]])),
                phase=known_phase(operations.phases[rows.phase[found[0]]]),
            )
            for (kind, size_bytes, dtype, root), found in sides.items()
        ),
        num_untrusted=num_untrusted,
    )


def _count_incomplete(operations: Operations, matches: Matches) -> tuple[int, int]:
    """Incomplete operations by reason: a rank had stopped or not begun, or lost a record.

    A send without a recv counts as stopped.
    """
    is_open = ~matches.is_complete
    num_alone = int(np.count_nonzero(is_open & matches.is_point_to_point))
    num_stopped = num_lost = 0
    num_collectives = int(np.count_nonzero(~matches.is_point_to_point))  # they come first
    for _, part in slice_runs(matches.group[:num_collectives]):
        own = np.arange(part.start, part.stop)[is_open[part]]
        if not len(own):
            continue
        lowest, highest = _find_extents(operations, matches, part)
        wanted = matches.sequence[own]
        going = np.searchsorted(lowest, wanted, side="right") - np.searchsorted(highest, wanted)
        count = int(np.count_nonzero(matches.size[own] >= going))
        num_stopped, num_lost = num_stopped + count, num_lost + len(own) - count
    return num_stopped + num_alone, num_lost


def _find_extents(operations: Operations, matches: Matches, part: slice) -> tuple[Int64s, Int64s]:
    """The first and the last sequence numbers of the ranks of a group, each in order."""
    start = int(matches.first[part.start])
    end = int(matches.first[part.stop - 1] + matches.size[part.stop - 1])
    rank = operations.rows.rank[matches.member[start:end]]
    order = np.argsort(rank, kind="stable")
    number = matches.sequence[matches.of_member[start:end]][order]
    runs = [run for _, run in slice_runs(rank[order])]
    lowest = np.sort(number[[run.start for run in runs]])
    highest = np.sort(number[[run.stop - 1 for run in runs]])
    return lowest, highest


def _find_suspects(operations: Operations, matches: Matches, clocks: HostClocks) -> list[int]:
    """Groups whose collectives disagree, or whose times contradict the match."""
    rows = operations.rows
    is_bad = ~matches.is_trusted & ~matches.is_point_to_point
    disagreeing = np.bincount(matches.group[is_bad], minlength=len(operations.groups)) > 0
    is_symmetric = np.isin(rows.kind[matches.member[matches.first]], [int(k) for k in SYMMETRIC])
    is_checked = matches.is_usable & is_symmetric
    member = matches.member[is_checked[matches.of_member]]
    if not len(member):
        return np.flatnonzero(disagreeing).tolist()
    size = matches.size[is_checked]
    first = np.cumsum(size) - size
    offset_ns, is_placed = clocks.rough_offsets()
    rank = rows.rank[member]
    last_start = np.maximum.reduceat(rows.start_ns[member] - offset_ns[rank], first)
    first_end = np.minimum.reduceat(rows.end_ns[member] - offset_ns[rank], first)
    is_timed = np.logical_and.reduceat(is_placed[rank] & rows.has_end[member], first)
    group = matches.group[is_checked]
    tolerance = np.array([_tolerance_ns(operations, g, clocks) for g in range(len(disagreeing))])
    is_apart = is_timed & (last_start - first_end > tolerance[group])
    num_timed = np.bincount(group[is_timed], minlength=len(disagreeing))
    num_apart = np.bincount(group[is_apart], minlength=len(disagreeing))
    is_contradicted = (num_timed >= MIN_OVERLAP) & (2 * num_apart > num_timed)
    return np.flatnonzero(disagreeing | is_contradicted).tolist()


def _tolerance_ns(operations: Operations, group: int, clocks: HostClocks) -> int:
    is_one = clocks.is_one_clock(operations.groups[group].recorded_ranks)
    return _SAME_CLOCK_TOLERANCE_NS if is_one else WALL_CLOCK_UNCERTAINTY_NS


def _find_group_shifts(
    operations: Operations, group: int, clocks: HostClocks
) -> dict[tuple[int, int], int]:
    """What must be added to the sequence numbers of the group's ranks, without zeros."""
    rows = operations.rows
    is_collective = ~np.isin(rows.kind, [int(kind) for kind in POINT_TO_POINT])
    inside = np.flatnonzero((rows.group == group) & is_collective)
    offset_ns, is_placed = clocks.rough_offsets()
    by_rank = {
        rank: _channel_rows(rows, inside[rows.rank[inside] == rank], int(offset_ns[rank]))
        for rank in np.unique(rows.rank[inside]).tolist()
        if is_placed[rank]
    }
    if len(by_rank) < 2:
        return {}
    reference = max(by_rank, key=lambda rank: len(by_rank[rank].sequence))
    found = {}
    for rank, own in by_rank.items():
        is_one = clocks.is_one_clock((reference, rank))
        tolerance_ns = _SAME_CLOCK_TOLERANCE_NS if is_one else WALL_CLOCK_UNCERTAINTY_NS
        shift = find_shift(by_rank[reference], own, tolerance_ns=tolerance_ns)
        if rank != reference and shift:
            found[group, rank] = shift
    return found


def _channel_rows(rows: OperationRows, picked: Int64s, offset_ns: int) -> ChannelRows:
    sequence, at = np.unique(rows.sequence[picked], return_index=True)
    picked = picked[at]
    kind = rows.kind[picked].astype(np.int64)
    size = np.where(np.isin(kind, [int(k) for k in _ANY_SIZE]), 0, rows.size_bytes[picked])
    root = np.where(np.isin(kind, [int(k) for k in ROOTED]), rows.peer[picked], 0)
    return ChannelRows(
        sequence=sequence,
        start_ns=rows.start_ns[picked] - offset_ns,
        end_ns=np.where(rows.end_ns[picked] >= 0, rows.end_ns[picked] - offset_ns, -1),
        signature=np.stack([kind, size, rows.dtype[picked].astype(np.int64), root], axis=1),
        is_symmetric=np.isin(kind, [int(k) for k in SYMMETRIC]),
    )
