"""Causes that the diagnosis and the in-process monitor both know: limits, and what to do.

A rule looks at all ranks and prices what it finds; the monitor sees one rank while it trains. What
they call the same thing counts from the same limit on and is answered with the same words.
"""

from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold, Thresholds

MIN_DATA_PARALLEL_RATIO = Threshold(
    name="exposed_dp_min_ratio",
    default=0.10,
    meaning="share of the wall clock in transfers along dp that nothing hides",
)
MIN_STALL_RATIO = Threshold(
    name="input_min_stall_ratio",
    default=0.05,
    meaning="share of the step that waiting for data must take if all ranks wait alike",
)
NEAR_RATIO = Threshold(
    name="memory_near_capacity_ratio",
    default=0.9,
    meaning="share of the available memory from which it counts as nearly full",
)
CRITICAL_RATIO = Threshold(
    name="memory_critical_ratio",
    default=0.97,
    meaning="share of the available memory from which the next allocation may fail",
)

OVERLAP_TRANSFERS = "Overlap these transfers with backward: buckets, prefetch, fewer bytes."
KEEP_TP_INSIDE = "Keep tp groups inside a host and lower the degree as far as memory allows."
SHRINK_BUBBLE = (
    "Use more microbatches per step, balance the stages, or use a schedule with a smaller bubble."
)
FEED_FASTER = (
    "Give loaders more workers and a deeper queue, or move decoding out of the training process."
)
NEED_LESS_MEMORY = (
    "Recompute activations, take a smaller microbatch, or shard the optimizer's state over more "
    "ranks."
)


def grade_memory(used_ratio: float, thresholds: Thresholds) -> Severity:
    """Advice for memory that is nearly full."""
    return Severity.HIGH if used_ratio >= thresholds[CRITICAL_RATIO] else Severity.MEDIUM
