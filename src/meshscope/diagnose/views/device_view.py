"""What rules about idle devices share: where devices had nothing to do, and why."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.device_parts import CAUSES, DeviceParts
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import known
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import MEASURED, Confidence, ConfidenceLevel, Evidence
from meshscope.numerics.chance import MIN_STEPS
from meshscope.store.read.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonTime:
    """What all ranks have of some parts of their devices' time.

    What one rank has beyond its peers is its own: rules about slow ranks and slow input name it.
    """

    total_ns: float
    ratio: Floats
    """[rank]: which part of its own time that is."""


def measure_common(context: Context, parts: DeviceParts, *names: str) -> CommonTime:
    own = np.sum([parts.ns_by_rank(name) for name in names], axis=0).astype(np.float64)
    common = own.copy()
    work = known(context.study.peer_work)
    for group in () if work is None else work.groups:
        for index in group.indices:
            others = [own[other] for other in group.indices if other != index]
            common[index] = min(own[index], float(np.median(others)))
    return CommonTime(total_ns=float(common.sum()), ratio=common / np.maximum(own, 1.0))


PROFILED = Confidence(
    level=ConfidenceLevel.MEDIUM,
    text="counted; but a profiler slows the host, and gaps are shorter without it",
)


def has_enough_steps(
    context: Context, timeline: Timeline, sampled: DeviceParts | None = None
) -> bool:
    """A profiler sees every gap, so one step of a trace is enough where recorded runs need ten:
    marked ones, and up to half of them `sampled` where samples alone show what is looked for."""
    if context.study.attempt.is_from_traces:
        return len(timeline.steps) >= 1
    counts = () if sampled is None else (len(one.steps) for one in sampled.sampled.values())
    return len(timeline.steps) + min(min(counts, default=0), MIN_STEPS // 2) >= MIN_STEPS


def state_confidence(context: Context) -> Confidence:
    """How sure what is said about the parts of a device's time is."""
    if context.study.attempt.is_from_traces:
        return PROFILED
    budget = known(context.study.budget)
    evidence = None if budget is None else known(budget.evidence)
    if evidence is None:
        return MEASURED
    return Confidence(level=ConfidenceLevel.HIGH, text=f"estimated from {evidence}")


def list_causes(context: Context, num_rank_steps: int) -> Iterable[Evidence]:
    """Idle time by cause per rank and step, the largest first."""
    parts = known(context.study.device_parts)
    if parts is None:
        return
    totals = {cause: parts.total_ns(cause) for cause in CAUSES}
    for cause in sorted(totals, key=lambda one: -totals[one]):
        if totals[cause]:
            value = totals[cause] / max(num_rank_steps, 1)
            yield Evidence(name=f"idle, {CAUSES[cause]}", value=value, unit="ns")
