"""Slow ranks of a run: which, in which phase, since when, how certain, with which others.

Each group of true peers is tested in its whole work and in each phase (`persistence`), and every
rank's work for a change of level (`change_point`); Holm corrects over all ranks and phases of the
run. A rank whose work changed level is fail-slow and not also called persistently slow.

Where devices wait for each other unseen, all ranks seem to work as long. Ranks that stand out in
kernel samples (`sampled_excess`) are slow too, if their peers wait as much longer.

Ranks that lose about as much in the same phases are one set: they are slow together, and fixing one
alone saves nothing. A rank that loses less than half of the worst is in a separate set.

Wrong where more than half of a group is slow, and blind to a rank without peers that was slow from
its first step; a stage that is slow on all its ranks is for the pipeline rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from meshscope.analyze.stragglers.sampled_excess import SampledExcess
from meshscope.analyze.stragglers.slow_sets import SharedTrait, find_shared
from meshscope.analyze.timeline.peer_work import PeerGroup, PeerWork
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.chance import SIGNIFICANCE_RATIO
from meshscope.numerics.change_point import (
    MIN_STEPS,
    LevelChange,
    chance_of_pauses,
    find_changes,
    measure_step_noise,
)
from meshscope.numerics.paired_excess import Effect
from meshscope.numerics.persistence import (
    MIN_EFFECT_RATIO,
    Candidate,
    correct_holm,
    find_candidates,
    is_slow,
)
from meshscope.store.read.arrays import Floats

_MIN_EXCESS_SHARE = 0.01
"""Least excess, as a share of a step's period, that is reported."""
_SAME_SET_RATIO = 0.5
"""Least share of the worst rank's excess of a rank in its set."""
_SAME_ONSET_RATIO = 0.05
"""Onsets within this share of the steps are one."""
_MAIN_PHASE_RATIO = 0.25
"""Least share of a rank's excess of a phase that is named."""
_MIN_PAUSE_PEERS = 3
"""Peers that show how often pauses come by chance."""
_USUAL_QUANTILE = 0.25
"""Of a rank's own steps: its work while not slow, even if it is slow for half of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """One rank that is persistently slow."""

    rank: int
    axis: str
    """Along which its peers lie; "" where no layout is known."""
    tested_phase: str | None
    """The phase of the clearest test; None for all its work together."""
    candidate: Candidate
    adjusted_p: float
    """Corrected for all ranks and phases of the run."""
    excess_ns: float
    """Per step, over all phases in which it is slower: median over steps."""
    phase_excess_ns: Mapping[str, float]
    """Median excess in each phase, largest first, without those below 1 % of a step."""
    reference: tuple[int, ...]
    """Peers it was compared with, none of them slow."""

    @property
    def effect(self) -> Effect:
        """Its effect in the phase of the test."""
        return self.candidate.effect

    @property
    def main_phases(self) -> tuple[str, ...]:
        """Phases with a large part of the excess."""
        return _choose_main(self.phase_excess_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailSlowRank:
    """A rank that became slow, and perhaps recovered."""

    rank: int
    change: LevelChange
    adjusted_p: float
    excess_ns: float
    """Per slow step: median."""
    phase_excess_ns: Mapping[str, float]
    reference: tuple[int, ...]
    """Peers that did not change; empty if it was compared with its own other steps."""

    @property
    def main_phases(self) -> tuple[str, ...]:
        """Phases with a large part of the excess."""
        return _choose_main(self.phase_excess_ns)


def _choose_main(phase_excess_ns: Mapping[str, float]) -> tuple[str, ...]:
    least_ns = _MAIN_PHASE_RATIO * sum(phase_excess_ns.values())
    return tuple(name for name, ns in phase_excess_ns.items() if ns >= least_ns)


_Rank = TypeVar("_Rank", SlowRank, FailSlowRank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlowSet(Generic[_Rank]):
    """Slow ranks with one cause, worst first."""

    slow: tuple[_Rank, ...]
    shared: tuple[SharedTrait, ...]
    """What they share with few others."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(one.rank for one in self.slow))


SlowSet = _SlowSet[SlowRank]
FailSlowSet = _SlowSet[FailSlowRank]
"""Ranks that became slow at about the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """What was found, worst first."""

    slow_sets: tuple[SlowSet, ...]
    fail_slow_sets: tuple[FailSlowSet, ...]
    num_tests: int
    """Ranks times phases tested."""
    num_steps: int

    @property
    def ranks(self) -> frozenset[int]:
        slow = {rank for found in self.slow_sets for rank in found.ranks}
        return frozenset(slow.union(*(found.ranks for found in self.fail_slow_sets)))


def find_stragglers(
    work: PeerWork,
    layout: Layout | Unavailable,
    hosts: Mapping[int, str],
    sampled: Mapping[int, SampledExcess] = MappingProxyType({}),
) -> Stragglers:
    fail_slow = _find_fail_slow(work)
    changed = {one.rank for one in fail_slow}
    slow, num_tests = _find_slow(work, changed)
    named = changed.union(one.rank for one in slow)
    least_ns = MIN_EFFECT_RATIO * work.step_ns
    unseen = [one for one in sampled.values() if one.is_clear and one.rank not in named]
    slow += [
        _take_sampled(one, work) for one in unseen if min(one.own_ns, one.waiting_ns) >= least_ns
    ]
    return Stragglers(
        slow_sets=_make_sets(slow, work, layout, hosts),
        fail_slow_sets=_make_fail_slow_sets(fail_slow, work, layout, hosts),
        num_tests=num_tests,
        num_steps=len(work.steps),
    )


def _find_slow(work: PeerWork, changed: set[int]) -> tuple[list[SlowRank], int]:
    """Persistently slow ranks, each by its clearest test, and the number of tests."""
    tests: list[tuple[PeerGroup, int | None, Candidate]] = []
    num_tests = 0
    for group in work.groups:
        columns = list(group.indices)
        for phase in (None, *range(len(work.phases))):
            matrix = work.total_ns if phase is None else work.work_ns[phase]
            num_tests += len(columns)
            found = find_candidates(matrix[:, columns])
            tests += [(group, phase, candidate) for candidate in found]
    adjusted = correct_holm([test[2].p_value for test in tests], num_tests=num_tests)
    passed = [
        (*test, p)
        for test, p in zip(tests, adjusted, strict=True)
        if is_slow(test[2], p)
        and test[2].excess_ns >= _MIN_EXCESS_SHARE * work.step_ns
        and _measure_whole_excess(work, test[0], test[2].index) > 0
    ]
    passed = [test for test in passed if not _is_majority(test[0], passed)]
    slow_indices = {group.indices[candidate.index] for group, _, candidate, _ in passed}
    best: dict[int, SlowRank] = {}
    # A rank that failed several tests is reported by the one with most time in it.
    for group, phase, candidate, p in sorted(passed, key=lambda test: -test[2].excess_ns):
        index = group.indices[candidate.index]
        rank = work.ranks[index]
        if rank in changed or rank in best:
            continue
        reference = tuple(other for other in group.indices if other not in slow_indices)
        by_phase = _measure_phase_excess(work, index, reference)
        best[rank] = SlowRank(
            rank=rank,
            axis=group.axis,
            tested_phase=None if phase is None else work.phases[phase],
            candidate=candidate,
            adjusted_p=p,
            excess_ns=sum(by_phase.values()) or candidate.excess_ns,
            phase_excess_ns=by_phase,
            reference=tuple(work.ranks[other] for other in reference),
        )
    return list(best.values()), num_tests


def _is_majority(
    group: PeerGroup, passed: list[tuple[PeerGroup, int | None, Candidate, float]]
) -> bool:
    """Whether most of a group are slow by one test or another: then the others are fast."""
    slow = {candidate.index for other, _, candidate, _ in passed if other is group}
    return len(slow) > max(1, len(group.indices) // 2)


def _take_sampled(one: SampledExcess, work: PeerWork) -> SlowRank:
    """A rank that only kernel samples show."""
    ratio = one.own_ns / max(one.peers_own_ns, 1.0)
    candidate = Candidate(
        index=work.ranks.index(one.rank),
        num_steps=one.num_steps,
        num_effective_steps=one.num_steps,
        num_steps_last=one.num_steps,
        num_peers=len(one.reference),
        p_value=one.p_value,
        effect=Effect(ratio=ratio, low_ratio=ratio, high_ratio=ratio),
        excess_ns=one.own_ns,
    )
    least = _MIN_EXCESS_SHARE * work.step_ns
    return SlowRank(
        rank=one.rank,
        axis=one.axis,
        tested_phase=None,
        candidate=candidate,
        adjusted_p=one.p_value,
        excess_ns=min(one.own_ns, one.waiting_ns),
        phase_excess_ns={name: ns for name, ns in one.by_phase_ns.items() if ns >= least},
        reference=one.reference,
    )


def _measure_whole_excess(work: PeerWork, group: PeerGroup, index: int) -> float:
    """How much more than its peers a rank works in a step, all phases together.

    Where ranks wait within phases, or share a device, one that is early in a phase takes longer for
    the next: it is not slow.
    """
    total = work.total_ns[:, list(group.indices)]
    others = np.delete(total, index, axis=1)
    return float(np.median(total[:, index] - np.median(others, axis=1)))


def _measure_phase_excess(
    work: PeerWork,
    rank_index: int,
    reference: tuple[int, ...],
    steps: slice | np.typing.NDArray[np.bool_] = np.s_[:],
) -> dict[str, float]:
    """Median over steps of a rank's work minus its peers' median, by phase, largest first."""
    if not reference:
        return {}
    excess = {}
    for index, name in enumerate(work.phases):
        matrix = work.work_ns[index][steps]
        base = np.median(matrix[:, list(reference)], axis=1)
        excess[name] = float(np.median(matrix[:, rank_index] - base))
    least = _MIN_EXCESS_SHARE * work.step_ns
    kept = [(name, ns) for name, ns in excess.items() if ns >= least]
    return dict(sorted(kept, key=lambda item: -item[1]))


def _find_fail_slow(work: PeerWork) -> list[FailSlowRank]:
    """Ranks whose work changed level against that of the others."""
    if len(work.steps) < MIN_STEPS:
        return []
    grouped = {index for group in work.groups for index in group.indices}
    alone = tuple(index for index in range(len(work.ranks)) if index not in grouped)
    # Persistence and onset share the error of a run.
    num_series = 2 * len(work.ranks)
    found: list[FailSlowRank] = []
    for indices in [group.indices for group in work.groups] + ([alone] if alone else []):
        series = _relate(work.total_ns[:, list(indices)], are_peers=indices is not alone)
        if series is None:
            continue
        # The noise of most ranks; a rank that seems steadier is so by chance.
        noise = float(np.median(measure_step_noise(series)))
        found_changes = find_changes(series, num_series=num_series, least_noise=noise)
        changes = {
            indices[column]: change
            for column, change in found_changes.items()
            if _has_risen(work, indices[column], change)
        }
        changes = _leave_out_pauses(series, indices, changes, num_series)
        if 2 * len(changes) > len(indices) and len(indices) > 2:
            continue  # Most ranks changed: no single rank is the cause.
        others = tuple(index for index in indices if index not in changes)
        for index, change in changes.items():
            reference = others if indices is not alone else ()
            found.append(_describe_fail_slow(work, index, change, reference, num_series))
    return found


def _leave_out_pauses(
    series: Floats, indices: tuple[int, ...], changes: dict[int, LevelChange], num_series: int
) -> dict[int, LevelChange]:
    """Without changes that are a few pauses close together, as others have them too."""
    others = [column for column, index in enumerate(indices) if index not in changes]
    if len(others) < _MIN_PAUSE_PEERS:
        return changes
    like = series[:, others]
    return {
        index: change
        for index, change in changes.items()
        if chance_of_pauses(series[:, indices.index(index)], like, change) * num_series
        < SIGNIFICANCE_RATIO
    }


def _relate(total_ns: Floats, *, are_peers: bool) -> Floats | None:
    """Each rank's work over the lower median of the others in the step, minus one.

    The lower median holds while up to half of the ranks are slow. Ranks that do different work are
    divided by their usual work first.
    """
    if not bool(np.isfinite(total_ns).all()) or not bool((total_ns > 0).all()):
        return None
    if not are_peers:
        total_ns = total_ns / np.quantile(total_ns, _USUAL_QUANTILE, axis=0)
    num_ranks = total_ns.shape[1]
    if num_ranks == 1:
        return np.asarray(total_ns - 1)
    middle = (num_ranks - 2) // 2
    ordered = np.partition(total_ns, [middle, middle + 1], axis=1)
    low, high = ordered[:, [middle]], ordered[:, [middle + 1]]
    return np.asarray(total_ns / np.where(total_ns > low, low, high) - 1)


def _has_risen(work: PeerWork, index: int, change: LevelChange) -> bool:
    """Whether the rank's own work rose, and not that of the others fell."""
    own = work.total_ns[:, index]
    inside = np.zeros(len(own), dtype=np.bool_)
    inside[change.onset : change.recovery] = True
    high_ns, low_ns = float(np.median(own[inside])), float(np.median(own[~inside]))
    is_relative = high_ns / low_ns - 1 >= change.shift_ratio / 2
    return is_relative and high_ns - low_ns >= _MIN_EXCESS_SHARE * work.step_ns


def _describe_fail_slow(
    work: PeerWork,
    rank_index: int,
    change: LevelChange,
    reference: tuple[int, ...],
    num_series: int,
) -> FailSlowRank:
    inside = np.zeros(len(work.steps), dtype=np.bool_)
    inside[change.onset : change.recovery] = True
    by_phase = {}
    for index, name in enumerate(work.phases):
        own = work.work_ns[index][:, rank_index]
        rise_ns = float(np.median(own[inside]) - np.median(own[~inside]))
        if rise_ns >= _MIN_EXCESS_SHARE * work.step_ns:
            by_phase[name] = rise_ns
    own = work.total_ns[:, rank_index]
    return FailSlowRank(
        rank=work.ranks[rank_index],
        change=change,
        adjusted_p=min(1.0, change.p_value * num_series),
        excess_ns=float(np.median(own[inside]) - np.median(own[~inside])),
        phase_excess_ns=dict(sorted(by_phase.items(), key=lambda item: -item[1])),
        reference=tuple(work.ranks[other] for other in reference),
    )


def _make_sets(
    slow: list[SlowRank], work: PeerWork, layout: Layout | Unavailable, hosts: Mapping[int, str]
) -> tuple[SlowSet, ...]:
    """Ranks of similar excess in the same phases together, worst first."""
    left = sorted(slow, key=lambda one: (-one.excess_ns, one.rank))
    sets = []
    while left:
        worst = left[0]
        together = tuple(one for one in left if _is_alike(one, worst))
        left = [one for one in left if one not in together]
        shared = find_shared((one.rank for one in together), work.ranks, layout, hosts)
        sets.append(_SlowSet(slow=together, shared=shared))
    return tuple(sets)


def _is_alike(one: SlowRank, worst: SlowRank) -> bool:
    """Ranks that are slow in different phases have different causes."""
    phases = worst.main_phases
    is_same_phase = not phases or not one.main_phases or bool({*phases} & {*one.main_phases})
    return is_same_phase and one.excess_ns >= _SAME_SET_RATIO * worst.excess_ns


def _make_fail_slow_sets(
    slow: list[FailSlowRank],
    work: PeerWork,
    layout: Layout | Unavailable,
    hosts: Mapping[int, str],
) -> tuple[FailSlowSet, ...]:
    """Ranks that changed at about the same step together."""
    near = max(2, _SAME_ONSET_RATIO * len(work.steps))
    left = sorted(slow, key=lambda one: (-one.excess_ns, one.rank))
    sets = []
    while left:
        first = left[0]
        together = tuple(
            one
            for one in left
            if abs(one.change.onset - first.change.onset) <= near
            and abs(one.change.recovery - first.change.recovery) <= near
        )
        left = [one for one in left if one not in together]
        shared = find_shared((one.rank for one in together), work.ranks, layout, hosts)
        sets.append(_SlowSet(slow=together, shared=shared))
    return tuple(sets)
