"""Two sets of traces against each other: each part of a device's time, and each kernel, per step.

Numbers are means over the devices of a set; per profiler step where both sets have steps, else of
the whole traces, which then should cover the same work. A difference says nothing about chance: a
trace holds few steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshscope.analyze.trace_summary import DeviceSummary, TraceSummary
from meshscope.analyze.trace_time import DeviceTime
from meshscope.core.unavailable import Unavailable

PARTS: dict[str, Callable[[DeviceTime], int]] = {
    "total": lambda time: time.total_ns,
    "compute": lambda time: time.compute_ns,
    "exposed communication": lambda time: time.exposed_ns,
    "exposed copies": lambda time: time.exposed_copy_ns,
    "idle": lambda time: time.idle_ns,
    "communication": lambda time: time.communication_ns,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """One part of the devices' time."""

    part: str
    first_ns: float
    second_ns: float

    @property
    def change_ns(self) -> float:
        """Second less first."""
        return self.second_ns - self.first_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDifference:
    """One kernel, by name; a count of 0 where a set does not have it."""

    name: str
    first_ns: float
    second_ns: float
    first_count: float
    second_count: float

    @property
    def change_ns(self) -> float:
        """Second less first."""
        return self.second_ns - self.first_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDifference:
    """The second set against the first."""

    is_per_step: bool
    num_first_devices: int
    num_second_devices: int
    parts: tuple[PartDifference, ...]
    kernels: tuple[KernelDifference, ...]
    """Largest change first."""


def compare_traces(
    first: Sequence[TraceSummary], second: Sequence[TraceSummary]
) -> TraceDifference | Unavailable:
    """What is different in the second set."""
    before = [device for summary in first for device in summary.devices]
    after = [device for summary in second for device in summary.devices]
    if not before or not after:
        return Unavailable("one of the two sets has no device in it")
    is_per_step = all(device.breakdown.steps for device in (*before, *after))
    return TraceDifference(
        is_per_step=is_per_step,
        num_first_devices=len(before),
        num_second_devices=len(after),
        parts=tuple(
            PartDifference(
                part=part,
                first_ns=_mean_part(before, pick, is_per_step=is_per_step),
                second_ns=_mean_part(after, pick, is_per_step=is_per_step),
            )
            for part, pick in PARTS.items()
        ),
        kernels=_compare_kernels(before, after, is_per_step=is_per_step),
    )


def _mean_part(
    devices: Sequence[DeviceSummary], pick: Callable[[DeviceTime], int], *, is_per_step: bool
) -> float:
    if not is_per_step:
        return sum(pick(device.breakdown.time) for device in devices) / len(devices)
    times = [pick(step.time) for device in devices for step in device.breakdown.steps]
    return sum(times) / len(times)


def _compare_kernels(
    before: Sequence[DeviceSummary], after: Sequence[DeviceSummary], *, is_per_step: bool
) -> tuple[KernelDifference, ...]:
    first = _kernel_means(before, is_per_step=is_per_step)
    second = _kernel_means(after, is_per_step=is_per_step)
    absent = (0.0, 0.0)
    rows = [
        KernelDifference(
            name=name,
            first_ns=first.get(name, absent)[0],
            second_ns=second.get(name, absent)[0],
            first_count=first.get(name, absent)[1],
            second_count=second.get(name, absent)[1],
        )
        for name in dict.fromkeys((*first, *second))
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ns)))


def _kernel_means(
    devices: Sequence[DeviceSummary], *, is_per_step: bool
) -> dict[str, tuple[float, float]]:
    """Time and count by name, per device, and per step where there are steps."""
    found: dict[str, tuple[float, float]] = {}
    for device in devices:
        share = 1 / len(devices) / (len(device.breakdown.steps) if is_per_step else 1)
        for row in device.kernels:
            ns, count = found.get(row.name, (0.0, 0.0))
            found[row.name] = (ns + row.total_ns * share, count + row.count * share)
    return found
