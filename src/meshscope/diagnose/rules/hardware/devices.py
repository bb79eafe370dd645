"""Rules about devices that their driver holds back, or that report errors."""

from collections.abc import Callable, Iterable

from meshscope.analyze.device.hardware import DeviceUse
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import MEASURED, Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.hardware_view import describe_clocks, find_main_limit, is_behind_peers
from meshscope.diagnose.wording import capitalize, name_ranks, plural, ratio

_MIN_LIMITED_RATIO = Threshold(
    name="device_limited_min_ratio",
    default=0.10,
    meaning="share of readings with a device's clocks held down, from which it is reported",
)
_MAX_CLOCK_RATIO = Threshold(
    name="device_low_clock_ratio",
    default=0.90,
    meaning="median clock over the highest one, below which a device counts as held back",
)
_MIN_LINK_ERRORS = Threshold(
    name="link_errors_min_count",
    default=10,
    meaning="errors of a device's links during the run, from which they are reported",
)
_FAULTS = frozenset({"heat (hardware)", "heat (driver)", "power brake", "hardware slowdown"})
"""Limits that a healthy machine does not meet; its power cap it does."""
_NOT_PRICED = Unavailable("what lower clocks cost is not known; a slow rank has its own finding")


class ThrottledDevice(Rule):
    """Devices run below their clocks, because something holds them down.

    What it finds: devices whose clocks were held down in `device_limited_min_ratio` of the readings
    or more, with a median clock below `device_low_clock_ratio` of their highest.

    Why it matters: kernels slow down with the clocks, and all ranks wait for the slowest device.

    How it is measured: the driver is asked once a second for the clocks and for what limits them
    (table `hardware`), in steady steps and while the device is not idle. It is MEDIUM if the limit
    is heat, a power brake or a slowdown by the hardware, or if the clocks are behind those of the
    job's other devices of the same product; otherwise LOW. A device whose rank was found slow is in
    that finding's evidence and not repeated here.

    What to change: cooling and air flow for heat; the machine's power supply for a power brake; the
    power limit (`nvidia-smi -q -d POWER`) for a power cap; `nvidia-smi -rgc` for clocks that
    someone set.

    When it is wrong: large matrix products reach the power cap on healthy devices. Readings of one
    moment per second say little about short runs.
    """

    code = "HW001"
    name = "throttled-device"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (_MIN_LIMITED_RATIO, _MAX_CLOCK_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per limit and severity."""
        hardware, stragglers = need(context.study.hardware), known(context.study.stragglers)
        named = frozenset() if stragglers is None else stragglers.ranks
        groups: dict[tuple[str, Severity], list[DeviceUse]] = {}
        for device in hardware.devices:
            limit, share = find_main_limit(device)
            is_held = share >= context.thresholds[_MIN_LIMITED_RATIO] and _is_low(device, context)
            if is_held and not (is_behind_peers(device) and named & set(device.ranks)):
                is_fault = limit in _FAULTS or is_behind_peers(device)
                severity = Severity.MEDIUM if is_fault else Severity.LOW
                groups.setdefault((limit, severity), []).append(device)
        for (limit, severity), devices in groups.items():
            yield _describe_throttled(self.code, limit, severity, devices)


class DeviceErrors(Rule):
    """Devices reported errors of their memory or their links during the run.

    What it finds: memory errors (ECC) that were not corrected, and errors of NVLink or packets
    repeated over PCIe, `link_errors_min_count` or more.

    Why it matters: a memory error that was not corrected means wrong numbers or a process that
    ends. Links with errors send again, which is slow, and may fail next.

    How it is measured: what the driver's counters rose by between the first and the last reading of
    each device. Errors of memory are HIGH, those of NVLink MEDIUM, repeated packets LOW.

    What to change: drain the machine and run the vendor's diagnostics; for links, reseat or replace
    cable, board or switch.

    When it is wrong: counters are those of the device, so another job may have caused them. Some
    drivers do not count, which is not reported.
    """

    code = "HW002"
    name = "device-errors"
    severities = (Severity.LOW, Severity.HIGH)
    thresholds = (_MIN_LINK_ERRORS,)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per kind of error."""
        devices = need(context.study.hardware).devices
        least_links = int(context.thresholds[_MIN_LINK_ERRORS])
        kinds: tuple[tuple[str, Severity, int, Callable[[DeviceUse], int | Unavailable]], ...] = (
            ("uncorrected memory error", Severity.HIGH, 1, lambda one: one.num_ecc_uncorrected),
            ("NVLink error", Severity.MEDIUM, least_links, lambda one: one.num_nvlink_errors),
            ("repeated PCIe packet", Severity.LOW, least_links, lambda one: one.num_pcie_replays),
        )
        for noun, severity, least, read in kinds:
            counts = [(device, known(read(device)) or 0) for device in devices]
            found = [(device, number) for device, number in counts if number >= least]
            if found:
                yield _describe_errors(self.code, noun, severity, found)


def _is_low(device: DeviceUse, context: Context) -> bool:
    clock, highest = known(device.sm_clock_mhz), known(device.max_sm_clock_mhz)
    if clock is None or highest is None:
        return False
    return clock < context.thresholds[_MAX_CLOCK_RATIO] * highest


def _list_ranks(devices: Iterable[DeviceUse]) -> tuple[int, ...]:
    return tuple(sorted({rank for device in devices for rank in device.ranks}))


def _describe_throttled(
    code: str, limit: str, severity: Severity, devices: list[DeviceUse]
) -> Finding:
    slowest = min(devices, key=lambda one: known(one.sm_clock_mhz) or 0.0)
    ranks = _list_ranks(devices)
    share = find_main_limit(slowest)[1]
    devices_of = "the device of" if len(devices) == 1 else "devices of"
    rank = name_ranks(slowest.ranks)
    return Finding(
        code=code,
        title=f"{devices_of} {name_ranks(ranks)} held back: {limit}",
        severity=severity,
        summary=f"The device of {rank} ran at {describe_clocks(slowest)}, in {ratio(share)} of "
        f"{plural(slowest.num_readings, 'reading')}.",
        ranks=ranks,
        evidence=tuple(_list_evidence(devices)),
        confidence=Confidence(
            level=ConfidenceLevel.MEDIUM, text="read once a second; the cost is not measured"
        ),
        change="Look at cooling and power supply of the machine, and at the device's power limit "
        "and set clocks (nvidia-smi -q -d PERFORMANCE,POWER,CLOCK).",
        gain=_NOT_PRICED,
    )


def _list_evidence(devices: list[DeviceUse]) -> Iterable[Evidence]:
    for device in devices[:8]:
        of = f"of {name_ranks(device.ranks)}'s device"
        yield Evidence(name=f"clock {of}", value=describe_clocks(device))
        watts, celsius = known(device.power_watts), known(device.temperature_celsius)
        if watts is not None:
            yield Evidence(name=f"power {of}", value=watts, unit="W")
        if celsius is not None:
            yield Evidence(name=f"highest temperature {of}", value=celsius, unit="°C")


def _describe_errors(
    code: str, noun: str, severity: Severity, found: list[tuple[DeviceUse, int]]
) -> Finding:
    total, ranks = sum(number for _, number in found), _list_ranks(one for one, _ in found)
    where = f"the device of {name_ranks(ranks)}" if len(found) == 1 else f"{len(found)} devices"
    return Finding(
        code=code,
        title=f"{noun}s on {where}",
        severity=severity,
        summary=f"{capitalize(plural(total, noun))} on {where} during the run.",
        ranks=ranks,
        evidence=tuple(
            Evidence(name=f"{noun}s on the device of {name_ranks(device.ranks)}", value=number)
            for device, number in found[:8]
        ),
        confidence=MEASURED,
        change="Drain the machine, run the vendor's diagnostics, replace what reports errors.",
        gain=Unavailable("errors are not a matter of time"),
    )
