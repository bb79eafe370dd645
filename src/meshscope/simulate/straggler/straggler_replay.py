"""Replays a straggler trace with measured, even or edited durations.

start(v) = latest end of what v waits for; compute ends a duration later; communication ends a
transfer after the last of its group has started. Transfer = end - latest start in the group; one of
-10 ms or less is a clock error and counts as 0. All steps, dp ranks and edits are evaluated
together, operation by operation. Unexplained gaps are left out; `fidelity` says how much of the
measured step they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunError
from meshscope.ingest.straggler.straggler_dependencies import (
    COMMUNICATION,
    MESSAGES,
    Dependencies,
    find_dependencies,
)
from meshscope.ingest.straggler.straggler_trace import StragglerTrace
from meshscope.simulate.straggler.slowdown import (
    Share,
    Slowdown,
    choose_worst,
    share_excess,
    sort_slowdowns,
)
from meshscope.simulate.what_if import Fidelity, Gain
from meshscope.store.read.arrays import Bools, Floats

_CLOCK_ERROR_S = 0.01
_CHUNK_CELLS = 20_000_000
"""Operations x steps x dp ranks x edits that are evaluated at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StragglerReplay:
    """A trace with its dependencies."""

    trace: StragglerTrace
    dependencies: Dependencies
    measured_s: Floats
    """[operation, step, dp]: duration, or transfer if it has a group."""
    ideal_s: Floats
    """[operation]: even over all of its type."""
    num_clock_errors: int

    @classmethod
    def make(cls, trace: StragglerTrace) -> Self:
        """RunError if the trace's steps do not form one graph."""
        found = find_dependencies(trace)
        if isinstance(found, str):
            raise RunError(f"{trace.name}: {found}; it cannot be replayed")
        measured, num_errors = _measure(trace, found)
        ideal = _find_ideal(trace, measured)
        return cls(
            trace=trace,
            dependencies=found,
            measured_s=measured,
            ideal_s=ideal,
            num_clock_errors=num_errors,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Operations, steps, dp ranks."""
        num_operations, num_steps, num_dp = self.measured_s.shape
        return num_operations, num_steps, num_dp

    def step_times_s(self, durations: Sequence[Floats]) -> Floats:
        """[edit, step]: the replayed times of steps, for durations that broadcast to `shape`."""
        size = max(1, _CHUNK_CELLS // max(1, self.measured_s.size))
        parts = [
            _evaluate(self.dependencies, durations[low : low + size], self.shape)
            for low in range(0, len(durations), size)
        ]
        return np.concatenate(parts)

    def mean_ns(self, durations: Sequence[Floats]) -> list[float]:
        times: list[float] = (self.step_times_s(durations).mean(axis=1) * 1e9).tolist()
        return times

    def fidelity(self) -> Fidelity:
        end = self.trace.end_s.max(axis=(0, 2))
        measured_ns = float((end - self.trace.begin_s.min(axis=(0, 2))).mean()) * 1e9
        replayed_ns = self.mean_ns([self.measured_s])[0]
        error = abs(measured_ns - replayed_ns) / measured_ns if measured_ns else 0.0
        return Fidelity(
            error_ratio=error,
            measured_ns=measured_ns,
            replayed_ns=replayed_ns,
            num_steps=len(self.trace.steps),
        )

    def even(self, is_even: Bools) -> Floats:
        """Measured durations with the chosen ones made even."""
        return np.where(is_even, self.ideal_s[:, None, None], self.measured_s)

    def price(self, durations: Floats, fidelity: Fidelity) -> Gain | Unavailable:
        return fidelity.problem or fidelity.price(self.mean_ns([durations])[0])

    def types(self) -> list[str]:
        """The type of each operation; sends and recvs of a direction are one type."""
        return [_merge_type(one.optype) for one in self.trace.operations]

    def is_stage(self, stage: int) -> Bools:
        """[operation, 1, 1]."""
        return np.array([one.stage == stage for one in self.trace.operations])[:, None, None]

    def is_worker(self, ranks: Sequence[int]) -> Bools:
        """[operation, 1, dp]: operations of these ranks."""
        stage = np.array([one.stage for one in self.trace.operations])
        found: Bools = np.isin(self.trace.ranks, list(ranks))[stage][:, None, :]
        return found


def _merge_type(optype: str) -> str:
    """`forward-send` → `forward-pp-comm`; others as they are."""
    return f"{optype.partition('-')[0]}-pp-comm" if optype in MESSAGES else optype


def _measure(trace: StragglerTrace, dependencies: Dependencies) -> tuple[Floats, int]:
    measured, num_errors = trace.duration_s.copy(), 0
    end = trace.end_s
    for group, is_across in zip(dependencies.groups, dependencies.is_across_dp, strict=True):
        members = list(group)
        latest = trace.begin_s[members].max(axis=0)
        if is_across:
            latest = latest.max(axis=1, keepdims=True)
        transfer = end[members] - latest
        is_error = transfer <= -_CLOCK_ERROR_S
        num_errors += int(np.count_nonzero(is_error))
        measured[members] = np.where(is_error, 0.0, transfer)
    return measured, num_errors


def _find_ideal(trace: StragglerTrace, measured: Floats) -> Floats:
    optypes = np.array([one.optype for one in trace.operations])
    ideal = np.empty(len(optypes))
    for optype in dict.fromkeys(optypes.tolist()):
        own = optypes == optype
        middle = np.median if optype in COMMUNICATION else np.mean
        ideal[own] = middle(measured[own])
    return ideal


def _evaluate(
    dependencies: Dependencies, durations: Sequence[Floats], shape: tuple[int, int, int]
) -> Floats:
    num_operations, num_steps, num_dp = shape
    is_across = dict(zip(dependencies.groups, dependencies.is_across_dp, strict=True))
    end = np.empty((num_operations, len(durations), num_steps, num_dp))
    cost = np.empty((len(durations), num_operations, num_steps, num_dp))
    for edit, duration in enumerate(durations):
        cost[edit] = duration
    for unit_index in dependencies.order:
        unit = dependencies.units[unit_index]
        start = np.zeros(end.shape[1:])
        for operation in unit:
            for other in dependencies.before[operation]:
                np.maximum(start, end[other], out=start)
        if is_across.get(unit, False):
            start = start.max(axis=2, keepdims=True)
        for operation in unit:
            end[operation] = start + cost[:, operation]
    times: Floats = end.max(axis=(0, 3))
    return times


def measure_slowdown(replay: StragglerReplay) -> Slowdown | Unavailable:
    """S and its parts, from one batch of replays."""
    fidelity = replay.fidelity()
    if fidelity.problem is not None:
        return fidelity.problem
    trace = replay.trace
    everywhere = np.ones(1, dtype=np.bool_).reshape(1, 1, 1)
    types = replay.types()
    parts: dict[tuple[str, object], Bools] = {("ideal", 0): ~everywhere}
    for optype in dict.fromkeys(types):
        parts["type", optype] = np.array([one == optype for one in types])[:, None, None]
    for stage in range(trace.num_stages):
        parts["pp", stage] = replay.is_stage(stage)
    for index, dp_rank in enumerate(trace.dp_ranks):
        is_own = np.arange(len(trace.dp_ranks)) == index
        parts["dp", dp_rank] = is_own[None, None, :]
    alone = dict(
        zip(parts, replay.mean_ns([replay.even(~part) for part in parts.values()]), strict=True)
    )
    ideal_ns = alone["ideal", 0]
    slow = {key: value / ideal_ns for key, value in alone.items()}
    by_axis = {
        axis: sort_slowdowns({int(str(at)): s for (kind, at), s in slow.items() if kind == axis})
        for axis in ("pp", "dp")
    }
    by_worker = sort_slowdowns(_rank_workers(trace, by_axis))
    worst = choose_worst(by_worker)
    return Slowdown(
        fidelity=fidelity,
        step_ns=fidelity.replayed_ns,
        ideal_ns=ideal_ns,
        by_type=sort_slowdowns({str(at): s for (kind, at), s in slow.items() if kind == "type"}),
        by_axis=by_axis,
        by_worker=by_worker,
        worst_workers=worst,
        worst_share=_share(replay, replay.is_worker(worst), fidelity, ideal_ns),
        last_stage_share=_share(replay, replay.is_stage(trace.num_stages - 1), fidelity, ideal_ns),
    )


def _rank_workers(
    trace: StragglerTrace, by_axis: Mapping[str, Mapping[int, float]]
) -> dict[int, float]:
    """A worker is as slow as its stage or its dp rank, whichever is less (OSDI'25)."""
    return {
        int(trace.ranks[stage, index]): min(by_axis["pp"][stage], by_axis["dp"][dp_rank])
        for stage in range(trace.num_stages)
        for index, dp_rank in enumerate(trace.dp_ranks)
    }


def _share(
    replay: StragglerReplay, is_part: Bools, fidelity: Fidelity, ideal_ns: float
) -> Share | Unavailable:
    removed_ns, alone_ns = replay.mean_ns([replay.even(is_part), replay.even(~is_part)])
    return share_excess(
        step_ns=fidelity.replayed_ns,
        ideal_ns=ideal_ns,
        removed_ns=removed_ns,
        alone_ns=alone_ns,
    )
