"""The operations of all ranks, matched and on one clock: what a job did together, made once.

    load_operations → doubt_ends → match_operations → align_clocks → align_rows → measure_arrivals
    → load_waits

A job without communication has no rows; other records then tie its clocks together.
"""

from dataclasses import dataclass

from meshscope.analyze.job.any_source import find_senders
from meshscope.analyze.job.arrivals import (
    AlignedTimes,
    Arrivals,
    RowTimes,
    align_rows,
    measure_arrivals,
)
from meshscope.analyze.job.clocks import ClockAlignment, align_clocks
from meshscope.analyze.job.host_clocks import find_host_clocks
from meshscope.analyze.job.kernel_operations import doubt_ends
from meshscope.analyze.job.matching import Matches, match_operations
from meshscope.analyze.job.operations import Operations, Waits, load_operations, load_waits
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.run import Attempt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """The operations of an attempt, or of the steps that were read."""

    attempt: Attempt
    """What was read; narrowed to windows of time if not all steps were."""
    operations: Operations
    matches: Matches
    times: AlignedTimes
    """On the reference clock."""
    row_times: RowTimes
    arrivals: Arrivals
    num_clock_errors: int
    """Rows that end 10 ms or more before the operation can have started; their transfer is 0."""
    alignment: ClockAlignment
    waits: Waits


def load_job(
    attempt: Attempt, alignment: ClockAlignment | None = None, unwatched: Int64s | None = None
) -> Job:
    """With `alignment`, clocks are taken to be as it says: that of more steps than these.

    `unwatched`: steps whose communication some rank did not record, where they are known.
    """
    operations = doubt_ends(attempt, load_operations(attempt, unwatched))
    host_clocks = find_host_clocks(attempt)
    operations = find_senders(operations, host_clocks)
    matches = match_operations(operations, host_clocks)
    if alignment is None:
        alignment = align_clocks(attempt, operations.rows, matches, host_clocks)
    times = align_rows(operations.rows, alignment)
    row_times, arrivals, num_clock_errors = measure_arrivals(operations, matches, times, alignment)
    return Job(
        attempt=attempt,
        operations=operations,
        matches=matches,
        times=times,
        row_times=row_times,
        arrivals=arrivals,
        num_clock_errors=num_clock_errors,
        alignment=alignment,
        waits=load_waits(attempt, operations, unwatched),
    )
