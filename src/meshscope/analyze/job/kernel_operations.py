"""Which kernel of a kernel sample is which recorded operation, and how long it was exposed.

    host:    enqueue a · launch a   enqueue b · launch b        both recorded, by us and by CUPTI
    device:                     a a a a   b b b

A kernel belongs to the last operation that its rank had enqueued when it was launched. Operations
of a batch are launched together, behind the last of them. Kernels without a launch in the sample
come before all others: a group's kernels run in the order of its operations, whatever the streams,
so they are counted back from the first one that is known. A kernel whose name says another kind of
operation is never matched, and counting back ends there.

Wrong for operations that move data without a kernel (copy engines): they have no match.

An event behind an operation may be reached long after it, where the stream it is recorded on shares
a queue of the device with others. Kernels show which operations of a step that happens to; in all
steps the ends of these are bounds (`doubt_ends`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.group_axes import UNKNOWN_GROUP
from meshscope.analyze.job.operations import OperationRows, Operations
from meshscope.analyze.rank.kernel_sample import KernelSample, read_samples
from meshscope.core.operations import POINT_TO_POINT, EndSource, Kind
from meshscope.numerics.intervals import own_moments, subtract
from meshscope.store.kernel_table import KernelKind
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.schema import OperationFlag

_MAX_LAG_NS = 100_000_000
"""From an operation's call to its launch: under 1 ms, or as long as the device's queue is full."""
_SAME_SHIFT_NS = 20_000
"""Shifts of one rank differ by less while its clock's offset is the same."""
_MIN_FIRST, _MIN_OTHER = 2, 3
"""Operations that have to agree on the first shift of a sample, and on another one."""
_LATE_NS = 200_000
"""An end so long after its kernel's is a bound; events that nothing holds up are 10 us late."""
_P2P_NAMES = ("sendrecv",)
_KERNEL_NAMES: dict[Kind, tuple[str, ...]] = {
    Kind.ALL_REDUCE: ("allreduce",),
    Kind.ALL_GATHER: ("allgather", "broadcast"),
    Kind.REDUCE_SCATTER: ("reducescatter", "reduce"),
    Kind.BROADCAST: ("broadcast",),
    Kind.REDUCE: ("reduce",),
    Kind.SCATTER: _P2P_NAMES,
    Kind.GATHER: _P2P_NAMES,
    Kind.SEND: _P2P_NAMES,
    Kind.RECV: _P2P_NAMES,
    Kind.BARRIER: ("allreduce",),
    Kind.ALL_TO_ALL: (*_P2P_NAMES, "alltoall"),
}
"""How libraries call the kernels of an operation; uneven ones may be several of the second."""
_SPOKEN = ("allreduce", "allgather", "reducescatter", "sendrecv", "broadcast", "alltoall", "reduce")
"""What a name may say; the first one that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelMatch:
    """The communication kernels of one sample, in order of their start, with their operations."""

    work: Int64s
    """Indices in the sample's `work`."""
    row: Int64s
    """Index in `OperationRows`; -1 where no operation is known to be the kernel's."""
    batch_row: Int64s
    """Operations without a kernel of their own: they were launched with one of a later one."""
    batch_leader: Int64s
    """The row of that one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelOperations:
    """Operations in an interval of a sample; the exposures of all sum to the interval's."""

    row: Int64s
    """In ascending order; -1 first, for kernels of no known operation."""
    start_ns: Int64s
    """Of its first kernel, which may be before the interval, on the clock of the rank's host."""
    end_ns: Int64s
    """Of its last kernel."""
    exposed_ns: Int64s
    """No kernel computed meanwhile. Where several communicate, the one that began first counts."""
    beside_copy_ns: Int64s
    """The part of `exposed_ns` with a copy or fill beside it."""
    hidden_ns: Int64s
    """A kernel computed meanwhile."""

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockShift:
    """What is to be added to the device times that a rank recorded in a part of a sample."""

    rank: int
    first_host_ns: int
    """When the first and the last of the operations ended that it was measured on."""
    last_host_ns: int
    shift_ns: int
    spread_ns: int
    """Half of the range in which the single shifts lie."""
    num_operations: int


def match_kernels(
    sample: KernelSample, rows: OperationRows, names: Mapping[int, str]
) -> KernelMatch:
    """`names` are the kernels', by the rank's name ids."""
    work = sample.work
    kernels = np.flatnonzero(work.kind == KernelKind.COMMUNICATION)
    spoken = _read_names(work.name_id[kernels], names)
    first, last = np.searchsorted(rows.rank, (sample.rank, sample.rank + 1)).tolist()
    row = _match_launches(work.launch_ns[kernels], spoken, rows, first, last)
    batch_row, batch_leader = _find_batches(sample, rows, first, last, row)
    _count_back(sample, kernels, spoken, rows, first, last, row)
    return KernelMatch(work=kernels, row=row, batch_row=batch_row, batch_leader=batch_leader)


def doubt_ends(attempt: Attempt, operations: Operations) -> Operations:
    """The ends of operations whose kernels ended earlier, in any sample, are bounds in all steps.

    Operations are told apart by their position among those of their rank, step and group.
    """
    rows = operations.rows
    sampled = [recording for recording in attempt if recording.has_table("kernels")]
    if not sampled or not len(rows):
        return operations
    position = _number_in_step(rows)
    is_late = np.zeros(len(rows), dtype=np.bool_)
    for recording in sampled:
        first, last = np.searchsorted(rows.rank, (recording.rank, recording.rank + 1)).tolist()
        late = _find_late(recording, rows)
        keys = {(int(rows.group[row]), int(position[row])) for row in late.tolist()}
        for group, index in sorted(keys):
            own = slice(first, last)
            is_late[own] |= (rows.group[own] == group) & (position[own] == index)
    is_late &= rows.end_source == EndSource.DEVICE
    if not is_late.any():
        return operations
    source = np.where(is_late, int(EndSource.DEVICE_LATE), rows.end_source).astype(np.uint8)
    return replace(operations, rows=replace(rows, end_source=source))


def _number_in_step(rows: OperationRows) -> Int64s:
    """Per row how many of its rank, step and group came before it."""
    order = np.lexsort((rows.group, rows.step, rows.rank))
    starts = np.zeros(len(rows), dtype=np.bool_)
    starts[:1] = True
    for column in (rows.rank, rows.step, rows.group):
        starts[1:] |= column[order][1:] != column[order][:-1]
    first = np.flatnonzero(starts)
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.arange(len(rows)) - first[np.cumsum(starts) - 1]
    return number


def _find_late(recording: Recording, rows: OperationRows) -> Int64s:
    """Rows of one rank whose recorded end is later than their kernels', in its samples."""
    found = [np.empty(0, dtype=np.int64)]
    for sample in read_samples(recording):
        names = {int(one): recording.name_of(int(one)) for one in np.unique(sample.work.name_id)}
        row, end = _find_kernel_ends(sample, match_kernels(sample, rows, names))
        is_timed = rows.end_source[row] == EndSource.DEVICE
        lag = rows.end_ns[row[is_timed]] - end[is_timed]
        if len(lag):
            # The clocks of both may differ by a constant; most steps have an end that is exact.
            is_late = lag - np.quantile(lag, 0.1) > _LATE_NS
            found.append(row[is_timed][is_late])
    return np.concatenate(found)


def _find_kernel_ends(sample: KernelSample, match: KernelMatch) -> tuple[Int64s, Int64s]:
    """The matched rows, and when the last kernel of each ended."""
    row, index = np.unique(match.row, return_inverse=True)
    end = np.zeros(len(row), dtype=np.int64)
    np.maximum.at(end, index, sample.work.end_ns[match.work])
    return row[row >= 0], end[row >= 0]


def _read_names(name_id: Int64s, names: Mapping[int, str]) -> Int64s:
    """Index in `_SPOKEN` of what each kernel's name says; the length of it for nothing."""
    found = np.full(len(name_id), len(_SPOKEN), dtype=np.int64)
    for one in np.unique(name_id).tolist():
        text = names.get(one, "").lower().replace("_", "")
        said = (index for index, part in enumerate(_SPOKEN) if part in text)
        found[name_id == one] = next(said, len(_SPOKEN))
    return found


def _make_fits() -> Bools:
    """By kind of operation and what a name says."""
    fits = np.ones((256, len(_SPOKEN) + 1), dtype=np.bool_)
    for kind, parts in _KERNEL_NAMES.items():
        fits[kind, :-1] = [part in parts for part in _SPOKEN]
    return fits


_FITS = _make_fits()


def _match_launches(
    launch_ns: Int64s, spoken: Int64s, rows: OperationRows, first: int, last: int
) -> Int64s:
    enqueue = np.append(rows.enqueue_ns[first:last], np.iinfo(np.int64).max)
    index = np.searchsorted(enqueue, launch_ns, side="right") - 1
    is_matched = (launch_ns >= 0) & (index >= 0)
    is_matched &= launch_ns - enqueue[index] <= _MAX_LAG_NS
    row = np.where(is_matched, first + index, -1)
    row[is_matched & ~_FITS[np.append(rows.kind, 0)[row], spoken]] = -1
    return row


def _find_batches(
    sample: KernelSample, rows: OperationRows, first: int, last: int, row: Int64s
) -> tuple[Int64s, Int64s]:
    """Operations that had no kernel of their own when a later one of the batch was launched."""
    first = _find_first_seen(sample, rows, first, last)
    one = slice(first, last)
    is_part = rows.has_flag(OperationFlag.COALESCED)[one]
    is_part |= np.isin(rows.kind[one], [int(kind) for kind in POINT_TO_POINT])
    is_own = np.isin(np.arange(first, last), row)
    count = last - first
    index = np.arange(count)
    is_linked = np.zeros(count, dtype=np.bool_)
    is_linked[:-1] = is_part[:-1] & is_part[1:] & (rows.group[one][:-1] == rows.group[one][1:])
    leader = _next_index(is_own)
    broken = _next_index(~is_linked)
    found = np.flatnonzero(~is_own & (leader < count) & (leader <= broken) & (leader > index))
    return first + found, first + leader[found]


def _find_first_seen(sample: KernelSample, rows: OperationRows, first: int, last: int) -> int:
    """The first operation whose launch is in the sample for sure."""
    launch = sample.work.launch_ns
    since_ns = launch.min(where=launch >= 0, initial=np.iinfo(np.int64).max)
    return first + int(np.searchsorted(rows.enqueue_ns[first:last], since_ns))


def _next_index(is_there: Bools) -> Int64s:
    """For each entry the next one, itself included, that is there; the length without any."""
    count = len(is_there)
    index = np.where(is_there, np.arange(count), count)
    found: Int64s = np.minimum.accumulate(index[::-1])[::-1]
    return found


def _count_back(
    sample: KernelSample,
    kernels: Int64s,
    spoken: Int64s,
    rows: OperationRows,
    first: int,
    last: int,
    row: Int64s,
) -> None:
    """Fills in the rows of kernels that were launched before the sample began."""
    last = _find_first_seen(sample, rows, first, last)
    stream = sample.work.stream[kernels]
    is_known = row >= 0
    group = np.where(is_known, np.append(rows.group, UNKNOWN_GROUP)[row], UNKNOWN_GROUP)
    is_known &= group != UNKNOWN_GROUP
    for streams, groups in _join_pairs(stream[is_known], group[is_known]):
        mine = np.flatnonzero(np.isin(stream, streams))
        seen = mine[row[mine] >= 0]
        early = mine[mine < seen[0]][::-1]
        early = early[: _count_true(sample.work.launch_ns[kernels[early]] < 0)]
        until = min(last, int(row[seen[0]]))
        before = first + np.flatnonzero(np.isin(rows.group[first:until], groups))[::-1]
        count = min(len(early), len(before))
        early, before = early[:count], before[:count]
        is_good = _FITS[rows.kind[before], spoken[early]]
        # Where one batch ends and the next begins is not known.
        is_good &= (rows.flags[before] & OperationFlag.COALESCED) == 0
        count = _count_true(is_good)
        row[early[:count]] = before[:count]


def _count_true(values: Bools) -> int:
    """How many there are before the first that is not."""
    return int(np.logical_and.accumulate(values).sum()) if len(values) else 0


def _join_pairs(stream: Int64s, group: Int64s) -> list[tuple[list[int], list[int]]]:
    """Streams and groups that have to do with each other: a group's kernels may run on several
    streams, a stream's may be of several groups."""
    found: list[tuple[set[int], set[int]]] = []
    for one_stream, one_group in sorted(set(zip(stream.tolist(), group.tolist(), strict=True))):
        streams, groups = {one_stream}, {one_group}
        rest = []
        for other_streams, other_groups in found:
            if one_stream in other_streams or one_group in other_groups:
                streams |= other_streams
                groups |= other_groups
            else:
                rest.append((other_streams, other_groups))
        found = [*rest, (streams, groups)]
    return [(sorted(streams), sorted(groups)) for streams, groups in found]


def measure_operations(
    sample: KernelSample, match: KernelMatch, start_ns: int, end_ns: int
) -> KernelOperations:
    """What each operation had of an interval of the sample, such as a step of the device."""
    work = sample.work
    start, end = work.start_ns[match.work], work.end_ns[match.work]
    own = [np.clip(moment, start_ns, end_ns) for moment in own_moments(start, end)]
    compute = work.unite(KernelKind.COMPUTE)
    copies = subtract(work.unite(KernelKind.COPY, KernelKind.FILL), compute)
    is_inside = (end > start_ns) & (start < end_ns)
    hidden = compute.within(own[0], own[1])[is_inside]
    exposed = (own[1] - own[0])[is_inside] - hidden
    beside = copies.within(own[0], own[1])[is_inside]
    row, index = np.unique(match.row[is_inside], return_inverse=True)
    earliest = np.full(len(row), np.iinfo(np.int64).max)
    np.minimum.at(earliest, index, start[is_inside])
    latest = np.zeros(len(row), dtype=np.int64)
    np.maximum.at(latest, index, end[is_inside])

    def sum_up(values: Int64s) -> Int64s:
        total = np.zeros(len(row), dtype=np.int64)
        np.add.at(total, index, values)
        return total

    return KernelOperations(
        row=row,
        start_ns=earliest,
        end_ns=latest,
        exposed_ns=sum_up(exposed),
        beside_copy_ns=sum_up(beside),
        hidden_ns=sum_up(hidden),
    )


def measure_clock_shifts(
    sample: KernelSample, match: KernelMatch, rows: OperationRows
) -> tuple[ClockShift, ...]:
    """From the ends of operations that were timed by events of the device, and of their kernels.

    The offset with which device times were recorded may change within a sample: operations that
    agree make a shift, and where the times of two shifts overlap, that of more operations holds,
    or else the higher one: events can be held up, and are late then, never early.
    """
    row, end = _find_kernel_ends(sample, match)
    is_timed = (rows.end_source[row] == EndSource.DEVICE) & rows.has_exact_end[row]
    shift = end[is_timed] - rows.end_ns[row[is_timed]]
    order = np.argsort(shift, kind="stable")
    shift, end = shift[order], end[is_timed][order]
    cuts = np.flatnonzero(np.diff(shift) > _SAME_SHIFT_NS) + 1
    parts = [part for part in np.split(np.arange(len(shift)), cuts) if len(part) >= _MIN_FIRST]
    found: list[ClockShift] = []
    for part in sorted(parts, key=lambda part: (-len(part), -int(part[0]))):
        one = ClockShift(
            rank=sample.rank,
            first_host_ns=int(end[part].min()),
            last_host_ns=int(end[part].max()),
            shift_ns=int(np.median(shift[part])),
            spread_ns=int(shift[part[-1]] - shift[part[0]] + 1) // 2,
            num_operations=len(part),
        )
        is_apart = all(
            one.last_host_ns < other.first_host_ns or other.last_host_ns < one.first_host_ns
            for other in found
        )
        if is_apart and len(part) >= (_MIN_OTHER if found else _MIN_FIRST):
            found.append(one)
    return tuple(sorted(found, key=lambda one: one.first_host_ns))
