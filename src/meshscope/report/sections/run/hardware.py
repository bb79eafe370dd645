"""The devices as their driver saw them: clocks, power, heat, what held them down, energy."""

from meshscope.analyze.device.hardware import DeviceUse, Hardware
from meshscope.core.unavailable import known
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import (
    Blank,
    Line,
    Part,
    Section,
    Table,
    make_column,
    make_facts,
)

_MAX_DEVICES = 8
_ERRORS = {
    "num_ecc_uncorrected": "uncorrected memory errors",
    "num_ecc_corrected": "corrected memory errors",
    "num_nvlink_errors": "NVLink errors",
    "num_pcie_replays": "repeated PCIe packets",
}


def show_hardware(report: Report, detail: Detail) -> Section | None:
    """One row per device; None where none was read."""
    found = known(report.study.hardware)
    if found is None:
        return None
    shown = found.devices if detail.shows_all_ranks else _pick(found)
    parts: list[Part] = [make_facts(_list_facts(found)), Blank(), _tabulate(shown)]
    if len(shown) < len(found.devices):
        left = form.plural(len(found.devices) - len(shown), "more device")
        parts.append(Line(f"{left} (--all-ranks); those with the lowest clocks are shown"))
    note = "medians of steady steps, read about once a second"
    return Section(key="hardware", title="Hardware", note=note, parts=tuple(parts))


def _pick(found: Hardware) -> tuple[DeviceUse, ...]:
    """The devices with the lowest clocks, by rank."""
    by_clock = sorted(found.devices, key=lambda one: known(one.sm_clock_mhz) or 0.0)
    return tuple(sorted(by_clock[:_MAX_DEVICES], key=lambda one: one.ranks))


def _list_facts(found: Hardware) -> list[tuple[str, str]]:
    energy = form.or_reason(found.joules_per_step, lambda value: f"{form.energy(value)} a step")
    tokens = form.or_reason(found.joules_per_token, lambda value: f"{form.energy(value)} a token")
    devices = form.plural(len(found.devices), "device")
    return [
        ("Energy", f"{energy}, {devices} together" if known(found.joules_per_step) else energy),
        ("", tokens),
        ("Errors", _describe_errors(found)),
        ("A reading", f"{form.duration(found.reading_cost_ns)} of processor time a device"),
    ]


def _describe_errors(found: Hardware) -> str:
    counts = {
        words: sum(known(getattr(device, name)) or 0 for device in found.devices)
        for name, words in _ERRORS.items()
    }
    listed = [f"{form.count(number)} {words}" for words, number in counts.items() if number]
    if listed:
        return ", ".join(listed)
    is_counted = any(
        known(getattr(device, name)) is not None for device in found.devices for name in _ERRORS
    )
    return "none during the run" if is_counted else "n/a: the driver does not count them"


def _tabulate(devices: tuple[DeviceUse, ...]) -> Table:
    return Table(
        (
            make_column(
                "ranks", devices, lambda one: form.name_ranks(one.ranks), 9, is_right=False
            ),
            make_column("SM clock", devices, _show_clock, 8),
            make_column("held back by", devices, _show_limits, 7, is_right=False),
            make_column(
                "power",
                devices,
                lambda one: form.or_dash(one.power_watts, lambda watts: f"{watts:,.0f} W"),
                6,
            ),
            make_column(
                "hottest",
                devices,
                lambda one: form.or_dash(one.temperature_celsius, lambda heat: f"{heat} °C"),
                4,
            ),
            make_column(
                "energy/step",
                devices,
                lambda one: form.or_dash(one.joules_per_step, form.energy),
                5,
            ),
            make_column(
                "memory clock",
                devices,
                lambda one: form.or_dash(one.memory_clock_mhz, lambda mhz: f"{mhz:,.0f} MHz"),
                2,
            ),
            make_column("device", devices, lambda one: form.clean_text(one.device, 48), 1),
        )
    )


def _show_clock(device: DeviceUse) -> str:
    clock, highest = known(device.sm_clock_mhz), known(device.max_sm_clock_mhz)
    if clock is None:
        return "n/a"
    return f"{clock:,.0f}{'' if highest is None else f' of {highest:,}'} MHz"


def _show_limits(device: DeviceUse) -> str:
    limits = known(device.limited_ratio)
    if limits is None:
        return "n/a"
    first = sorted(limits.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{word} {form.ratio(share)}" for word, share in first) or "nothing"
