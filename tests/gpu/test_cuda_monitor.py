"""FLOPs, the allocator's figures and the monitor on a real device; see CONTRIBUTING.md."""

import itertools
import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from meshscope.analyze.budget.model_flops import read_flops
from meshscope.analyze.memory.memory import Place, analyze_memory
from meshscope.capture.memory.device_memory import DeviceCapacity, sample_memory
from meshscope.capture.memory.host_memory import resident_bytes
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, HEADS, LENGTH, BATCH = 1024, 16, 512, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        parts = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


@pytest.fixture
def recorded(tmp_path: Path):
    model = Attention().cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.attach(model, optimizer)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    held = torch.cuda.memory_allocated()
    counted = recorder.count_flops(model, x)
    assert torch.cuda.memory_allocated() == held
    start_s = time.monotonic()
    # Marks on the device are read ten times a second: where steps take less than a millisecond, 60
    # of them may end before the first are.
    for step in itertools.count():
        if step >= 60 and time.monotonic() - start_s > 0.5:
            break
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    yield recorder, counted
    recorder.close()


def test_fused_attention_is_counted_as_its_products(recorded):
    _, counted = recorded
    tokens = BATCH * LENGTH
    matrices = 2 * tokens * 4 * WIDTH * WIDTH
    attention = 4 * tokens * LENGTH * WIDTH
    assert counted.forward_flops == matrices + attention
    # The input needs no gradient: qkv has one product less in backward.
    assert counted.backward_flops == 2 * (matrices + attention) - 2 * tokens * 3 * WIDTH * WIDTH
    assert counted.main_dtype == "bfloat16"


def test_the_allocators_figures_agree_with_torch(recorded):
    recorder, _ = recorded
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    rank = open_run(run_dir).last_attempt.ranks[0]
    allocator, memory = rank.read("allocator"), rank.read("memory")
    assert allocator["time_host_mono_ns"].tolist() == memory["time_host_mono_ns"].tolist()
    total = torch.cuda.get_device_properties(0).total_memory
    # The driver is asked once a second, the allocator far more often.
    assert set(allocator["device_total_bytes"].tolist()) <= {total, -1}
    assert int(allocator["device_total_bytes"][0]) == total
    assert (allocator["device_free_bytes"] < total).all()
    assert (allocator["active_bytes"] >= memory["allocated_bytes"]).all()
    assert (allocator["num_ooms"] <= torch.cuda.memory_stats()["num_ooms"]).all()


@pytest.mark.parametrize("leak_bytes", [64 << 20, 0])
def test_sixty_steps_of_25_ms_are_enough_to_see_a_leak(tmp_path: Path, leak_bytes: int):
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    kept = [torch.empty(1 << 20, device="cuda")]
    for _ in range(60):
        with recorder.step():
            if leak_bytes:
                kept.append(torch.empty(leak_bytes, dtype=torch.uint8, device="cuda"))
            time.sleep(0.025)
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}, recorder.guard.first_messages
    attempt = open_run(run_dir).last_attempt
    read_after = attempt.ranks[0].read("memory")["step"].tolist()
    told = f"memory was read after steps {read_after}; a reading takes {time_readings()}"
    # Growth takes 8 of them after the first.
    assert len(read_after) >= 9, told
    memory = analyze_memory(attempt)
    (rank,) = (rank for rank in memory.ranks if rank.place is Place.DEVICE)
    assert not isinstance(rank.growth, Unavailable), f"{rank.growth.reason}; {told}"
    assert rank.is_leaking is bool(leak_bytes), f"{rank.growth}; {told}"
    assert rank.growth.per_step == pytest.approx(leak_bytes, rel=0.01), told


def time_readings() -> dict[str, str]:
    """What a reading of memory consists of, and how long each part takes."""
    parts = {
        "resident": resident_bytes,
        "allocator": torch.cuda.memory_stats_as_nested_dict,
        "driver": torch.cuda.mem_get_info,
        "sample": lambda: sample_memory(torch, DeviceCapacity()),
    }
    found = {}
    for name, read in parts.items():
        costs = []
        for _ in range(20):
            start_ns = time.monotonic_ns()
            read()
            costs.append(time.monotonic_ns() - start_ns)
        found[name] = f"{statistics.median(costs) / 1e3:.0f} us, at most {max(costs) / 1e3:.0f}"
    return found


def test_the_peak_is_found_by_the_devices_name_and_the_monitor_knows_mfu(recorded):
    recorder, _ = recorded
    analysis = recorder.analysis()
    assert analysis.clock == "device"
    run_dir = recorder.run_dir
    recorder.close()
    found = read_flops(open_run(run_dir).last_attempt)
    assert not isinstance(found, Unavailable)
    if isinstance(found[0].peak_flops_per_s, Unavailable):
        pytest.skip(found[0].peak_flops_per_s.reason)
    assert 0 < analysis.mfu_ratio < 1
    assert torch.cuda.get_device_name() in found[0].peak_source
