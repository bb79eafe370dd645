"""Which shares of a step are bottlenecks, how bad they are, and what to try.

What is recoverable is an upper bound: the whole share. `meshscope report` prices by replay.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshscope.capture.monitor.monitor_results import Bottleneck, MonitorThresholds, Severity
from meshscope.core.unavailable import Unavailable

FIXES = {
    "dp": "overlap the reduction with backward (larger or earlier buckets), accumulate more "
    "microbatches per update, or look for a late rank with `meshscope report`",
    "tp": "keep tensor-parallel ranks on one host, lower tp, or use sequence parallelism",
    "pp": "use more microbatches per step, balance the stages, or a schedule with more chunks",
    "communication": "see by axis and rank where it is exposed with `meshscope report "
    "--communication`",
    "input": "more loader workers, prefetching, or a faster source",
    "memory": "recompute activations, use a smaller microbatch, or shard more",
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
    """The one with the most to win first; memory, which ends a run, before all."""
    found = [
        *_find_memory(shares, thresholds),
        *_find_communication(shares, thresholds),
        *_find_input(shares, thresholds),
        *_find_pipeline(shares, thresholds),
    ]
    found.sort(key=lambda one: (one.recoverable_ns is not None, -(one.recoverable_ns or 0)))
    return tuple(found)


def _find_memory(shares: Shares, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    used = shares.memory_used
    if not isinstance(used, Unavailable) and used >= thresholds.memory_used_ratio:
        where = "the device's memory" if shares.is_device_memory else "the memory its host allows"
        yield Bottleneck(
            category="memory",
            severity=Severity.CRITICAL,
            description=f"this rank needs {used:.0%} of {where}",
            suggested_fix=FIXES["memory"],
            recoverable_ns=None,
        )


def _find_communication(shares: Shares, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    """By axis, where the axis is known. Waiting in a pipeline is its bubble, which has a verdict of
    its own."""
    has_pipeline = not isinstance(shares.pipeline, Unavailable)
    for axis, share in shares.by_axis.items():
        if share >= thresholds.communication_ratio and not (axis == "pp" and has_pipeline):
            known = next((name for name in axis.split("+") if name in FIXES), "communication")
            yield Bottleneck(
                category=known,
                severity=thresholds.grade(share),
                description=f"communication over {axis} holds this rank up for {share:.1%} of the "
                f"step ({share * shares.step_ns / 1e6:.3g} ms), waiting for others included",
                suggested_fix=FIXES[known],
                recoverable_ns=round(share * shares.step_ns),
            )


def _find_input(shares: Shares, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    share = shares.input
    if not isinstance(share, Unavailable) and share >= thresholds.input_ratio:
        yield Bottleneck(
            category="input",
            severity=thresholds.grade(share),
            description=f"waiting for data takes {share:.1%} of the step "
            f"({share * shares.step_ns / 1e6:.3g} ms)",
            suggested_fix=FIXES["input"],
            recoverable_ns=round(share * shares.step_ns),
        )


def _find_pipeline(shares: Shares, thresholds: MonitorThresholds) -> Iterator[Bottleneck]:
    used, plain = shares.pipeline, shares.plain_pipeline
    if isinstance(used, Unavailable) or isinstance(plain, Unavailable):
        return
    excess = plain - used
    if excess >= thresholds.bubble_excess_ratio:
        yield Bottleneck(
            category="pp",
            severity=thresholds.grade(excess),
            description=f"the pipeline keeps this rank busy for {used:.1%} of the step, where its "
            f"schedule allows {plain:.1%}",
            suggested_fix=FIXES["pp"],
            recoverable_ns=round(excess * shares.step_ns),
        )
