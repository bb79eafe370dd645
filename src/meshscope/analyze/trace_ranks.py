"""Traces of several ranks together: whose collective is whose, who came late, how fast data moved.

The k-th collective of a process group on one rank is the k-th on every other: matched by group and
order, and checked by kind and size; where counts differ the windows are taken to end together, and
what does not agree is left out and counted. Kernels of one collective end together, so the median
of the differences of their ends is the difference of the ranks' clocks, and its spread the error. A
kernel begins when its rank is there: the last to begin is the one the others waited for.
wait = last begin - own begin, transfer = own end - last begin; busbw is as nccl-tests define it,
over transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.trace_collectives import TraceCollective
from meshscope.analyze.trace_summary import TraceSummary
from meshscope.core.unavailable import Unavailable

MIN_FOR_CLOCK = 3
"""Collectives it takes to speak of a clock's offset."""
BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
SYMMETRIC = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))


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
    group: str
    size_bytes: int | Unavailable
    group_size: int
    ranks: tuple[int, ...]
    """Those whose traces are here."""
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
class RankComparison:
    """Several ranks' traces."""

    ranks: tuple[int, ...]
    clocks: tuple[RankClock, ...] | Unavailable
    matched: tuple[MatchedCollective, ...]
    num_unmatched: int
    late: tuple[LateRank, ...]


def compare_ranks(summaries: Sequence[TraceSummary]) -> RankComparison | Unavailable:
    """Traces of different ranks of one job."""
    by_rank: dict[int, TraceSummary] = {}
    for summary in summaries:
        if isinstance(summary.rank, Unavailable):
            return Unavailable(f"{summary.source} does not say its rank")
        if summary.rank in by_rank:
            return Unavailable(f"two traces are of rank {summary.rank}")
        by_rank[summary.rank] = summary
    if len(by_rank) < 2:
        return Unavailable("it takes traces of two ranks or more")
    groups = {rank: _by_group(summary) for rank, summary in sorted(by_rank.items())}
    sets, num_unmatched = _match(groups)
    clocks = _align(sets, tuple(groups))
    if isinstance(clocks, Unavailable):
        return RankComparison(
            ranks=tuple(groups), clocks=clocks, matched=(), num_unmatched=num_unmatched, late=()
        )
    offset = {clock.rank: clock.offset_ns for clock in clocks}
    unsure = max((clock.uncertainty_ns for clock in clocks), default=0.0)
    matched = tuple(_measure(one, offset) for one in sets if set(one) <= set(offset))
    return RankComparison(
        ranks=tuple(groups),
        clocks=clocks,
        matched=matched,
        num_unmatched=num_unmatched,
        late=_rank_late(matched, unsure),
    )


_Groups = dict[tuple[str, str], list[TraceCollective]]
_Set = dict[int, TraceCollective]


def _by_group(summary: TraceSummary) -> _Groups:
    found: _Groups = {}
    for device in summary.devices:
        for one in device.collectives:
            key = (one.group or one.description, ",".join(map(str, one.ranks)))
            found.setdefault(key, []).append(one)
    return found


def _match(groups: dict[int, _Groups]) -> tuple[list[_Set], int]:
    sets: list[_Set] = []
    num_unmatched = 0
    for key in dict.fromkeys(key for found in groups.values() for key in found):
        members = {rank: found[key] for rank, found in groups.items() if key in found}
        shared = min(map(len, members.values()))
        num_unmatched += sum(len(found) - shared for found in members.values())
        if len(members) < 2:
            num_unmatched += shared
            continue
        for place in range(-shared, 0):
            one = {rank: found[place] for rank, found in members.items()}
            if len({(each.kind, str(each.size_bytes)) for each in one.values()}) == 1:
                sets.append(one)
            else:
                num_unmatched += len(one)
    return sets, num_unmatched


def _align(sets: list[_Set], ranks: tuple[int, ...]) -> tuple[RankClock, ...] | Unavailable:
    """Offsets against the first rank, over the collectives both are in."""
    first = ranks[0]
    clocks = [RankClock(rank=first, offset_ns=0.0, uncertainty_ns=0.0, num_collectives=0)]
    for rank in ranks[1:]:
        differences = np.array(
            [
                _end(one[rank]) - _end(one[first])
                for one in sets
                if rank in one and first in one and one[rank].kind in SYMMETRIC
            ],
            dtype=np.float64,
        )
        if len(differences) < MIN_FOR_CLOCK:
            return Unavailable(
                f"ranks {first} and {rank} share {len(differences)} collectives that end "
                f"together; it takes {MIN_FOR_CLOCK} to align their clocks"
            )
        offset = float(np.median(differences))
        spread = float(np.median(np.abs(differences - offset)))
        clocks.append(
            RankClock(
                rank=rank,
                offset_ns=offset,
                uncertainty_ns=spread,
                num_collectives=len(differences),
            )
        )
    return tuple(clocks)


def _end(one: TraceCollective) -> int:
    return one.begin_ns + one.duration_ns


def _measure(one: _Set, offset: dict[int, float]) -> MatchedCollective:
    ranks = tuple(sorted(one))
    begin = {rank: one[rank].begin_ns - offset[rank] for rank in ranks}
    last_rank = max(ranks, key=lambda rank: begin[rank])
    last = begin[last_rank]
    transfer = max(0, round(max(_end(one[rank]) - offset[rank] - last for rank in ranks)))
    example = one[ranks[0]]
    size = example.size_bytes
    known = example.group_size
    group_size = len(ranks) if isinstance(known, Unavailable) else known
    return MatchedCollective(
        kind=example.kind,
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
        if not others or min(others) <= 2 * unsure_ns:
            continue
        entry = found.setdefault(one.last_rank, [0, 0])
        entry[0] += 1
        entry[1] += sum(others)
    rows = (
        LateRank(rank=rank, num_last=count, caused_wait_ns=wait)
        for rank, (count, wait) in found.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.caused_wait_ns))
