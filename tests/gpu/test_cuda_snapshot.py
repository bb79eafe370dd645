"""Real snapshots of torch.cuda.memory against the allocator's own numbers; run by hand."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from meshscope.analyze.memory.snapshot_summary import summarize_snapshot
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.ingest.snapshot.snapshot_native import load_library

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
        reserved_peak_bytes = torch.cuda.max_memory_reserved()
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
    assert device.reserved_peak_bytes == reserved_peak_bytes
    assert device.final_bytes == in_use
    print(device.sentence, dict(device.categories_bytes))
    assert {"activations", "gradients", "optimizer state"} <= set(device.categories_bytes)
    plain = pickle.loads(path.read_bytes())
    assert len(snapshot.event_action) == sum(map(len, plain["device_traces"]))
    assert len(snapshot.block_bytes) == sum(len(one["blocks"]) for one in plain["segments"])
    hold_against_torch(plain, device)
    del held


def hold_against_torch(plain, device):
    """Torch's own summary of the same file."""
    text = _memory_viz.segsum(plain)
    lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    part = device.fragmentation
    assert lines["total_reserved"] == str(_memory_viz.Bytes(part.reserved_bytes))
    in_use = sum(
        block["size"]
        for segment in plain["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    assert part.in_use_bytes == in_use


@pytest.mark.skipif(load_library() is None, reason="no compiled reader here")
def test_both_readers_give_the_same_of_a_real_file(tmp_path):
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="all")
    try:
        held = train(2)
        path = tmp_path / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found, other = (read_snapshot(path, use_native=use_native) for use_native in (True, False))
    assert found.frames == other.frames
    for field in fields(found):
        one, two = getattr(found, field.name), getattr(other, field.name)
        if isinstance(one, np.ndarray):
            assert np.array_equal(one, two), field.name
    assert found.num_odd == 0
    assert found.num_stacks > 10
    del held
