"""The table of device readings; `store.schema` says what all tables have in common."""

from meshscope.store.table import Column, Table, name_column


def _packed(name: str, word: int, shift: int, width: int, meaning: str, unit: str = "") -> Column:
    return Column(
        name=name,
        word=word,
        shift=shift,
        width=width,
        meaning=meaning,
        unit=unit,
        can_be_missing=True,
        is_stored_plus_one=True,
    )


HARDWARE = Table(
    name="hardware",
    meaning="What the driver says of a device, about once a second; one process of a node writes "
    "it for all devices the job can use there. Counters run since the driver was loaded and count "
    "what all processes did: only differences mean something.",
    is_detail=True,
    columns=(
        name_column(1, "which device: an id in the rank's name list, of its PCI address or UUID"),
        _packed("sm_clock_mhz", 1, 16, 16, "clock of its multiprocessors", "MHz"),
        _packed("memory_clock_mhz", 1, 32, 16, "clock of its memory", "MHz"),
        _packed("temperature_celsius", 1, 48, 15, "of its die", "°C"),
        Column(name="time_host_mono_ns", word=2, unit="ns", meaning="when it was read"),
        Column(
            name="energy_millijoules",
            word=3,
            unit="mJ",
            can_be_missing=True,
            meaning="counter of the energy it used",
        ),
        _packed("power_milliwatts", 4, 0, 32, "drawn by the whole board", "mW"),
        _packed("clock_limits", 4, 32, 31, "what holds its clocks down: see ClockLimit"),
        _packed("num_ecc_corrected", 5, 0, 32, "counter of memory errors that were corrected"),
        _packed("num_ecc_uncorrected", 5, 32, 31, "counter of memory errors that were not"),
        _packed("num_pcie_replays", 6, 0, 32, "counter of packets sent again over PCIe"),
        _packed("num_nvlink_errors", 6, 32, 31, "counters of its NVLinks' errors, all together"),
        Column(
            name="cost_ns",
            word=7,
            width=32,
            unit="ns",
            meaning="processor time that this reading took",
        ),
    ),
)


class ClockLimit:
    """Bits of `hardware.clock_limits`, as NVML numbers them."""

    IDLE = 0x1
    """Nothing runs on it."""
    CLOCKS_SET = 0x2
    """Someone set its clocks."""
    POWER_CAP = 0x4
    """Its power limit."""
    HARDWARE_SLOWDOWN = 0x8
    """Heat or power, by its hardware."""
    SYNC_BOOST = 0x10
    """The slowest of devices whose clocks are tied to each other."""
    SOFTWARE_THERMAL = 0x20
    """Heat, by its driver."""
    HARDWARE_THERMAL = 0x40
    """Heat, by its hardware."""
    POWER_BRAKE = 0x80
    """The machine's power supply asked for it."""
    DISPLAY = 0x100
    """A display's clock."""


CLOCK_LIMITS: dict[int, str] = {
    ClockLimit.POWER_CAP: "power cap",
    ClockLimit.HARDWARE_THERMAL: "heat (hardware)",
    ClockLimit.SOFTWARE_THERMAL: "heat (driver)",
    ClockLimit.POWER_BRAKE: "power brake",
    ClockLimit.HARDWARE_SLOWDOWN: "hardware slowdown",
    ClockLimit.SYNC_BOOST: "sync boost",
    ClockLimit.CLOCKS_SET: "clocks set",
    ClockLimit.DISPLAY: "display",
}
"""What reports call them; a device that is idle is not held back."""
