"""A real program with a slow function between steps, and one without."""

import time
from collections import Counter
from pathlib import Path

import torch

from meshscope.capture.config import RecorderConfig
from meshscope.capture.recorder import Recorder
from meshscope.store.read.run import open_run
from meshscope.store.schema import SampleReason

QUIET = RecorderConfig(provenance=False, communication=False, stack_dumps=False)


def log_metrics(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


SLEEP_LINE = log_metrics.__code__.co_firstlineno + 2


def train(run_dir: Path, *, num_steps: int, between: float = 0.0, inside: float = 0.0) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2048, 64)
    recorder = Recorder(run_dir, config=QUIET).attach(model, optimizer)
    for _ in range(num_steps):
        loss = model(batch).sum()
        log_metrics(inside)
        loss.backward()
        optimizer.step()
        log_metrics(between)
    recorder.close()
    assert recorder.guard.num_errors == 0


def count_lines(run_dir: Path) -> tuple[Counter[str], set[int], set[int]]:
    recording = open_run(run_dir).last_attempt.ranks[0]
    stacks = recording.read("stacks")
    lines = Counter(recording.name_of(int(one)).partition(" < ")[0] for one in stacks["name_id"])
    return lines, set(stacks["reason"].tolist()), set(stacks["step"].tolist())


SLEEPS = f"capture/test_gap_watch.py:{SLEEP_LINE} log_metrics > sleep"


def test_a_gap_that_repeats_is_sampled_and_its_line_named(tmp_path: Path) -> None:
    train(tmp_path / "run", num_steps=24, between=0.012)
    lines, reasons, steps = count_lines(tmp_path / "run")
    assert lines[SLEEPS] >= 2
    assert reasons == {SampleReason.GAP}
    assert len(steps) <= 2  # the sampled one, and the one before, whose gap it was


def test_time_inside_a_step_that_no_phase_claims_is_sampled(tmp_path: Path) -> None:
    train(tmp_path / "run", num_steps=24, inside=0.012)
    lines, _, _ = count_lines(tmp_path / "run")
    assert lines[SLEEPS] >= 2
