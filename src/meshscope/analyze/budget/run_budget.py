"""The budget of the whole run, of which a timeline may have only some steps.

The wall clock is exact. Lines are those of the steps that were looked at, counted as often as
`run_weights` says; what rare phases took in steps that none of these is like is added as the host
had it (`step_kinds`). Where a run was thinned, exact sums of its operations correct that: a line of
communication along an axis is to the sampled one as all operations of that axis are to the sampled
ones, and compute is what is left.

Wrong where operations of the steps between were hidden behind compute to another degree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget_lines import SHARE_OF_PHASE, Line, Share
from meshscope.analyze.budget.exact_sums import ExactSums
from meshscope.analyze.timeline.run_weights import measure_between, measure_missing
from meshscope.analyze.timeline.step_kinds import RARE_PHASES
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.store.read.arrays import Bools, Floats, Int64s

_OWN_WORK = (Share.COMPUTE, Share.INEFFICIENCY, Share.SPAN)
"""What communication that was not sampled takes its time from; one of them is there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunBudget:
    """Sums over all steps from the first one that was looked at to the last."""

    num_steps: int
    wall_ns: Int64s
    """Per rank; exact."""
    time_ns: Int64s
    """[rank, line]"""
    num_summed_steps: int
    """Steps whose communication is known by exact sums of what was thinned."""


def measure_run(
    timeline: Timeline,
    lines: Sequence[Line],
    time_ns: Int64s,
    weight: Floats,
    exact: ExactSums | None,
) -> RunBudget:
    """`time_ns` [rank, step, line] is what was looked at, `weight` how often each step counts."""
    wall_ns = timeline.period_end_ns - timeline.period_start_ns
    if not timeline.num_left_out and not timeline.kinds.num_missing:
        return RunBudget(
            num_steps=len(timeline.steps),
            wall_ns=wall_ns.sum(axis=1),
            time_ns=time_ns.sum(axis=1),
            num_summed_steps=0,
        )
    run_wall_ns = wall_ns.sum(axis=1)
    if timeline.num_left_out:
        run_wall_ns = run_wall_ns + measure_between(timeline).sum(axis=1)
    else:
        run_wall_ns = run_wall_ns + measure_missing(timeline)
    unseen_ns = _place_unseen(timeline, lines, run_wall_ns)
    # So that lines sum to the exact wall clock of each rank.
    left_ns = run_wall_ns - unseen_ns.sum(axis=1)
    factor = left_ns / np.maximum((wall_ns * weight).sum(axis=1), 1)
    weights = weight[None, :] * factor[:, None]
    run_ns = np.einsum("rs,rsl->rl", weights, time_ns.astype(np.float64)) + unseen_ns
    if exact is not None:
        run_ns += _correct(timeline, lines, time_ns, weights, exact)
    rounded = np.rint(run_ns).astype(np.int64)
    # Rounding is not a residual of the budget: that stays what pieces do not explain.
    residual_ns = np.rint((weights * (wall_ns - time_ns.sum(axis=2))).sum(axis=1)).astype(np.int64)
    largest = rounded.argmax(axis=1)
    rounded[np.arange(len(rounded)), largest] += run_wall_ns - residual_ns - rounded.sum(axis=1)
    return RunBudget(
        num_steps=_count_steps(timeline),
        wall_ns=run_wall_ns,
        time_ns=rounded,
        num_summed_steps=0 if exact is None else exact.end_step - exact.first_step,
    )


def _count_steps(timeline: Timeline) -> int:
    if timeline.num_left_out:
        return int(timeline.steps[-1] - timeline.steps[0]) + 1
    return len(timeline.kinds.kind)


def _place_unseen(timeline: Timeline, lines: Sequence[Line], run_wall_ns: Int64s) -> Floats:
    """[rank, line], never more than half of the wall clock."""
    found = np.zeros((len(run_wall_ns), len(lines)))
    kinds = timeline.kinds
    if not timeline.num_left_out:
        for kind in np.unique(kinds.kind[kinds.excess_ns.any(axis=0)]).tolist():
            at = [line.share for line in lines].index(SHARE_OF_PHASE[RARE_PHASES[kind]])
            found[:, at] += kinds.excess_ns[:, kinds.kind == kind].sum(axis=1)
    most = run_wall_ns / 2
    found *= np.minimum(1.0, most / np.maximum(found.sum(axis=1), 1.0))[:, None]
    return found


def _correct(
    timeline: Timeline,
    lines: Sequence[Line],
    time_ns: Int64s,
    weights: Floats,
    exact: ExactSums,
) -> Floats:
    """[rank, line]: what exact sums of operations add to the lines."""
    change = np.zeros((time_ns.shape[0], len(lines)))
    inside = (timeline.steps >= exact.first_step) & (timeline.steps < exact.end_step)
    rest = next((at for at, line in enumerate(lines) if line.share in _OWN_WORK), None)
    if timeline.communication is None or rest is None or not inside.any():
        return change
    for axis in dict.fromkeys(line.axis for line in lines if line.axis):
        own = np.flatnonzero([line.axis == axis for line in lines])
        sampled = _measure_operations(timeline, axis, inside)
        for index, rank in enumerate(timeline.ranks):
            weight = weights[index] * inside
            total = (exact.end_step - exact.first_step) / max(weight.sum(), 1e-9)
            estimate = float((weight * sampled[index]).sum()) * total
            if estimate <= 0:
                continue
            ratio = exact.time_ns.get((rank, axis), 0) / estimate
            change[index, own] = (ratio - 1) * (weight[:, None] * time_ns[index][:, own]).sum(
                axis=0
            )
    more = change.sum(axis=1)
    left = (weights[:, :, None] * time_ns).sum(axis=1)[:, rest]
    # Never more than there is to take from.
    change *= np.minimum(1.0, left / np.maximum(more, 1.0))[:, None]
    change[:, rest] -= change.sum(axis=1)
    return change


def _measure_operations(timeline: Timeline, axis: str, inside: Bools) -> Floats:
    """[rank, step]: from begin to end of the operations along an axis, as table `aggregates` has
    it."""
    assert timeline.communication is not None
    operations = timeline.communication.operations
    rows = operations.rows
    is_axis = np.array([group.axis == axis for group in operations.groups] + [False])
    found = np.flatnonzero(is_axis[rows.group] & rows.has_end & (rows.start_ns >= 0))
    place = np.searchsorted(timeline.steps, rows.step[found])
    place = np.minimum(place, len(timeline.steps) - 1)
    is_kept = (timeline.steps[place] == rows.step[found]) & inside[place]
    found, place = found[is_kept], place[is_kept]
    index = np.searchsorted(np.array(timeline.ranks), rows.rank[found])
    shape = (len(timeline.ranks), len(timeline.steps))
    duration = (rows.end_ns - rows.start_ns)[found].astype(np.float64)
    sums = np.bincount(index * shape[1] + place, duration, minlength=shape[0] * shape[1])
    return np.asarray(sums.reshape(shape), dtype=np.float64)
