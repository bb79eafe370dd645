"""Trains with trace windows in a process of its own: torch's profiler is one per process, and what
other tests leave behind must not matter.

    python profiling_program.py FOLDER

Every scenario is a run below FOLDER. The last one ends in SIGKILL.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout

QUIET = RecorderConfig(provenance=False, communication=False, stack_dumps=False)


def train(
    run_dir: Path,
    text: str,
    num_steps: int,
    *,
    before: Callable[[Recorder, int], None] = lambda recorder, step: None,
    first_step: int = 0,
    close: bool = True,
) -> Recorder:
    """Explicit steps, each with one matrix product; `before` is called between steps."""
    recorder = Recorder(run_dir, config=QUIET, layout=Layout(dp=1))
    recorder.profile(text)
    weight = torch.ones(8, 8)
    for step in range(first_step, first_step + num_steps):
        before(recorder, step)
        with recorder.step(step):
            weight @ weight
    if close:
        recorder.close()
    return recorder


def infer_steps(run_dir: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(run_dir, config=QUIET)
    recorder.attach(model, optimizer)
    recorder.profile("skip=2,wait=0,warmup=1,active=2,shapes")
    for _ in range(8):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    recorder.close()


def meet_other_profiler(run_dir: Path) -> None:
    """The program's own profiler waits in its warm-up while a window is due."""
    own = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=5, active=2, repeat=1),
    )
    own.start()
    train(run_dir, "skip=1,wait=0,warmup=1", 7, before=lambda recorder, step: own.step())
    own.stop()
    assert own.events()


def fail(run_dir: Path) -> None:
    """A profiler that cannot be started: its module is not there."""
    name = "torch.profiler"
    module, sys.modules[name] = sys.modules[name], None  # type: ignore[assignment]  # no module
    try:
        train(run_dir, "skip=1,wait=0,repeat=3", 8)
    finally:
        sys.modules[name] = module


def lose_loss(run_dir: Path) -> None:
    def log(recorder: Recorder, step: int) -> None:
        if step in (3, 8):
            recorder.log(loss=float("nan"))

    train(run_dir, "triggered,anomaly", 12, before=log)


def ask(run_dir: Path) -> None:
    def write(recorder: Recorder, step: int) -> None:
        if step == 2:
            (run_dir / "trigger").write_text('{"steps": 2, "first_step": 6}')
            windows = recorder.profiles.windows
            assert windows is not None
            assert windows._file is not None
            windows._file._next_look_ns = 0  # as if a second had passed
            recorder.timeline.next_visit_ns = 0

    train(run_dir, "triggered", 10, before=write)


def main(folder: Path) -> None:
    train(folder / "schedule", "skip=2,wait=1,warmup=1,active=2,repeat=2", 14, first_step=100)
    train(folder / "no_warmup", "skip=1,wait=0,warmup=0,active=1,plain", 4)
    infer_steps(folder / "inferred")
    train(folder / "capped", "skip=1,wait=1,repeat=0,cap=100", 12)
    train(folder / "cut_short", "skip=1,wait=0,active=50", 6)
    train(folder / "not_chosen", "skip=1,ranks=3", 6)
    lose_loss(folder / "nan")
    ask(folder / "asked")
    train(
        folder / "program",
        "triggered",
        6,
        before=lambda recorder, step: recorder.profile_now() if step == 2 else None,
    )
    fail(folder / "failing")
    meet_other_profiler(folder / "other")
    gc.collect()
    train(folder / "killed", "skip=1,wait=0,active=50", 4, close=False)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
