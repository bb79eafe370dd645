"""Devices are read through a real library: a small one, compiled here, whose answers are known."""

import ctypes
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshscope.capture.hardware import hardware_sampling
from meshscope.capture.hardware.device_choice import choose_devices, name_device
from meshscope.capture.hardware.nvml import DeviceReading, Nvml
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.placement import Placement
from meshscope.store.read.columns import decode_words
from meshscope.store.read.run import open_run
from meshscope.store.schema import MISSING, TABLES, ClockLimit

SOURCE = Path(__file__).parents[2] / "fake_nvml.c"
ADDRESS = "00000000:65:00.0"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


@pytest.fixture
def library(compiled, tmp_path) -> str:
    """A copy of its own: its counters begin at 0."""
    return shutil.copy(compiled, tmp_path / compiled.name)


class Cuda:
    """What torch says of devices, by index."""

    def __init__(self, *properties):
        self._properties = properties

    def is_initialized(self):
        return True

    def current_device(self):
        return len(self._properties) - 1

    def device_count(self):
        return len(self._properties)

    def get_device_properties(self, index):
        return self._properties[index]


def at_address(bus: int) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, uuid="1234")


def make_placement(local_rank: int | None) -> Placement:
    return Placement(
        rank=local_rank or 0,
        world_size=8,
        local_rank=local_rank,
        local_world_size=None if local_rank is None else 8,
        node_rank=None,
        source="made up",
    )


def test_a_device_is_read_and_what_it_does_not_have_is_asked_for_once(library):
    nvml = Nvml(library)
    assert nvml.find_device("00000000:66:00.0") is None
    device = nvml.find_device(ADDRESS)
    assert device is not None
    first, second = device.read(), device.read()
    known = DeviceReading(
        sm_clock_mhz=1245,
        memory_clock_mhz=2619,
        temperature_celsius=61,
        energy_millijoules=first.energy_millijoules,
        power_milliwatts=500_000,
        clock_limits=ClockLimit.POWER_CAP,
        num_ecc_corrected=MISSING,
        num_ecc_uncorrected=MISSING,
        num_pcie_replays=7,
        num_nvlink_errors=38 + 45,
    )
    assert first == known
    assert second == known._replace(
        energy_millijoules=second.energy_millijoules, num_ecc_uncorrected=2
    )
    assert ctypes.c_int.in_dll(ctypes.CDLL(library), "num_asked_for_ecc").value == 3
    assert device.describe() == {
        "name": "Made-up GPU",
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 2619,
        "power_limit_milliwatts": 700_000,
    }
    assert nvml.find_device("GPU-1234") is not None
    nvml.close()


def test_a_row_holds_every_value_and_what_is_missing():
    full = DeviceReading(1980, 2619, 90, 1 << 40, 700_000, 0x1FF, 3, 2, 1, 0)
    empty = DeviceReading(*[MISSING] * 10)
    too_much = full._replace(sm_clock_mhz=1 << 20, energy_millijoules=1 << 63)
    for reading, shown in (
        (full, full),
        (empty, empty),
        (too_much, full._replace(sm_clock_mhz=0xFFFE, energy_millijoules=MISSING)),
    ):
        words = hardware_sampling.pack_reading(64, 123, reading, 456)
        row = decode_words(TABLES["hardware"], np.array([[0, *words]], dtype=np.int64))
        values = {name: int(column[0]) for name, column in row.items()}
        assert values == {
            "name_id": 64, "time_host_mono_ns": 123, "cost_ns": 456, **shown._asdict()
        }  # fmt: skip


def test_who_reads_which_device():
    torch = SimpleNamespace(cuda=Cuda(at_address(0x65), at_address(0x66), at_address(0x65)))
    both = [ADDRESS, "00000000:66:00.0"]
    assert choose_devices(torch, 1, make_placement(0), {}) == both
    assert choose_devices(torch, 1, make_placement(3), {}) == []
    assert choose_devices(torch, 1, make_placement(3), {"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    # Nobody else sees the only device of a rank, or knows which ranks share its node.
    assert choose_devices(torch, 1, make_placement(3), {"CUDA_VISIBLE_DEVICES": "3"}) == both[1:]
    assert choose_devices(torch, 1, make_placement(None), {}) == both[1:]


def test_a_device_without_an_address_goes_by_its_uuid():
    torch = SimpleNamespace(cuda=Cuda(SimpleNamespace(uuid="1234"), SimpleNamespace()))
    assert name_device(torch, 0) == "GPU-1234"
    assert name_device(torch, 1) == ""


@pytest.fixture
def on_cuda(monkeypatch):
    """The recorder sees a program on the made-up device, and looks at every step."""
    torch = SimpleNamespace(cuda=Cuda(at_address(0x65)), get_num_threads=lambda: 1)
    monkeypatch.setitem(hardware_sampling.sys.modules, "torch", torch)
    monkeypatch.setattr("meshscope.capture.sampling._SAMPLE_EVERY_NS", 0)
    monkeypatch.setattr("meshscope.capture.sampling._LEAST_PARTS_NS", 1_000_000_000)
    monkeypatch.setattr(hardware_sampling, "_SAMPLE_EVERY_S", 0.002)
    monkeypatch.setattr(hardware_sampling, "_COST_PER_WALL", 0)


def make_recorder(path: Path, **settings) -> Recorder:
    config = RecorderConfig(
        provenance=False, device_events=False, memory=False, communication=False, **settings
    )
    return Recorder(path, config=config)


def take_steps(recorder: Recorder, num_steps: int = 10) -> None:
    for _ in range(num_steps):
        with recorder.step():
            time.sleep(0.01)


def find_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "meshscope-hardware"]


def test_a_run_has_its_device_and_stops_with_it(library, on_cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware_sampling, "LIBRARY", library)
    recorder = make_recorder(tmp_path / "run")
    take_steps(recorder)
    assert len(find_threads()) == 1
    recorder.close()
    assert not find_threads()
    assert recorder.guard.counts == {}
    assert ctypes.c_int.in_dll(ctypes.CDLL(library), "num_open").value == 0
    rank = open_run(tmp_path / "run").last_attempt.ranks[0]
    rows = rank.read("hardware")
    assert len(rows["name_id"]) >= 3
    assert {rank.name_of(int(one)) for one in rows["name_id"]} == {ADDRESS}
    assert set(rows["sm_clock_mhz"].tolist()) == {1245}
    # 500 W: half a joule, so 500 mJ, a millisecond; the counter counts whole milliseconds.
    times, energy = rows["time_host_mono_ns"], rows["energy_millijoules"]
    expected = (times[-1] - times[0]) / 1e6 * 500
    assert energy[-1] - energy[0] == pytest.approx(expected, abs=2_500)
    updates = {key: value for line in rank.updates for key, value in line.items()}
    assert updates["hardware_device"] == ADDRESS
    assert updates["hardware"]["devices"][0]["max_sm_clock_mhz"] == 1980


def test_pausing_and_settings_hold_it_up_and_a_new_attempt_is_described(
    library, on_cuda, monkeypatch, tmp_path
):
    monkeypatch.setattr(hardware_sampling, "LIBRARY", library)
    recorder = make_recorder(tmp_path / "run")
    take_steps(recorder)
    recorder.pause()
    time.sleep(0.01)  # a reading under way may still end
    paused_ns = time.monotonic_ns()
    time.sleep(0.03)
    resumed_ns = time.monotonic_ns()
    recorder.resume()
    take_steps(recorder)
    recorder.configure(hardware=False)
    assert not find_threads()
    recorder.configure(hardware=True)
    take_steps(recorder)
    assert find_threads()
    recorder.reset()
    take_steps(recorder)
    recorder.close()
    assert recorder.guard.counts == {}
    first, second = open_run(tmp_path / "run").attempts
    times = first.ranks[0].read("hardware")["time_host_mono_ns"]
    assert not ((times > paused_ns) & (times < resumed_ns)).any()
    for attempt in (first, second):
        updates = {key for line in attempt.ranks[0].updates for key in line}
        assert {"hardware", "hardware_device"} <= updates
        assert len(attempt.ranks[0].read("hardware")["name_id"])


def test_without_the_library_the_journal_says_so_and_nothing_else(
    on_cuda, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(hardware_sampling, "LIBRARY", str(tmp_path / "absent.so"))
    recorder = make_recorder(tmp_path / "run")
    take_steps(recorder)
    recorder.close()
    assert recorder.guard.counts == {}
    assert not caplog.records
    rank = open_run(tmp_path / "run").last_attempt.ranks[0]
    assert not rank.has_table("hardware")
    (reason,) = [line["hardware"]["reason"] for line in rank.updates if "hardware" in line]
    assert "absent.so" in reason


def test_no_thread_without_cuda_or_against_the_settings(on_cuda, monkeypatch, tmp_path):
    recorder = make_recorder(tmp_path / "off", hardware=False)
    take_steps(recorder)
    assert not find_threads()
    recorder.close()
    monkeypatch.setattr(Cuda, "is_initialized", lambda self: False)
    recorder = make_recorder(tmp_path / "cpu")
    take_steps(recorder)
    assert not find_threads()
    recorder.close()
    rank = open_run(tmp_path / "cpu").last_attempt.ranks[0]
    assert not any("hardware_device" in line for line in rank.updates)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_reads_nothing(library, on_cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware_sampling, "LIBRARY", library)
    recorder = make_recorder(tmp_path / "run")
    take_steps(recorder)
    child = os.fork()
    if child == 0:
        recorder.sampling.hardware.stop()  # waits for no thread
        os._exit(len(find_threads()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.close()
    assert recorder.guard.counts == {}


def test_a_dear_reading_comes_less_often(library, monkeypatch, tmp_path):
    recorder = make_recorder(tmp_path / "run")
    with recorder.step():
        pass
    nvml = Nvml(library)
    devices = {ADDRESS: nvml.find_device(ADDRESS)}
    costs = iter([0, 200_000, 0, 4_000_000])
    monkeypatch.setattr(hardware_sampling.time, "thread_time_ns", lambda: next(costs))
    assert recorder.sampling.hardware._read_all(devices) == 1.0
    assert recorder.sampling.hardware._read_all(devices) == 4.0
    recorder.close()
    nvml.close()
