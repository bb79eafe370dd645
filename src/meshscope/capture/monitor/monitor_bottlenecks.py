"""Which shares of a step are bottlenecks, how bad they are, and what to try.

What is recoverable is an upper bound: the whole share. `meshscope report` prices by replay.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.capture.monitor.monitor_results import Bottleneck, MonitorThresholds
from meshscope.core.unavailable import Unavailable, known
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

ADVICE = {
    "dp": OVERLAP_TRANSFERS,
    "tp": KEEP_TP_INSIDE,
    "pp": SHRINK_BUBBLE,
    "communication": "See by axis and rank where it is exposed: `meshscope report "
    "--communication`.",
    "input": FEED_FASTER,
    "memory": NEED_LESS_MEMORY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the median step."""

    step_ns: float
    communication: float | Unavailable
    by_axis: dict[str, float]
    input: float | Unavailable
    pipeline: float | Unavailable
    plain_pipeline: float | Unavailable
    memory_used: float | Unavailable
    is_device_memory: bool


def find_bottlenecks(shares: Shares, thresholds: MonitorThresholds) -> tuple[Bottleneck, ...]:
    """The one with the most to save first; memory, which ends a run, before all."""
    found = [*_find_memory(shares, thresholds), *_find_losses(shares, thresholds)]
    found.sort(key=lambda one: (one.recoverable_ns is not None, -(one.recoverable_ns or 0)))
    return tuple(found)


def _find_memory(shares: Shares, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    used = known(shares.memory_used)
    if used is not None and used >= thresholds.memory_used_ratio:
        where = "the device's memory" if shares.is_device_memory else "the memory its host allows"
        yield Bottleneck(
            category="memory",
            severity=grade_memory(used, Thresholds()),
            description=f"this rank needs {ratio(used)} of {where}",
            suggested_fix=ADVICE["memory"],
            recoverable_ns=None,
        )


def _find_losses(shares: Shares, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    """What takes too much of a step. Waiting in a pipeline is its bubble."""
    used, plain = known(shares.pipeline), known(shares.plain_pipeline)
    for axis, share in shares.by_axis.items():
        if share >= thresholds.communication_ratio and not (axis == "pp" and used is not None):
            category = next((one for one in axis.split("+") if one in ADVICE), "communication")
            text = f"communication over {axis} holds this rank up for {_show(share, shares)}, "
            yield _lose(category, share, shares, f"{text}waiting for others included")
    waiting = known(shares.input)
    if waiting is not None and waiting >= thresholds.input_ratio:
        text = f"waiting for data takes {_show(waiting, shares)}"
        yield _lose("input", waiting, shares, text)
    if used is not None and plain is not None and plain - used >= thresholds.bubble_excess_ratio:
        text = f"the pipeline keeps this rank busy for {ratio(used)} of the step, where its "
        yield _lose("pp", plain - used, shares, f"{text}schedule allows {ratio(plain)}")


def _show(share: float, shares: Shares) -> str:
    return f"{ratio(share)} of the step ({duration(share * shares.step_ns)})"


def _lose(category: str, share: float, shares: Shares, description: str) -> Bottleneck:
    return Bottleneck(
        category=category,
        severity=grade(share),
        description=description,
        suggested_fix=ADVICE[category],
        recoverable_ns=round(share * shares.step_ns),
    )
