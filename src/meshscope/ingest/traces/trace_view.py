"""A trace with what was found out about its events, each when it is first asked for, and once."""

from functools import cached_property

from meshscope.core.layout import Layout
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.traces.trace_axes import AxisNamer
from meshscope.ingest.traces.trace_host import HostSummary, summarize_host
from meshscope.ingest.traces.trace_idle import HostCalls, find_calls
from meshscope.ingest.traces.trace_kernels import KernelClasses, classify_kernels
from meshscope.ingest.traces.trace_steps import TraceSteps, assign_steps, find_launches, find_steps
from meshscope.ingest.traces.trace_tables import find_operators
from meshscope.ingest.traces.trace_time import find_devices
from meshscope.store.read.arrays import Int32s, Int64s


class TraceView:
    """One trace; a layout names axes that the trace does not."""

    def __init__(self, trace: Trace, layout: Layout | None = None) -> None:
        self.trace = trace
        self.namer = AxisNamer(trace.groups, world_size=trace.world_size, layout=layout)

    @cached_property
    def classes(self) -> KernelClasses:
        """What each event of a device does."""
        return classify_kernels(self.trace)

    @cached_property
    def steps(self) -> TraceSteps:
        """Those that the profiler marked; there may be none."""
        return find_steps(self.trace)

    @cached_property
    def launch(self) -> Int64s:
        """For each event the call that launched it; -1."""
        return find_launches(self.trace)

    @cached_property
    def step_of(self) -> Int32s:
        """For each event the index of its step; -1."""
        return assign_steps(self.trace, self.steps, self.launch)

    @cached_property
    def operator_of(self) -> Int64s:
        """For each event the operator that launched it; -1."""
        return find_operators(self.trace, self.launch)

    @cached_property
    def device_of(self) -> Int32s:
        """For each event its device; -1 for what is not device work."""
        return find_devices(self.trace, self.classes.work)

    @cached_property
    def calls(self) -> HostCalls:
        """Calls in which the host waits or communicates."""
        return find_calls(self.trace)

    @cached_property
    def host(self) -> HostSummary:
        """What the host did."""
        has_device = bool((self.device_of >= 0).any())
        return summarize_host(self.trace, self.steps, self.namer, has_device=has_device)
