"""NVIDIA's management library (NVML) by ctypes: what its driver says of one device.

The library comes with the driver, so it may be absent; no package is needed. Each call releases the
interpreter's lock and returns a code; a quantity whose call fails is missing, and one that a device
or a driver does not have is not asked for again. Names and numbers are those of nvml.h.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshscope.store.schema import MISSING

LIBRARY = "libnvidia-ml.so.1"

_SUCCESS = 0
_NEVER_CODES = frozenset({2, 3, 4, 13, 26})
"""Invalid argument, not supported, no permission, function not found, deprecated: these stay."""
_CLOCK_SM = 1
_CLOCK_MEM = 2
_TEMPERATURE_GPU = 0
_ERROR_CORRECTED = 0
_ERROR_UNCORRECTED = 1
_VOLATILE_ECC = 0
_NVLINK_TOTALS = (38, 45, 52, 59)
"""NVML_FI_DEV_NVLINK_…_ERROR_COUNT_TOTAL: CRC of flits, CRC of data, replays, recoveries."""
_NAME_BYTES = 96
_PCI_ADDRESS = re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.0")


class DeviceReading(NamedTuple):
    """One moment of a device; MISSING where a quantity is not known."""

    sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_celsius: int
    energy_millijoules: int
    power_milliwatts: int
    clock_limits: int
    num_ecc_corrected: int
    num_ecc_uncorrected: int
    num_pcie_replays: int
    num_nvlink_errors: int


class _FieldValue(ctypes.Structure):
    """`nvmlFieldValue_t`, of which an integer value is read as unsigned long long."""

    _fields_ = (
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_usec", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("code", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


class Nvml:
    """The library, open until `close`. OSError where it is not there or has no driver."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        code = self._library.nvmlInit_v2()  # starts no device: asking for a handle does
        if code != _SUCCESS:
            raise OSError(f"{path} does not start: NVML's code {code}")

    def close(self) -> None:
        self._library.nvmlShutdown()

    def count_devices(self) -> int:
        """Devices the driver shows, without starting one."""
        num_devices = ctypes.c_uint()
        code = self._library.nvmlDeviceGetCount_v2(ctypes.byref(num_devices))
        if code != _SUCCESS:
            raise OSError(f"the number of devices is not known: NVML's code {code}")
        return num_devices.value

    def find_device(self, device: str) -> "NvmlDevice | None":
        """The device of a PCI address or UUID; None where the driver does not know it."""
        by_address = _PCI_ADDRESS.fullmatch(device) is not None
        name = "nvmlDeviceGetHandleByPciBusId_v2" if by_address else "nvmlDeviceGetHandleByUUID"
        handle = ctypes.c_void_p()
        code = getattr(self._library, name)(device.encode(), ctypes.byref(handle))
        return NvmlDevice(self._library, handle) if code == _SUCCESS else None


class NvmlDevice:
    """Reads one device. Not for two threads at once: the cells for results are its own."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle
        self._uint = ctypes.c_uint()
        self._ulong = ctypes.c_ulonglong()
        self._fields = (_FieldValue * len(_NVLINK_TOTALS))()
        for field, field_id in zip(self._fields, _NVLINK_TOTALS, strict=True):
            field.field_id = field_id
        uint, ulong, ask = self._uint, self._ulong, self._make_query
        ecc = "nvmlDeviceGetTotalEccErrors"
        # Two names of one function: older drivers have only the second.
        limits = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        self._queries: list[Callable[[], int | None] | None] = [
            ask(("nvmlDeviceGetClockInfo",), uint, _CLOCK_SM),
            ask(("nvmlDeviceGetClockInfo",), uint, _CLOCK_MEM),
            ask(("nvmlDeviceGetTemperature",), uint, _TEMPERATURE_GPU),
            ask(("nvmlDeviceGetTotalEnergyConsumption",), ulong),
            ask(("nvmlDeviceGetPowerUsage",), uint),
            ask(limits, ulong),
            ask((ecc,), ulong, _ERROR_CORRECTED, _VOLATILE_ECC),
            ask((ecc,), ulong, _ERROR_UNCORRECTED, _VOLATILE_ECC),
            ask(("nvmlDeviceGetPcieReplayCounter",), uint),
            self._ask_links,
        ]

    def read(self) -> DeviceReading:
        return DeviceReading(*(self._answer(index) for index in range(len(self._queries))))

    def describe(self) -> dict[str, object]:
        """What does not change: its product's name, highest clocks and power limit."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._library.nvmlDeviceGetName(self._handle, name, ctypes.c_uint(_NAME_BYTES))
        clock, limit = ("nvmlDeviceGetMaxClockInfo",), ("nvmlDeviceGetEnforcedPowerLimit",)
        asked = {
            "max_sm_clock_mhz": self._make_query(clock, self._uint, _CLOCK_SM),
            "max_memory_clock_mhz": self._make_query(clock, self._uint, _CLOCK_MEM),
            "power_limit_milliwatts": self._make_query(limit, self._uint),
        }
        answers = {key: query() for key, query in asked.items() if query is not None}
        known = {key: value for key, value in answers.items() if value is not None and value >= 0}
        return {"name": name.value.decode(errors="replace"), **known}

    def _answer(self, index: int) -> int:
        query = self._queries[index]
        answer = None if query is None else query()
        if answer is None:
            self._queries[index] = None
            return MISSING
        return answer

    def _make_query(
        self, names: Sequence[str], cell: Any, *arguments: int
    ) -> Callable[[], int | None] | None:
        """Asks the first of these functions that the library has: a value, MISSING where it has
        none now, None where it never will."""
        function = next((f for name in names if (f := getattr(self._library, name, None))), None)
        if function is None:
            return None
        handle, result = self._handle, ctypes.byref(cell)
        given = [ctypes.c_uint(argument) for argument in arguments]

        def query() -> int | None:
            code = function(handle, *given, result)
            if code == _SUCCESS:
                return int(cell.value)
            return None if code in _NEVER_CODES else MISSING

        return query

    def _ask_links(self) -> int | None:
        ask = getattr(self._library, "nvmlDeviceGetFieldValues", None)
        if ask is None:
            return None
        code = ask(self._handle, ctypes.c_int(len(self._fields)), self._fields)
        if code != _SUCCESS:
            return None if code in _NEVER_CODES else MISSING
        counts = [int(field.value) for field in self._fields if field.code == _SUCCESS]
        return sum(counts) if counts else None
