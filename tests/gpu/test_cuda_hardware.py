"""What the driver's library says beside `nvidia-smi`; run by hand where there is a device."""

import shutil
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch

from meshscope.analyze.study import Study
from meshscope.capture.hardware.device_choice import name_device
from meshscope.capture.hardware.nvml import LIBRARY, Nvml
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi"),
]

QUERIED = (
    "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw",
    "enforced.power.limit", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
WIDTH = 4096


def ask_smi(device: str) -> dict[str, float]:
    """The same quantities by the vendor's own program; those it does not know are left out."""
    fields = ",".join(QUERIED)
    command = ["nvidia-smi", f"--id={device}", f"--query-gpu={fields}"]
    shown = subprocess.run(
        [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    ).stdout
    answers = zip(QUERIED, shown.strip().split(", "), strict=True)
    return {name: float(text) for name, text in answers if text.replace(".", "").isdigit()}


def multiply(seconds: float) -> None:
    """Keeps the device busy."""
    matrix = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.synchronize()


def test_a_reading_agrees_with_nvidia_smi():
    multiply(0.5)
    device_name = name_device(torch, torch.cuda.current_device())
    nvml = Nvml(LIBRARY)
    device = nvml.find_device(device_name)
    assert device is not None, device_name
    torch.cuda.synchronize()
    ours, theirs, facts = device.read(), ask_smi(device_name), device.describe()
    print(ours, theirs, facts)
    assert facts["max_sm_clock_mhz"] == theirs["clocks.max.sm"]
    assert facts["name"] == torch.cuda.get_device_name()
    assert facts["power_limit_milliwatts"] / 1000 == pytest.approx(theirs["enforced.power.limit"])
    assert ours.memory_clock_mhz == pytest.approx(theirs["clocks.mem"], rel=0.02)
    assert ours.sm_clock_mhz == pytest.approx(theirs["clocks.sm"], rel=0.15)
    assert ours.temperature_celsius == pytest.approx(theirs["temperature.gpu"], abs=4)
    assert ours.power_milliwatts / 1000 == pytest.approx(theirs["power.draw"], rel=0.3)
    if "ecc.errors.uncorrected.volatile.total" in theirs:
        assert ours.num_ecc_uncorrected == theirs["ecc.errors.uncorrected.volatile.total"]
    nvml.close()


def test_readings_are_cheap_and_energy_is_power_times_time():
    nvml = Nvml(LIBRARY)
    device = nvml.find_device(name_device(torch, 0))
    costs, readings = [], []
    for _ in range(20):
        multiply(0.1)
        wall_ns, start_ns = time.monotonic_ns(), time.thread_time_ns()
        readings.append((time.monotonic_ns(), device.read()))
        costs.append((time.thread_time_ns() - start_ns, time.monotonic_ns() - wall_ns))
    cpu_us, wall_us = (statistics.median(one) / 1e3 for one in zip(*costs, strict=True))
    print(f"a reading: {cpu_us:.0f} us of processor time, {wall_us:.0f} us by the clock")
    (first_ns, first), (last_ns, last) = readings[5], readings[-1]
    watts = (last.energy_millijoules - first.energy_millijoules) * 1e6 / (last_ns - first_ns)
    drawn = statistics.median(one.power_milliwatts for _, one in readings[10:]) / 1000
    print(f"by the counter {watts:.0f} W, by readings {drawn:.0f} W")
    assert watts == pytest.approx(drawn, rel=0.3)
    nvml.close()


def test_a_recorded_run_has_its_device_and_its_energy(tmp_path: Path):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    for _ in range(40):
        with recorder.step():
            multiply(0.1)
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    hardware = Study(open_run(run_dir).last_attempt).hardware
    assert not isinstance(hardware, Unavailable), hardware
    print(hardware)
    (device,) = hardware.devices
    assert 1 <= device.num_readings <= 6  # as often as a reading's cost allows
    # A step of 0.1 s at between 60 W and the limit.
    assert 6 < hardware.joules_per_step < 0.13 * device.power_limit_watts
    assert hardware.joules_per_step == pytest.approx(0.1 * device.power_watts, rel=0.4)
    assert hardware.reading_cost_ns < 20_000_000
