"""The section on hardware, in text and JSON."""

from pathlib import Path

from builders import MS, make_run
from hardware_builders import MadeDevice, MadeHardware
from meshscope.core.layout import Layout
from meshscope.report.contents import list_sections
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.report import Detail, Report
from meshscope.report.screen import Screen
from meshscope.store.schema import ClockLimit
from report_builders import document_of, render_report, report_of


def make_report(path: Path, *devices: MadeDevice, num_ranks: int = 2) -> Report:
    """Steps of 100 ms and 1 ms of gap, 4096 tokens a rank."""
    made = MadeHardware(devices=devices, num_readings=90, period_ns=100 * MS)
    make_run(
        path,
        layout=Layout(dp=num_ranks),
        num_steps=60,
        input_tokens=4096,
        host=lambda rank: "node0",
        also=made.write,
    )
    return report_of(path)


def show(report: Report, **detail: bool) -> list[str]:
    sections = list_sections(report, Detail(**detail), ("hardware",))
    return render_terminal(sections, Screen(width=120)).splitlines()


def test_each_device_has_a_line_and_energy_is_of_all(tmp_path):
    capped = MadeDevice(
        ranks=(1,), bus=0x66, sm_clock_mhz=1245, clock_limits=lambda index: ClockLimit.POWER_CAP
    )
    lines = show(make_report(tmp_path, MadeDevice(ranks=(0,)), capped))
    # 500 W in 59 steps and 58 gaps, on two devices: 100.98 J a step.
    assert lines[1:6] == [
        "Hardware  medians of steady steps, read about once a second",
        "  Energy     101 J a step, 2 devices together",
        "             12.3 mJ a token",
        "  Errors     none during the run",
        "  A reading  300 µs of processor time a device",
    ]
    rows = [" ".join(line.split()) for line in lines[6:] if "MHz" in line]
    assert rows == [
        "rank 0 1,980 of 1,980 MHz nothing 500 W 64 °C 50.5 J 2,619 MHz 00000000:65:00.0",
        "rank 1 1,245 of 1,980 MHz power cap 100 % 500 W 64 °C 50.5 J 2,619 MHz 00000000:66:00.0",
    ]


def test_errors_are_named_and_many_devices_are_cut(tmp_path):
    devices = [
        MadeDevice(
            ranks=(rank,), bus=rank, sm_clock_mhz=1900 + rank, errors={"num_pcie_replays": 1}
        )
        for rank in range(10)
    ]
    report = make_report(tmp_path, *devices, num_ranks=10)
    lines = show(report)
    assert "  Errors     10 repeated PCIe packets" in lines
    assert sum("of 1,980 MHz" in line for line in lines) == 8
    assert lines[-1].startswith("  2 more devices (--all-ranks)")
    assert sum("of 1,980 MHz" in line for line in show(report, shows_all_ranks=True)) == 10


def test_the_document_has_the_devices(tmp_path):
    hardware = document_of(make_report(tmp_path, MadeDevice(ranks=(0, 1))))["hardware"]
    (device,) = hardware["devices"]
    assert (device["ranks"], device["product"], device["limited_ratio"]) == (
        [0, 1], "Made-up GPU", {}
    )  # fmt: skip
    assert hardware["joules_per_step"] == device["joules_per_step"]


def test_a_run_without_readings_has_no_section(tmp_path):
    report = report_of(make_run(tmp_path, num_steps=5))
    assert "Hardware" not in render_report(report)
    assert document_of(report)["hardware"] == {
        "unavailable": "no rank was seen to use a CUDA device"
    }
