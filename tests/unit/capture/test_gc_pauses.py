"""Pauses of the garbage collector become spans; the collector is left as it was."""

import gc
import threading
from pathlib import Path

import pytest
from recorded import read_recorded

from meshscope.capture.memory.gc_pauses import LEAST_PAUSE_NS, MAX_WAITING, GcPauses, pause_name
from meshscope.capture.recorder import Recorder, RecorderConfig


class SteppingClock:
    """Every reading is a millisecond after the one before."""

    def __init__(self):
        self.now_ns = 0
        self.step_ns = 1_000_000

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


@pytest.fixture
def quiet_collector():
    """No collection but those a test asks for."""
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


@pytest.fixture
def pauses(quiet_collector):
    woken = []
    made = GcPauses(SteppingClock(), lambda: woken.append(1))
    made.woken = woken
    made.install()
    yield made
    made.remove()


def test_a_long_collection_is_kept_with_its_generation(pauses):
    gc.collect(1)
    gc.collect()
    found = pauses.take()
    assert [(generation, end - begin) for generation, begin, end, _ in found] == [
        (1, 1_000_000),
        (2, 1_000_000),
    ]
    assert {ident for *_, ident in found} == {threading.get_ident()}
    assert len(pauses.woken) == 2
    assert pauses.take() == []


def test_short_collections_go_by(pauses):
    pauses._clock.step_ns = LEAST_PAUSE_NS - 1
    gc.collect()
    assert (pauses.take(), pauses.woken) == ([], [])


def test_the_queue_is_bounded(pauses):
    for _ in range(MAX_WAITING + 3):
        gc.collect(0)
    assert len(pauses.take()) == MAX_WAITING
    assert pauses.num_forgotten == 3


def test_callbacks_are_taken_out_and_others_stay(quiet_collector):
    before = list(gc.callbacks)
    pauses = GcPauses(SteppingClock(), lambda: None)
    pauses.install()
    pauses.install()
    assert len(gc.callbacks) == len(before) + 1
    pauses.remove()
    pauses.remove()
    assert gc.callbacks == before


def test_a_generation_of_another_python_has_a_name():
    assert [pause_name(generation) for generation in (0, 2, 3)] == ["gc gen0", "gc gen2", "gc gen3"]


def test_the_recorder_writes_them_as_details_of_the_training_thread(
    tmp_path: Path, quiet_collector
):
    clock = SteppingClock()
    before = list(gc.callbacks)
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False), clock=clock)
    assert gc.callbacks == before, "nothing is installed before the first record"
    with rec.step():
        pass
    with rec.step(), rec.phase("forward"):
        gc.collect()
    path = rec.run_dir
    rec.close()
    assert gc.callbacks == before
    recorded = read_recorded(path)
    (pause,) = recorded.pauses
    assert (pause.name, pause.thread, pause.is_detail) == ("gc gen2", 0, True)
    (forward,) = recorded.steps[1].phases
    assert forward.start_ns < pause.start_ns < pause.end_ns < forward.end_ns
    assert forward.self_ns == forward.end_ns - forward.start_ns


def test_a_collection_inside_the_journal_does_not_deadlock(tmp_path, quiet_collector):
    rec = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False), clock=SteppingClock())
    with rec.step():
        pass
    with rec.session.writer.journal._lock, rec.session.writer._lock:
        gc.collect()
    with rec.step():
        pass
    path = rec.run_dir
    rec.close()
    assert len(read_recorded(path).pauses) == 1


def test_pauses_can_be_turned_off_and_on(tmp_path, quiet_collector):
    config = RecorderConfig(provenance=False, gc_pauses=False)
    rec = Recorder(tmp_path / "run", config=config, clock=SteppingClock())
    with rec.step():
        gc.collect()
    rec.configure(gc_pauses=True)
    with rec.step():
        gc.collect()
    rec.configure(gc_pauses=False)
    with rec.step():
        gc.collect()
    path = rec.run_dir
    rec.close()
    recorded = read_recorded(path)
    (pause,) = recorded.pauses
    assert recorded.steps[1].start_ns < pause.start_ns < recorded.steps[1].end_ns
