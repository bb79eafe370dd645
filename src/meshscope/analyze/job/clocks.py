"""Brings the clocks of all ranks together: one time line for the whole job.

Every clock gets an offset and a drift against the clock of the lowest rank. They come from the
operations that pairs of clocks share (`clock_pairs`), solved over all pairs at once
(`clock_graph`). If a clock runs unevenly, because its host corrects it, the residual is subtracted
in windows of time. A clock that shares no operation with the others is aligned by the hosts' wall
clocks, and says so.

`uncertainty_ns` holds over the whole recorded time. A skew between two ranks that is smaller than
`uncertainty_between` them is not known to be one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.clock_fit import ClockFit, ClockModel, fit_clocks, start_model
from meshscope.analyze.job.clock_pairs import FLOOR_NS, ClockMethod, make_evidence
from meshscope.analyze.job.clock_samples import (
    HOST_TOLERANCE_NS,
    MAX_ALL_PAIRS,
    NONE_NS,
    Calibration,
    PairSamples,
    collect_segments,
    find_contradicted,
    join_pairs,
    pair_calibrations,
    pair_messages,
    pair_segments,
    read_calibrations,
)
from meshscope.analyze.job.host_clocks import (
    WALL_CLOCK_UNCERTAINTY_NS,
    HostClock,
    HostClocks,
    find_host_clocks,
)
from meshscope.analyze.job.matching import Matches
from meshscope.analyze.job.operations import OperationRows
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.clock_graph import Edge, find_islands, walk_best, walk_between
from meshscope.store.read.arrays import Floats, Int32s, Int64s
from meshscope.store.read.run import Attempt

TRACE_CLOCK_NS = 100_000.0
"""Profilers of one host have one wall clock. Traces of four processes on one device, which their
operations tie to within 47 µs and 78 µs, were 17 µs and 4 µs apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One clock against the reference clock."""

    host: str | Unavailable
    ranks: tuple[int, ...]
    """Ranks whose times it gives."""
    method: ClockMethod
    offset_ns: int | Unavailable
    """This clock minus the reference clock, at the reference moment."""
    drift_ppm: float | Unavailable
    """Positive if it runs faster."""
    uncertainty_ns: int | Unavailable
    """How far its aligned times may be off at any recorded time."""
    unevenness_ns: int
    """The largest correction beyond offset and drift; 0 for a clock that runs evenly."""
    num_operations: int
    """Operations and messages its offset is based on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClockAlignment:
    """All clocks of an attempt on the time line of the reference clock."""

    reference_rank: int
    """The lowest rank that recorded."""
    reference_host_mono_ns: int
    """The moment at which offsets are given, on the reference clock."""
    clocks: tuple[Clock, ...]
    problems: tuple[str, ...]
    model: ClockModel
    of_rank: Int64s
    """Index in `clocks` by rank; -1 for ranks that recorded nothing."""
    island: Int64s
    """By clock: clocks with the same number are connected by operations."""
    within_ns: Floats
    """By clock: uncertainty against the lowest clock of its island."""
    island_ns: Floats
    """By clock: uncertainty of its island against the reference; infinite when not known."""
    shared_ns: float
    """What times of two ranks of one clock may be off: 0 for hosts, but profilers put the times of
    a device on it each for its own process."""
    between_ns: Floats | None
    """[clock, clock]: what two of one island may be off against each other, which they show better
    by what they did together than each by the reference; None where there are many clocks."""

    def to_reference(self, rank: int, times: Int64s) -> Int64s:
        """Converts times of a rank's host clock to the reference clock."""
        return self.model.to_reference(int(self.of_rank[rank]), times)

    def uncertainty_between(self, first: Int32s, second: Int32s) -> Floats:
        """How far a difference between aligned times of two ranks may be off, elementwise."""
        one, two = self.of_rank[first], self.of_rank[second]
        total = self.within_ns[one] + self.within_ns[two]
        if self.between_ns is not None:
            total = np.minimum(total, self.between_ns[one, two])
        is_apart = self.island[one] != self.island[two]
        total = total + np.where(is_apart, self.island_ns[one] + self.island_ns[two], 0.0)
        return np.where(one == two, np.where(first == second, 0.0, self.shared_ns), total)


def align_clocks(
    attempt: Attempt,
    rows: OperationRows,
    matches: Matches,
    host_clocks: HostClocks | None = None,
) -> ClockAlignment:
    """Aligns the clocks of an attempt whose operations are matched."""
    found = find_host_clocks(attempt) if host_clocks is None else host_clocks
    calibrations = read_calibrations(attempt)
    clocks, problems = _split_contradicted(found, rows, matches, calibrations)
    pairs: list[PairSamples] = []
    if len(clocks.clocks) > 1:
        pairs += pair_segments(collect_segments(rows, matches, clocks.of_rank))
        pairs += pair_messages(rows, matches, clocks.of_rank)
        pairs += pair_calibrations(calibrations, clocks.of_rank)
    alignment = _align(clocks, join_pairs(pairs), rows)
    return replace(
        alignment,
        problems=(*problems, *alignment.problems),
        shared_ns=TRACE_CLOCK_NS if attempt.is_from_traces else 0.0,
    )


def _split_contradicted(
    found: HostClocks, rows: OperationRows, matches: Matches, calibrations: list[Calibration]
) -> tuple[HostClocks, list[str]]:
    """Gives ranks that cannot share a clock separate ones."""
    segments = collect_segments(rows, matches, found.of_rank)
    contradicted = set(find_contradicted(segments, len(found.clocks)).tolist())
    for item in calibrations:
        index = int(found.of_rank[item.rank])
        is_far = abs(item.offset_ns) > item.uncertainty_ns + HOST_TOLERANCE_NS
        if index == found.of_rank[item.reference_rank] and is_far:
            contradicted.add(index)
    if not contradicted:
        return found, []
    clocks: list[HostClock] = []
    for index, clock in enumerate(found.clocks):
        if index in contradicted:
            clocks += [replace(clock, ranks=(rank,)) for rank in clock.ranks]
        else:
            clocks.append(clock)
    of_rank = np.full(len(found.of_rank), -1, dtype=np.int64)
    for index, clock in enumerate(clocks):
        of_rank[list(clock.ranks)] = index
    problems = [
        f"ranks {', '.join(map(str, found.clocks[index].ranks[:8]))} name the same host "
        f"({found.clocks[index].host}) but do not share a clock: each is aligned on its own"
        for index in sorted(contradicted)
    ]
    return HostClocks(clocks=tuple(clocks), of_rank=of_rank), problems


def _align(clocks: HostClocks, pairs: list[PairSamples], rows: OperationRows) -> ClockAlignment:
    count = len(clocks.clocks)
    rough = [edge for pair in pairs if (edge := _rough_edge(pair)) is not None]
    islands = find_islands(count, rough)
    base_ns = _choose_bases(clocks, rough, islands)
    low_ns, high_ns = _recorded_range(rows, clocks.of_rank, base_ns)
    origin_ns = (low_ns + high_ns) // 2
    evidence = [make_evidence(pair, base_ns, origin_ns) for pair in pairs]
    evidence = [item for item in evidence if item.is_known]
    fit = fit_clocks(evidence, islands, start_model(base_ns, origin_ns), (high_ns - low_ns) / 2)
    edges = _add_residuals(fit)
    _, within = walk_best(count, edges, islands)
    island_ns = np.array([_island_error(clocks, root) for root in islands])
    return ClockAlignment(
        reference_rank=clocks.clocks[0].ranks[0],
        reference_host_mono_ns=origin_ns,
        clocks=tuple(
            _describe(clocks, index, islands, fit, within[index] + island_ns[index])
            for index in range(count)
        ),
        problems=tuple(_find_problems(clocks, islands, fit)),
        model=fit.model,
        of_rank=clocks.of_rank,
        island=np.array(islands, dtype=np.int64),
        within_ns=np.array(within),
        island_ns=island_ns,
        shared_ns=0.0,
        between_ns=walk_between(count, edges) if count <= MAX_ALL_PAIRS else None,
    )


def _add_residuals(fit: ClockFit) -> list[Edge]:
    """Edges with how far the clocks' offsets, which average over all, miss each of them."""
    offset = fit.model.offset
    return [
        replace(
            edge, error=edge.error + abs(float(offset[edge.high] - offset[edge.low]) - edge.value)
        )
        for edge in fit.edges
    ]


def _rough_edge(pair: PairSamples) -> Edge | None:
    """The difference including drift and noise; the error only ranks the edges."""
    values = pair.difference_ns[pair.difference_ns < NONE_NS]
    lower = pair.lower_ns[pair.lower_ns > -NONE_NS]
    upper = pair.upper_ns[pair.upper_ns < NONE_NS]
    if len(values):
        value, error = float(np.median(values)), 1.0
    elif len(pair.calibrated_ns):
        value, error = float(np.median(pair.calibrated_ns)), 2.0
    elif len(lower) and len(upper):
        value, error = (float(np.max(lower)) + float(np.min(upper))) / 2, 4.0
    else:
        return None
    return Edge(low=pair.low, high=pair.high, value=value, error=error)


def _choose_bases(clocks: HostClocks, rough: Sequence[Edge], islands: Sequence[int]) -> list[int]:
    """Whole nanoseconds to subtract from each clock, so that the rest is small."""
    values, _ = walk_best(len(clocks.clocks), rough, islands)
    return [
        round(value) + (_wall_offset(clocks, root) or 0)
        for value, root in zip(values, islands, strict=True)
    ]


def _wall_offset(clocks: HostClocks, index: int) -> int | None:
    """A clock minus the reference clock according to wall clocks."""
    if index == 0:
        return 0
    own = clocks.clocks[index].mono_minus_unix_ns
    reference = clocks.clocks[0].mono_minus_unix_ns
    return None if own is None or reference is None else own - reference


def _island_error(clocks: HostClocks, root: int) -> float:
    if root == 0:
        return 0.0
    is_placed = _wall_offset(clocks, root) is not None
    return float(WALL_CLOCK_UNCERTAINTY_NS) if is_placed else np.inf


def _recorded_range(
    rows: OperationRows, of_rank: Int64s, base_ns: Sequence[int]
) -> tuple[int, int]:
    """First and last moment of any operation, roughly on the reference clock."""
    if not len(rows):
        return 0, 0
    base = np.array(base_ns, dtype=np.int64)[of_rank[rows.rank]]
    first = int((rows.enqueue_ns - base).min())
    last = int((np.maximum(rows.end_ns, rows.start_ns) - base).max())
    return first, last


def _describe(
    clocks: HostClocks, index: int, islands: Sequence[int], fit: ClockFit, error_ns: float
) -> Clock:
    own = clocks.clocks[index]
    incident = [
        (item, line)
        for item, line in zip(fit.evidence, fit.lines, strict=True)
        if index in (item.low, item.high)
    ]
    method = ClockMethod.REFERENCE
    if index and islands[index] == 0:
        method = min((line for _, line in incident), key=lambda line: line.error).method
    elif index:
        is_placed = np.isfinite(_island_error(clocks, islands[index]))
        method = ClockMethod.WALL_CLOCK if is_placed else ClockMethod.NONE
    none = Unavailable("no operation and no reading of the wall clock ties it to the other clocks")
    is_known = bool(np.isfinite(error_ns))
    is_timed = is_known and method is not ClockMethod.WALL_CLOCK
    model = fit.model
    return Clock(
        host=own.host or Unavailable("no rank on this clock names its host"),
        ranks=own.ranks,
        method=method,
        offset_ns=model.base_ns[index] + round(float(model.offset[index])) if is_known else none,
        drift_ppm=float(model.slope[index]) * 1e6
        if is_timed
        else Unavailable("no operation ties it to the reference clock"),
        uncertainty_ns=int(np.ceil(error_ns)) if is_known else none,
        unevenness_ns=round(float(np.abs(model.uneven[index]).max(initial=0.0))),
        num_operations=sum(item.num_operations for item, _ in incident),
    )


def _find_problems(clocks: HostClocks, islands: Sequence[int], fit: ClockFit) -> list[str]:
    problems = [
        f"clocks of {_label(clocks, item.low)} and {_label(clocks, item.high)}: no offset and "
        f"drift fits all operations; off by {line.gap / 1e6:.3f} ms at least"
        for item, line in zip(fit.evidence, fit.lines, strict=True)
        if line.gap > FLOOR_NS
    ]
    if len(fit.edges) >= len(clocks.clocks):
        problems += _check_loops(clocks, fit)
    for index, root in enumerate(islands):
        if index != root:
            problems += _check_against_wall(clocks, index, root, fit.model)
    unplaced = [index for index, root in enumerate(islands) if root and root == index]
    for index in unplaced:
        is_placed = _wall_offset(clocks, index) is not None
        how = "placed by the wall clocks of the hosts" if is_placed else "not aligned"
        problems.append(
            f"no operation ties the clock of {_label(clocks, index)} to that of "
            f"{_label(clocks, 0)}: it is {how}"
        )
    return problems


def _check_loops(clocks: HostClocks, fit: ClockFit) -> list[str]:
    """Pairs whose own offset contradicts the other pairs."""
    problems = []
    for edge in fit.edges:
        offset = fit.model.offset[edge.high] - fit.model.offset[edge.low]
        rest = float(offset) - edge.value
        if abs(rest) > 2 * edge.error + FLOOR_NS:
            problems.append(
                f"clocks of {_label(clocks, edge.low)} and {_label(clocks, edge.high)} differ by "
                f"{rest / 1e6:.3f} ms from what other clocks say"
            )
    return problems


def _check_against_wall(clocks: HostClocks, index: int, root: int, model: ClockModel) -> list[str]:
    own, other = (clocks.clocks[c].mono_minus_unix_ns for c in (index, root))
    if own is None or other is None:
        return []
    between = [model.base_ns[c] + float(model.offset[c]) for c in (index, root)]
    apart_ns = (between[0] - between[1]) - (own - other)
    if abs(apart_ns) <= WALL_CLOCK_UNCERTAINTY_NS:
        return []
    return [
        f"the wall clocks of {_label(clocks, index)} and {_label(clocks, root)} are "
        f"{abs(apart_ns) / 1e9:.3f} s apart by their operations: one is set wrongly, or operations "
        "are matched wrongly"
    ]


def _label(clocks: HostClocks, index: int) -> str:
    clock = clocks.clocks[index]
    where = clock.host or "an unknown host"
    return f"{where} (rank {clock.ranks[0]}{', …' if len(clock.ranks) > 1 else ''})"
