"""A trace with what was found out about its events, each when it is first asked for, and once."""

from functools import cached_property

import numpy as np

from meshscope.core.layout import Layout
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.traces.trace_axes import AxisNamer
from meshscope.ingest.traces.trace_collectives import TraceCollective, list_collectives
from meshscope.ingest.traces.trace_host import HostSummary, summarize_host
from meshscope.ingest.traces.trace_idle import HostCalls, find_calls
from meshscope.ingest.traces.trace_kernels import KernelClasses, Work, classify_kernels
from meshscope.ingest.traces.trace_step_search import search_steps
from meshscope.ingest.traces.trace_steps import (
    Places,
    TraceSteps,
    assign_steps,
    find_launches,
    find_steps,
)
from meshscope.ingest.traces.trace_tables import find_operators
from meshscope.ingest.traces.trace_time import WorkSpans, find_devices, unite_devices
from meshscope.store.read.arrays import Int32s, Int64s, find_true


class TraceView:
    """One trace; a layout names axes that the trace does not."""

    def __init__(self, trace: Trace, layout: Layout | None = None) -> None:
        self.trace = trace
        self.has_layout = layout is not None
        self.namer = AxisNamer(trace.groups, world_size=trace.world_size, layout=layout)
        self._collectives: dict[int, tuple[TraceCollective, ...]] = {}

    @cached_property
    def classes(self) -> KernelClasses:
        """What each event of a device does."""
        return classify_kernels(self.trace)

    @cached_property
    def steps(self) -> TraceSteps:
        """Those that the profiler marked, else what repeats; there may be none."""
        marked = find_steps(self.trace)
        if len(marked):
            return marked
        return search_steps(self.trace, self._find_kernels(), self.launch)

    def _find_kernels(self) -> Int64s:
        """What the busiest device computed."""
        numbers, count = np.unique(self.device_of[self.device_of >= 0], return_counts=True)
        if not len(numbers):
            return np.empty(0, dtype=np.int64)
        chosen = self.device_of == numbers[count.argmax()]
        return find_true(chosen & (self.classes.work == int(Work.COMPUTE)))

    @cached_property
    def launch(self) -> Int32s:
        """For each event the call that launched it; -1."""
        return find_launches(self.trace)

    @cached_property
    def step_of(self) -> Places:
        """For each event the index of its step; -1."""
        return assign_steps(self.trace, self.steps, self.launch)

    @cached_property
    def operator_of(self) -> Int32s:
        """For each event the operator that launched it; -1."""
        return find_operators(self.trace, self.launch)

    @cached_property
    def device_of(self) -> Places:
        """For each event its device; -1 for what is not device work."""
        return find_devices(self.trace, self.classes.work)

    @cached_property
    def spans_of(self) -> dict[int, WorkSpans]:
        """When each device did what."""
        return unite_devices(self.trace, self.classes, self.device_of)

    def list_collectives(self, device: int) -> tuple[TraceCollective, ...]:
        """The communication kernels of a device, in order of begin."""
        if device not in self._collectives:
            self._collectives[device] = list_collectives(
                self.trace,
                self.classes,
                find_true(self.device_of == device),
                self.spans_of[device].compute,
                self.operator_of,
                namer=self.namer,
                step_of=self.step_of,
                steps=self.steps,
            )
        return self._collectives[device]

    @cached_property
    def calls(self) -> HostCalls:
        """Calls in which the host waits or communicates."""
        return find_calls(self.trace)

    @cached_property
    def host(self) -> HostSummary:
        """What the host did."""
        has_device = bool((self.device_of >= 0).any())
        return summarize_host(self.trace, self.steps, self.namer, has_device=has_device)
