"""Ranks that stand out in a phase among ranks that do the same work, step by step.

Ranks that share all coordinates but dp, cp and ep are peers; without a known layout all ranks are,
which is wrong between pipeline stages. Where ranks wait for each other, a slow rank's steps are no
longer than the others', but its slow phase is. A rank is a clue when its median time per step in a
phase is more than MIN_RATIO times the median of its peers' medians, by at least
_MIN_SHARE of a step, and it is the largest of them in most steps, beyond chance.

A clue, not a diagnosis: waiting is inside phases too, so of two peers the one that waits stands
out as much as the one waited for. Several slow ranks in one group hide each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.rank.phases import PhaseTable
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.analyze.rank.steps import NO_STEP
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.chance import MIN_STEPS, is_beyond_chance
from meshscope.store.read.arrays import Bools, Float32s, Int64s

MIN_RATIO = 1.25
"""Least ratio of a rank's median to that of its peers."""
_MIN_SHARE = 0.01
"""Least excess, as a share of a step's time."""
MAX_PHASES = 16
"""Phases kept: the largest of the first ranks."""
MAX_STEPS = 1000
"""Steps kept of a rank, chosen by their number, the same on every rank."""
MAX_CELLS = 2_000_000
"""Above this many steps times ranks of a phase fewer steps are kept, but never below a tenth."""

_PeerGroups = Mapping[int, int]
"""Rank to what it shares with its peers and with no other rank."""

_SPREADER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: its multiples modulo 2^64 are spread evenly (Knuth, vol. 3, 6.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpread:
    """Mean time per step of one phase, compared over the ranks that have it."""

    phase: str
    num_ranks: int
    min_ns: float
    median_ns: float
    max_ns: float
    min_rank: int
    max_rank: int
    """The lowest rank of several that share the maximum."""
    furthest_rank: int | Unavailable
    """The rank furthest above the median of its peers."""
    excess_ns: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseClue:
    """A rank that spends persistently more time in a phase than its peers."""

    rank: int
    phase: str
    median_ns: float
    """Of the rank's time per step in the phase."""
    peers_median_ns: float
    """The median of the other peers' medians."""
    num_peers: int
    """The others it is compared with."""
    num_steps: int
    """Steps compared, without warm-up."""
    num_steps_largest: int
    """Of these, steps in which no peer spent as long."""

    @property
    def excess_ns(self) -> float:
        return self.median_ns - self.peers_median_ns


def group_peers(layout: Layout | Unavailable, ranks: Iterable[int]) -> _PeerGroups:
    """For each rank the lowest of its peers; 0 for all without a layout."""
    if isinstance(layout, Unavailable):
        return dict.fromkeys(ranks, 0)
    return {rank: layout.peer_head(rank) for rank in ranks}


def _spread_phase(
    phase: str, found: list[tuple[float, int]], peer_groups: _PeerGroups
) -> PhaseSpread:
    """Compares one value per rank; `found` is not empty."""
    means = np.array([value for value, _ in found])
    groups: dict[int, list[tuple[float, int]]] = {}
    for value, rank in found:
        groups.setdefault(peer_groups[rank], []).append((value, rank))
    # Only the largest of a group can stand out most.
    furthest = max(
        (_measure_excess(peers) for peers in groups.values() if len(peers) > 1), default=None
    )
    none = Unavailable("no rank has a peer to compare with")
    return PhaseSpread(
        phase=phase,
        num_ranks=len(found),
        min_ns=float(means.min()),
        median_ns=float(np.median(means)),
        max_ns=float(means.max()),
        min_rank=found[int(means.argmin())][1],
        max_rank=found[int(means.argmax())][1],
        furthest_rank=none if furthest is None else -furthest[1],
        excess_ns=none if furthest is None else furthest[0],
    )


def _measure_excess(peers: list[tuple[float, int]]) -> tuple[float, int]:
    """How far the largest is above the median of the others, and minus its rank (for max)."""
    ordered = sorted((value, -rank) for value, rank in peers)
    value, minus_rank = ordered[-1]
    return value - _median([other for other, _ in ordered[:-1]]), minus_rank


def _median(ordered: list[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def spread_phases(
    ranks: Sequence[RankSummary], peer_groups: _PeerGroups
) -> tuple[PhaseSpread, ...]:
    """The phases of the steady steps; first the one whose rank is furthest above its peers."""
    values: dict[str, list[tuple[float, int]]] = {}
    for rank in ranks:
        for phase, total in rank.time.steady_steps.phase_ns.items():
            values.setdefault(phase, []).append((total / rank.num_phased, rank.rank))
    spreads = [_spread_phase(phase, found, peer_groups) for phase, found in values.items()]
    return tuple(sorted(spreads, key=_order_spread))


def _order_spread(spread: PhaseSpread) -> tuple[float, float, str]:
    excess_ns = 0.0 if isinstance(spread.excess_ns, Unavailable) else spread.excess_ns
    return -excess_ns, -spread.median_ns, spread.phase


def spread_unattributed(
    ranks: Sequence[RankSummary], peer_groups: _PeerGroups
) -> PhaseSpread | Unavailable:
    """The time of steady steps that no phase claimed."""
    found = [
        (rank.time.steady_steps.unattributed_ns / rank.num_phased, rank.rank) for rank in ranks
    ]
    return _spread_phase("unattributed", found, peer_groups) if found else Unavailable(NO_STEP)


class PeerPhases:
    """Collects the time of each rank, step and phase, in four bytes each."""

    def __init__(self, *, num_ranks: int) -> None:
        self._max_steps = min(MAX_STEPS, max(MAX_CELLS // max(num_ranks, 1), MAX_STEPS // 10))
        self._phases: list[str] = []
        self._ranks: list[tuple[int, Int64s, dict[str, Float32s]]] = []
        """Rank, step numbers in ascending order, nanoseconds per phase."""

    def add(self, rank: int, step: Int64s, table: PhaseTable, *, is_steady: Bools) -> None:
        """Takes in one rank; `step` and the table's steps are in order of time."""
        numbers, times = step[is_steady], table.in_steps_ns[is_steady]
        if len(numbers) < MIN_STEPS:
            return
        if not bool((numbers[1:] > numbers[:-1]).all()):
            numbers, first = np.unique(numbers, return_index=True)
            times = times[first]
        if len(numbers) > self._max_steps:
            # A rank with fewer steps keeps all that one with more does, so they have these alike.
            order = (numbers.astype(np.uint64) * _SPREADER) >> np.uint64(32)
            kept = order < (self._max_steps << 32) // len(numbers)
            numbers, times = numbers[kept], times[kept]
        if self._ranks and np.array_equal(self._ranks[-1][1], numbers):
            numbers = self._ranks[-1][1]
        else:
            numbers = numbers.copy()
        self._choose_phases(table.phases, times)
        columns = np.ascontiguousarray(times.T, dtype=np.float32)
        found = dict(zip(table.phases, columns, strict=True))
        self._ranks.append((rank, numbers, {p: found[p] for p in self._phases if p in found}))

    def _choose_phases(self, phases: list[str], times: Int64s) -> None:
        if len(self._phases) == MAX_PHASES or all(phase in self._phases for phase in phases):
            return
        totals = times.sum(axis=0)
        new = [phases[i] for i in np.argsort(-totals).tolist() if phases[i] not in self._phases]
        self._phases += new[: MAX_PHASES - len(self._phases)]

    def find_clues(
        self, peer_groups: _PeerGroups, step_ns: float | Unavailable
    ) -> tuple[PhaseClue, ...]:
        """The ranks that stand out, furthest first; `step_ns` is the job's median step."""
        most = max((len(step) for _, step, _ in self._ranks), default=0)
        # A rank that stopped early would leave few steps that all have.
        kept = [entry for entry in self._ranks if 2 * len(entry[1]) >= most]
        common = _intersect([step for _, step, _ in kept])
        if isinstance(step_ns, Unavailable) or len(common) < MIN_STEPS:
            return ()
        candidates: list[PhaseClue] = []
        num_tests = 0
        for phase in self._phases:
            having = [entry for entry in kept if phase in entry[2]]
            if len(having) < 2:
                continue
            times = np.stack([_select(step, found[phase], common) for _, step, found in having])
            medians = _row_medians(times)
            for rows in _group_rows([entry[0] for entry in having], medians, peer_groups):
                num_tests += len(rows)
                values = medians[rows].tolist()
                top = max(range(len(rows)), key=values.__getitem__)
                others_ns = _median(sorted(values[:top] + values[top + 1 :]))
                is_far = values[top] - others_ns >= _MIN_SHARE * step_ns
                if is_far and values[top] > MIN_RATIO * others_ns:
                    clue = PhaseClue(
                        rank=having[rows[top]][0],
                        phase=phase,
                        median_ns=values[top],
                        peers_median_ns=others_ns,
                        num_peers=len(rows) - 1,
                        num_steps=len(common),
                        num_steps_largest=_count_largest(times[rows], top),
                    )
                    candidates.append(clue)
        clues = [clue for clue in candidates if _is_persistent(clue, num_tests)]
        return tuple(sorted(clues, key=lambda clue: (-clue.excess_ns, clue.rank)))


def _group_rows(
    ranks: list[int], medians: npt.NDArray[np.float64], peer_groups: _PeerGroups
) -> list[list[int]]:
    """The rows of each peer group of two or more that have the phase in most of their steps."""
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(medians > 0).tolist():
        groups.setdefault(peer_groups[ranks[row]], []).append(row)
    return [rows for rows in groups.values() if len(rows) > 1]


def _is_persistent(clue: PhaseClue, num_tests: int) -> bool:
    return 2 * clue.num_steps_largest > clue.num_steps and is_beyond_chance(
        clue.num_steps_largest,
        num_steps=clue.num_steps,
        num_ranks=clue.num_peers + 1,
        num_tests=num_tests,
    )


def _intersect(arrays: list[Int64s]) -> Int64s:
    common = arrays[0] if arrays else np.empty(0, dtype=np.int64)
    for array in arrays[1:]:
        if array is not common:
            common = np.intersect1d(common, array, assume_unique=True)
    return common


def _select(step: Int64s, values: Float32s, common: Int64s) -> Float32s:
    return values if len(step) == len(common) else values[np.searchsorted(step, common)]


def _row_medians(table: Float32s) -> npt.NDArray[np.float64]:
    middle = table.shape[1] // 2
    low = (table.shape[1] - 1) // 2
    ordered = np.partition(table, (low, middle), axis=1)
    return (ordered[:, low].astype(np.float64) + ordered[:, middle]) / 2


def _count_largest(times: Float32s, row: int) -> int:
    """Steps in which the row is larger than all others."""
    others = np.delete(times, row, axis=0).max(axis=0)
    return int(np.count_nonzero(times[row] > others))
