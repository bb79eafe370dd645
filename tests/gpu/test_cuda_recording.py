"""What must be true on a real device; run by hand where there is one (see CONTRIBUTING.md)."""

from pathlib import Path

import pytest
import torch
from torch import nn

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.capture.steps.marking import MAX_STRIDE
from meshscope.store.read.run import open_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH = 2048


def make_training():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model, optimizer):
    loss = model(torch.randn(512, WIDTH, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def values_of(rank, name):
    scalars = rank.read("scalars")
    named = [rank.name_of(int(i)) == name for i in scalars["name_id"]]
    return [v for v, is_it in zip(scalars["value"].tolist(), named, strict=True) if is_it]


def test_device_spans_and_numbers_arrive_without_waiting(tmp_path: Path):
    model, optimizer = make_training()
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.attach(model, optimizer)
    losses = []
    for _ in range(3 * MAX_STRIDE + 1):  # however short steps are, three of them are marked
        loss = train_step(model, optimizer)
        recorder.log(loss=loss)
        losses.append(loss.detach())
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    rank = open_run(run_dir).last_attempt.ranks[0]
    assert values_of(rank, "loss") == pytest.approx([float(loss) for loss in losses])
    assert values_of(rank, "backward_loss")
    device = rank.read("device_spans")
    spans = rank.read("spans")
    assert len(device["name_id"]) >= 3
    assert set(device["host_start_host_mono_ns"].tolist()) <= set(
        spans["start_host_mono_ns"].tolist()
    )
    assert (device["duration_ns"] > 0).all()
    assert (device["offset_min_ns"] <= device["offset_max_ns"]).all()
    assert rank.problems == []


def test_without_device_events_a_far_number_is_refused(tmp_path: Path):
    model, optimizer = make_training()
    config = RecorderConfig(provenance=False, device_events=False)
    recorder = Recorder(tmp_path / "run", config=config)
    recorder.attach(model, optimizer)
    for _ in range(3):
        recorder.log(loss=train_step(model, optimizer))
    run_dir = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {"scalar": 3}
    rank = open_run(run_dir).last_attempt.ranks[0]
    assert values_of(rank, "backward_loss") == []
    assert len(rank.read("steps")["step"]) == 3


def test_a_graph_can_be_captured_while_recording(tmp_path: Path):
    model, optimizer = make_training()
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.attach(model, optimizer)
    for _ in range(3):
        train_step(model, optimizer)
    static = torch.randn(64, WIDTH, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        model(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = model(static)
    static.copy_(torch.ones_like(static))
    graph.replay()
    with torch.no_grad():
        expected = model(static)
    assert torch.allclose(captured, expected, atol=1e-4)
    train_step(model, optimizer)
    recorder.close()
    assert recorder.guard.counts == {}


def test_a_killed_or_hanging_step_is_known_on_a_device_too(tmp_path: Path):
    model, optimizer = make_training()
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.attach(model, optimizer)
    for _ in range(3):
        train_step(model, optimizer)
    loss = model(torch.randn(512, WIDTH, device="cuda")).square().mean()
    rank = open_run(recorder.run_dir).last_attempt.ranks[0]
    done = [rank.name_of(phase.name_id) for phase in rank.open_phases()]
    assert done == ["forward"]
    loss.backward()
    recorder.close()
