"""Children of multiprocessing end without the interpreter's exit functions, but with an end."""

import gc
import multiprocessing
import sys
import weakref
from pathlib import Path

import pytest
import torch

from meshscope.capture.default import start
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run

QUIET = RecorderConfig(provenance=False)


def record_a_step(run_dir: Path) -> None:
    with Recorder(run_dir, config=QUIET).step():
        pass


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_recorder_made_in_a_child_is_closed_at_its_end(tmp_path: Path, method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=record_a_step, args=(tmp_path,))
    child.start()
    child.join()
    (rank,) = open_run(tmp_path).last_attempt
    assert child.exitcode == 0
    assert rank.closing is not None
    assert rank.closing["last_step"] == 0


def start_and_fail(run_dir: Path) -> None:
    """As torch's start_processes runs its ranks."""
    try:
        with start(run_dir, provenance=False).step():
            pass
        raise ValueError("no more")
    except ValueError:
        sys.exit(1)


def test_the_exception_of_a_child_is_in_its_recording(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=start_and_fail, args=(tmp_path,))
    child.start()
    child.join()
    (rank,) = open_run(tmp_path).last_attempt
    assert (child.exitcode, rank.exception) == (1, "ValueError: no more")


def test_a_recorder_made_before_the_fork_is_closed_in_the_child_that_used_it(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, config=QUIET)

    def use() -> None:
        with recorder.step():
            pass

    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join()
    recorder.close()
    (attempt,) = open_run(tmp_path).attempts
    (rank,) = attempt
    assert child.exitcode == 0
    assert rank.closing is not None


def test_a_child_leaves_the_parents_recording_open(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, config=QUIET)
    assert recorder.open()
    with recorder.step():
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        (rank,) = open_run(tmp_path).last_attempt
        assert rank.closing is None
    recorder.close()


def test_nothing_keeps_a_closed_recorder(tmp_path: Path) -> None:
    """A program may record a hundred times; each recorder has buffers and events."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    recorders = []
    for number in range(2):  # the last one stays: it is the process's own
        recorder = start(tmp_path / str(number), provenance=False)
        recorder.attach(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        recorder.close()
        recorders.append(weakref.ref(recorder))
        del recorder
    gc.collect()
    assert recorders[0]() is None
