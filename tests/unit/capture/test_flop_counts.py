"""Steps of a program that says nothing are counted, and nothing else changes."""

import gc
import os

import pytest
import torch
from torch import nn

from meshscope.analyze.budget.model_flops import read_flops
from meshscope.capture.model.operator_events import find_graph_dtype
from meshscope.capture.profiling import flop_counts
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from meshscope.store.read.trace_windows import disturbing_windows

ONE = 2 * 4 * 8 * 8


def train(recorder, num_steps=10, num_microbatches=2, inside=lambda step: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if recorder is not None:
        recorder.attach(model, optimizer)
    for step in range(num_steps):
        for _ in range(num_microbatches):
            model(torch.randn(4, 8)).sum().backward()
        inside(step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def read(recorder):
    path = recorder.run_dir
    recorder.close()
    assert recorder.guard.counts == {}
    return open_run(path).last_attempt


def test_a_step_is_counted_with_all_its_microbatches(recorder, monkeypatch):
    monkeypatch.setattr(flop_counts, "_MAX_DISTURBANCE", 0.0)  # however long the step takes here
    bare = train(None)
    assert all(map(torch.equal, bare, train(recorder)))
    attempt = read(recorder)
    found = read_flops(attempt)[0]
    assert found.model_flops == found.hardware_flops == 2 * 5 * ONE
    assert found.source == "counted, 10 operators of step 6"
    assert found.dtype == "float32"
    (window,) = disturbing_windows(attempt)
    assert (window.disturbed_from_step, window.disturbed_to_step) == (6, 6)
    assert not torch.autograd._profiler_enabled()


def test_steps_that_differ_are_said_to(recorder, monkeypatch):
    monkeypatch.setattr(flop_counts, "_MAX_SHARE", 1e9)
    monkeypatch.setattr(flop_counts, "_LEAST_COUNTING_NS", 10**9)
    train(recorder, num_steps=10)
    train(recorder, num_steps=10, num_microbatches=3)
    found = read_flops(read(recorder))[0]
    assert found.model_flops == 2 * 5 * ONE  # the lower middle
    assert found.source.startswith("counted, 10 operators of steps 6, ")
    assert found.source.endswith("; which differ by 0.4 of their median")


def test_a_step_of_too_many_operators_is_not_watched_and_that_is_said(recorder, monkeypatch):
    monkeypatch.setattr(flop_counts, "_LEAST_MAX_EVENTS", 100)
    monkeypatch.setattr(flop_counts, "_MAX_STEP_SHARE", 0.0)
    train(recorder)
    attempt = read(recorder)
    assert not disturbing_windows(attempt)
    found = read_flops(attempt)
    assert isinstance(found, Unavailable)
    assert "too many to note" in found.reason


@pytest.mark.parametrize("says", [True, False])
def test_the_program_may_say_it_or_switch_it_off(recorder, says):
    if says:
        recorder.set_flops(model_flops_per_step=7e9, source="me")
    else:
        recorder.configure(flop_counts=False)
    train(recorder)
    attempt = read(recorder)
    found = read_flops(attempt)
    assert disturbing_windows(attempt) == ()
    assert not says or (found[0].model_flops, found[0].source) == (7e9, "me")


def test_a_profiler_of_the_programs_goes_first(recorder):
    def profile(step):
        if step == 6:  # the counted one
            with torch.autograd.profiler.profile(use_kineto=False) as found:
                torch.ones(2, 2) @ torch.ones(2, 2)
            seen.extend(found.function_events)

    seen = []
    train(recorder, inside=profile)
    assert seen
    assert read(recorder)


def test_a_child_of_a_counted_step_is_left_alone(recorder):
    def fork(step):
        if step == 6:
            pid = os.fork()
            if not pid:
                os._exit(int(torch.autograd._profiler_enabled()))
            codes.append(os.waitpid(pid, 0)[1])

    codes = []
    train(recorder, inside=fork)
    assert codes == [0]
    assert read_flops(read(recorder))[0].model_flops == 2 * 5 * ONE


def test_with_a_device_the_first_count_is_later(recorder, monkeypatch):
    monkeypatch.setattr(flop_counts, "_uses_device", lambda: True)
    train(recorder, num_steps=32)
    assert read_flops(read(recorder))[0].source == "counted, 10 operators of step 30"


def test_a_look_at_the_graph_of_a_deep_model_makes_few_objects():
    weight = torch.ones(2, 2, requires_grad=True)
    loss = weight
    for _ in range(1000):
        loss = (loss @ weight).relu()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        assert find_graph_dtype(loss.sum()) == "float32"
        assert gc.get_count()[0] - before < 350
    finally:
        gc.enable()
