"""Trace windows on a real device; run by hand where there is one (see CONTRIBUTING.md)."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshscope.store.read.run import open_run
from meshscope.store.read.trace_windows import windows_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROGRAM = """
import sys, torch
from torch import nn
from meshscope.capture.recorder import Recorder
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
recorder = Recorder(sys.argv[1])
recorder.attach(model, optimizer)
recorder.profile("skip=3,wait=0,warmup=1,active=2,repeat=3,shapes,memory")
for _ in range(20):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
recorder.close()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_traces_hold_kernels_of_their_own_steps(run):
    found = windows_of(open_run(run).last_attempt)
    assert [(w.first_step, w.last_step) for w in found] == [(4, 5), (7, 8), (10, 11)]
    for window in found:
        with gzip.open(run / window.path) as file:
            events = json.load(file)["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert len(kernels) >= 6, "two steps of forward, backward and optimizer"
        assert {f"ProfilerStep#{window.first_step}", f"ProfilerStep#{window.last_step}"} <= names


def test_the_program_is_not_disturbed(run):
    recording = open_run(run).last_attempt.ranks[0]
    assert recording.read("steps")["step"].tolist() == list(range(20))
    assert recording.closing["num_errors"] == 0
