"""Real snapshots of torch.cuda.memory against the allocator's own numbers; run by hand."""

import pickle

import pytest
import torch
from torch import nn

from meshscope.analyze.snapshot_summary import summarize_snapshot
from meshscope.ingest.snapshot import read_snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH = 1024


def train(num_steps):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(4096, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_snapshot_agrees_with_the_allocator(tmp_path):
    train(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        torch.cuda.reset_peak_memory_stats()
        held = train(3)
        torch.cuda.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated()
        in_use, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        path = tmp_path / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    snapshot = read_snapshot(path)
    [device] = [one for one in summarize_snapshot(snapshot).devices if one.num_events]
    assert snapshot.warnings == ()
    assert device.fragmentation.reserved_bytes == reserved
    assert device.fragmentation.in_use_bytes == in_use
    assert device.peak_bytes == pytest.approx(peak_bytes, rel=0.001)
    assert abs(device.unexplained_bytes) <= 0.001 * peak_bytes
    print(device.sentence, dict(device.categories_bytes))
    assert {"activations", "gradients", "optimizer state"} <= set(device.categories_bytes)
    plain = pickle.loads(path.read_bytes())
    assert len(snapshot.event_action) == sum(map(len, plain["device_traces"]))
    assert len(snapshot.block_bytes) == sum(len(one["blocks"]) for one in plain["segments"])
    del held
