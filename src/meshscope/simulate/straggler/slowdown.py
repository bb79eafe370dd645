"""How much slower a job was than an even one, and why: S, its parts, M_W and M_S.

T is the replay with measured durations, T_ideal the replay with even ones: the mean for work
(moving work around keeps its sum), the median for communication (outliers have outside causes).
S = T / T_ideal; waste = 1 - 1/S. S of a part is the replay in which only that part keeps its
measured durations, over T_ideal. A share of the excess T - T_ideal is given twice: `removed` (only
that part made even) and `added_alone` (only that part left as measured); they differ if causes
interact. After "Understanding Stragglers in Large Model Training Using What-if Analysis",
OSDI'25.

Wrong if the even share cannot be reached, for example if stages must differ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshscope.core.unavailable import Unavailable
from meshscope.simulate.what_if import Fidelity

K = TypeVar("K", int, str)

_WORST_WORKERS_RATIO = 0.03
"""The share of workers that M_W makes even (OSDI'25)."""
MIN_EXCESS_RATIO = 1e-6
"""Shares of a smaller excess over T_ideal are meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What part of the excess T - T_ideal one culprit explains; may be outside 0..1."""

    removed: float
    """(T - T with the culprit even) / (T - T_ideal)."""
    added_alone: float
    """(T with only the culprit as measured - T_ideal) / (T - T_ideal)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """The answer for one job; times are means over steps."""

    fidelity: Fidelity
    step_ns: float
    """T."""
    ideal_ns: float
    """T_ideal."""
    by_type: Mapping[str, float]
    """S_t: op type to slowdown, the largest first."""
    by_axis: Mapping[str, Mapping[int, float]]
    """Axis to the coordinate along it to slowdown, the largest first."""
    by_worker: Mapping[int, float]
    """S_w: rank to slowdown, the largest first."""
    worst_workers: tuple[int, ...]
    """The 3 % that M_W is about, at least one."""
    worst_share: Share | Unavailable
    """Its `removed` is M_W."""
    last_stage_share: Share | Unavailable
    """Its `removed` is M_S."""

    @property
    def slowdown(self) -> float:
        """S."""
        return self.step_ns / self.ideal_ns if self.ideal_ns else 1.0

    @property
    def waste_ratio(self) -> float:
        """1 - 1/S: the share of the time that an even job would not have needed."""
        return 1 - self.ideal_ns / self.step_ns if self.step_ns else 0.0


def count_worst(num_workers: int) -> int:
    return max(1, math.ceil(num_workers * _WORST_WORKERS_RATIO - 1e-9))


def choose_worst(by_worker: Mapping[int, float], num_workers: int | None = None) -> tuple[int, ...]:
    """The slowest 3 % of all workers; ties go to the lower rank."""
    ordered = sorted(by_worker, key=lambda rank: (-by_worker[rank], rank))
    return tuple(ordered[: count_worst(len(ordered) if num_workers is None else num_workers)])


def share_excess(
    *, step_ns: float, ideal_ns: float, removed_ns: float, alone_ns: float
) -> Share | Unavailable:
    excess = step_ns - ideal_ns
    if abs(excess) <= MIN_EXCESS_RATIO * step_ns:
        return Unavailable("the job is as fast as an even one, so there is no excess to share out")
    return Share(
        removed=(step_ns - removed_ns) / excess, added_alone=(alone_ns - ideal_ns) / excess
    )


def sort_slowdowns(found: Mapping[K, float]) -> dict[K, float]:
    return dict(sorted(found.items(), key=lambda item: -item[1]))
