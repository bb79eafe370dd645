"""What it costs that the allocator had to empty its cache: longer steps wherever its count rose.

Before an allocation is repeated, the allocator gives its cached blocks back to the driver, which
waits for the device, and takes new ones for a while after. The count of retries is read between
steps, so a rise belongs to the steps since the last reading: what those took, from start to start,
beyond the median of the steps without a rise.

Wrong where something else made the same steps longer, and too low where all steps are slower since
memory is short.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Columns, int64_column

_MIN_QUIET_STEPS = 8
"""Fewer steps without a retry do not say what a step takes without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCost:
    """Time that steps with retries took beyond those without."""

    num_retries: int
    """In the steps compared."""
    excess_ns: float
    """All together."""
    per_step_ns: float
    """The same over all steps compared, with and without retries."""
    step_ns: float
    """Mean time from the start of a step to that of the next, over the same."""

    @property
    def per_retry_ns(self) -> float:
        return self.excess_ns / self.num_retries


def measure_retry_cost(
    steps: Columns, read_step: Int64s, num_retries: Int64s
) -> RetryCost | Unavailable:
    """`num_retries` as it was read after the steps `read_step`, in order."""
    rises = np.diff(num_retries)
    if not (rises > 0).any():
        return Unavailable("no retry between two readings")
    start = int64_column(steps, "start_host_mono_ns")
    order = np.argsort(start, kind="stable")
    number, period = int64_column(steps, "step")[order][:-1], np.diff(start[order])
    reading = np.searchsorted(read_step, number, side="left")
    # From the first reading on, until the last; the step that ends with reading i is of rise i - 1.
    is_read = (reading > 0) & (reading < len(read_step))
    period, rise = period[is_read], rises[reading[is_read] - 1]
    quiet = period[rise == 0]
    if len(quiet) < _MIN_QUIET_STEPS:
        return Unavailable(f"only {len(quiet)} steps are known to be without a retry")
    excess_ns = float((period[rise > 0] - np.median(quiet)).sum())
    return RetryCost(
        num_retries=int(rises[rises > 0].sum()),
        excess_ns=max(excess_ns, 0.0),
        per_step_ns=max(excess_ns, 0.0) / len(period),
        step_ns=float(period.mean()),
    )
