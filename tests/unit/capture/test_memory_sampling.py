"""Memory: how often it is read, what is read, and the limits of the host."""

from pathlib import Path

import pytest
from recorded import read_recorded

from meshscope.capture import sampling
from meshscope.capture.memory import device_memory as memory
from meshscope.capture.memory.device_memory import (
    MemorySample,
    pack_counts,
    pause_after,
    sample_memory,
)
from meshscope.capture.memory.host_memory import (
    read_host_memory,
    read_limit_bytes,
    read_total_bytes,
    resident_bytes,
)
from meshscope.capture.recorder import Recorder, RecorderConfig
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
    assert pause_after(cost_ns) == pause_ns


class FakeClock:
    def __init__(self):
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


@pytest.mark.parametrize(("cost_ns", "num_samples"), [(0, 50), (10_000, 50), (100_000, 5)])
def test_every_step_is_sampled_as_far_as_it_is_cheap(tmp_path, monkeypatch, cost_ns, num_samples):
    clock = FakeClock()

    def sample(torch):
        clock.now_ns += cost_ns
        return MemorySample((7, -1, -1, -1, -1), None)

    monkeypatch.setattr(sampling, "sample_memory", sample)
    rec = Recorder(
        tmp_path / "run", config=RecorderConfig(provenance=False, gc_pauses=False), clock=clock
    )
    with rec.step():  # its record opens the run
        pass
    for _ in range(50):
        with rec.step():
            clock.now_ns += 10 * MS
    path = rec.run_dir
    rec.close()
    found = read_recorded(path).rank.read("memory")
    assert len(found["step"]) == num_samples
    assert set(found["rss_bytes"].tolist()) == {7}


class FakeCuda:
    """Answers as torch.cuda does on a device."""

    is_capturing = False

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return self.is_capturing

    def mem_get_info(self):
        return (30, 100)

    def memory_stats(self):
        return {
            "allocated_bytes.all.current": 1,
            "reserved_bytes.all.current": 2,
            "allocated_bytes.all.peak": 3,
            "reserved_bytes.all.peak": 4,
            "active_bytes.all.current": 5,
            "inactive_split_bytes.all.current": 6,
            "num_alloc_retries": 8,
            "num_ooms": 9,
        }


class FakeTorch:
    cuda = FakeCuda()


def test_the_allocator_is_read_in_one_go():
    sample = sample_memory(FakeTorch())
    assert sample.memory[1:] == (1, 2, 3, 4)
    assert sample.allocator == (5, 6, 30, 100, pack_counts(8, 9))


def test_a_graph_that_is_captured_is_left_alone():
    torch = FakeTorch()
    torch.cuda = FakeCuda()
    torch.cuda.is_capturing = True
    assert sample_memory(torch).allocator[2:4] == (-1, -1)


def test_counts_are_read_back_and_missing_ones_stay_missing(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(sampling, "sample_memory", lambda torch: memory.sample_memory(FakeTorch()))
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False), clock=clock)
    for _ in range(2):
        with rec.step():
            clock.now_ns += MS
    path = rec.run_dir
    rec.close()
    found = open_run(path).last_attempt.ranks[0].read("allocator")
    row = {column.name: int(found[column.name][0]) for column in ALLOCATOR.columns}
    assert (row["num_alloc_retries"], row["num_ooms"], row["device_total_bytes"]) == (8, 9, 100)
    assert pack_counts(-1, -1) == 0


def test_without_a_device_only_the_process_is_known():
    assert sample_memory(None).allocator is None
    assert sample_memory(None).memory[1:] == (-1, -1, -1, -1)
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
