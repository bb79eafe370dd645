"""One trace in numbers: each device's time, why it idled, what it ran; and what the host did."""

from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.device.trace_launches import LaunchQueue, find_graph_work, measure_launches
from meshscope.analyze.device.trace_memory import MemoryUse, measure_memory
from meshscope.analyze.device.trace_modules import (
    ModuleClassRow,
    ModuleRow,
    roll_up,
    tabulate_modules,
)
from meshscope.analyze.device.trace_roofline import (
    Coverage,
    OperatorRate,
    measure_coverage,
    measure_rates,
)
from meshscope.core.hardware import find_device
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Trace, TraceCounts
from meshscope.ingest.traces.trace_axes import find_rank
from meshscope.ingest.traces.trace_collectives import TraceCollective
from meshscope.ingest.traces.trace_communication import (
    AxisRow,
    CollectiveColumns,
    as_columns,
    tabulate_axes,
)
from meshscope.ingest.traces.trace_host import HostSummary
from meshscope.ingest.traces.trace_idle import explain_idle, find_gaps
from meshscope.ingest.traces.trace_kernels import (
    Recognition,
    Work,
)
from meshscope.ingest.traces.trace_spans import find_ends, unite_events
from meshscope.ingest.traces.trace_steps import (
    StepSource,
    measure_unrecorded,
    note_steps,
    split_by_step,
)
from meshscope.ingest.traces.trace_tables import (
    CategoryRow,
    KernelRow,
    OperatorRow,
    tabulate_categories,
    tabulate_kernels,
    tabulate_operators,
)
from meshscope.ingest.traces.trace_time import (
    DeviceBreakdown,
    break_down_devices,
    unite_work,
)
from meshscope.ingest.traces.trace_view import TraceView
from meshscope.numerics.idle_gaps import IdleGaps, IdleTime
from meshscope.store.read.arrays import Int64s, find_true


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """One step on one device, beside its times: why it idled, whom it talked to."""

    step: int
    idle: IdleTime
    """Sums to the step's idle time."""
    communication: tuple[AxisRow, ...]
    """Sums to the step's communication and exposed communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """One device."""

    breakdown: DeviceBreakdown
    idle: IdleTime
    communication: tuple[AxisRow, ...]
    """By axis and kind; sums to the device's."""
    steps: tuple[DeviceStep, ...]
    launches: LaunchQueue | Unavailable
    categories: tuple[CategoryRow, ...]
    """The time of all device events by what they are for."""
    kernels: tuple[KernelRow, ...]
    operators: tuple[OperatorRow, ...]
    rates: tuple[OperatorRate, ...]
    coverage: Coverage
    """Of how much of the device's time there are rates."""
    modules: tuple[ModuleRow, ...]
    module_classes: tuple[ModuleClassRow, ...]
    collectives: tuple[TraceCollective, ...]
    exposed_spans: tuple[tuple[int, int], ...]
    """When communication was exposed, begin and end."""
    symmetric_ns: int
    """Of compute: kernels that communicate over symmetric memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One trace."""

    source: str
    rank: int | Unavailable
    world_size: int | Unavailable
    num_groups: int
    """Process groups in the header's table."""
    counts: TraceCounts
    recognition: Recognition
    step_source: StepSource
    """How the steps were found."""
    warnings: tuple[str, ...]
    devices: tuple[DeviceSummary, ...]
    host: HostSummary
    unrecorded_ns: int = 0
    """Between steps while the profiler was off; devices count it as idle, for the host's sake."""
    memory: tuple[MemoryUse, ...] = ()
    """Of each allocator; none where the profiler was not asked (`profile_memory=True`)."""


def summarize_trace(
    trace: Trace,
    *,
    layout: Layout | None = None,
    view: TraceView | None = None,
    device_name: str = "",
) -> TraceSummary:
    """Everything that one trace alone can tell; a layout names axes that the trace does not.

    `view` is what was found out about it already, with the layout; `device_name` what its devices
    are, where it does not say or names no known product.
    """
    view = view or TraceView(trace, layout)
    classes = view.classes
    host = view.host  # ahead of what is kept for every event of the devices: it takes most memory
    devices = tuple(
        _summarize_device(
            view,
            breakdown if breakdown.name else replace(breakdown, name=device_name),
            find_true(view.device_of == breakdown.device),
            device_name,
        )
        for breakdown in break_down_devices(
            trace, classes, view.steps, view.step_of, view.device_of, view.spans_of
        )
    )
    return TraceSummary(
        source=trace.source,
        rank=find_rank(trace),
        world_size=trace.world_size,
        num_groups=len(trace.groups),
        counts=trace.counts,
        recognition=classes.recognition,
        step_source=view.steps.source,
        warnings=(
            *trace.warnings,
            *classes.recognition.warnings,
            *note_steps(trace, view.steps),
        ),
        devices=devices,
        host=host,
        unrecorded_ns=measure_unrecorded(trace, view.steps),
        memory=measure_memory(trace, view.steps),
    )


def _summarize_device(
    view: TraceView, breakdown: DeviceBreakdown, rows: Int64s, device_name: str
) -> DeviceSummary:
    """`device_name` has the peaks where what the trace says is no known product."""
    is_known = not isinstance(find_device(breakdown.name), Unavailable)
    trace, classes, launch = view.trace, view.classes, view.launch
    spans = view.spans_of[breakdown.device]
    beside, exposed = spans.compute, spans.exposed
    symmetric = rows[classes.is_symmetric[rows]]
    operators = tabulate_operators(trace, classes, rows, view.operator_of)
    kernels = tabulate_kernels(trace, classes, rows, view.operator_of)
    rates = measure_rates(operators, breakdown.name if is_known else device_name or breakdown.name)
    modules = tabulate_modules(trace, rows, launch)
    collectives = view.list_collectives(breakdown.device)
    columns = as_columns(collectives)
    graph_work = find_graph_work(trace, rows, launch)
    launches = measure_launches(trace, rows, launch, graph_work)
    graph_ns = trace.events.duration_ns[graph_work[view.operator_of[graph_work] < 0]].sum()
    gaps = find_gaps(trace, rows, launch, breakdown.begin_ns, breakdown.end_ns, view.calls)
    return DeviceSummary(
        breakdown=breakdown,
        idle=gaps.sum_up(),
        communication=tabulate_axes(columns, beside),
        steps=_summarize_steps(view, rows, columns, gaps),
        launches=launches,
        categories=tabulate_categories(kernels),
        kernels=kernels,
        operators=operators,
        rates=rates,
        coverage=measure_coverage(operators, rates, int(graph_ns)),
        modules=modules,
        module_classes=roll_up(modules),
        collectives=collectives,
        exposed_spans=tuple(zip(exposed.start_ns.tolist(), exposed.end_ns.tolist(), strict=True)),
        symmetric_ns=unite_events(trace, symmetric).total_ns,
    )


def _summarize_steps(
    view: TraceView, rows: Int64s, columns: CollectiveColumns, gaps: IdleGaps
) -> tuple[DeviceStep, ...]:
    """Each from its first work to its last, beside its own compute, as its times are measured.

    Idle is the device: what it did for other steps in between is no gap.
    """
    events = view.trace.events
    found = []
    for place, part in split_by_step(rows, view.step_of):
        begin, end = int(events.begin_ns[part].min()), int(find_ends(view.trace, part).max())
        found.append(
            DeviceStep(
                step=int(view.steps.number[place]),
                idle=_sum_gaps(view, rows, gaps, begin, end),
                communication=tabulate_axes(
                    columns,
                    unite_work(view.trace, view.classes, part, Work.COMPUTE),
                    view.step_of[columns.row] == place,
                ),
            )
        )
    return tuple(found)


def _sum_gaps(
    view: TraceView, rows: Int64s, gaps: IdleGaps, begin_ns: int, end_ns: int
) -> IdleTime:
    """Gaps of a device between two moments at which it began or ended something."""
    first = int(np.searchsorted(gaps.end_ns, begin_ns, side="right"))
    after = int(np.searchsorted(gaps.begin_ns, end_ns, side="left"))
    inside = slice(first, max(after, first))
    is_cut = (gaps.begin_ns[inside] < begin_ns) | (gaps.end_ns[inside] > end_ns)
    if is_cut.any():  # by an event without length
        return explain_idle(view.trace, rows, view.launch, begin_ns, end_ns, view.calls)
    return gaps.sum_up(inside)
