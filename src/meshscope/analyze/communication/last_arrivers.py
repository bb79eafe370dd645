"""Which ranks others wait for: how often each came last, its cost, and whether it is chance.

Operations count in which every rank waits for every other and the last to arrive is known beyond
the clocks' uncertainty. Operations of one step are not independent, so chance is judged by step: in
each step of a group one rank cost the others most, and if ranks were alike it would be each of n
with probability 1/n. An operation outside of steps is judged alone.

The cost of a rank is the time in which only it was missing. If it is late for several operations at
once, as for the buckets of one backward pass, that time counts once.

Not a verdict: ranks of different pipeline stages do different work, and the one that is late in a
group that spans stages may only have more to do. Nor is the cost what the job would gain: others
may have computed in the meantime, which only a replay shows.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.arrivals import Arrivals
from meshscope.analyze.job.matching import Matches
from meshscope.analyze.job.operations import (
    NO_PHASE,
    Operations,
    find_rows,
    number_values,
    slice_runs,
)
from meshscope.core.unavailable import Unavailable
from meshscope.numerics.chance import MIN_STEPS, SIGNIFICANCE_RATIO, binomial_tail
from meshscope.store.read.arrays import Bools, Int32s, Int64s

ALL_AXES = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastArriver:
    """One rank in the groups of one axis, or in all its groups."""

    axis: str
    """`all` for all groups of the rank: sums over its axes."""
    rank: int
    num_last: int
    """Operations at which it was the last to arrive."""
    num_operations: int
    """Operations of its groups whose last arrival is known."""
    expected_last: float
    """How often it would be the last if ranks were alike."""
    num_steps_worst: int
    """Steps in which it cost its group more than any other rank did."""
    num_steps: int
    """Steps of its groups with at least one such operation."""
    p_value: float | Unavailable
    """Chance of at least `num_steps_worst` in `num_steps` if ranks were alike."""
    is_beyond_chance: bool
    """The p-value, times the number of ranks, is below one per cent."""
    cost_ns: int
    """From the second-to-last arrival to its own, over the operations at which it was last; shared
    time counts once."""
    caused_wait_ns: int
    """The waits of all ranks in these operations; shared time counts for each."""
    phase: str | Unavailable
    """The phase in which it cost most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counts:
    """Operations with a known last arriver; one entry each."""

    row: Int64s
    rank: Int32s
    group: Int64s
    step: Int32s
    last_ns: Int64s
    gap_ns: Int64s
    wait_ns: Int64s

    def select(self, part: Int64s) -> "_Counts":
        return _Counts(
            row=self.row[part],
            rank=self.rank[part],
            group=self.group[part],
            step=self.step[part],
            last_ns=self.last_ns[part],
            gap_ns=self.gap_ns[part],
            wait_ns=self.wait_ns[part],
        )


def rank_last_arrivers(
    operations: Operations,
    matches: Matches,
    arrivals: Arrivals,
    is_included: Bools,
) -> tuple[LastArriver, ...]:
    """One entry per axis and rank that was ever last, and one for all axes; costliest first.

    `is_included` is by match.
    """
    counts = _count(
        operations, matches, arrivals, arrivals.is_decided & is_included[arrivals.match]
    )
    axis_of_group = np.array([group.axis for group in operations.groups] or [""])
    axis = axis_of_group[counts.group]
    found: list[LastArriver] = []
    for name in np.unique(axis).tolist():
        part = counts.select(np.flatnonzero(axis == name))
        found += _rank_part(operations, matches, part, str(name))
    by_rank: dict[int, list[LastArriver]] = {}
    for entry in found:
        by_rank.setdefault(entry.rank, []).append(entry)
    cost = _sum_costs(counts, _cut_gaps(counts), operations.world_size)
    found += [_add_entries(entries, int(cost[rank])) for rank, entries in by_rank.items()]
    return tuple(sorted(found, key=lambda entry: (-entry.cost_ns, entry.rank, entry.axis)))


def sum_costs_by_step(
    operations: Operations, matches: Matches, arrivals: Arrivals, steps: Int64s
) -> Int64s:
    """[rank, step]: the cost of each of `operations.ranks`, along all axes, in these steps."""
    counts = _count(operations, matches, arrivals, arrivals.is_decided)
    column = find_rows(steps, counts.step.astype(np.int64))
    inside = column >= 0
    cost = np.zeros((len(operations.ranks), len(steps)), dtype=np.int64)
    row = np.searchsorted(np.array(operations.ranks), counts.rank[inside])
    np.add.at(cost, (row, column[inside]), _cut_gaps(counts)[inside])
    return cost


def _count(operations: Operations, matches: Matches, arrivals: Arrivals, is_kept: Bools) -> _Counts:
    kept = np.flatnonzero(is_kept)
    return _Counts(
        row=arrivals.row[kept],
        rank=arrivals.rank[kept],
        group=matches.group[arrivals.match[kept]].astype(np.int64),
        step=operations.rows.step[arrivals.row[kept]],
        last_ns=arrivals.last_ns[kept],
        gap_ns=arrivals.gap_ns[kept],
        wait_ns=arrivals.wait_ns[kept],
    )


def _cut_gaps(counts: _Counts) -> Int64s:
    """The gaps without the parts that earlier gaps of the same rank cover."""
    order = np.lexsort((counts.last_ns - counts.gap_ns, counts.rank))
    start, end = (counts.last_ns - counts.gap_ns)[order], counts.last_ns[order]
    for _, part in slice_runs(counts.rank[order]):
        covered = np.maximum.accumulate(end[part])
        start[part][1:] = np.maximum(start[part][1:], covered[:-1])
    gaps = np.empty_like(counts.gap_ns)
    gaps[order] = np.maximum(end - start, 0)
    return gaps


def _sum_costs(counts: _Counts, gap_ns: Int64s, size: int) -> Int64s:
    cost = np.zeros(size, dtype=np.int64)
    np.add.at(cost, counts.rank, gap_ns)
    return cost


def _add_entries(entries: list[LastArriver], cost_ns: int) -> LastArriver:
    """All axes of one rank together."""
    costliest = max(entries, key=lambda entry: entry.cost_ns)
    return replace(
        costliest,
        axis=ALL_AXES,
        num_last=sum(entry.num_last for entry in entries),
        num_operations=sum(entry.num_operations for entry in entries),
        expected_last=sum(entry.expected_last for entry in entries),
        num_steps_worst=sum(entry.num_steps_worst for entry in entries),
        num_steps=sum(entry.num_steps for entry in entries),
        p_value=Unavailable("chance is judged along each axis"),
        is_beyond_chance=any(entry.is_beyond_chance for entry in entries),
        cost_ns=cost_ns,
        caused_wait_ns=sum(entry.caused_wait_ns for entry in entries),
    )


def _rank_part(
    operations: Operations, matches: Matches, counts: _Counts, axis: str
) -> list[LastArriver]:
    size, num_groups = operations.world_size, len(operations.groups)
    num_last = np.bincount(counts.rank, minlength=size)
    gap_ns = _cut_gaps(counts)
    cost = _sum_costs(counts, gap_ns, size)
    caused = _sum_costs(counts, counts.wait_ns, size)
    worst, num_trials = _count_worst(counts, gap_ns, size, num_groups)
    phases = _find_phases(operations, counts, gap_ns)
    chances = _Chances(size)
    per_group = np.bincount(counts.group, minlength=num_groups)
    for group in np.flatnonzero(per_group).tolist():
        chances.add(
            operations.groups[group].recorded_ranks,
            num_operations=int(per_group[group]),
            num_trials=int(num_trials[group]),
            num_ranks=int(matches.num_present[group]),
        )
    entries = []
    for rank in np.flatnonzero(num_last).tolist():
        num_steps = int(chances.num_trials[rank])
        p_value = binomial_tail(int(worst[rank]), num_steps, 1 / int(chances.num_ranks[rank]))
        is_clear = p_value * chances.num_tests < SIGNIFICANCE_RATIO and num_steps >= MIN_STEPS
        entries.append(
            LastArriver(
                axis=axis,
                rank=rank,
                num_last=int(num_last[rank]),
                num_operations=int(chances.num_operations[rank]),
                expected_last=float(chances.expected[rank]),
                num_steps_worst=int(worst[rank]),
                num_steps=num_steps,
                p_value=p_value,
                is_beyond_chance=is_clear,
                cost_ns=int(cost[rank]),
                caused_wait_ns=int(caused[rank]),
                phase=_name_phase(operations, int(phases[rank])),
            )
        )
    return entries


class _Chances:
    """How often each rank could have been the last."""

    def __init__(self, size: int) -> None:
        self.num_operations = np.zeros(size, dtype=np.int64)
        self.num_trials = np.zeros(size, dtype=np.int64)
        self.expected = np.zeros(size)
        self.num_ranks = np.full(size, np.iinfo(np.int64).max)
        """The smallest of its groups, so that chance is not underestimated."""

    def add(
        self, ranks: tuple[int, ...], *, num_operations: int, num_trials: int, num_ranks: int
    ) -> None:
        members = np.array(ranks, dtype=np.int64)
        self.num_operations[members] += num_operations
        self.num_trials[members] += num_trials
        self.expected[members] += num_operations / num_ranks
        self.num_ranks[members] = np.minimum(self.num_ranks[members], num_ranks)

    @property
    def num_tests(self) -> int:
        return int(np.count_nonzero(self.num_operations))


def _count_worst(
    counts: _Counts, gap_ns: Int64s, size: int, num_groups: int
) -> tuple[Int64s, Int64s]:
    """Per rank, the trials in which it cost most; per group, how many trials there were."""
    if not len(counts.row):
        return np.zeros(size, dtype=np.int64), np.zeros(num_groups, dtype=np.int64)
    # Outside of steps every operation is a separate trial.
    step = np.where(counts.step >= 0, counts.step, -1 - np.arange(len(counts.step)))
    _, step = number_values(step.astype(np.int64))
    _, trial = number_values(counts.group * (int(step.max()) + 1) + step)
    cell, where = number_values(trial * size + counts.rank)
    total = np.zeros(len(cell), dtype=np.int64)
    np.add.at(total, where, gap_ns)
    owner = cell // size
    order = np.lexsort((total, owner))
    is_worst = np.append(np.diff(owner[order]) != 0, True)
    winner = cell[order][is_worst] % size
    group_of_trial = np.zeros(int(trial.max()) + 1, dtype=np.int64)
    group_of_trial[trial] = counts.group
    return (
        np.bincount(winner, minlength=size),
        np.bincount(group_of_trial, minlength=num_groups),
    )


def _find_phases(operations: Operations, counts: _Counts, gap_ns: Int64s) -> Int64s:
    """For each rank the index of the phase in which it cost most."""
    num_phases = len(operations.phases)
    cell = counts.rank.astype(np.int64) * num_phases + operations.rows.phase[counts.row]
    size = operations.world_size * num_phases
    total = np.bincount(cell, weights=gap_ns, minlength=size)
    return np.asarray(total.reshape(-1, num_phases).argmax(axis=1), dtype=np.int64)


def _name_phase(operations: Operations, index: int) -> str | Unavailable:
    name = operations.phases[index]
    return Unavailable("it was late outside of any phase") if name == NO_PHASE else name
