"""Where the training thread is, seen from another thread: real threads, real lines."""

import dis
import gc
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from meshscope.capture.config import RecorderConfig
from meshscope.capture.recorder import Recorder
from meshscope.capture.stacks.frames import FrameTexts, find_call, shorten_path
from meshscope.store.read.run import open_run
from meshscope.store.schema import SampleReason

QUIET = RecorderConfig(provenance=False, communication=False, stack_dumps=False)


class Big:
    """Something whose life can be watched."""


def pause_for_a_while(seconds: float = 0.08) -> None:
    held = Big()
    pause_for_a_while.held = weakref.ref(held)  # type: ignore[attr-defined]
    time.sleep(seconds)


LINE_OF_SLEEP = pause_for_a_while.__code__.co_firstlineno + 3


def read_samples(run_dir: Path) -> list[tuple[str, int, int]]:
    recording = open_run(run_dir).last_attempt.ranks[0]
    stacks = recording.read("stacks")
    return [
        (recording.name_of(int(name)), int(step), int(reason))
        for name, step, reason in zip(
            stacks["name_id"], stacks["step"], stacks["reason"], strict=True
        )
    ]


def test_the_line_that_sleeps_is_named_with_what_it_calls(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", config=QUIET)
    sampler = recorder.session.stack_sampler
    before = set(threading.enumerate())  # others' recorders may have one
    with recorder.step():
        assert sampler.start(SampleReason.KERNELS, expected_ns=200_000_000)
        assert not sampler.start(SampleReason.GAP, expected_ns=1)  # one request at a time
        pause_for_a_while()
        sampler.stop()
    (own,) = set(threading.enumerate()) - before
    assert own.name == "meshscope-stacks"
    recorder.close()
    assert not own.is_alive()

    samples = read_samples(tmp_path / "run")
    here = f"capture/test_stack_sampler.py:{LINE_OF_SLEEP} pause_for_a_while > sleep < "
    inside = [sample for sample in samples if sample[0].startswith(here)]
    assert len(inside) >= 2
    assert {sample[1:] for sample in inside} == {(0, SampleReason.KERNELS)}


def test_no_frame_outlives_its_sample(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", config=QUIET)
    sampler = recorder.session.stack_sampler
    sampler.start(SampleReason.KERNELS, expected_ns=1)
    pause_for_a_while(0.02)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        sampler.stop()
        deadline = time.monotonic() + 5
        while sampler.is_sampling and time.monotonic() < deadline:
            time.sleep(0.001)
        assert pause_for_a_while.held() is None  # type: ignore[attr-defined]
    finally:
        if was_enabled:
            gc.enable()
    recorder.close()


def test_what_costs_more_than_its_share_is_declined(tmp_path: Path) -> None:
    now = [0]
    recorder = Recorder(tmp_path / "run", config=QUIET, clock=lambda: now[0])
    sampler = recorder.session.stack_sampler
    sampler.cost_ns = 30_000_000
    assert not sampler.start(SampleReason.GAP, expected_ns=1)
    now[0] = 20 * 10**9  # 20 ms and a thousandth of 20 s are 40 ms
    assert sampler.start(SampleReason.GAP, expected_ns=1)
    sampler.stop()
    recorder.configure(stack_samples=False)
    assert not sampler.start(SampleReason.GAP, expected_ns=1)
    recorder.close()


def test_a_forked_child_has_no_thread_and_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", config=QUIET)
    with recorder.step():
        recorder.session.stack_sampler.start(SampleReason.KERNELS, expected_ns=1)
        while recorder.session.writer is None:  # the first sample opens the run
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            sampler = recorder.session.stack_sampler
            is_quiet = not sampler.is_sampling and not sampler.start(1, expected_ns=1)
            recorder.close()
            os._exit(0 if is_quiet else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.close()
    assert len(read_samples(tmp_path / "run")) >= 1


def test_frames_of_the_standard_library_are_left_out() -> None:
    texts, seen = FrameTexts(), []

    def look(_: object) -> str:
        seen.append(texts.write(texts.find_spots(sys._getframe(1))))
        return ""

    json.dumps({"a": Big()}, default=look)  # `default` is called by the encoder's own frames
    assert [text.partition(" < ")[0].split(" ", 1)[1] for text in seen] == [
        "test_frames_of_the_standard_library_are_left_out > dumps"
    ]


def test_the_call_is_read_from_the_instruction() -> None:
    def nested(a, b):  # type: ignore[no-untyped-def]
        return a.first(b.second()).third(
            b.fourth(),
        )

    calls = [i for i in dis.get_instructions(nested) if i.opname == "CALL"]
    names = [find_call(nested.__code__, call.offset) for call in calls]
    assert names == ["second", "first", "fourth", "third"]
    assert find_call(nested.__code__, 0) == ""


def test_a_path_keeps_its_last_two_parts() -> None:
    assert shorten_path("/home/me/my project/train.py") == "my_project/train.py"
    assert shorten_path("train.py") == "train.py"


def test_of_a_package_the_innermost_frames_stay(tmp_path: Path) -> None:
    file = tmp_path / "tracker" / "client.py"
    package: dict[str, Callable[..., None]] = {}
    source = "def send(f): return f()\ndef log(f): return send(f)\ndef run(f): return log(f)\n"
    exec(compile(source, str(file), "exec"), package)
    texts, seen = FrameTexts(), []
    texts._sites = (f"{tmp_path}/",)

    def look() -> None:
        seen.append(texts.write(texts.find_spots(sys._getframe(1))))

    package["run"](look)
    here = "test_of_a_package_the_innermost_frames_stay"
    line = test_of_a_package_the_innermost_frames_stay.__code__.co_firstlineno
    frames = seen[0].split(" < ")
    assert frames[:3] == [
        "~tracker/client.py:1 send > f",
        "~tracker/client.py:2 log",
        f"capture/test_stack_sampler.py:{line + 11} {here[:60]}",
    ]
