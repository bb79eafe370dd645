"""Prices of findings: severity from a gain, hours saved over the run, and joined edits.

Two findings cover the same waits if fixing both saves hardly more than fixing one. A replay tells:
the two edits are joined, and the second finding gets what it adds to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity, grade
from meshscope.diagnose.finding import Estimate
from meshscope.simulate.what_if import Edit, Gain
from meshscope.store.read.arrays import Int64s

_NS_PER_HOUR = 3.6e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What a saving per step is multiplied by."""

    num_steps: int
    """Steps the attempt finished, warm-up included."""
    num_ranks: int
    has_accelerators: bool

    @property
    def hours_unit(self) -> str:
        """`GPU-hours` only with accelerators."""
        return "GPU-hours" if self.has_accelerators else "rank-hours"


def recoverable_hours(gain: Gain | Estimate | Unavailable, scale: Scale) -> float | Unavailable:
    """Rank hours that the run would have saved: saved per step x steps x ranks."""
    if isinstance(gain, Unavailable):
        return gain
    return max(0.0, float(gain.saved_ns)) * scale.num_steps * scale.num_ranks / _NS_PER_HOUR


def severity_of(
    gain: Gain | Estimate | Unavailable, *, otherwise: float | Unavailable | None = None
) -> Severity:
    """`severity.grade` of a gain."""
    ratio = gain if isinstance(gain, Unavailable) else gain.saved_ratio
    return grade(ratio) if otherwise is None else grade(ratio, otherwise=otherwise)


def join_edits(timeline: Timeline, edits: Sequence[Edit]) -> Edit:
    """One edit that does what all of them do; the shorter duration holds if two change the same."""
    pieces = timeline.pieces
    work = [edit.work_ns for edit in edits if edit.work_ns is not None]
    transfer = [edit.transfer_ns for edit in edits if edit.transfer_ns is not None]
    joined_transfer = None
    if transfer and timeline.communication is not None:
        joined_transfer = _join(timeline.communication.row_times.transfer_ns, transfer)
    return Edit(
        name=" and ".join(edit.name for edit in edits),
        work_ns=_join(pieces.end_ns - pieces.start_ns, work) if work else None,
        transfer_ns=joined_transfer,
    )


def _join(measured: Int64s, edited: Sequence[Int64s]) -> Int64s:
    """Elementwise: a value that one edit left as measured is taken from the others."""
    joined = edited[0].astype(np.int64)
    for other in edited[1:]:
        shorter = np.minimum(joined, other)
        joined = np.where(joined == measured, other, np.where(other == measured, joined, shorter))
    return joined
