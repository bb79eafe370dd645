"""Readings of made-up devices, for the builders' `also`.

    make_run(path, …, also=MadeHardware(devices=(MadeDevice(ranks=(0, 1)),), num_readings=9).write)

Every rank names its device and the readers write them all, as a recorder would. A device is what a
test says of it at every reading; its energy grows by its power.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from builders import MS, SECOND, START_MONO_NS
from meshscope.capture.hardware.hardware_sampling import pack_reading
from meshscope.capture.hardware.nvml import DeviceReading
from meshscope.store.schema import MISSING
from meshscope.store.write.writer import RankWriter

COUNTERS = ("num_ecc_corrected", "num_ecc_uncorrected", "num_pcie_replays", "num_nvlink_errors")
_LOADED_MJ = 987_654_321
"""The driver was loaded before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDevice:
    """A device at 500 W and its full clocks, unless a test says otherwise."""

    ranks: tuple[int, ...]
    bus: int = 0x65
    sm_clock_mhz: int = 1980
    watts: Callable[[int], int] = lambda time_ns: 500
    """By nanoseconds since the first reading."""
    energy_mj: Callable[[int], int] = lambda time_ns: 500 * time_ns // MS
    """Since the first reading; below 0: the driver has no counter."""
    clock_limits: Callable[[int], int] = lambda index: 0
    """By number of reading."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Column of `hardware` to what it rises by at the last reading."""

    @property
    def address(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeHardware:
    """The devices of a node."""

    devices: tuple[MadeDevice, ...]
    num_readings: int
    period_ns: int = SECOND
    start_ns: int = START_MONO_NS
    readers: tuple[int, ...] = (0,)

    def write(self, writer: RankWriter) -> None:
        """Adds to what one rank writes."""
        for device in self.devices:
            if writer.rank in device.ranks:
                writer.journal.write("update", hardware_device=device.address)
        if writer.rank in self.readers:
            writer.journal.write("update", hardware={"devices": [*map(_describe, self.devices)]})
            for index in range(self.num_readings):
                for device in self.devices:
                    self._put(writer, device, index)

    def _put(self, writer: RankWriter, device: MadeDevice, index: int) -> None:
        elapsed_ns = index * self.period_ns
        is_last = index == self.num_readings - 1
        energy_mj = device.energy_mj(elapsed_ns)
        reading = DeviceReading(
            sm_clock_mhz=device.sm_clock_mhz,
            memory_clock_mhz=2619,
            temperature_celsius=60 + index % 5,
            energy_millijoules=_LOADED_MJ + energy_mj if energy_mj >= 0 else MISSING,
            power_milliwatts=device.watts(elapsed_ns) * 1000,
            clock_limits=device.clock_limits(index),
            **{name: 3 + (device.errors.get(name, 0) if is_last else 0) for name in COUNTERS},
        )
        name_id = writer.name_id(device.address)
        time_ns = self.start_ns + elapsed_ns
        writer.table("hardware").put(*pack_reading(name_id, time_ns, reading, 300_000))


def _describe(device: MadeDevice) -> dict[str, object]:
    return {
        "device": device.address,
        "name": "Made-up GPU",
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 2619,
        "power_limit_milliwatts": 700_000,
    }
