"""A recorder with a size limit thins in a thread of its own."""

import threading
import time
from pathlib import Path

import numpy as np

from meshscope.capture.background_thinning import find_max_bytes
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run
from meshscope.store.write.pack import OLD_PACK


def test_a_job_s_size_is_divided_by_its_ranks_and_a_rank_s_own_comes_first(tmp_path: Path) -> None:
    env = {"MESHSCOPE_MAX_DISK": "8000"}
    assert find_max_bytes(None, env, 8, tmp_path / "rank") == 1000
    assert find_max_bytes(70, env, 8, tmp_path / "rank") == 70
    for nothing in ({}, {"MESHSCOPE_MAX_DISK": "much"}):
        assert find_max_bytes(None, nothing, 8, tmp_path / "rank") == 16 << 30
    for none_env, given in ((env, 0), ({"MESHSCOPE_MAX_DISK": "0"}, None)):
        assert find_max_bytes(given, none_env, 8, tmp_path / "rank") is None


def test_earlier_attempts_count_but_leave_a_quarter(tmp_path: Path) -> None:
    earlier = tmp_path / "attempt000"
    earlier.mkdir()
    (earlier / "steps.tbl").write_bytes(bytes(600))
    assert find_max_bytes(1000, {}, 1, tmp_path) == 400
    (earlier / "spans.tbl").write_bytes(bytes(600))
    assert find_max_bytes(1000, {}, 1, tmp_path) == 250


def test_a_recorder_thins_while_it_records(tmp_path: Path) -> None:
    config = RecorderConfig(max_disk_bytes=4 << 20, provenance=False, hardware=False)
    recorder = Recorder(tmp_path / "run", config=config)
    deadline_s, num_steps, old = time.monotonic() + 120, 0, Path()
    while time.monotonic() < deadline_s and not old.is_file():
        for _ in range(50):
            with recorder.step():
                for _ in range(8):
                    with recorder.span("piece"):
                        pass
            num_steps += 1
        time.sleep(0.01)
        if recorder.run_dir is not None:
            old = recorder.run_dir / "rank00000" / "attempt000" / OLD_PACK
    recorder.close()
    assert old.is_file()
    recording = open_run(tmp_path / "run").last_attempt.ranks[0]
    assert not recording.problems
    assert not recording.health
    assert len(recording.read("steps")["step"]) == num_steps
    starts = recording.read("spans")["start_host_mono_ns"]
    assert len(np.unique(starts)) == len(starts)


def test_no_thread_is_there_until_a_large_size_has_something_to_thin(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    config = RecorderConfig(provenance=False, hardware=False, stack_samples=False)
    recorder = Recorder(tmp_path / "run", config=config)
    with recorder.step():
        pass
    recorder.session.watch_size()
    assert not set(threading.enumerate()) - before
    assert recorder.session.writer is not None
    thinner = recorder.session.writer.thinner
    assert thinner is not None
    assert thinner.segment_bytes == 1 << 30
    thinner._max_bytes = 1 << 20  # as if a segment had been filled: 16 GiB take a while
    while not thinner.is_due():
        with recorder.step(), recorder.span("piece"):
            pass
    recorder.session.watch_size()
    assert [one.name for one in set(threading.enumerate()) - before] == ["meshscope-thin"]
    recorder.close()
    assert not set(threading.enumerate()) - before
