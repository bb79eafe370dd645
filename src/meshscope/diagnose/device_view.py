"""What rules about idle devices share: where devices had nothing to do, and why."""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.timeline.device_gaps import CAUSES
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import known
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import MEASURED, Confidence, ConfidenceLevel, Evidence
from meshscope.numerics.chance import MIN_STEPS
from meshscope.store.read.arrays import Bools

PROFILED = Confidence(
    level=ConfidenceLevel.MEDIUM,
    text="counted; but a profiler slows the host, and gaps are shorter without it",
)


def has_enough_steps(context: Context, timeline: Timeline) -> bool:
    """A profiler sees every gap, so one step of a trace is enough where marked runs need ten."""
    return len(timeline.steps) >= (1 if context.study.attempt.is_from_traces else MIN_STEPS)


def find_gap_pieces(timeline: Timeline) -> Bools:
    """Pieces in which a device had nothing to do, no operation ran and no phase explains it."""
    pieces = timeline.pieces
    on_device = timeline.on_device[np.searchsorted(np.array(timeline.ranks), pieces.rank)]
    found: Bools = on_device & (pieces.kind == PieceKind.WORK) & (pieces.phase == 0)
    found &= pieces.row < 0
    return found


def state_confidence(context: Context) -> Confidence:
    return PROFILED if context.study.attempt.is_from_traces else MEASURED


def list_causes(context: Context, num_rank_steps: int) -> Iterable[Evidence]:
    """Idle time by cause per rank and step, the largest first."""
    gaps = known(context.study.device_gaps)
    if gaps is None:
        return
    totals = dict(zip(CAUSES, gaps.cause_ns.sum(axis=0).tolist(), strict=True))
    for cause in sorted(totals, key=lambda one: -totals[one]):
        if totals[cause]:
            value = totals[cause] / max(num_rank_steps, 1)
            yield Evidence(name=f"idle, {CAUSES[cause]}", value=value, unit="ns")
