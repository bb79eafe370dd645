"""Devices over the steps of a run, with energies known in closed form."""

from pathlib import Path

import pytest

from builders import MS, SECOND, make_run
from hardware_builders import MadeDevice, MadeHardware
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.schema import ClockLimit

NUM_STEPS = 60
PERIOD_S = 0.101
"""100 ms of step and 1 ms of gap, from 0.5 s on."""
STEPS_S = (NUM_STEPS - 1) * PERIOD_S - 0.001
"""From the second step's start to the last one's end: the first is warm-up."""


def study_of(path: Path, hardware: MadeHardware | None, **run: object) -> Study:
    settings = {"num_steps": NUM_STEPS, **run}
    if hardware is not None:
        settings["also"] = hardware.write
    make_run(path, **settings)
    return Study(open_run(path).last_attempt)


def test_energy_of_a_steady_device_is_power_times_time(tmp_path):
    device = MadeDevice(ranks=(0,), clock_limits=lambda index: ClockLimit.POWER_CAP * (index % 2))
    study = study_of(tmp_path, MadeHardware(devices=(device,), num_readings=9), input_tokens=4096)
    hardware = study.hardware
    (found,) = hardware.devices
    expected = 500 * STEPS_S / (NUM_STEPS - 1)
    assert found.joules_per_step == pytest.approx(expected, rel=1e-6)
    assert hardware.joules_per_step == pytest.approx(expected, rel=1e-6)
    # The rates of steps and tokens are over the same time, so that only 4096 is left of them.
    assert hardware.joules_per_token == pytest.approx(expected / 4096, rel=1e-6)
    # Steps 1 to 59 last from 0.601 s to 6.559 s: readings 1 to 6 of 9.
    assert found.num_readings == 6
    assert found.limited_ratio == {"power cap": pytest.approx(0.5)}
    assert (found.sm_clock_mhz, found.max_sm_clock_mhz) == (1980, 1980)
    assert (found.memory_clock_mhz, found.max_memory_clock_mhz) == (2619, 2619)
    assert (found.power_watts, found.power_limit_watts) == (500, 700)
    assert found.temperature_celsius == 64
    assert found.product == "Made-up GPU"
    assert isinstance(found.peer_sm_clock_mhz, Unavailable)
    assert hardware.reading_cost_ns == 300_000


def test_without_a_counter_power_is_added_up(tmp_path):
    """Power that rises by 100 W a second: over [a, b] it is 300 (b - a) + 50 (b² - a²) joules."""
    device = MadeDevice(
        ranks=(0,),
        energy_mj=lambda time_ns: -1,
        watts=lambda time_ns: 300 + 100 * time_ns // SECOND,
    )
    study = study_of(tmp_path, MadeHardware(devices=(device,), num_readings=90, period_ns=100 * MS))
    start_s, end_s = 0.5 + PERIOD_S, 0.5 + PERIOD_S + STEPS_S
    joules = 300 * (end_s - start_s) + 50 * (end_s**2 - start_s**2)
    assert study.hardware.joules_per_step == pytest.approx(joules / (NUM_STEPS - 1), rel=1e-3)


def test_ranks_that_share_a_device_and_several_readers_count_it_once(tmp_path):
    device = MadeDevice(ranks=(0, 1, 2, 3))
    made = MadeHardware(devices=(device,), num_readings=9, readers=(0, 1, 2, 3))
    hardware = study_of(tmp_path, made, layout=Layout(dp=4), input_tokens=1000).hardware
    assert [one.ranks for one in hardware.devices] == [(0, 1, 2, 3)]
    expected = 500 * STEPS_S / (NUM_STEPS - 1)
    assert hardware.joules_per_step == pytest.approx(expected, rel=1e-6)
    assert hardware.joules_per_token == pytest.approx(expected / 4000, rel=1e-6)


def test_devices_of_a_job_are_added_up_and_compared(tmp_path):
    devices = tuple(
        MadeDevice(
            ranks=(rank,),
            bus=rank,
            sm_clock_mhz=1245 if rank == 2 else 1900 + rank,
            energy_mj=lambda time_ns, rank=rank: (100 + rank) * time_ns // MS,
        )
        for rank in range(4)
    )
    made = MadeHardware(devices=devices, num_readings=9)
    hardware = study_of(tmp_path, made, layout=Layout(dp=4)).hardware
    watts = 100 + 101 + 102 + 103
    expected = watts * STEPS_S / (NUM_STEPS - 1)
    assert hardware.joules_per_step == pytest.approx(expected, rel=1e-6)
    clocks = [(one.sm_clock_mhz, one.peer_sm_clock_mhz) for one in hardware.devices]
    assert clocks == [(1900, 1901), (1901, 1900), (1245, 1901), (1903, 1900)]
    assert isinstance(hardware.joules_per_token, Unavailable)


def test_a_device_that_nobody_read_leaves_the_sum_unknown(tmp_path):
    made = MadeHardware(devices=(MadeDevice(ranks=(0,)),), num_readings=9)

    def also(writer):
        made.write(writer)
        if writer.rank == 1:
            writer.journal.write("update", hardware_device="00000000:66:00.0")

    make_run(tmp_path, num_steps=NUM_STEPS, world_size=2, also=also)
    hardware = Study(open_run(tmp_path).last_attempt).hardware
    assert len(hardware.devices) == 1
    assert hardware.joules_per_step == Unavailable(
        "1 of 2 device(s) have no energy: not all were read"
    )


@pytest.mark.parametrize(
    ("energy_mj", "num_readings", "num_steps", "reason"),
    [
        (lambda time_ns: 500, 1, NUM_STEPS, "tells neither"),
        (lambda time_ns: 10 * SECOND - time_ns, 9, NUM_STEPS, "went back"),
        (lambda time_ns: time_ns, 9, 8, "less than a second"),
    ],
)
def test_energy_that_cannot_be_known_says_why(tmp_path, energy_mj, num_readings, num_steps, reason):
    device = MadeDevice(ranks=(0,), energy_mj=energy_mj)
    made = MadeHardware(devices=(device,), num_readings=num_readings)
    hardware = study_of(tmp_path, made, num_steps=num_steps).hardware
    assert reason in hardware.joules_per_step.reason


def test_idle_readings_do_not_count_as_low_clocks(tmp_path):
    device = MadeDevice(ranks=(0,), sm_clock_mhz=345, clock_limits=lambda index: ClockLimit.IDLE)
    (found,) = study_of(tmp_path, MadeHardware(devices=(device,), num_readings=9)).hardware.devices
    assert found.sm_clock_mhz == Unavailable("idle at every reading")
    assert found.limited_ratio == {}


def test_errors_are_what_counters_rose_by(tmp_path):
    device = MadeDevice(ranks=(0,), errors={"num_ecc_uncorrected": 2, "num_nvlink_errors": 5})
    (found,) = study_of(tmp_path, MadeHardware(devices=(device,), num_readings=9)).hardware.devices
    counts = (found.num_ecc_corrected, found.num_ecc_uncorrected, found.num_pcie_replays)
    assert (*counts, found.num_nvlink_errors) == (0, 2, 0, 5)


def test_a_run_without_readings_says_why(tmp_path):
    assert study_of(tmp_path / "cpu", None).hardware == Unavailable(
        "no rank was seen to use a CUDA device"
    )

    def also(writer):
        writer.journal.write("update", hardware_device="00000000:65:00.0")
        writer.journal.write("update", hardware={"reason": "no such library"})

    make_run(tmp_path / "bare", num_steps=5, also=also)
    study = Study(open_run(tmp_path / "bare").last_attempt)
    assert "no such library" in study.hardware.reason


def test_nonsense_in_the_journal_is_ignored(tmp_path):
    made = MadeHardware(devices=(MadeDevice(ranks=(0,)),), num_readings=9)

    def also(writer):
        made.write(writer)
        for fields in ([], {"devices": 3}, {"devices": [None, {"device": 7}]}, {"reason": 1}):
            writer.journal.write("update", hardware=fields)
        writer.journal.write("update", hardware_device=["x"])

    make_run(tmp_path, num_steps=NUM_STEPS, also=also)
    hardware = Study(open_run(tmp_path).last_attempt).hardware
    assert [one.device for one in hardware.devices] == ["00000000:65:00.0"]
