"""The phase or gap in which some steps of one rank spend their extra time.

The period of a step (from the end of the previous one) is split by phase, and the mean over the
slow steps is compared with the median over the others. Time outside phases counts as between steps
if it lies in the gap, else as unattributed. Wrong about the cause if the rank only waits in that
phase for another: pick the rank that works more in these steps.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.phases import assign_phases, order_steps, tabulate_phases
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.recording import Recording

BETWEEN_STEPS = "no phase (between steps)"
UNATTRIBUTED = "no phase (inside steps)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseExcess:
    """One phase in slow steps."""

    phase: str
    excess_ns: float
    """Mean in the slow steps minus median in the others."""


def find_excess(recording: Recording, slow: Int64s) -> tuple[PhaseExcess, ...]:
    """Phases by their excess in the steps numbered `slow`, largest first."""
    steps = order_steps(recording.read("steps"))
    placed, _ = assign_phases(steps, recording.read("spans"))
    table = tabulate_phases(placed, recording.names, num_steps=len(steps))
    gap_phases, step_phases = table.total_ns[0:-1:2], table.in_steps_ns
    gap = np.append(0, (steps.start_ns[1:] - steps.end_ns[:-1]) * steps.is_followed)
    rows = np.column_stack(
        [
            gap_phases + step_phases,
            gap - gap_phases.sum(axis=1),
            steps.duration_ns - step_phases.sum(axis=1),
        ]
    )[1:]
    is_slow = np.isin(steps.step[1:], slow)
    if not is_slow.any() or is_slow.all():
        return ()
    usual = np.median(rows[~is_slow], axis=0)
    # The first checkpoint or evaluation may take far longer than all others.
    excess = np.median(rows[is_slow], axis=0) - usual
    if not (excess > 0).any():
        excess = rows[is_slow].mean(axis=0) - usual
    names = [*table.phases, BETWEEN_STEPS, UNATTRIBUTED]
    found = [
        PhaseExcess(phase=name, excess_ns=float(value))
        for name, value in zip(names, excess, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: -one.excess_ns))
