"""What would be saved where devices wait for a host that launches work too slowly.

Compilation with CUDA graphs takes the launches of forward and backward off the host; what it does
outside of them stays, and so do the gaps of a device between kernels of a graph. Nothing that the
recorder itself takes is there to be saved: its calls, and the marks that only some steps have.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.stragglers.step_pattern import StepPeriods, read_periods
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.device_parts import DeviceParts, Sampled
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import known, need
from meshscope.store.read.arrays import Bools, Floats

GRAPH_GAP_NS = 1_500
"""Between two kernels of a CUDA graph: 1 to 2 µs on devices in use."""
CAPTURED = ("forward", "backward")
"""Phases that compilation and graphs take off the host."""
_MAX_USUAL_FACTOR = 1.5
"""A step idles longer than this many medians for a reason of its own, which other rules name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchRelief:
    """Idle time of devices because of their hosts, and what of it could be saved."""

    idle_ns: Floats
    """[rank, step], without the recorder's part."""
    captured_ratio: float
    """The part of it that compilation with CUDA graphs would save."""
    outside_ratio: float
    """The part outside of forward and backward."""
    fill_factor: float
    """How many times as much the devices could compute in the same time."""
    has_graphs: bool
    """Most kernels are in CUDA graphs already: what is left of forward and backward stays."""

    @property
    def mean_ns(self) -> float:
        return float(self.idle_ns.mean())

    @property
    def is_captured(self) -> bool:
        """Most of it is in forward and backward."""
        return self.outside_ratio < 0.5 and not self.has_graphs

    @property
    def saved_ratio(self) -> float:
        """Between phases everything can go; in them, what graphs leave stays."""
        if self.has_graphs:
            return self.outside_ratio
        return self.captured_ratio if self.is_captured else 1.0


def find_relief(study: Study, idle_ns: Floats) -> LaunchRelief:
    """`idle_ns` is per rank and step, as kernel samples show it."""
    timeline, parts = need(study.timeline), need(study.device_parts)
    own_ns = _measure_own(study, timeline)
    idle_ns = np.maximum(cap_at_usual(idle_ns) - own_ns, 0.0)
    outside, floor_ns, fill = _look_at_ranks(timeline, parts)
    mean_ns = max(float(idle_ns.mean()), 1.0)
    steps = [step for sampled in parts.sampled.values() for step in sampled.steps]
    num_graph_kernels = sum(step.num_graph_kernels for step in steps)
    has_graphs = 2 * num_graph_kernels > sum(step.num_kernels for step in steps)
    return LaunchRelief(
        idle_ns=idle_ns,
        captured_ratio=0.0 if has_graphs else max(1 - outside - floor_ns / mean_ns, 0.0),
        outside_ratio=outside,
        fill_factor=fill,
        has_graphs=has_graphs,
    )


def cap_at_usual(idle_ns: Floats) -> Floats:
    """[rank, step]: without what single steps have beyond the usual, such as a checkpoint's."""
    usual_ns = np.median(idle_ns, axis=1, keepdims=True)
    return np.asarray(np.minimum(idle_ns, _MAX_USUAL_FACTOR * usual_ns), dtype=np.float64)


def _measure_own(study: Study, timeline: Timeline) -> float:
    """What the recorder takes of the steps of a timeline, as far as it is known: its calls, and
    that steps with marks on the device are longer than the others."""
    overhead = known(study.health.overhead)
    ratio = None if overhead is None else known(overhead.lost_ratio)
    host_ns = np.median(timeline.host_period_ns, axis=0)
    own_ns = (ratio or 0.0) * float(host_ns.mean())
    periods = known(study.get(_read_periods))
    if periods is not None and timeline.num_unmarked:
        own_ns += max(float(np.median(host_ns) - np.median(periods.period_ns)), 0.0)
    return own_ns


def _read_periods(study: Study) -> StepPeriods:
    return need(read_periods(study.attempt, num_warmup=study.steps.num_warmup))


def _look_at_ranks(timeline: Timeline, parts: DeviceParts) -> tuple[float, float, float]:
    """Of the sampled ranks together: the share of idle time outside of forward and backward, the
    gaps that graphs leave in a step, and how much more devices could compute."""
    pieces = timeline.pieces
    inside_ns = outside_ns = floor_ns = busy_ns = period_ns = 0.0
    for rank, sampled in parts.sampled.items():
        mine = parts.is_divided & (pieces.rank == rank)
        busy = _mean_busy(sampled)
        captured = [n for n, name in enumerate(timeline.phases) if name in CAPTURED]
        is_captured = mine & np.isin(pieces.phase, captured)
        in_phases = sum(value for name, value in busy.items() if name in CAPTURED)
        inside_ns += max(_mean_time(timeline, is_captured) - in_phases, 0.0)
        rest = sum(busy.values()) - in_phases
        outside_ns += max(_mean_time(timeline, mine & ~is_captured) - rest, 0.0)
        floor_ns += GRAPH_GAP_NS * float(np.mean([one.num_kernels for one in sampled.steps]))
        busy_ns += sum(busy.values())
        period_ns += _mean_time(timeline, mine)
    share = outside_ns / max(inside_ns + outside_ns, 1.0)
    return share, floor_ns / max(len(parts.sampled), 1), period_ns / max(busy_ns, 1.0)


def _mean_busy(sampled: Sampled) -> dict[str, float]:
    """Compute and copies of a sampled step by phase."""
    busy: dict[str, float] = {}
    for one in sampled.steps:
        for by_phase in (one.compute_by_phase_ns, one.copy_by_phase_ns):
            for name, value in by_phase.items():
                busy[name] = busy.get(name, 0.0) + value / len(sampled.steps)
    return busy


def _mean_time(timeline: Timeline, rows: Bools) -> float:
    return float(timeline.pieces.duration_ns[rows].sum()) / max(len(timeline.steps), 1)
