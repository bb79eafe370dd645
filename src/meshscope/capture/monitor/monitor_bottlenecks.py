"""Which shares of a step are bottlenecks, how bad they are, and what to try.

What is recoverable is an upper bound: the whole share. `meshscope report` prices by replay.
"""

from collections.abc import Iterator

from meshscope.capture.monitor.monitor_results import (
    Bottleneck,
    MonitorAnalysis,
    MonitorThresholds,
)
from meshscope.core.unavailable import known
from meshscope.core.unit_text import duration, ratio
from meshscope.core.verdict.advice import (
    FEED_FASTER,
    KEEP_TP_INSIDE,
    NEED_LESS_MEMORY,
    OVERLAP_TRANSFERS,
    SHRINK_BUBBLE,
    grade_memory,
)
from meshscope.core.verdict.severity import grade
from meshscope.core.verdict.thresholds import Thresholds

_ADVICE = {
    "dp": OVERLAP_TRANSFERS,
    "tp": KEEP_TP_INSIDE,
    "pp": SHRINK_BUBBLE,
    "communication": "See by axis and rank where it is exposed: `meshscope report "
    "--communication`.",
    "input": FEED_FASTER,
    "memory": NEED_LESS_MEMORY,
}


def find_bottlenecks(
    analysis: MonitorAnalysis, step_ns: float, thresholds: MonitorThresholds
) -> tuple[Bottleneck, ...]:
    """The one with the most to save first; memory, which ends a run, before all. `step_ns`: the
    median step, of which the shares are."""
    losses = [
        Bottleneck(
            category=category,
            severity=grade(share),
            description=description,
            suggested_fix=_ADVICE[category],
            recoverable_ns=round(share * step_ns),
        )
        for category, share, description in _find_losses(analysis, step_ns, thresholds)
    ]
    losses.sort(key=lambda one: -(one.recoverable_ns or 0))
    return (*_find_memory(analysis, thresholds), *losses)


def _find_memory(analysis: MonitorAnalysis, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    used = known(analysis.memory_used_ratio)
    if used is not None and used >= thresholds.memory_used_ratio:
        yield Bottleneck(
            category="memory",
            severity=grade_memory(used, Thresholds()),
            description=f"this rank needs {ratio(used)} of the memory there is",
            suggested_fix=_ADVICE["memory"],
            recoverable_ns=None,
        )


def _find_losses(
    analysis: MonitorAnalysis, step_ns: float, thresholds: MonitorThresholds
) -> Iterator[tuple[str, float, str]]:
    """Category, share and description of what takes too much of a step. Waiting in a pipeline is
    its bubble."""

    def show(share: float) -> str:
        return f"{ratio(share)} of the step ({duration(share * step_ns)})"

    used = known(analysis.pipeline_utilization_ratio)
    plain = known(analysis.pipeline_plain_ratio)
    for axis, share in analysis.communication_ratio_by_axis.items():
        if share >= thresholds.communication_ratio and not (axis == "pp" and used is not None):
            category = next((one for one in axis.split("+") if one in _ADVICE), "communication")
            text = f"communication over {axis} holds this rank up for {show(share)}, "
            yield category, share, f"{text}waiting for others included"
    waiting = known(analysis.input_ratio)
    if waiting is not None and waiting >= thresholds.input_ratio:
        yield "input", waiting, f"waiting for data takes {show(waiting)}"
    if used is not None and plain is not None and plain - used >= thresholds.bubble_excess_ratio:
        text = f"the pipeline keeps this rank busy for {ratio(used)} of the step, where its "
        yield "pp", plain - used, f"{text}schedule allows {ratio(plain)}"
