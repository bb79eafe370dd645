"""The little of a trace that a line among many shows: whose it is, and where its time went.

Of thousands of traces one is shown in full; what the others ran need not be tabulated for that.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_axes import find_rank
from meshscope.ingest.traces.trace_host import HostTime
from meshscope.ingest.traces.trace_time import DeviceTime, measure
from meshscope.ingest.traces.trace_view import TraceView
from meshscope.store.read.arrays import find_true

if TYPE_CHECKING:  # an outline is made without what tabulates a trace
    from meshscope.analyze.device.trace_summary import TraceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOutline:
    """One trace."""

    source: str
    rank: int | Unavailable
    world_size: int | Unavailable
    devices: tuple[DeviceTime, ...]
    """Of each device that did anything, as in `TraceSummary`."""
    host: HostTime | None
    """Only where there is no device."""


def outline_trace(view: TraceView) -> TraceOutline:
    """The same as that of its summary."""
    devices = tuple(
        measure(view.trace, view.classes, find_true(view.device_of == device), spans=spans)
        for device, spans in view.spans_of.items()
    )
    return TraceOutline(
        source=view.trace.source,
        rank=find_rank(view.trace),
        world_size=view.trace.world_size,
        devices=devices,
        host=None if devices else view.host.time,
    )


def outline_summary(summary: "TraceSummary") -> TraceOutline:
    """Of a trace that was looked at in full."""
    return TraceOutline(
        source=summary.source,
        rank=summary.rank,
        world_size=summary.world_size,
        devices=tuple(one.breakdown.time for one in summary.devices),
        host=None if summary.devices else summary.host.time,
    )
