"""Memory: how often it is read, what is read, and the limits of the host."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded import read_recorded

from fake_clock import FakeClock
from meshscope.capture import sampling
from meshscope.capture.memory import device_memory as memory
from meshscope.capture.memory.device_memory import (
    DeviceCapacity,
    MemorySample,
    pack_counts,
    pause_after,
    read_capacity,
    sample_memory,
)
from meshscope.capture.memory.host_memory import (
    read_host_memory,
    read_limit_bytes,
    read_total_bytes,
    resident_bytes,
)
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.capture.steps.device_events import find_backend
from meshscope.store.read.run import open_run
from meshscope.store.schema import ALLOCATOR

MS = 1_000_000


@pytest.mark.parametrize(
    ("cost_ns", "pause_ns"),
    [
        (0, 0),
        (15_000, 15 * MS),
        (1 * MS, 1000 * MS),
        (5 * MS, 1000 * MS),
        (20 * MS, 2000 * MS),
    ],
)
def test_a_reading_costs_a_thousandth_and_at_worst_a_hundredth(cost_ns, pause_ns):
    assert pause_after(cost_ns, 16) == pause_ns


@pytest.mark.parametrize(
    ("cost_ns", "pause_ns"), [(15_000, 15 * MS), (MS // 2, 100 * MS), (5 * MS, 500 * MS)]
)
def test_the_first_readings_come_ten_times_a_second(cost_ns, pause_ns):
    assert pause_after(cost_ns, 15) == pause_ns


def record_steps(path, clock, *, num_steps, step_ns):
    """The memory of a run whose first step, which opens it, is not counted."""
    config = RecorderConfig(provenance=False, gc_pauses=False)
    rec = Recorder(path / "run", config=config, clock=clock)
    with rec.step():
        pass
    for _ in range(num_steps):
        with rec.step():
            clock.now_ns += step_ns
    path = rec.run_dir
    rec.close()
    return read_recorded(path).rank


@pytest.mark.parametrize(("cost_ns", "num_samples"), [(0, 50), (10_000, 50), (100_000, 6)])
def test_every_step_is_sampled_as_far_as_it_is_cheap(tmp_path, monkeypatch, cost_ns, num_samples):
    clock = FakeClock()

    def sample(torch, capacity):
        clock.now_ns += cost_ns
        return MemorySample((7, -1, -1, -1, -1), None)

    monkeypatch.setattr(sampling, "sample_memory", sample)
    rank = record_steps(tmp_path, clock, num_steps=50, step_ns=10 * MS)
    found = rank.read("memory")
    # The first two follow each other: the first one is cold.
    assert len(found["step"]) == num_samples
    assert set(found["rss_bytes"].tolist()) == {7}


class FakeCuda:
    """Answers as torch.cuda does on a device; each call takes the time it is given."""

    is_capturing = False
    share = 1.0

    def __init__(self, clock=None, *, stats_ns=0, driver_ns=0):
        self.clock, self.stats_ns, self.driver_ns = clock or FakeClock(), stats_ns, driver_ns
        self.num_driver_calls = 0

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return self.is_capturing

    def mem_get_info(self):
        self.clock.now_ns += self.driver_ns
        self.num_driver_calls += 1
        return (30, 100)

    def get_per_process_memory_fraction(self):
        return self.share

    def memory_stats_as_nested_dict(self):
        self.clock.now_ns += self.stats_ns
        return {
            "allocated_bytes": {"all": {"current": 1, "peak": 3}, "small_pool": {"current": 0}},
            "reserved_bytes": {"all": {"current": 2, "peak": 4}},
            "active_bytes": {"all": {"current": 5}},
            "inactive_split_bytes": {"all": {"current": 6}},
            "num_alloc_retries": 8,
            "num_ooms": 9,
        }


class FakeTorch:
    def __init__(self, cuda=None):
        self.cuda = cuda or FakeCuda()


@pytest.mark.parametrize(
    ("stats_us", "driver_us", "least"), [(40, 200, 30), (70, 900, 20), (20, 2000, 60)]
)
def test_sixty_steps_on_a_device_have_twenty_readings_at_a_thousandth_each(
    tmp_path, monkeypatch, stats_us, driver_us, least
):
    clock = FakeClock()
    cuda = FakeCuda(clock, stats_ns=1000 * stats_us, driver_ns=1000 * driver_us)
    torch = FakeTorch(cuda)
    read, ask = memory.sample_memory, memory.read_capacity
    monkeypatch.setattr(sampling, "sample_memory", lambda _, capacity: read(torch, capacity))
    monkeypatch.setattr(sampling, "read_capacity", lambda _: ask(torch))
    rank = record_steps(tmp_path, clock, num_steps=60, step_ns=25 * MS)
    found = rank.read("allocator")
    num_readings, num_free = len(found["step"]), int((found["device_free_bytes"] == 30).sum())
    assert num_readings >= least
    # 1.5 s: the driver is asked at the start and a second later, or later where it is slow.
    assert cuda.num_driver_calls == num_free == (1 if driver_us > 1000 else 2)
    assert 1000 * stats_us * (num_readings - 2) <= 60 * 25 * MS / 1000 * 1.01


def test_the_allocator_is_read_in_one_go():
    sample = sample_memory(FakeTorch(), DeviceCapacity(30, 100))
    assert sample.memory[1:] == (1, 2, 3, 4)
    assert sample.allocator == (5, 6, 30, 100, pack_counts(8, 9))


def test_what_an_allocator_does_not_count_is_missing():
    cuda = FakeCuda()
    cuda.memory_stats_as_nested_dict = lambda: {"allocated_bytes": {"all": {"current": 1}}}
    sample = sample_memory(FakeTorch(cuda), DeviceCapacity())
    assert sample.memory[1:] == (1, -1, -1, -1)
    assert sample.allocator == (-1, -1, -1, -1, pack_counts(-1, -1))


def test_a_graph_that_is_captured_is_left_alone():
    cuda = FakeCuda()
    cuda.is_capturing = True
    assert read_capacity(FakeTorch(cuda)) == DeviceCapacity(-1, -1, -1)


def test_a_share_of_the_device_is_a_limit():
    cuda = FakeCuda()
    assert read_capacity(FakeTorch(cuda)) == DeviceCapacity(30, 100, -1)
    cuda.share = 0.25
    assert read_capacity(FakeTorch(cuda)) == DeviceCapacity(30, 100, 25)


def test_counts_are_read_back_and_missing_ones_stay_missing(tmp_path, monkeypatch):
    clock, torch = FakeClock(), FakeTorch()
    torch.cuda.share = 0.5
    monkeypatch.setattr(sampling, "sample_memory", lambda _, c: memory.sample_memory(torch, c))
    monkeypatch.setattr(sampling, "read_capacity", lambda _: memory.read_capacity(torch))
    rank = record_steps(tmp_path, clock, num_steps=2, step_ns=MS)
    found = rank.read("allocator")
    row = {column.name: int(found[column.name][0]) for column in ALLOCATOR.columns}
    assert (row["num_alloc_retries"], row["num_ooms"], row["device_total_bytes"]) == (8, 9, 100)
    assert pack_counts(-1, -1) == 0
    limits = [line["device_memory"] for line in rank.updates if "device_memory" in line]
    assert limits == [{"limit_bytes": 50}]


def test_without_a_device_only_the_process_is_known():
    assert sample_memory(None, DeviceCapacity()).allocator is None
    assert sample_memory(None, DeviceCapacity()).memory[1:] == (-1, -1, -1, -1)
    assert read_capacity(None) == DeviceCapacity()
    assert resident_bytes() > 0


def test_the_hosts_memory_is_written_down_once(tmp_path):
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    with rec.step():
        pass
    path = rec.run_dir
    rec.close()
    updates = open_run(path).last_attempt.ranks[0].updates
    assert [line["host_memory"] for line in updates if "host_memory" in line] == [
        read_host_memory()
    ]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_smallest_limit_of_the_control_groups_counts(tmp_path):
    root = tmp_path / "cgroup"
    write(root / "a" / "b" / "memory.max", "max\n")
    write(root / "a" / "memory.max", "5000\n")
    write(root / "memory.max", "9000\n")
    groups = write(tmp_path / "groups", "0::/a/b\n")
    assert read_limit_bytes(groups, root) == 5000


def test_the_first_version_of_control_groups(tmp_path):
    root = tmp_path / "cgroup"
    write(root / "memory" / "job" / "memory.limit_in_bytes", "7000\n")
    write(root / "memory" / "memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")
    groups = write(tmp_path / "groups", "5:cpu,cpuacct:/x\n4:memory:/job\n")
    assert read_limit_bytes(groups, root) == 7000


def test_what_the_system_does_not_tell_is_missing(tmp_path):
    assert read_limit_bytes(tmp_path / "none", tmp_path) == -1
    assert read_limit_bytes(write(tmp_path / "odd", "nonsense\n::\n0::/../..\n"), tmp_path) == -1
    assert read_total_bytes(tmp_path / "none") == -1
    assert read_total_bytes(write(tmp_path / "meminfo", "MemTotal: many kB\n")) == -1
    assert read_total_bytes(write(tmp_path / "good", "MemTotal:  2 kB\n")) == 2048


def make_other(name: str, *, is_initialized: bool = True, **functions) -> SimpleNamespace:
    """A torch with an accelerator that a package added under a name of its own."""
    module = SimpleNamespace(
        Event=object,
        Stream=object,
        current_device=lambda: 2,
        is_initialized=lambda: is_initialized,
        **functions,
    )
    c = SimpleNamespace(
        _get_privateuse1_backend_name=lambda: name, _accelerator_getAccelerator=lambda: name
    )
    cuda = SimpleNamespace(is_initialized=lambda: False)
    return SimpleNamespace(cuda=cuda, _C=c, **{name: module})


def test_an_accelerator_of_another_package_is_marked_and_its_memory_read():
    counters = {"memory_allocated": lambda: 10, "memory_reserved": lambda: 20}
    torch = make_other("npu", **counters, max_memory_allocated=lambda: 15)
    assert find_backend(torch) == ("npu", 2)
    assert sample_memory(torch, DeviceCapacity()).memory[1:] == (10, 20, 15, -1)
    idle = make_other("npu", is_initialized=False, **counters)
    assert find_backend(idle) is None
    assert sample_memory(idle, DeviceCapacity()).memory[1:] == (-1, -1, -1, -1)


def test_one_without_events_has_host_times_only():
    torch = make_other("npu")
    del torch.npu.Event
    assert find_backend(torch) is None


def test_memory_of_mps_is_read_once_it_is_in_use(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    torch = make_other("privateuseone")
    torch.backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True))
    used = [0]
    torch.mps = SimpleNamespace(
        current_allocated_memory=lambda: used[0], driver_allocated_memory=lambda: 64
    )
    assert sample_memory(torch, DeviceCapacity()).memory[1:] == (-1, -1, -1, -1)
    used[0] = 48
    assert sample_memory(torch, DeviceCapacity()).memory[1:] == (48, 64, -1, -1)
