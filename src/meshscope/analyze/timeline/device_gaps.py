"""Why devices had nothing to do, summed over the steps of a timeline. Only traces record it.

`trace_idle` found the cause of each gap.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.operations import MAX_SPAN_NS
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.run import Attempt

CAUSES: Mapping[str, str] = {
    "host": "the host was at something else",
    "synchronising": "behind a wait of the host for the device",
    "communicating": "the host was in a collective's call",
    "launch": "the launch was on its way",
    "dependency": "launched, and waiting for other work",
    "unknown": "not known",
}
"""Columns of table `device_gaps`, in words."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceGaps:
    ranks: tuple[int, ...]
    cause_ns: Int64s
    """[rank, cause], all steps of the timeline together; causes in the order of `CAUSES`."""

    def ns_by_rank(self, cause: str) -> Int64s:
        """[rank]: idle time of one cause."""
        found: Int64s = self.cause_ns[:, list(CAUSES).index(cause)]
        return found


def measure_gaps(attempt: Attempt, timeline: Timeline) -> DeviceGaps | Unavailable:
    sums = np.zeros((len(timeline.ranks), len(CAUSES)), dtype=np.int64)
    is_any = False
    for index, rank in enumerate(timeline.ranks):
        recording = attempt.ranks[rank]
        if not recording.has_table("device_gaps"):
            continue
        is_any = True
        columns = recording.read("device_gaps")
        inside = np.isin(int64_column(columns, "step"), timeline.steps)
        for column, cause in enumerate(CAUSES):
            values = int64_column(columns, f"{cause}_ns")
            is_good = inside & (values >= 0) & (values < MAX_SPAN_NS)
            sums[index, column] = int(values[is_good].sum())
    if not is_any:
        return Unavailable("only traces of a profiler say why a device had nothing to do")
    return DeviceGaps(ranks=timeline.ranks, cause_ns=sums)
