"""Tables of profiler traces, one row of an analysis each, for SQL, CSV and Parquet.

Names begin with `trace_`: a run made of traces has tables of its own, those of every run. Each row
has the rank and the device it is of; units are in the names of columns. A missing value is None.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from meshscope.analyze.device.trace_summary import DeviceSummary, TraceSummary
from meshscope.core.unavailable import Unavailable
from meshscope.report.tables import StudyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable:
    """A table of devices' rows."""

    meaning: str
    rows: Callable[[DeviceSummary], Iterable[Any]] = lambda device: ()
    of_trace: Callable[[TraceSummary], Iterable[tuple[int, Any]]] = lambda summary: ()
    """Rows that the devices' summaries do not have, each with its device; -1: the host."""


def _one(pick: Callable[[DeviceSummary], Any]) -> Callable[[DeviceSummary], Iterable[Any]]:
    def rows(device: DeviceSummary) -> Iterable[Any]:
        found = pick(device)
        return () if isinstance(found, Unavailable) else (found,)

    return rows


def _list_steps(device: DeviceSummary) -> list[dict[str, int]]:
    rows = []
    for step in device.breakdown.steps:
        parts = asdict(step.period)
        begin_ns, end_ns = parts.pop("begin_ns"), parts.pop("end_ns")
        whole = {"begin_ns": begin_ns, "end_ns": end_ns, "period_ns": step.period.total_ns}
        rows.append({"step": step.step, **whole, **parts})
    return rows


TRACE_TABLES: dict[str, TraceTable] = {
    "trace_kernels": TraceTable(
        meaning="kernels, copies and fills by name, with category and short name",
        rows=lambda device: device.kernels,
    ),
    "trace_categories": TraceTable(
        meaning="device time by what kernels are for", rows=lambda device: device.categories
    ),
    "trace_operators": TraceTable(
        meaning="operators by name and shapes that launched device work",
        rows=lambda device: device.operators,
    ),
    "trace_rates": TraceTable(
        meaning="FLOPs, bytes and roofline of operators whose cost is known",
        rows=lambda device: device.rates,
    ),
    "trace_modules": TraceTable(
        meaning="device time by path of modules", rows=lambda device: device.modules
    ),
    "trace_module_classes": TraceTable(
        meaning="device time by class of module and its parent's",
        rows=lambda device: device.module_classes,
    ),
    "trace_collectives": TraceTable(
        meaning="communication kernels, one by one; without a device the host's collectives",
        rows=lambda device: device.collectives,
        of_trace=lambda summary: _of_host(summary, summary.host.collectives),
    ),
    "trace_axes": TraceTable(
        meaning="communication by axis and kind",
        rows=lambda device: device.communication,
        of_trace=lambda summary: _of_host(summary, summary.host.communication),
    ),
    "trace_steps": TraceTable(
        meaning="periods of steps on the device, with their parts",
        rows=_list_steps,
    ),
    "trace_devices": TraceTable(
        meaning="where each device's time went", rows=_one(lambda device: device.breakdown.time)
    ),
    "trace_idle": TraceTable(
        meaning="idle time of devices by cause", rows=_one(lambda device: device.idle)
    ),
    "trace_launches": TraceTable(
        meaning="how far ahead of devices their hosts were", rows=_one(lambda one: one.launches)
    ),
    "trace_host_operators": TraceTable(
        meaning="operators of a trace without a device, by name and shapes",
        of_trace=lambda summary: [(-1, row) for row in summary.host.operators],
    ),
    "trace_host_steps": TraceTable(
        meaning="where the time of the host's main thread went in each step",
        of_trace=lambda summary: [
            (-1, {"step": step.step, **asdict(step.time)}) for step in summary.host.steps
        ],
    ),
    "trace_memory": TraceTable(
        meaning="what allocators had given out over time, at most 240 moments of each",
        of_trace=lambda summary: [
            (-1 if use.device_type == "cpu" else use.device, point)
            for use in summary.memory
            for point in use.timeline
        ],
    ),
}
"""In the order in which they are listed."""


def _of_host(summary: TraceSummary, rows: Sequence[Any]) -> list[tuple[int, Any]]:
    """What the host did stands for itself where there is no device."""
    return [] if summary.devices else [(-1, row) for row in rows]


def build_trace_table(name: str, summaries: Sequence[TraceSummary]) -> StudyTable | Unavailable:
    """One of `TRACE_TABLES`, of all devices of all traces."""
    table = TRACE_TABLES[name]
    found: list[tuple[TraceSummary, int, Any]] = []
    for summary in summaries:
        for device in summary.devices:
            found += [(summary, device.breakdown.device, row) for row in table.rows(device)]
        found += [(summary, number, row) for number, row in table.of_trace(summary)]
    if not found:
        return Unavailable(f"the traces have nothing for {name}")
    columns: dict[str, list[object]] = {
        "rank": [_value(summary.rank) for summary, _, _ in found],
        "device": [device for _, device, _ in found],
    }
    rows = [_cells(row) for _, _, row in found]
    for column in rows[0]:
        columns[column] = [_value(row[column]) for row in rows]
    return StudyTable({key: _column(values) for key, values in columns.items()})


def _cells(row: Any) -> Mapping[str, object]:
    return (
        row
        if isinstance(row, Mapping)
        else {one.name: getattr(row, one.name) for one in fields(row)}
    )


def _value(value: object) -> object:
    if isinstance(value, Unavailable):
        return None
    if isinstance(value, bool | int | float | str) or value is None:
        return str(value) if isinstance(value, str) else value
    return str(value)


def _column(values: list[object]) -> np.ndarray[Any, np.dtype[Any]]:
    """Numbers as numbers: a missing one is NaN."""
    present = [one for one in values if one is not None]
    if present and all(isinstance(one, int) for one in present):
        if len(present) == len(values):
            return np.array([int(one) for one in present if isinstance(one, int)], dtype=np.int64)
        return np.array([np.nan if one is None else one for one in values], dtype=np.float64)
    if present and all(isinstance(one, int | float) for one in present):
        return np.array([np.nan if one is None else one for one in values], dtype=np.float64)
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
