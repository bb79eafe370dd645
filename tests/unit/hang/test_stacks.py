"""Live processes are asked for their stacks, and no other process is ever signalled."""

import os
import signal
import time
from pathlib import Path

import pytest

from hang_builders import Process, read_state
from meshscope.hang.processes import Life, ProcessState, look_at_process, this_machine
from meshscope.hang.stacks import (
    Frame,
    ask_for_stacks,
    find_askable,
    find_main_stack,
    parse_stacks,
    pick_telling_frames,
)
from meshscope.store.write.now_file import NOW_NAME

SIGNAL = int(signal.SIGRTMAX) - 6

# What a recorder does, and then a program that sleeps two calls deep, beside another thread.
PROGRAM = f"""
import faulthandler, threading, time
file = open({{path!r}}, "a")
faulthandler.register({SIGNAL}, file=file, all_threads=True)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def load():
    open({{ready!r}}, "w").close()
    time.sleep(600)
def main():
    load()
main()
"""


@pytest.fixture
def offering(processes, tmp_path) -> Process:
    """A process that has registered the signal."""
    ready = tmp_path / "ready"
    code = PROGRAM.format(path=str(tmp_path / NOW_NAME), ready=str(ready))
    found = processes.start(code)
    deadline = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def state_of(process: Process) -> ProcessState:
    here = this_machine()
    header = {
        "host": here.host,
        "pid": process.pid,
        "process_start_ticks": process.start_ticks,
    }
    return look_at_process(header, here)


def test_a_process_says_where_its_main_thread_is(offering, tmp_path):
    askable = find_askable(SIGNAL, state_of(offering), tmp_path)
    for _ in range(2):  # each answer is the newest
        (frames,) = ask_for_stacks({3: askable}, answer_seconds=10).values()
        assert [frame.function for frame in frames] == ["load", "main", "<module>"]
    assert read_state(offering.pid) in "SR"


def refuse(number: int | None, process: ProcessState, directory: Path) -> bool:
    return find_askable(number, process, directory) is None


def test_nobody_else_is_signalled(processes, offering, tmp_path):
    state = state_of(offering)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert refuse(SIGNAL, state, elsewhere)  # no such file
    (elsewhere / NOW_NAME).write_text("", encoding="utf-8")
    assert refuse(SIGNAL, state, elsewhere)  # which it does not hold open
    (elsewhere / NOW_NAME).unlink()
    (elsewhere / NOW_NAME).symlink_to(tmp_path / NOW_NAME)
    assert refuse(SIGNAL, state, elsewhere)
    assert refuse(None, state, tmp_path)
    assert refuse(signal.SIGKILL, state, tmp_path)
    assert refuse(signal.SIGUSR1, state, tmp_path)  # it would die of it: no handler
    assert refuse(SIGNAL, state_of(processes.sleeper()), tmp_path)
    later = Process(offering.pid, offering.start_ticks + 1)
    assert refuse(SIGNAL, state_of(later), tmp_path)
    unverified = ProcessState(life=Life.SLEEPING, pid=offering.pid)
    assert refuse(SIGNAL, unverified, tmp_path)
    os.kill(offering.pid, signal.SIGSTOP)
    stopped = ProcessState(life=Life.STOPPED, pid=offering.pid, is_verified=True)
    assert refuse(SIGNAL, stopped, tmp_path)


def test_one_that_does_not_answer_is_not_waited_for_long(offering, tmp_path):
    askable = find_askable(SIGNAL, state_of(offering), tmp_path)
    os.kill(offering.pid, signal.SIGSTOP)
    assert ask_for_stacks({0: askable}, answer_seconds=0.05) == {}


DUMP = b"""Thread 0x00007ff1383fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007ff138e6db80 [python] (most recent call first):
  File "/x/site-packages/meshscope/capture/operations/collectives.py", line 433 in wait
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 1 in all_reduce
  File "/home/me/train.py", line ??? in step
  File "/home/me/train.py", line 12 in <module>
  a line that is none
"""


def test_dumps_of_faulthandler_are_read():
    threads = parse_stacks(DUMP)
    assert [len(frames) for frames in threads] == [2, 4]
    frames = find_main_stack(threads)
    assert frames[2] == Frame(file="/home/me/train.py", line=None, function="step")
    telling = [(frame.function, frame.is_program) for frame in pick_telling_frames(frames)]
    assert telling == [("all_reduce", False), ("step", True), ("<module>", True)]


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b'  File "a", line 1 in b\n', DUMP[:200]])
def test_what_is_no_dump_gives_no_stack(data):
    assert find_main_stack(parse_stacks(data)) == ()
    assert pick_telling_frames(()) == ()
