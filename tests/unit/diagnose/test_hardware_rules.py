"""Devices that are held back or report errors, and those that only look like it."""

import pytest
from diagnosed import context_of, find

from builders import MS, make_run
from hardware_builders import MadeDevice, MadeHardware
from late_runs import LateRun, noisy
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from meshscope.store.schema import ClockLimit

NUM_RANKS = 4


def make_devices(**of_rank_2: object) -> tuple[MadeDevice, ...]:
    """One per rank; that of rank 2 is another."""
    return tuple(
        MadeDevice(ranks=(rank,), bus=rank, **(of_rank_2 if rank == 2 else {}))
        for rank in range(NUM_RANKS)
    )


def find_in(path, devices: tuple[MadeDevice, ...], code: str):
    made = MadeHardware(devices=devices, num_readings=50, period_ns=100 * MS)
    make_run(path, layout=Layout(dp=NUM_RANKS), num_steps=50, also=made.write)
    return find(code, path)


def always(bits: int):
    return lambda index: bits


def test_heat_on_one_device_is_named_with_its_clocks(tmp_path):
    heat = ClockLimit.HARDWARE_THERMAL | ClockLimit.HARDWARE_SLOWDOWN
    devices = make_devices(
        sm_clock_mhz=1245, clock_limits=lambda index: heat if index % 4 == 0 else 0
    )
    (finding,) = find_in(tmp_path, devices, "HW001")
    assert finding.ranks == (2,)
    assert finding.severity is Severity.MEDIUM
    assert finding.title == "the device of rank 2 held back: heat (hardware)"
    assert "1,245 of 1,980 MHz, heat (hardware), in 2" in finding.summary


def test_a_power_cap_on_all_devices_alike_is_low(tmp_path):
    devices = tuple(
        MadeDevice(
            ranks=(rank,),
            bus=rank,
            sm_clock_mhz=1500 + rank,
            clock_limits=always(ClockLimit.POWER_CAP),
        )
        for rank in range(NUM_RANKS)
    )
    (finding,) = find_in(tmp_path, devices, "HW001")
    assert (finding.ranks, finding.severity) == ((0, 1, 2, 3), Severity.LOW)


@pytest.mark.parametrize(
    "near_miss",
    [
        {},
        {"sm_clock_mhz": 1800, "clock_limits": always(ClockLimit.POWER_CAP)},  # 91 %: high enough
        {"sm_clock_mhz": 1245, "clock_limits": lambda index: ClockLimit.POWER_CAP * (index == 20)},
        {"sm_clock_mhz": 345, "clock_limits": always(ClockLimit.IDLE)},
        {"errors": {"num_ecc_corrected": 400, "num_nvlink_errors": 9, "num_pcie_replays": 9}},
    ],
)
def test_healthy_devices_are_not_reported(tmp_path, near_miss):
    devices = make_devices(**near_miss)
    assert find_in(tmp_path, devices, "HW001") == []
    assert find("HW002", tmp_path) == []


@pytest.mark.parametrize(
    ("column", "number", "severity", "title"),
    [
        (
            "num_ecc_uncorrected",
            1,
            Severity.HIGH,
            "uncorrected memory errors on the device of rank 2",
        ),
        ("num_nvlink_errors", 10, Severity.MEDIUM, "NVLink errors on the device of rank 2"),
        ("num_pcie_replays", 10, Severity.LOW, "repeated PCIe packets on the device of rank 2"),
    ],
)
def test_errors_during_the_run_are_reported(tmp_path, column, number, severity, title):
    (finding,) = find_in(tmp_path, make_devices(errors={column: number}), "HW002")
    assert (finding.title, finding.severity, finding.ranks) == (title, severity, (2,))
    assert [one.value for one in finding.evidence] == [number]


def test_a_run_without_readings_has_no_finding(tmp_path):
    make_run(tmp_path, num_steps=20)
    assert find("HW001", tmp_path) == find("HW002", tmp_path) == []


def record_slow_rank(path, devices: tuple[MadeDevice, ...]):
    """Rank 2 computes longer, as it would on a slower device."""
    plain = noisy(1)

    def work(rank: int, step: int):
        extra = 8 * MS if rank == 2 else 0
        return {name: ns + extra * (name == "forward") for name, ns in plain(rank, step).items()}

    made = MadeHardware(devices=devices, num_readings=15, period_ns=100 * MS)
    LateRun(
        layout=Layout(dp=NUM_RANKS), work=work, also=made.write, host=lambda rank: "node0"
    ).record(path)
    rules = {code: RULES[code] for code in ("ST001", "HW001")}
    return diagnose(context_of(path), rules=rules).findings


def test_a_slow_ranks_device_is_evidence_and_not_a_second_finding(tmp_path):
    devices = make_devices(sm_clock_mhz=1245, clock_limits=always(ClockLimit.POWER_CAP))
    (finding,) = record_slow_rank(tmp_path, devices)
    assert (finding.code, finding.ranks) == ("ST001", (2,))
    clocks = "1,245 of 1,980 MHz, power cap (its peers' 1,980)"
    assert f"Rank 2's device ran at {clocks}." in finding.summary
    assert ("clock of rank 2's device", clocks) in {
        (one.name, one.value) for one in finding.evidence
    }
    assert "power limit" in finding.change


def test_a_slow_rank_on_a_device_like_its_peers_is_not_blamed_on_it(tmp_path):
    (finding,) = record_slow_rank(tmp_path, make_devices(sm_clock_mhz=1960))
    assert finding.code == "ST001"
    assert "device" not in finding.summary
    assert "host" in finding.change
