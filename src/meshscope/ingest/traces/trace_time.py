"""Where a device's time went in a trace: compute, communication, copies, idle, and what overlaps.

Per device, and per profiler step: `compute` is the union of fills and of all kernels that do not
communicate, `communication` that of those that do, `copy` that of copies. Communication is exposed
where no compute runs, copies where neither does: a copy hides no communication, and where both run
alone `exposed_beside_copy` says so. busy = compute + exposed communication + exposed copies;
idle = total - busy. All are exact sums of integer nanoseconds.

Total is from the first to the last moment of the device's work. For a step it is from the step's
first work to its last, so steps of a device may overlap or leave gaps; idle between them is in the
total only. Moments of a step in which only work of other steps ran are `other`, not idle.

A kernel counts as one device's by the `device` the profiler gives, else by its process.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.traces.trace_kernels import KernelClasses, Work
from meshscope.ingest.traces.trace_spans import find_ends, unite_events
from meshscope.ingest.traces.trace_steps import Places, TraceSteps, make_places, split_by_step
from meshscope.numerics.intervals import Intervals, subtract
from meshscope.store.read.arrays import Int64s, find_true


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """One device over some time; compute + exposed + exposed copy + other + idle == total."""

    total_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    copy_ns: int
    exposed_copy_ns: int
    exposed_beside_copy_ns: int
    """Part of `exposed_ns` in which a copy ran, too."""
    other_ns: int
    """Of a step: only work of other steps ran. Of a device 0."""
    idle_ns: int
    """Nothing ran."""
    num_kernels: int
    """With those that communicate, without fills."""
    num_collectives: int
    """Of the kernels."""
    num_fills: int
    num_copies: int

    @property
    def busy_ns(self) -> int:
        """Something of it ran."""
        return self.compute_ns + self.exposed_ns + self.exposed_copy_ns

    @property
    def overlapped_ns(self) -> int:
        """Communication behind which compute ran."""
        return self.communication_ns - self.exposed_ns

    @property
    def work_ns(self) -> int:
        """Compute or copies: all that is not communication, each moment once."""
        return self.compute_ns + self.exposed_copy_ns + self.exposed_beside_copy_ns

    @property
    def exposed_alone_ns(self) -> int:
        """Communication with neither compute nor a copy beside it."""
        return self.exposed_ns - self.exposed_beside_copy_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """One stream of a device: the union of what ran on it."""

    stream: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    num_events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeriod:
    """A device from the end of one step's work to the end of the next one's, whatever it ran.

    Periods follow each other: they sum to the device's time from the first step's begin to the last
    one's end. compute + exposed + exposed copy + idle == total."""

    begin_ns: int
    end_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    exposed_copy_ns: int
    idle_ns: int

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step on one device."""

    step: int
    time: DeviceTime
    """The work that was launched in it, from its first to its last; steps may overlap."""
    period: StepPeriod
    """What it took: the pace of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBreakdown:
    """One device of a trace."""

    device: int
    name: str
    begin_ns: int
    end_ns: int
    time: DeviceTime
    streams: tuple[StreamTime, ...]
    steps: tuple[StepTime, ...]
    num_outside_steps: int
    """Device events that belong to no profiler step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkSpans:
    """When events of a device ran."""

    compute: Intervals
    communication: Intervals
    copy: Intervals
    exposed: Intervals
    """Communication without compute."""
    exposed_copy: Intervals
    """Copies without either."""


def find_devices(trace: Trace, work: npt.NDArray[np.uint8]) -> Places:
    """For each event its device; -1 for what is not device work. Without a number, its process."""
    rows = find_true(work != int(Work.NONE))
    of_track = np.array(
        [track.process if isinstance(track.process, int) else -1 for track in trace.tracks] + [-1],
        dtype=np.int64,
    )
    of_track = np.where((of_track < 0) | (of_track > 1 << 30), 0, of_track)
    device = trace.events.device[rows]
    number = np.where(device >= 0, device, of_track[trace.events.track[rows]])
    found = make_places(len(work), int(number.max(initial=0)))
    found[rows] = number
    return found


def break_down_devices(
    trace: Trace,
    classes: KernelClasses,
    steps: TraceSteps,
    step_of: Places,
    device_of: Places | None = None,
    spans_of: Mapping[int, WorkSpans] | None = None,
) -> tuple[DeviceBreakdown, ...]:
    """Every device of the trace that did anything; `device_of` and `spans_of` where they were found
    already."""
    device = find_devices(trace, classes.work) if device_of is None else device_of
    spans_of = unite_devices(trace, classes, device) if spans_of is None else spans_of
    return tuple(
        _break_down(trace, classes, steps, step_of, number, find_true(device == number), spans)
        for number, spans in spans_of.items()
    )


def unite_devices(trace: Trace, classes: KernelClasses, device_of: Places) -> dict[int, WorkSpans]:
    """When each device that did anything did what."""
    return {
        number: unite_kinds(trace, classes, find_true(device_of == number))
        for number in np.unique(device_of[device_of >= 0]).tolist()
    }


def _break_down(
    trace: Trace,
    classes: KernelClasses,
    steps: TraceSteps,
    step_of: Places,
    device: int,
    rows: Int64s,
    spans: WorkSpans,
) -> DeviceBreakdown:
    events = trace.events
    own_step = step_of[rows]
    busy = unite_events(trace, rows)
    parts = split_by_step(rows, step_of)
    periods = _measure_periods(trace, spans, [part for _, part in parts])
    found = [
        StepTime(
            step=int(steps.number[place]),
            time=measure(trace, classes, part, busy),
            period=period,
        )
        for (place, part), period in zip(parts, periods, strict=True)
    ]
    return DeviceBreakdown(
        device=device,
        name=trace.device_names.get(device, ""),
        begin_ns=int(events.begin_ns[rows].min()),
        end_ns=int(find_ends(trace, rows).max()),
        time=measure(trace, classes, rows, spans=spans),
        streams=_measure_streams(trace, classes, rows),
        steps=tuple(found),
        num_outside_steps=int(np.count_nonzero(own_step < 0)),
    )


def _measure_periods(trace: Trace, spans: WorkSpans, steps: list[Int64s]) -> list[StepPeriod]:
    """Of steps in order of time."""
    if not steps:
        return []
    first = int(trace.events.begin_ns[steps[0]].min())
    end = np.maximum.accumulate(np.array([find_ends(trace, own).max() for own in steps]))
    begin = np.append(first, end[:-1])
    sets = (spans.compute, spans.communication, spans.exposed, spans.exposed_copy)
    lengths = [one.within(begin, end).tolist() for one in sets]
    return [
        StepPeriod(
            begin_ns=since,
            end_ns=until,
            compute_ns=computed,
            communication_ns=sent,
            exposed_ns=exposed,
            exposed_copy_ns=copied,
            idle_ns=until - since - computed - exposed - copied,
        )
        for since, until, computed, sent, exposed, copied in zip(
            begin.tolist(), end.tolist(), *lengths, strict=True
        )
    ]


def unite_work(trace: Trace, classes: KernelClasses, rows: Int64s, work: Work) -> Intervals:
    """When the events among `rows` that count as `work` ran."""
    picked = find_true(classes.work.take(rows) == work)
    return unite_events(trace, rows.take(picked))


def unite_kinds(trace: Trace, classes: KernelClasses, rows: Int64s) -> WorkSpans:
    """When events among `rows` of each kind ran."""
    compute = unite_work(trace, classes, rows, Work.COMPUTE)
    communication = unite_work(trace, classes, rows, Work.COMMUNICATION)
    copy = unite_work(trace, classes, rows, Work.COPY)
    return WorkSpans(
        compute=compute,
        communication=communication,
        copy=copy,
        exposed=subtract(communication, compute),
        exposed_copy=subtract(subtract(copy, compute), communication),
    )


def measure(
    trace: Trace,
    classes: KernelClasses,
    rows: Int64s,
    busy: Intervals | None = None,
    spans: WorkSpans | None = None,
) -> DeviceTime:
    """The times of some events of one device; `busy` is when it ran any, if these are not all,
    `spans` theirs, where they were united already."""
    spans = spans or unite_kinds(trace, classes, rows)
    compute, copy, exposed = spans.compute, spans.copy, spans.exposed
    work = classes.work.take(rows)
    is_fill = trace.events.category.take(rows) == int(Category.MEMSET)
    begin, end = trace.events.begin_ns.take(rows), find_ends(trace, rows)
    first, last = (int(begin.min()), int(end.max())) if len(rows) else (0, 0)
    exposed_ns = exposed.total_ns
    exposed_copy_ns = spans.exposed_copy.total_ns
    own_ns = compute.total_ns + exposed_ns + exposed_copy_ns
    busy_ns = own_ns if busy is None else int(busy.within(np.array([first]), np.array([last]))[0])
    return DeviceTime(
        total_ns=last - first,
        compute_ns=compute.total_ns,
        communication_ns=spans.communication.total_ns,
        exposed_ns=exposed_ns,
        copy_ns=copy.total_ns,
        exposed_copy_ns=exposed_copy_ns,
        exposed_beside_copy_ns=exposed_ns - subtract(exposed, copy).total_ns,
        other_ns=busy_ns - own_ns,
        idle_ns=last - first - busy_ns,
        num_kernels=int(np.count_nonzero((work != int(Work.COPY)) & ~is_fill)),
        num_collectives=int(np.count_nonzero(work == int(Work.COMMUNICATION))),
        num_fills=int(np.count_nonzero(is_fill)),
        num_copies=int(np.count_nonzero(work == int(Work.COPY))),
    )


def _measure_streams(trace: Trace, classes: KernelClasses, rows: Int64s) -> tuple[StreamTime, ...]:
    streams = trace.events.stream.take(rows)
    others = streams[1:][streams[1:] != streams[:-1]]  # most are as the one before
    found = []
    for stream in np.unique(np.append(streams[:1], others)).tolist():
        part = rows.take(find_true(streams == stream))
        found.append(
            StreamTime(
                stream=stream,
                busy_ns=unite_events(trace, part).total_ns,
                compute_ns=unite_work(trace, classes, part, Work.COMPUTE).total_ns,
                communication_ns=unite_work(trace, classes, part, Work.COMMUNICATION).total_ns,
                copy_ns=unite_work(trace, classes, part, Work.COPY).total_ns,
                num_events=len(part),
            )
        )
    return tuple(found)
