"""What operations and calibrations tell about the difference between two clocks.

Three kinds of evidence, all for `high` minus `low`:

- *differences*: a symmetric operation ends on all ranks at about the same time, each noticing it a
  little late. Among ranks on one clock the first to notice counts.
- *bounds*: no rank leaves a symmetric operation before every rank has entered it, and nothing is
  received before it was sent. Each operation bounds the difference from both sides, or a message
  from one, and no noise can make a bound wrong.
- *calibrations*: differences that the recorder measured itself, with their uncertainty.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.matching import Matches
from meshscope.analyze.job.operations import OperationRows, slice_runs
from meshscope.core.operations import SYMMETRIC, Kind
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.run import Attempt
from meshscope.store.schema import OperationFlag

_MAX_PER_GROUP = 8_000
"""Operations sampled per group, spread over all of them."""
_MIN_CONTRADICTIONS = 3
_MAX_CONTRADICTED_RATIO = 0.1
"""The share of operations that may contradict that their ranks share a clock."""
MAX_ALL_PAIRS = 16
"""Clocks up to which each is compared with each."""
HOST_TOLERANCE_NS = 20_000
_DEVICE_TOLERANCE_NS = 1_000_000
"""Device times are put on the host's clock less exactly."""
NONE_NS = 1 << 62
"""No time or no bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Symmetric operations by clock: one entry per operation and clock that took part."""

    match: Int64s
    """Ascending."""
    clock: Int64s
    """Ascending within an operation."""
    num_members: Int64s
    last_start_ns: Int64s
    first_end_ns: Int64s
    """The first of any rank; NONE_NS if no end is known."""
    first_exact_end_ns: Int64s
    shortest_ns: Int64s
    """The least time any rank spent in it."""
    is_device: Bools


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairSamples:
    """Evidence about two clocks, by operation."""

    low: int
    high: int
    time_ns: Int64s
    """On the clock `low`."""
    difference_ns: Int64s
    """NONE_NS where there is none."""
    lower_ns: Int64s
    upper_ns: Int64s
    """-NONE_NS and NONE_NS where there is no bound."""
    duration_ns: Int64s
    """The least time a rank spent in the operation; NONE_NS for messages."""
    calibrated_time_ns: Int64s
    """When the recorder measured the difference, on the clock `low`."""
    calibrated_ns: Int64s
    calibrated_error_ns: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A difference between the clocks of two ranks that the recorder measured."""

    rank: int
    reference_rank: int
    offset_ns: int
    """The rank's clock minus the reference rank's."""
    uncertainty_ns: int
    at_ns: int
    """On the rank's clock."""


def collect_segments(rows: OperationRows, matches: Matches, clock_of_rank: Int64s) -> Segments:
    """Symmetric operations that are complete and trusted, thinned out, by clock."""
    chosen = _choose_matches(rows, matches)
    is_chosen = np.zeros(len(matches), dtype=np.bool_)
    is_chosen[chosen] = True
    picked = np.flatnonzero(is_chosen[matches.of_member])
    member, match = matches.member[picked], matches.of_member[picked]
    clock = clock_of_rank[rows.rank[member]]
    order = np.lexsort((clock, match))
    member, match, clock = member[order], match[order], clock[order]
    starts = np.ones(len(member), dtype=np.bool_)
    starts[1:] = (match[1:] != match[:-1]) | (clock[1:] != clock[:-1])
    first = np.flatnonzero(starts)
    start, end = rows.start_ns[member], rows.end_ns[member]
    has_end = end >= 0
    exact = np.where(rows.has_exact_end[member], end, NONE_NS)
    return Segments(
        match=match[first],
        clock=clock[first],
        num_members=np.diff(np.append(first, len(member))),
        last_start_ns=_reduce(np.maximum, start, first),
        first_end_ns=_reduce(np.minimum, np.where(has_end, end, NONE_NS), first),
        first_exact_end_ns=_reduce(np.minimum, exact, first),
        shortest_ns=_reduce(np.minimum, np.where(has_end, end - start, NONE_NS), first),
        is_device=_reduce(np.maximum, rows.flags[member] & OperationFlag.DEVICE, first) > 0,
    )


def _reduce(function: np.ufunc, values: np.ndarray, first: Int64s) -> Int64s:
    if not len(first):
        return np.empty(0, dtype=np.int64)
    return np.asarray(function.reduceat(values, first), dtype=np.int64)


def _choose_matches(rows: OperationRows, matches: Matches) -> Int64s:
    kind = rows.kind[matches.member[matches.first]]
    is_exact = rows.has_exact_end[matches.member]
    num_exact = _reduce(np.add, is_exact.astype(np.int64), matches.first)
    is_useful = matches.is_usable & np.isin(kind, [int(k) for k in SYMMETRIC]) & (num_exact > 0)
    useful = np.flatnonzero(is_useful)  # collectives, so in order of their groups
    chosen = [np.empty(0, dtype=np.int64)]
    for _, part in slice_runs(matches.group[useful]):
        own = useful[part]
        count = min(len(own), _MAX_PER_GROUP)
        chosen.append(own[np.linspace(0, len(own) - 1, count).astype(np.int64)])
    return np.concatenate(chosen)


def find_contradicted(segments: Segments, num_clocks: int) -> Int64s:
    """Clocks on which a rank left an operation before another rank of that clock had entered."""
    shared = (segments.num_members > 1) & (segments.first_end_ns < NONE_NS)
    tolerance = np.where(segments.is_device, _DEVICE_TOLERANCE_NS, HOST_TOLERANCE_NS)
    is_early = shared & (segments.last_start_ns - segments.first_end_ns > tolerance)
    num_shared = np.bincount(segments.clock[shared], minlength=num_clocks)
    num_early = np.bincount(segments.clock[is_early], minlength=num_clocks)
    is_bad = (num_early >= _MIN_CONTRADICTIONS) & (num_early > _MAX_CONTRADICTED_RATIO * num_shared)
    return np.flatnonzero(is_bad)


def pair_segments(segments: Segments) -> list[PairSamples]:
    """Each clock of an operation against its lowest clock; of few clocks, each against each."""
    low, high = _choose_pairs(segments)
    exact_low, exact_high = segments.first_exact_end_ns[low], segments.first_exact_end_ns[high]
    end_low, end_high = segments.first_end_ns[low], segments.first_end_ns[high]
    start_low, start_high = segments.last_start_ns[low], segments.last_start_ns[high]
    is_exact = (exact_low < NONE_NS) & (exact_high < NONE_NS)
    return _split_pairs(
        segments.clock[low],
        segments.clock[high],
        time_ns=np.where(exact_low < NONE_NS, exact_low, start_low),
        difference_ns=np.where(is_exact, exact_high - exact_low, NONE_NS),
        lower_ns=np.where(end_low < NONE_NS, start_high - end_low, -NONE_NS),
        upper_ns=np.where(end_high < NONE_NS, end_high - start_low, NONE_NS),
        duration_ns=np.minimum(segments.shortest_ns[low], segments.shortest_ns[high]),
    )


def _choose_pairs(segments: Segments) -> tuple[Int64s, Int64s]:
    """Rows of segments to compare, the lower clock first."""
    match = segments.match
    if len(np.unique(segments.clock)) <= MAX_ALL_PAIRS:
        apart = range(1, MAX_ALL_PAIRS)
        pairs = [np.flatnonzero(match[d:] == match[:-d]) for d in apart]
        low = np.concatenate(pairs)
        return low, low + np.repeat(apart, [len(one) for one in pairs])
    starts = np.ones(len(match), dtype=np.bool_)
    starts[1:] = match[1:] != match[:-1]
    pivot = np.flatnonzero(starts)[np.cumsum(starts) - 1]
    high = np.flatnonzero(~starts)
    return pivot[high], high


def pair_messages(
    rows: OperationRows, matches: Matches, clock_of_rank: Int64s
) -> list[PairSamples]:
    """Bounds from messages between ranks with different clocks."""
    chosen = np.flatnonzero(matches.is_usable & matches.is_point_to_point)
    one = matches.member[matches.first[chosen]]
    two = matches.member[matches.first[chosen] + 1]
    is_sent = rows.kind[one] == Kind.SEND
    send, recv = np.where(is_sent, one, two), np.where(is_sent, two, one)
    source, target = clock_of_rank[rows.rank[send]], clock_of_rank[rows.rank[recv]]
    keep = (source != target) & (rows.end_ns[recv] >= 0)
    send, recv, source, target = send[keep], recv[keep], source[keep], target[keep]
    sent, received = rows.start_ns[send], rows.end_ns[recv]
    is_forward = source < target
    none = np.full(len(sent), NONE_NS, dtype=np.int64)
    return _split_pairs(
        np.minimum(source, target),
        np.maximum(source, target),
        time_ns=np.where(is_forward, sent, received),
        difference_ns=none,
        lower_ns=np.where(is_forward, -none, sent - received),
        upper_ns=np.where(is_forward, received - sent, none),
        duration_ns=none,
    )


def pair_calibrations(calibrations: list[Calibration], clock_of_rank: Int64s) -> list[PairSamples]:
    """Differences that recorders measured between ranks with different clocks."""
    parts = []
    for item in calibrations:
        own, reference = int(clock_of_rank[item.rank]), int(clock_of_rank[item.reference_rank])
        if own == reference:
            continue
        is_high = own > reference
        at_ns = item.at_ns - item.offset_ns if is_high else item.at_ns
        parts.append(
            _make_pair(
                min(own, reference),
                max(own, reference),
                calibrated_time_ns=np.array([at_ns], dtype=np.int64),
                calibrated_ns=np.array([item.offset_ns if is_high else -item.offset_ns]),
                calibrated_error_ns=np.array([item.uncertainty_ns]),
            )
        )
    return parts


def _make_pair(low: int, high: int, **columns: Int64s) -> PairSamples:
    none = np.empty(0, dtype=np.int64)
    values = dict.fromkeys(_COLUMNS, none) | columns
    return PairSamples(low=low, high=high, **values)


_COLUMNS = (
    "time_ns", "difference_ns", "lower_ns", "upper_ns", "duration_ns",
    "calibrated_time_ns", "calibrated_ns", "calibrated_error_ns",
)  # fmt: skip


def _split_pairs(low: Int64s, high: Int64s, **columns: Int64s) -> list[PairSamples]:
    if not len(low):
        return []
    code = low * (int(high.max()) + 1) + high
    order = np.argsort(code, kind="stable")
    cuts = np.flatnonzero(np.diff(code[order])) + 1
    return [
        _make_pair(
            int(low[part[0]]),
            int(high[part[0]]),
            **{name: column[part] for name, column in columns.items()},
        )
        for part in np.split(order, cuts)
    ]


def join_pairs(parts: list[PairSamples]) -> list[PairSamples]:
    """One entry per two clocks."""
    found: dict[tuple[int, int], list[PairSamples]] = {}
    for part in parts:
        found.setdefault((part.low, part.high), []).append(part)
    return [
        _make_pair(
            low,
            high,
            **{name: np.concatenate([getattr(p, name) for p in same]) for name in _COLUMNS},
        )
        for (low, high), same in sorted(found.items())
    ]


def read_calibrations(attempt: Attempt) -> list[Calibration]:
    """The plausible calibrations in the ranks' journals."""
    found = []
    for recording in attempt:
        for line in recording.updates:
            fields = line.get("clock_calibration")
            if isinstance(fields, Mapping):
                calibration = _parse_calibration(recording.rank, fields)
                if calibration is not None and calibration.reference_rank in attempt.ranks:
                    found.append(calibration)
    return found


def _parse_calibration(rank: int, fields: Mapping[str, object]) -> Calibration | None:
    numbers = []
    for name in ("reference_rank", "offset_ns", "uncertainty_ns", "at_host_mono_ns"):
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= NONE_NS >> 1:
            return None
        numbers.append(value)
    reference_rank, offset_ns, uncertainty_ns, at_ns = numbers
    if reference_rank == rank or uncertainty_ns < 0 or at_ns < 0:
        return None
    return Calibration(
        rank=rank,
        reference_rank=reference_rank,
        offset_ns=offset_ns,
        uncertainty_ns=uncertainty_ns,
        at_ns=at_ns,
    )
