"""Traces of several ranks together: whose collective is whose, who came late, how fast data moved.

Collectives of a group are matched by the number the group itself gives them (`Seq`), else by their
order: the windows are then taken to end together. Messages between two ranks are matched by sender,
receiver, group and order; where the trace does not tell a peer, only in groups of two. Where traces
tell no group at all, all ranks are taken for one: order among those of the same kind and size
decides, what does not run at the same time is left out, and how many were so is said. Kind and size
are checked; what does not agree is left out and counted.

Kernels of one collective end together, so the median of the differences of their ends is the
difference of the ranks' clocks, and its spread the error (of fewer than eight the largest distance
from the median; never under 1 µs); ranks that share none are aligned through others, and errors
add. A kernel begins when its rank is there: the last to begin is the one the others waited for.
wait = last begin - own begin, transfer = own end - last begin; busbw is as nccl-tests define it,
over transfer. A receiver that waits for its sender waits too, but the sender is not called late: it
may have had to compute what it sends.

Exposed communication of a rank is split alike: what of it lies before the last begin is wait, the
rest is transfer; where several collectives overlap a moment counts for the first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.device.trace_summary import TraceSummary
from meshscope.analyze.job.clock_pairs import FLOOR_NS, MIN_DIFFERENCES
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_collectives import SYMMETRIC, TraceCollective
from meshscope.ingest.traces.trace_communication import take_turns
from meshscope.ingest.traces.trace_messages import POINT_TO_POINT
from meshscope.numerics.intervals import Stretches
from meshscope.store.read.arrays import Floats, Int64s

MIN_FOR_CLOCK = 3
"""Collectives it takes to speak of a clock's offset."""
BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
UNEVEN = frozenset(("all_to_all", "gather", "scatter", "unknown"))
"""Kinds in which each rank may have a size of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """How far a rank's clock is ahead of the first rank's."""

    rank: int
    offset_ns: float
    uncertainty_ns: float
    num_collectives: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCollective:
    """One collective on all the ranks there are traces of."""

    kind: str
    axis: str
    group: str
    size_bytes: int | Unavailable
    """Of the rank with the largest."""
    group_size: int
    ranks: tuple[int, ...]
    """Those whose traces are here; of a message the sender and the receiver, in order of rank."""
    last_rank: int
    wait_ns: tuple[int, ...]
    transfer_ns: int
    """The longest."""
    bus_bytes_per_s: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank others waited for."""

    rank: int
    num_last: int
    caused_wait_ns: int
    """What the others waited, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSplit:
    """Exposed communication: wait + transfer + unmatched == exposed."""

    exposed_ns: int
    wait_ns: int
    """For the last rank of a collective to begin."""
    transfer_ns: int
    unmatched_ns: int
    """In collectives that were not found on the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedPart:
    """What was exposed in one step, or along one axis."""

    name: str
    """The step's number, `outside` of steps; or axis and kind."""
    split: ExposedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExposed:
    """Exposed communication of one device of a rank, or of its host where there is no device."""

    rank: int
    device: int | None
    split: ExposedSplit
    steps: tuple[ExposedPart, ...]
    """Of collectives by the step that launched them, beside all compute of the device."""
    axes: tuple[ExposedPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Several ranks' traces."""

    ranks: tuple[int, ...]
    clocks: tuple[RankClock, ...] | Unavailable
    unaligned: tuple[int, ...]
    """Ranks that share too few collectives with the others to align their clocks."""
    matched: tuple[MatchedCollective, ...]
    num_assumed: int
    """Of them, those of traces that tell no group: taken for one of all ranks."""
    num_unmatched: int
    late: tuple[LateRank, ...]
    exposed: tuple[RankExposed, ...]
    first_step: int | None = None
    """Of the windows that were compared; None where traces have no steps."""
    num_windows: int = 1
    """Ranks may have traces of several windows of steps; one is compared."""


def compare_ranks(summaries: Sequence[TraceSummary]) -> RankComparison | Unavailable:
    """Traces of different ranks of one job; of several windows, the last of those with most."""
    windows: dict[int | None, dict[int, TraceSummary]] = {}
    for summary in summaries:
        if isinstance(summary.rank, Unavailable):
            return Unavailable(f"{summary.source} does not say its rank")
        window = windows.setdefault(_first_step(summary), {})
        if summary.rank in window:
            return Unavailable(f"two traces are of rank {summary.rank} and begin with one step")
        window[summary.rank] = summary
    first_step = max(windows, key=lambda step: (len(windows[step]), -1 if step is None else step))
    if len(windows[first_step]) < 2:
        return Unavailable("it takes traces of two ranks or more, of the same steps")
    found = _compare(dict(sorted(windows[first_step].items())))
    return replace(found, first_step=first_step, num_windows=len(windows))


def _first_step(summary: TraceSummary) -> int | None:
    return summary.host.steps[0].step if summary.host.steps else None


def _compare(by_rank: dict[int, TraceSummary]) -> RankComparison:
    ranks = tuple(by_rank)
    sets, num_unmatched = _match({rank: _by_key(one) for rank, one in by_rank.items()})
    clocks, together, num_left = _bring_together(sets, ranks)
    if not sets and num_unmatched and not any(one.devices for one in by_rank.values()):
        clocks = Unavailable(
            "these calls name no group, and the job has several: whose is whose is not known"
        )
    if isinstance(clocks, Unavailable):
        return RankComparison(
            ranks=ranks,
            clocks=clocks,
            unaligned=ranks[1:],
            matched=(),
            num_assumed=0,
            num_unmatched=num_unmatched,
            late=(),
            exposed=(),
        )
    offset = {clock.rank: clock.offset_ns for clock in clocks}
    unsure = max((clock.uncertainty_ns for clock in clocks), default=0.0)
    matched = tuple(_measure(one, offset) for one in together)
    return RankComparison(
        ranks=ranks,
        clocks=clocks,
        unaligned=tuple(rank for rank in ranks if rank not in offset),
        matched=matched,
        num_assumed=sum(not one.is_certain for one in together),
        num_unmatched=num_unmatched + num_left,
        late=_rank_late(matched, unsure),
        exposed=tuple(_split_exposed(by_rank, together, offset)),
    )


@dataclass(frozen=True, slots=True)
class _Key:
    """What collectives have in common that may be one."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    """Only where the group is not enough."""
    size: str
    pair: tuple[int, int] | None
    """Sender and receiver."""
    is_certain: bool


@dataclass(frozen=True, slots=True)
class _Set:
    """One collective by rank."""

    members: dict[int, TraceCollective]
    is_certain: bool


_Keyed = dict[_Key | None, list[TraceCollective]]


def _by_key(summary: TraceSummary) -> _Keyed:
    found: _Keyed = {}
    listed = [one for device in summary.devices for one in device.collectives]
    for one in listed or summary.host.collectives:
        for key in _make_keys(one):
            is_assumed = key is not None and not key.is_certain
            if is_assumed and (summary.num_groups or not listed):
                key = None  # which of the groups it is would be a guess
            found.setdefault(key, []).append(one)
    return found


def _make_keys(one: TraceCollective) -> list[_Key | None]:
    """One, or one for each message of a batch; None for what cannot be matched."""
    group = one.group or one.description
    if one.kind == POINT_TO_POINT:
        # Messages have an order of their own, beside that of their group's collectives.
        if one.messages:
            return [_Key(group, one.ranks, "", "", message, True) for message in one.messages]
        return [_Key(group, one.ranks, one.kind, "", None, True) if len(one.ranks) == 2 else None]
    if group:
        return [_Key(group, one.ranks, "", "", None, True)]
    return [_Key("", one.ranks, *_likeness(one), None, bool(one.ranks))]


def _match(keyed: dict[int, _Keyed]) -> tuple[list[_Set], int]:
    sets: list[_Set] = []
    num_unmatched = sum(len(found.pop(None, [])) for found in keyed.values())
    for key in dict.fromkeys(key for found in keyed.values() for key in found):
        if key is None:
            continue
        members = {rank: found[key] for rank, found in keyed.items() if key in found}
        num_all = sum(map(len, members.values()))
        is_whole = key.pair is None or set(members) == set(key.pair)
        matched = list(_match_key(members, key)) if len(members) > 1 and is_whole else []
        sets += matched
        num_unmatched += num_all - sum(len(one.members) for one in matched)
    return sets, num_unmatched


def _match_key(members: dict[int, list[TraceCollective]], key: _Key) -> Iterator[_Set]:
    numbered = None if key.pair is not None else _by_sequence(members)
    if numbered is None:
        shared = min(map(len, members.values()))
        numbered = [
            {rank: found[place] for rank, found in members.items()} for place in range(-shared, 0)
        ]
    for one in numbered:
        alike = {_likeness(each) for each in one.values()}
        if key.pair is not None and any(len(each.messages) > 1 for each in one.values()):
            alike = {(kind, "") for kind, _ in alike}
        if len(alike) == 1:
            yield _Set(one, key.is_certain)


def _likeness(one: TraceCollective) -> tuple[str, str]:
    """Equal on all ranks of one collective."""
    is_even = one.kind not in UNEVEN and len(one.messages) < 2
    return one.kind, str(one.size_bytes) if is_even else ""


def _by_sequence(
    members: dict[int, list[TraceCollective]],
) -> list[dict[int, TraceCollective]] | None:
    """Those with the same number on all ranks; None where numbers are missing."""
    if any(one.sequence is None for found in members.values() for one in found):
        return None
    by_number: dict[tuple[int | None, int], dict[int, TraceCollective]] = {}
    for rank, found in members.items():
        seen: dict[int | None, int] = {}
        for one in found:
            # A group that coalesces gives several the same number.
            place = seen[one.sequence] = seen.get(one.sequence, -1) + 1
            by_number.setdefault((one.sequence, place), {})[rank] = one
    return [one for one in by_number.values() if len(one) == len(members)]


def _bring_together(
    sets: list[_Set], ranks: tuple[int, ...]
) -> tuple[tuple[RankClock, ...] | Unavailable, list[_Set], int]:
    """Clocks, what ran together by them, and how many kernels or calls of aligned ranks did not."""
    clocks = _align(sets, ranks, _median_distance)
    if isinstance(clocks, Unavailable):
        return clocks, [], 0
    offset = {clock.rank: clock.offset_ns for clock in clocks}
    unsure = max(clock.uncertainty_ns for clock in clocks)
    usable = [one for one in sets if set(one.members) <= set(offset)]
    together = [one for one in usable if one.is_certain or _is_at_once(one, offset, unsure)]
    # What was taken for one collective and is none says nothing about clocks.
    clocks = _align(together, ranks, _likely_distance)
    known = () if isinstance(clocks, Unavailable) else {clock.rank for clock in clocks}
    kept = [one for one in together if set(one.members).issubset(known)]
    left = sum(len(one.members) for one in usable) - sum(len(one.members) for one in kept)
    return clocks, kept, left


def _median_distance(away: Floats) -> float:
    return float(np.median(away))


def _likely_distance(away: Floats) -> float:
    """Of few the largest: their median may be 0 by chance."""
    return float(np.max(away)) if len(away) < MIN_DIFFERENCES else float(np.median(away))


def _align(
    sets: list[_Set], ranks: tuple[int, ...], measure_spread: Callable[[Floats], float]
) -> tuple[RankClock, ...] | Unavailable:
    """Offsets against the first rank, over the collectives that two ranks share."""
    differences: dict[tuple[int, int], list[int]] = {}
    for one in sets:
        first, *others = sorted(one.members)
        if one.members[first].kind in SYMMETRIC:
            for rank in others:
                difference = one.members[rank].end_ns - one.members[first].end_ns
                differences.setdefault((first, rank), []).append(difference)
    usable = {pair: found for pair, found in differences.items() if len(found) >= MIN_FOR_CLOCK}
    clocks = {
        ranks[0]: RankClock(rank=ranks[0], offset_ns=0.0, uncertainty_ns=0.0, num_collectives=0)
    }
    while True:
        edges = [
            (len(found), known, other, sign, found)
            for (low, high), found in usable.items()
            for known, other, sign in ((low, high, 1), (high, low, -1))
            if known in clocks and other not in clocks
        ]
        if not edges:
            break
        count, known, other, sign, found = max(edges, key=lambda edge: (edge[0], -edge[2]))
        values = np.array(found, dtype=np.float64) * sign
        middle = float(np.median(values))
        spread = measure_spread(np.abs(values - middle))
        clocks[other] = RankClock(
            rank=other,
            offset_ns=clocks[known].offset_ns + middle,
            uncertainty_ns=clocks[known].uncertainty_ns + max(spread, FLOOR_NS),
            num_collectives=count,
        )
    if len(clocks) < 2:
        most = max(map(len, differences.values()), default=0)
        return Unavailable(
            f"ranks {ranks[0]} and {ranks[1]} share {most} collectives that end together; "
            f"it takes {MIN_FOR_CLOCK} to align their clocks"
        )
    return tuple(clocks[rank] for rank in sorted(clocks))


def _is_at_once(one: _Set, offset: dict[int, float], unsure_ns: float) -> bool:
    """Nobody leaves a symmetric collective before the last is there."""
    if next(iter(one.members.values())).kind not in SYMMETRIC:
        return True
    last = max(each.begin_ns - offset[rank] for rank, each in one.members.items())
    first_end = min(each.end_ns - offset[rank] for rank, each in one.members.items())
    return last <= first_end + 2 * unsure_ns


def _measure(found: _Set, offset: dict[int, float]) -> MatchedCollective:
    one = found.members
    ranks = tuple(sorted(one))
    begin = {rank: one[rank].begin_ns - offset[rank] for rank in ranks}
    last_rank = max(ranks, key=lambda rank: begin[rank])
    last = begin[last_rank]
    transfer = max(0, round(max(one[rank].end_ns - offset[rank] - last for rank in ranks)))
    example = one[ranks[0]]
    sizes = [each.size_bytes for each in one.values()]
    size = max(
        (size for size in sizes if not isinstance(size, Unavailable)), default=example.size_bytes
    )
    known = example.group_size
    group_size = len(ranks) if isinstance(known, Unavailable) else known
    return MatchedCollective(
        kind=example.kind,
        axis=example.axis,
        group=example.description or example.group,
        size_bytes=size,
        group_size=group_size,
        ranks=ranks,
        last_rank=last_rank,
        wait_ns=tuple(round(last - begin[rank]) for rank in ranks),
        transfer_ns=transfer,
        bus_bytes_per_s=_bus_bandwidth(example.kind, size, group_size, transfer),
    )


def _bus_bandwidth(
    kind: str, size: int | Unavailable, group_size: int, transfer_ns: int
) -> float | Unavailable:
    if isinstance(size, Unavailable):
        return size
    if transfer_ns <= 0:
        return Unavailable("the transfer is shorter than the clocks' error")
    factor = BUS_FACTORS.get(kind)
    scale = 1.0 if factor is None else factor * (group_size - 1) / max(group_size, 1)
    return size * scale / transfer_ns * 1e9


def _rank_late(matched: tuple[MatchedCollective, ...], unsure_ns: float) -> tuple[LateRank, ...]:
    found: dict[int, list[int]] = {}
    for one in matched:
        others = [wait for wait in one.wait_ns if wait > 0]
        if one.kind == POINT_TO_POINT or not others or min(others) <= 2 * unsure_ns:
            continue
        entry = found.setdefault(one.last_rank, [0, 0])
        entry[0] += 1
        entry[1] += sum(others)
    rows = (
        LateRank(rank=rank, num_last=count, caused_wait_ns=wait)
        for rank, (count, wait) in found.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.caused_wait_ns))


def _split_exposed(
    by_rank: dict[int, TraceSummary], sets: list[_Set], offset: dict[int, float]
) -> Iterator[RankExposed]:
    """Of every aligned rank, device by device."""
    last_begin: dict[tuple[int, int], int] = {}
    for one in sets:
        last = max(each.begin_ns - offset[rank] for rank, each in one.members.items())
        for rank, each in one.members.items():
            there = round(last + offset[rank])
            # Of several messages in one kernel the last counts.
            last_begin[rank, each.row] = max(there, last_begin.get((rank, each.row), there))
    for rank, summary in by_rank.items():
        if rank not in offset:
            continue
        for device in summary.devices:
            number = device.breakdown.device
            yield _split_one(rank, number, device.collectives, device.exposed_spans, last_begin)
        if not summary.devices:
            host = summary.host
            yield _split_one(rank, None, host.collectives, host.exposed_spans, last_begin)


def _split_one(
    rank: int,
    device: int | None,
    collectives: tuple[TraceCollective, ...],
    spans: tuple[tuple[int, int], ...],
    last_begin: dict[tuple[int, int], int],
) -> RankExposed:
    pairs = np.array(spans, dtype=np.int64).reshape(-1, 2)
    exposed = Stretches(pairs[:, 0], pairs[:, 1])
    begin = np.array([one.begin_ns for one in collectives], dtype=np.int64)
    end = np.array([one.end_ns for one in collectives], dtype=np.int64)
    first, last = take_turns(begin, end)
    known = [last_begin.get((rank, one.row)) for one in collectives]
    is_matched = np.array([moment is not None for moment in known], dtype=np.bool_)
    there = np.array([moment or 0 for moment in known], dtype=np.int64)
    own = exposed.within(first, last)
    wait = np.where(is_matched, exposed.within(first, np.clip(there, first, last)), 0)
    transfer = np.where(is_matched, own - wait, 0)
    split = ExposedSplit(
        exposed_ns=exposed.total_ns,
        wait_ns=int(wait.sum()),
        transfer_ns=int(transfer.sum()),
        unmatched_ns=exposed.total_ns - int(wait.sum()) - int(transfer.sum()),
    )
    steps = ["outside" if one.step is None else str(one.step) for one in collectives]
    axes = [f"{one.axis} {one.kind}" for one in collectives]
    return RankExposed(
        rank=rank,
        device=device,
        split=split,
        steps=_group_parts(steps, own, wait, transfer),
        axes=_group_parts(axes, own, wait, transfer),
    )


def _group_parts(
    names: list[str], own: Int64s, wait: Int64s, transfer: Int64s
) -> tuple[ExposedPart, ...]:
    places: dict[str, int] = {}
    key = np.array([places.setdefault(name, len(places)) for name in names], dtype=np.int64)
    sums = np.zeros((3, len(places)), dtype=np.int64)
    for line, values in zip(sums, (own, wait, transfer), strict=True):
        np.add.at(line, key, values)
    return tuple(
        ExposedPart(
            name=name,
            split=ExposedSplit(
                exposed_ns=int(sums[0, at]),
                wait_ns=int(sums[1, at]),
                transfer_ns=int(sums[2, at]),
                unmatched_ns=int(sums[0, at] - sums[1, at] - sums[2, at]),
            ),
        )
        for name, at in places.items()
    )
