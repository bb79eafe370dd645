"""One trace in numbers: each device's time, why it idled, what it ran; and what the host did."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.intervals import unite
from meshscope.analyze.trace_collectives import TraceCollective, list_collectives
from meshscope.analyze.trace_idle import IdleTime, explain_idle
from meshscope.analyze.trace_kernels import (
    KernelClasses,
    Recognition,
    Work,
    classify_kernels,
)
from meshscope.analyze.trace_modules import ModuleRow, tabulate_modules
from meshscope.analyze.trace_roofline import OperatorRate, measure_rates
from meshscope.analyze.trace_steps import TraceSteps, assign_steps, find_launches, find_steps
from meshscope.analyze.trace_tables import (
    KernelRow,
    OperatorRow,
    find_operators,
    tabulate_kernels,
    tabulate_operators,
)
from meshscope.analyze.trace_time import (
    DeviceBreakdown,
    break_down_devices,
    find_devices,
    unite_work,
)
from meshscope.core.unavailable import Unavailable
from meshscope.store.trace_columns import Category, Trace, TraceCounts

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchQueue:
    """How far ahead of the device its host was, over the device work whose launch is known.

    The delay is from the begin of the launching call to the begin of the work: short delays mean
    that the device waited for its host."""

    num_launches: int
    median_delay_ns: float
    p5_delay_ns: float
    p95_delay_ns: float
    num_graph_kernels: int
    """Launched by a graph: one call for many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """One device."""

    breakdown: DeviceBreakdown
    idle: IdleTime
    launches: LaunchQueue | Unavailable
    kernels: tuple[KernelRow, ...]
    operators: tuple[OperatorRow, ...]
    rates: tuple[OperatorRate, ...]
    modules: tuple[ModuleRow, ...]
    collectives: tuple[TraceCollective, ...]
    symmetric_ns: int
    """Of compute: kernels that communicate over symmetric memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """What the host's threads did, for traces without a device."""

    total_ns: int
    operator_ns: int
    """The union of all operators of all threads."""
    communication_ns: int
    """The union of the collectives' calls."""
    steps: tuple[tuple[int, int], ...]
    """Number and length of each profiler step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One trace."""

    source: str
    rank: int | Unavailable
    world_size: int | Unavailable
    counts: TraceCounts
    recognition: Recognition
    warnings: tuple[str, ...]
    devices: tuple[DeviceSummary, ...]
    host: HostSummary


def summarize_trace(trace: Trace) -> TraceSummary:
    """Everything that one trace alone can tell."""
    classes = classify_kernels(trace)
    steps = find_steps(trace)
    launch = find_launches(trace)
    operator_of = find_operators(trace, launch)
    step_of = assign_steps(trace, steps, launch)
    device_of = find_devices(trace, classes.work)
    devices = tuple(
        _summarize_device(
            trace,
            classes,
            breakdown,
            np.flatnonzero(device_of == breakdown.device),
            launch,
            operator_of,
        )
        for breakdown in break_down_devices(trace, classes, steps, step_of)
    )
    return TraceSummary(
        source=trace.source,
        rank=trace.rank,
        world_size=trace.world_size,
        counts=trace.counts,
        recognition=classes.recognition,
        warnings=(*trace.warnings, *classes.recognition.warnings),
        devices=devices,
        host=_summarize_host(trace, steps),
    )


def _summarize_device(
    trace: Trace,
    classes: KernelClasses,
    breakdown: DeviceBreakdown,
    rows: Int64s,
    launch: Int64s,
    operator_of: Int64s,
) -> DeviceSummary:
    compute = unite_work(trace, classes, rows, Work.COMPUTE)
    symmetric = rows[classes.is_symmetric[rows]]
    operators = tabulate_operators(trace, rows, operator_of)
    return DeviceSummary(
        breakdown=breakdown,
        idle=explain_idle(trace, rows, launch, breakdown.begin_ns, breakdown.end_ns),
        launches=_measure_launches(trace, rows, launch),
        kernels=tabulate_kernels(trace, classes, rows),
        operators=operators,
        rates=measure_rates(operators, breakdown.name),
        modules=tabulate_modules(trace, rows, launch),
        collectives=list_collectives(trace, classes, rows, compute, operator_of),
        symmetric_ns=unite(
            trace.events.begin_ns[symmetric], trace.events.end_ns[symmetric]
        ).total_ns,
    )


def _measure_launches(trace: Trace, rows: Int64s, launch: Int64s) -> LaunchQueue | Unavailable:
    events = trace.events
    known = rows[launch[rows] >= 0]
    if not len(known):
        return Unavailable("no launching call of this device's work is in the trace")
    delay = events.begin_ns[known] - events.begin_ns[launch[known]]
    is_graph = _name_has(trace, launch[known], "graphlaunch")
    low, middle, high = np.percentile(delay, [5, 50, 95]).tolist()
    return LaunchQueue(
        num_launches=len(known),
        median_delay_ns=middle,
        p5_delay_ns=low,
        p95_delay_ns=high,
        num_graph_kernels=int(np.count_nonzero(is_graph)),
    )


def _name_has(trace: Trace, rows: Int64s, part: str) -> npt.NDArray[np.bool_]:
    names = trace.events.name[rows]
    wanted = [
        place
        for place in np.unique(names).tolist()
        if place >= 0 and part in trace.strings[place].lower()
    ]
    return np.isin(names, np.array(wanted, dtype=np.int64))


def _summarize_host(trace: Trace, steps: TraceSteps) -> HostSummary:
    events = trace.events
    operators = np.flatnonzero(events.category == Category.CPU_OP)
    calls = operators[_name_has(trace, operators, "c10d::") | _name_has(trace, operators, "gloo:")]
    annotations = np.flatnonzero(events.category == Category.ANNOTATION)
    named = annotations[
        _name_has(trace, annotations, "gloo:") | _name_has(trace, annotations, "nccl:")
    ]
    calls = np.concatenate([calls, named])
    host = np.concatenate([operators, annotations])
    begin, end = events.begin_ns[host], events.end_ns[host]
    return HostSummary(
        total_ns=int(end.max() - begin.min()) if len(host) else 0,
        operator_ns=unite(events.begin_ns[operators], events.end_ns[operators]).total_ns,
        communication_ns=unite(events.begin_ns[calls], events.end_ns[calls]).total_ns,
        steps=tuple(
            zip(steps.number.tolist(), (steps.end_ns - steps.begin_ns).tolist(), strict=True)
        ),
    )
