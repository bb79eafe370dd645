"""How fast data moved: bandwidths by size, latency and bandwidth fitted, messages by pair.

Sizes and factors are those of nccl-tests (`core.operations`). The time is that of the transfer
alone: from the last arrival to the end, without waiting for late ranks or in the queue behind
earlier operations of the group, over rows whose end is exact. These are the receiving ranks of a
broadcast or scatter, the root of a reduce or gather, the recv of a message.

The fit is t = α + β · size, by Theil and Sen. It holds for the sizes that occurred: a line through
small messages says nothing about large ones. Operations that share links at the same time are
slower than a benchmark of one at a time.
"""

import math
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.arrivals import EVERYONE, FROM_ROOT, TO_ROOT, RowTimes
from meshscope.analyze.job.clocks import ClockAlignment
from meshscope.analyze.job.matching import Matches
from meshscope.analyze.job.operations import OperationRows, Operations, number_values
from meshscope.core.operations import Kind, bus_factor
from meshscope.core.unavailable import Unavailable, known
from meshscope.numerics.theil_sen import pair_slopes
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.schema import OperationFlag

_MIN_SIZES = 3
"""Different sizes that a fit needs."""
_MAX_SIZES = 40
_PER_SIZE = 10
"""Transfers of each size in a fit, spread over the run."""
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthRow:
    """Operations of one kind and similar size along one axis."""

    axis: str
    kind: Kind
    num_ranks: int
    """In each group."""
    is_across_hosts: bool
    size_bucket_bytes: int
    """Lower end; the upper end is four times as large."""
    num_operations: int
    num_samples: int
    """Ranks and operations with an exact end."""
    median_size_bytes: float
    median_transfer_ns: float
    algorithm_bytes_per_s: float | Unavailable
    """Size over transfer time; the median over samples."""
    bus_bytes_per_s: float | Unavailable
    uncertainty_ns: float | Unavailable
    """Of a single transfer time, due to the clocks; 0 on one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFit:
    """t = latency + size · ns_per_byte for one kind along one axis."""

    axis: str
    kind: Kind
    num_ranks: int
    is_across_hosts: bool
    num_sizes: int
    min_size_bytes: int
    max_size_bytes: int
    num_samples: int
    latency_ns: float
    """α: may be negative if large transfers are slower per byte."""
    latency_low_ns: float
    latency_high_ns: float
    ns_per_byte: float
    """β."""
    ns_per_byte_low: float
    """95 % interval, from the spread of the slopes."""
    ns_per_byte_high: float
    bus_bytes_per_s: float | Unavailable
    """Of a transfer so large that latency is negligible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRefused:
    """An axis and kind without a fit, and why."""

    axis: str
    kind: Kind
    num_ranks: int
    is_across_hosts: bool
    reason: Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFlow:
    """Messages from one rank to another."""

    source: int
    target: int
    num_messages: int
    size_bytes: int
    """Total of all messages."""
    is_across_hosts: bool | Unavailable
    mean_latency_ns: float | Unavailable
    """From the arrival of both sides to the end of the recv; exact ends only."""
    mean_wait_ns: float | Unavailable
    """How long the recv waited for the send."""
    uncertainty_ns: float | Unavailable
    """Due to the clocks; 0 on one host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TransferSamples:
    """Transfers that bandwidths are measured from; one entry per row with an exact end."""

    family: Int64s
    """Index in `families`: axis, kind, number of ranks, whether across hosts."""
    families: tuple[tuple[str, Kind, int, bool], ...]
    match: Int64s
    size_bytes: Int64s
    transfer_ns: Floats
    uncertainty_ns: Floats


def collect_transfers(
    operations: Operations,
    matches: Matches,
    row_times: RowTimes,
    is_included: Bools,
    alignment: ClockAlignment,
) -> _TransferSamples:
    """Rows of complete operations whose end shows when the data had arrived."""
    rows = operations.rows
    is_usable = matches.is_usable & is_included
    picked = np.flatnonzero(is_usable[matches.of_member])
    match, row = matches.of_member[picked], matches.member[picked]
    is_good = rows.has_exact_end[row] & (rows.size_bytes[row] > 0)
    is_good &= ~rows.has_flag(OperationFlag.COALESCED)[row] & _receives(rows, row)
    match, row = match[is_good], row[is_good]
    # A message crosses hosts or not, whatever its group spans.
    sender = np.where(rows.kind[row] == Kind.RECV, rows.peer[row], rows.rank[row])
    host = _find_hosts(alignment)
    is_far = host[sender] != host[rows.rank[row]]
    used, where = number_values(
        (rows.group[row].astype(np.int64) * 256 + rows.kind[row]) * 2 + is_far
    )
    families: dict[tuple[str, Kind, int, bool], int] = {}
    family = np.zeros(len(used), dtype=np.int64)
    unsure = np.zeros(len(used))
    for index, value in enumerate(used.tolist()):
        group, kind = operations.groups[value // 512], Kind(value // 2 % 256)
        key = (group.axis, kind, len(group.ranks), group.is_across_hosts)
        if kind is Kind.RECV:
            key = (group.axis, kind, 2, bool(value % 2))
        family[index] = families.setdefault(key, len(families))
        members = np.array(group.recorded_ranks, dtype=np.int32)
        if key[3]:
            unsure[index] = alignment.uncertainty_between(members, members[:1]).max(initial=0.0)
    return _TransferSamples(
        family=family[where],
        families=tuple(families),
        match=match,
        size_bytes=rows.size_bytes[row],
        transfer_ns=row_times.pure_transfer_ns[row].astype(np.float64),
        uncertainty_ns=unsure[where],
    )


def _find_hosts(alignment: ClockAlignment) -> Int64s:
    """A number for the host of each rank; -1 for ranks that recorded nothing."""
    names: dict[str, int] = {}
    indices = [
        names.setdefault(known(clock.host) or f"(clock {index})", len(names))
        for index, clock in enumerate(alignment.clocks)
    ]
    return np.array([*indices, -1], dtype=np.int64)[alignment.of_rank]


def _receives(rows: OperationRows, row: Int64s) -> Bools:
    kind, is_root = rows.kind[row], rows.peer[row] == rows.rank[row]
    found: Bools = np.isin(kind, [int(k) for k in EVERYONE]) | (kind == Kind.RECV)
    found |= np.isin(kind, [int(k) for k in FROM_ROOT]) & ~is_root
    found |= np.isin(kind, [int(k) for k in TO_ROOT]) & is_root
    return found


def size_buckets(size_bytes: Int64s) -> Int64s:
    """`core.operations.size_bucket` of many sizes."""
    _, exponent = np.frexp(size_bytes.astype(np.float64))
    bits = np.maximum(exponent.astype(np.int64) - 1, 0) & ~1
    return np.where(size_bytes > 0, np.left_shift(np.int64(1), bits), 0)


def tabulate_bandwidth(samples: _TransferSamples) -> tuple[BandwidthRow, ...]:
    """One row per family and size bucket, in that order."""
    bucket = size_buckets(samples.size_bytes)
    order = np.lexsort((samples.match, bucket, samples.family))
    family, bucket = samples.family[order], bucket[order]
    starts = np.ones(len(order), dtype=np.bool_)
    starts[1:] = (family[1:] != family[:-1]) | (bucket[1:] != bucket[:-1])
    parts = np.split(order, np.flatnonzero(starts)[1:]) if len(order) else []
    found = [_make_row(samples, part) for part in parts]
    return tuple(sorted(found, key=lambda row: (row.axis, row.kind, row.size_bucket_bytes)))


def _make_row(samples: _TransferSamples, part: Int64s) -> BandwidthRow:
    axis, kind, num_ranks, is_across = samples.families[int(samples.family[part[0]])]
    size, transfer = samples.size_bytes[part], samples.transfer_ns[part]
    median_ns = float(np.median(transfer))
    uncertainty_ns = float(samples.uncertainty_ns[part].max())
    algorithm: float | Unavailable
    bus: float | Unavailable
    if median_ns <= max(uncertainty_ns, 0.0):
        algorithm = bus = Unavailable("the transfer is shorter than the clocks can tell")
    else:
        rate = size[transfer > 0] / transfer[transfer > 0]
        algorithm = float(np.median(rate)) * 1e9
        bus = algorithm * bus_factor(kind, num_ranks)
    return BandwidthRow(
        axis=axis,
        kind=kind,
        num_ranks=num_ranks,
        is_across_hosts=is_across,
        size_bucket_bytes=int(size_buckets(size[:1])[0]),
        num_operations=1 + int(np.count_nonzero(np.diff(samples.match[part]))),
        num_samples=len(part),
        median_size_bytes=float(np.median(size)),
        median_transfer_ns=median_ns,
        algorithm_bytes_per_s=algorithm,
        bus_bytes_per_s=bus,
        uncertainty_ns=_known(uncertainty_ns),
    )


def fit_latencies(samples: _TransferSamples) -> tuple[LatencyFit | FitRefused, ...]:
    """Per family a line, or why there is none."""
    order = np.argsort(samples.family, kind="stable")
    family = samples.family[order]
    parts = np.split(order, np.flatnonzero(np.diff(family)) + 1) if len(order) else []
    return tuple(
        _fit_family(
            samples.families[int(samples.family[part[0]])],
            samples.size_bytes[part],
            samples.transfer_ns[part],
        )
        for part in parts
    )


def _fit_family(
    family: tuple[str, Kind, int, bool], size_bytes: Int64s, transfer_ns: Floats
) -> LatencyFit | FitRefused:
    """The line through transfers of one axis and kind."""
    axis, kind, num_ranks, is_across = family
    order = np.sort(size_bytes)
    first = np.flatnonzero(np.append(True, order[1:] != order[:-1]))
    sizes, counts = order[first], np.diff(np.append(first, len(order)))
    if len(sizes) < _MIN_SIZES:
        noun = "size" if len(sizes) == 1 else "sizes"
        text = f"{len(sizes)} {noun} occurred, a fit needs {_MIN_SIZES}"
        return FitRefused(
            axis=axis,
            kind=kind,
            num_ranks=num_ranks,
            is_across_hosts=is_across,
            reason=Unavailable(text),
        )
    rows = _thin_out(size_bytes, sizes, counts)
    x, y = size_bytes[rows].astype(np.float64), transfer_ns[rows]
    slopes = np.sort(pair_slopes(x, y))
    slope = float(np.median(slopes))
    low, high = _slope_interval(slopes, len(x))
    latency = [float(np.median(y - beta * x)) for beta in (slope, high, low)]
    factor = bus_factor(kind, num_ranks)
    return LatencyFit(
        axis=axis,
        kind=kind,
        num_ranks=num_ranks,
        is_across_hosts=is_across,
        num_sizes=len(sizes),
        min_size_bytes=int(sizes[0]),
        max_size_bytes=int(sizes[-1]),
        num_samples=len(size_bytes),
        latency_ns=latency[0],
        latency_low_ns=latency[1],
        latency_high_ns=latency[2],
        ns_per_byte=slope,
        ns_per_byte_low=low,
        ns_per_byte_high=high,
        bus_bytes_per_s=1e9 * factor / slope
        if low > 0
        else Unavailable("transfers do not get longer with size in these sizes"),
    )


def _thin_out(size_bytes: Int64s, sizes: Int64s, counts: Int64s) -> Int64s:
    """A few rows of each of some sizes, spread evenly over both."""
    chosen = np.unique(np.linspace(0, len(sizes) - 1, _MAX_SIZES).astype(np.int64))
    order = np.argsort(size_bytes, kind="stable")
    first = np.cumsum(counts) - counts
    picked = []
    for index in chosen.tolist():
        count = int(counts[index])
        within = np.unique(np.linspace(0, count - 1, _PER_SIZE).astype(np.int64))
        picked.append(order[first[index] + within])
    return np.concatenate(picked)


def _slope_interval(slopes: Floats, num_points: int) -> tuple[float, float]:
    """Sen's interval of the ordered slopes, from Kendall's variance."""
    half = _NORMAL_95 * np.sqrt(num_points * (num_points - 1) * (2 * num_points + 5) / 18) / 2
    middle = (len(slopes) - 1) / 2
    low = max(int(np.floor(middle - half)), 0)
    high = min(int(np.ceil(middle + half)), len(slopes) - 1)
    return float(slopes[low]), float(slopes[high])


def tabulate_messages(
    operations: Operations,
    matches: Matches,
    row_times: RowTimes,
    is_included: Bools,
    alignment: ClockAlignment,
) -> tuple[MessageFlow, ...]:
    """One entry per pair of ranks that sent each other messages."""
    rows = operations.rows
    chosen = np.flatnonzero(matches.is_usable & matches.is_point_to_point & is_included)
    one = matches.member[matches.first[chosen]]
    two = matches.member[matches.first[chosen] + 1]
    recv = np.where(rows.kind[one] == Kind.RECV, one, two)
    source, target = rows.peer[recv], rows.rank[recv].astype(np.int64)
    code, where = number_values(source * operations.world_size + target)
    exact = rows.has_exact_end[recv]
    latency = _mean(where[exact], row_times.pure_transfer_ns[recv[exact]], len(code))
    wait = _mean(where[exact], row_times.wait_ns[recv[exact]], len(code))
    total = np.bincount(where, weights=np.maximum(rows.size_bytes[recv], 0), minlength=len(code))
    count = np.bincount(where, minlength=len(code))
    none = Unavailable("no recv between them has an exact end")
    flows = []
    for index, value in enumerate(code.tolist()):
        pair = value // operations.world_size, value % operations.world_size
        ends = np.array(pair, dtype=np.int32)
        clocks = alignment.of_rank[ends]
        flows.append(
            MessageFlow(
                source=pair[0],
                target=pair[1],
                num_messages=int(count[index]),
                size_bytes=int(total[index]),
                is_across_hosts=_is_across(alignment, int(clocks[0]), int(clocks[1])),
                mean_latency_ns=none if np.isnan(latency[index]) else float(latency[index]),
                mean_wait_ns=none if np.isnan(wait[index]) else float(wait[index]),
                uncertainty_ns=_known(alignment.uncertainty_between(ends[:1], ends[1:])[0]),
            )
        )
    return tuple(flows)


def _known(uncertainty_ns: float) -> float | Unavailable:
    if math.isfinite(uncertainty_ns):
        return float(uncertainty_ns)
    return Unavailable("nothing ties the clocks of these ranks together")


def _is_across(alignment: ClockAlignment, one: int, two: int) -> bool | Unavailable:
    hosts = known(alignment.clocks[one].host), known(alignment.clocks[two].host)
    return hosts[0] != hosts[1] if all(hosts) else Unavailable("a host is not known")


def _mean(where: Int64s, values: Int64s, size: int) -> Floats:
    count = np.bincount(where, minlength=size)
    total = np.bincount(where, weights=values, minlength=size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
