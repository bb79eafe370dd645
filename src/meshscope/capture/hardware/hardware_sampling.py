"""Reads the node's devices about once a second, in a thread of one process of the node.

Every rank writes down which device it uses; `device_choice` says who reads which. The thread begins
a second after the program was seen to use CUDA, and opens the driver's library itself, so that
training waits for nothing. It holds the interpreter's lock only between calls. A reading may take
a thousandth of the time until the next one, per device, in processor time of the thread: dearer
ones come less often. Without the library the journal says why, and nothing else happens.
"""

import os
import sys
import threading
import time
from typing import Any

from meshscope.capture.hardware.device_choice import choose_devices, name_device
from meshscope.capture.hardware.nvml import LIBRARY, DeviceReading, Nvml, NvmlDevice
from meshscope.capture.identity import resolve_identity
from meshscope.capture.session import Session
from meshscope.capture.steps.device_events import find_backend
from meshscope.store.schema import MISSING
from meshscope.store.write.writer import RankWriter

_SAMPLE_EVERY_S = 1.0
_COST_PER_WALL = 1000
"""A reading of a device may cost a thousandth of the time until the next one."""
_CLOSE_WAIT_S = 0.5
"""How long closing waits for the last reading: a device that hangs does not answer."""
_NO_READING = DeviceReading(*[MISSING] * len(DeviceReading._fields))


class HardwareSampling:
    """The devices of one rank's node, from the first step on CUDA to `stop`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._guard = session.guard
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._read_in: RankWriter | None = None
        """Whose files get readings, if this rank takes any."""
        self._named_in: RankWriter | None = None
        """Whose journal has the rank's device."""
        self._described_in: RankWriter | None = None
        """Whose journal has what does not change of the devices read."""

    def visit(self) -> None:
        """At a step's end, once a second: begins when the program uses CUDA."""
        writer, torch = self._session.writer, sys.modules.get("torch")
        if writer is None or writer is self._read_in or torch is None:
            return
        if not self._session.config.hardware:
            return
        found = find_backend(torch)
        if found is None or found[0] != "cuda":
            return
        if writer is not self._named_in:
            self._named_in = writer
            writer.journal.write("update", hardware_device=name_device(torch, found[1]))
            # Opening the library takes the driver some time: not in the first steps, which take
            # longer as it is, nor in a program that ends before there is much to read.
            return
        self._read_in = writer
        if self._thread is None:
            self._start(torch, found[1])

    def follow_config(self) -> None:
        """Ends where the settings say so; `visit` begins again."""
        if not self._session.config.hardware:
            self.stop()
            self._named_in = self._read_in = None

    def _start(self, torch: Any, own_index: int) -> None:
        placement = resolve_identity(os.environ).placement
        devices = choose_devices(torch, own_index, placement, os.environ)
        if devices:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._guard.protect("hardware", self._read_until_stopped),
                args=(devices, self._stop),
                name="meshscope-hardware",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread after a last reading."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join(_CLOSE_WAIT_S)

    def disarm_after_fork(self) -> None:
        """In a forked child, which has no such thread."""
        self._thread = None

    def _read_until_stopped(self, devices: list[str], stop: threading.Event) -> None:
        try:
            nvml = Nvml(LIBRARY)
        except OSError as error:
            self._session.journal("update", hardware={"reason": str(error)})
            return
        found = {name: device for name in devices if (device := nvml.find_device(name))}
        pause_s, is_last = 0.0, False
        while found and not is_last:
            is_last = stop.wait(pause_s)
            pause_s = self._guard.run("hardware", self._read_all, found) or _SAMPLE_EVERY_S
        nvml.close()

    def _read_all(self, devices: dict[str, NvmlDevice]) -> float:
        """Reads and writes every device. Returns the seconds until the next time."""
        total_ns = 0
        for name, device in devices.items():
            session = self._session
            with session.lock:  # no table may be made while its writer is being closed
                writer = session.writer
                if writer is None or session.is_paused:
                    return _SAMPLE_EVERY_S
                table = writer.table("hardware")
                name_id = writer.name_id(name)
            if writer is not self._described_in:
                self._described_in = writer
                facts = [{"device": key, **one.describe()} for key, one in devices.items()]
                writer.journal.write("update", hardware={"devices": facts})
            start_ns, time_ns = time.thread_time_ns(), session.clock()
            reading = device.read()
            cost_ns = time.thread_time_ns() - start_ns
            total_ns += cost_ns
            if reading != _NO_READING:
                table.put(*pack_reading(name_id, time_ns, reading, cost_ns))
        return max(_SAMPLE_EVERY_S, _COST_PER_WALL * total_ns / len(devices) / 1e9)


def pack_reading(
    name_id: int, time_ns: int, reading: DeviceReading, cost_ns: int
) -> tuple[int, int, int, int, int, int, int]:
    """A row of `hardware`."""
    return (
        name_id
        | _plus_one(reading.sm_clock_mhz, 16) << 16
        | _plus_one(reading.memory_clock_mhz, 16) << 32
        | _plus_one(reading.temperature_celsius, 15) << 48,
        time_ns,
        reading.energy_millijoules if reading.energy_millijoules < 1 << 63 else MISSING,
        _plus_one(reading.power_milliwatts, 32) | _plus_one(reading.clock_limits, 31) << 32,
        _plus_one(reading.num_ecc_corrected, 32) | _plus_one(reading.num_ecc_uncorrected, 31) << 32,
        _plus_one(reading.num_pcie_replays, 32) | _plus_one(reading.num_nvlink_errors, 31) << 32,
        min(cost_ns, 0xFFFFFFFF),
    )


def _plus_one(value: int, width: int) -> int:
    """A value as it is stored: plus one, the largest where it does not fit."""
    return min(value + 1, (1 << width) - 1)
