"""What recording cost: the time inside the recorder on the steps in which it timed itself.

The recorder times its own hooks and calls on every 16th step. Warm-up steps are left out, because
the first one also opens the files. This is not the whole effect on training (caches, memory
bandwidth), which only a comparison with an unrecorded run shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.distribution import interpolate_percentile
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Columns, int64_column


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time inside the recorder per step, over the steps in which it was measured."""

    num_steps: int
    """Steps measured, all ranks together."""
    is_warmup_only: bool
    """Only warm-up steps were measured; the first one also opened the files."""
    median_ns: float
    p95_ns: float
    max_ns: int
    median_ratio: float | Unavailable
    """Of the step's duration; the median of the steps' ratios."""
    p95_ratio: float | Unavailable
    max_ratio: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverheadSamples:
    """The measured steps of one rank, in order of time."""

    cost_ns: Int64s
    duration_ns: Int64s
    num_warmup: int
    """First entries that are of warm-up steps."""


def sample_overhead(steps: Columns, num_warmup: int) -> OverheadSamples:
    """The rows of a rank's step table in which the recorder timed itself."""
    cost = int64_column(steps, "recorder_ns")
    measured = np.flatnonzero(cost >= 0)
    start = int64_column(steps, "start_host_mono_ns")[measured]
    return OverheadSamples(
        cost_ns=cost[measured],
        duration_ns=int64_column(steps, "end_host_mono_ns")[measured] - start,
        num_warmup=int(np.searchsorted(measured, num_warmup)),
    )


def measure_overhead(samples: Sequence[OverheadSamples]) -> Overhead | Unavailable:
    """The overhead over all ranks: after warm-up, where any step there is measured."""
    is_warmup_only = not any(len(sample.cost_ns) > sample.num_warmup for sample in samples)
    first = [0 if is_warmup_only else sample.num_warmup for sample in samples]
    pairs = list(zip(samples, first, strict=True))
    none_ns = np.empty(0, dtype=np.int64)
    cost = np.concatenate([none_ns, *(sample.cost_ns[at:] for sample, at in pairs)])
    if not len(cost):
        return Unavailable("the recorder timed itself in no step")
    duration = np.concatenate([none_ns, *(sample.duration_ns[at:] for sample, at in pairs)])
    ordered = np.sort(cost)
    is_timed = duration > 0
    ratios = np.sort(cost[is_timed] / duration[is_timed])
    none = Unavailable("the measured steps have no duration")
    return Overhead(
        num_steps=len(cost),
        is_warmup_only=is_warmup_only,
        median_ns=interpolate_percentile(ordered, 0.5),
        p95_ns=interpolate_percentile(ordered, 0.95),
        max_ns=int(ordered[-1]),
        median_ratio=interpolate_percentile(ratios, 0.5) if len(ratios) else none,
        p95_ratio=interpolate_percentile(ratios, 0.95) if len(ratios) else none,
        max_ratio=float(ratios[-1]) if len(ratios) else none,
    )
