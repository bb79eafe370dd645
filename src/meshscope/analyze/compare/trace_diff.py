"""Two sets of traces against each other: each part of a device's time, each kernel and operator,
and communication by axis.

Numbers are means over the devices of a set; per profiler step where both sets have steps, else of
the whole traces, which then should cover the same work. Kernels and operators per step are all
those of a trace over its number of steps, those outside of steps too. Sets without devices are
compared by what their hosts did, operators by their own time there. A difference says nothing about
chance: a trace holds few steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshscope.analyze.device.trace_summary import DeviceSummary, TraceSummary
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_communication import AxisRow
from meshscope.ingest.traces.trace_host import HostSummary, HostTime
from meshscope.ingest.traces.trace_time import DeviceTime
from meshscope.numerics.idle_gaps import IdleTime

TIMES: dict[str, Callable[[DeviceTime], int]] = {
    "total": lambda time: time.total_ns,
    "compute": lambda time: time.compute_ns,
    "exposed communication": lambda time: time.exposed_ns,
    "exposed copies": lambda time: time.exposed_copy_ns,
    "other steps": lambda time: time.other_ns,
    "idle": lambda time: time.idle_ns,
}
CAUSES: dict[str, Callable[[IdleTime], int]] = {
    "idle: host": lambda idle: idle.host_ns,
    "idle: host synchronising": lambda idle: idle.synchronising_ns,
    "idle: host in collectives": lambda idle: idle.communicating_ns,
    "idle: launch": lambda idle: idle.launch_ns,
    "idle: dependency": lambda idle: idle.dependency_ns,
    "idle: unknown": lambda idle: idle.unknown_ns,
}
COMMUNICATION = "communication"
HOST_TIMES: dict[str, Callable[[HostTime], int]] = {
    "total": lambda time: time.total_ns,
    "operators": lambda time: time.operator_ns,
    "exposed communication": lambda time: time.exposed_ns,
    "data loading": lambda time: time.loading_ns,
    "optimizer": lambda time: time.optimizer_ns,
    "other": lambda time: time.other_ns,
    COMMUNICATION: lambda time: time.communication_ns,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """One part of the time."""

    part: str
    first_ns: float
    second_ns: float
    change_ns: float
    """Second less first."""
    ratio: float | Unavailable
    """Second over first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedDifference:
    """One kernel or operator, by name; a count of 0 where a set does not have it."""

    name: str
    first_ns: float
    second_ns: float
    change_ns: float
    ratio: float | Unavailable
    first_count: float
    second_count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisDifference:
    """Communication of one kind along one axis; times as in `AxisRow.communication_ns`."""

    axis: str
    kind: str
    first_ns: float
    second_ns: float
    change_ns: float
    ratio: float | Unavailable
    first_exposed_ns: float
    second_exposed_ns: float
    first_count: float
    second_count: float
    first_bytes: float | Unavailable
    second_bytes: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDifference:
    """The second set against the first; rows with the largest change first."""

    is_per_step: bool
    is_of_hosts: bool
    """Neither set has a device."""
    num_first_devices: int
    """Or hosts."""
    num_second_devices: int
    first_names: tuple[str, ...]
    """What the devices are, each once; empty where traces do not tell."""
    second_names: tuple[str, ...]
    parts: tuple[PartDifference, ...]
    categories: tuple[CountedDifference, ...]
    """What kernels are for; the most changed first."""
    modules: tuple[CountedDifference, ...]
    """Classes of modules with what is inside of them, as `Parent/Child`."""
    kernels: tuple[CountedDifference, ...]
    operators: tuple[CountedDifference, ...]
    communication: tuple[AxisDifference, ...]


def compare_traces(
    first: Sequence[TraceSummary], second: Sequence[TraceSummary]
) -> TraceDifference | Unavailable:
    """What is different in the second set."""
    before = [device for summary in first for device in summary.devices]
    after = [device for summary in second for device in summary.devices]
    if before and after:
        return _compare_devices(before, after)
    if before or after:
        return Unavailable("one of the two sets has no device in it")
    return _compare_hosts([one.host for one in first], [one.host for one in second])


def _compare_devices(
    before: Sequence[DeviceSummary], after: Sequence[DeviceSummary]
) -> TraceDifference:
    is_per_step = all(device.breakdown.steps for device in (*before, *after))
    sides = [_DeviceMeans(devices, is_per_step=is_per_step) for devices in (before, after)]
    return TraceDifference(
        is_per_step=is_per_step,
        is_of_hosts=False,
        num_first_devices=len(before),
        num_second_devices=len(after),
        first_names=_name_devices(before),
        second_names=_name_devices(after),
        parts=_compare_parts(*(side.parts() for side in sides)),
        categories=_compare_counted(*(side.categories() for side in sides)),
        modules=_compare_counted(*(side.modules() for side in sides)),
        kernels=_compare_counted(*(side.kernels() for side in sides)),
        operators=_compare_counted(*(side.operators() for side in sides)),
        communication=_compare_axes(*(side.axes() for side in sides)),
    )


def _name_devices(devices: Sequence[DeviceSummary]) -> tuple[str, ...]:
    return tuple(sorted({one.breakdown.name for one in devices if one.breakdown.name}))


def _compare_hosts(before: Sequence[HostSummary], after: Sequence[HostSummary]) -> TraceDifference:
    is_per_step = all(host.steps for host in (*before, *after))
    sides = [_HostMeans(hosts, is_per_step=is_per_step) for hosts in (before, after)]
    return TraceDifference(
        is_per_step=is_per_step,
        is_of_hosts=True,
        num_first_devices=len(before),
        num_second_devices=len(after),
        first_names=(),
        second_names=(),
        parts=_compare_parts(*(side.parts() for side in sides)),
        categories=(),
        modules=(),
        kernels=(),
        operators=_compare_counted(*(side.operators() for side in sides)),
        communication=_compare_axes(*(side.axes() for side in sides)),
    )


_Counted = dict[str, tuple[float, float]]
"""Time and count by name."""
_Axes = dict[tuple[str, str], list[float]]
"""Time, exposed, count, bytes, how many without a size."""


class _DeviceMeans:
    """Means over a set's devices, and over steps where these are compared."""

    def __init__(self, devices: Sequence[DeviceSummary], *, is_per_step: bool) -> None:
        self._devices = devices
        self._is_per_step = is_per_step

    def parts(self) -> dict[str, float]:
        if self._is_per_step:
            times = [step.time for one in self._devices for step in one.breakdown.steps]
            idles = [step.idle for one in self._devices for step in one.steps]
        else:
            times = [one.breakdown.time for one in self._devices]
            idles = [one.idle for one in self._devices]
        return (
            {name: _mean(map(pick, times)) for name, pick in TIMES.items()}
            | {name: _mean(map(pick, idles)) for name, pick in CAUSES.items()}
            | {COMMUNICATION: _mean(time.communication_ns for time in times)}
        )

    def _shares(self) -> Iterable[tuple[DeviceSummary, float]]:
        for device in self._devices:
            steps = len(device.breakdown.steps) if self._is_per_step else 1
            yield device, 1 / len(self._devices) / steps

    def categories(self) -> _Counted:
        found: _Counted = {}
        for device, share in self._shares():
            for row in device.categories:
                _add(found, str(row.category), row.total_ns * share, row.count * share)
        return found

    def modules(self) -> _Counted:
        found: _Counted = {}
        for device, share in self._shares():
            for row in device.module_classes:
                name = f"{row.parent}/{row.name}" if row.parent else row.name
                _add(found, name, row.device_ns * share, row.num_events * share)
        return found

    def kernels(self) -> _Counted:
        found: _Counted = {}
        for device, share in self._shares():
            for row in device.kernels:
                _add(found, row.name, row.total_ns * share, row.count * share)
        return found

    def operators(self) -> _Counted:
        found: _Counted = {}
        for device, share in self._shares():
            for row in device.operators:
                _add(found, row.name, row.device_ns * share, row.count * share)
        return found

    def axes(self) -> _Axes:
        if not self._is_per_step:
            return _mean_axes([one.communication for one in self._devices])
        return _mean_axes([step.communication for one in self._devices for step in one.steps])


class _HostMeans:
    """The same of hosts."""

    def __init__(self, hosts: Sequence[HostSummary], *, is_per_step: bool) -> None:
        self._hosts = hosts
        self._is_per_step = is_per_step

    def parts(self) -> dict[str, float]:
        if self._is_per_step:
            times = [step.time for host in self._hosts for step in host.steps]
        else:
            times = [host.time for host in self._hosts]
        return {name: _mean(map(pick, times)) for name, pick in HOST_TIMES.items()}

    def operators(self) -> _Counted:
        found: _Counted = {}
        for host in self._hosts:
            share = 1 / len(self._hosts) / (len(host.steps) if self._is_per_step else 1)
            for row in host.operators:
                _add(found, row.name, row.self_ns * share, row.count * share)
        return found

    def axes(self) -> _Axes:
        if not self._is_per_step:
            return _mean_axes([host.communication for host in self._hosts])
        return _mean_axes([step.communication for host in self._hosts for step in host.steps])


def _mean(values: Iterable[int]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)


def _add(found: _Counted, name: str, ns: float, count: float) -> None:
    before = found.get(name, (0.0, 0.0))
    found[name] = (before[0] + ns, before[1] + count)


def _mean_axes(tables: Sequence[tuple[AxisRow, ...]]) -> _Axes:
    found: _Axes = {}
    for row in (row for table in tables for row in table):
        sums = found.setdefault((row.axis, row.kind), [0.0] * 5)
        size = 0 if isinstance(row.size_bytes, Unavailable) else row.size_bytes
        values = (row.communication_ns, row.exposed_ns, row.count, size, row.num_unsized)
        for place, value in enumerate(values):
            sums[place] += value / len(tables)
    return found


def _ratio(first: float, second: float) -> float | Unavailable:
    return second / first if first else Unavailable("there was none before")


def _compare_parts(
    first: Mapping[str, float], second: Mapping[str, float]
) -> tuple[PartDifference, ...]:
    return tuple(
        PartDifference(
            part=part,
            first_ns=first[part],
            second_ns=second[part],
            change_ns=second[part] - first[part],
            ratio=_ratio(first[part], second[part]),
        )
        for part in first
    )


def _compare_counted(first: _Counted, second: _Counted) -> tuple[CountedDifference, ...]:
    absent = (0.0, 0.0)
    rows = []
    for name in dict.fromkeys((*first, *second)):
        before, after = first.get(name, absent), second.get(name, absent)
        rows.append(
            CountedDifference(
                name=name,
                first_ns=before[0],
                second_ns=after[0],
                change_ns=after[0] - before[0],
                ratio=_ratio(before[0], after[0]),
                first_count=before[1],
                second_count=after[1],
            )
        )
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns)))


def _compare_axes(first: _Axes, second: _Axes) -> tuple[AxisDifference, ...]:
    absent = [0.0] * 5
    rows = []
    for axis, kind in dict.fromkeys((*first, *second)):
        before, after = first.get((axis, kind), absent), second.get((axis, kind), absent)
        rows.append(
            AxisDifference(
                axis=axis,
                kind=kind,
                first_ns=before[0],
                second_ns=after[0],
                change_ns=after[0] - before[0],
                ratio=_ratio(before[0], after[0]),
                first_exposed_ns=before[1],
                second_exposed_ns=after[1],
                first_count=before[2],
                second_count=after[2],
                first_bytes=_size(before),
                second_bytes=_size(after),
            )
        )
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns)))


def _size(sums: Sequence[float]) -> float | Unavailable:
    if sums[4]:
        return Unavailable("the trace does not say the size of all of them")
    return sums[3]
