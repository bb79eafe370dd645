"""What the kernel says about real processes."""

import signal
import time
from dataclasses import replace

import pytest

from hang_builders import Process, wait_for_state
from meshscope.hang.processes import Life, look_at_process, this_machine


def header_of(process: Process, **changes: object) -> dict[str, object]:
    here = this_machine()
    return {
        "host": here.host,
        "clock_id": here.boot_id,
        "pid": process.pid,
        "process_start_ticks": process.start_ticks,
        "start_host_mono_ns": 1 << 62,
        **changes,
    }


def look(process: Process, **changes: object):
    return look_at_process(header_of(process, **changes), this_machine())


def test_lives_of_processes(processes):
    lives = {
        Life.SLEEPING: processes.sleeper(),
        Life.STOPPED: processes.stopped(),
        Life.ZOMBIE: processes.zombie(),
    }
    assert {look(process).life: process for process in lives.values()} == lives
    assert look(processes.killed()).life is Life.DEAD


def test_what_ended_a_zombie(processes):
    struck = look(processes.zombie())
    assert (struck.exit_signal, struck.was_sent_off) == (signal.SIGKILL, False)
    ended = processes.start("raise SystemExit(3)")
    wait_for_state(ended.pid, "Z")
    by_itself = look(ended)
    assert (by_itself.exit_signal, by_itself.was_sent_off) == (0, True)


def test_a_process_that_is_busy(processes):
    busy = processes.start("while True: pass")
    deadline = time.monotonic() + 20
    while (found := look(busy)).life is not Life.RUNNING and time.monotonic() < deadline:
        time.sleep(0.01)  # it may still be reading its files
    assert (found.life, found.waits_for_no_lock) == (Life.RUNNING, True)


def test_what_a_main_thread_waits_in(processes):
    waiter, sleeper = look(processes.waiter()), look(processes.sleeper())
    assert (waiter.system_call, sleeper.system_call) == ("futex", "clock_nanosleep")
    assert (waiter.waits_for_no_lock, sleeper.waits_for_no_lock) == (False, True)


def test_a_process_is_known_by_when_it_began(processes):
    sleeper = processes.sleeper()
    found = look(sleeper)
    assert (found.is_verified, found.pid) == (True, sleeper.pid)
    reused = look(replace(sleeper, start_ticks=sleeper.start_ticks + 1))
    assert (reused.life, reused.is_verified) == (Life.DEAD, False)


def test_without_a_tick_a_process_that_began_after_its_recording_is_another(processes):
    sleeper = processes.sleeper()
    found = look(sleeper, process_start_ticks=None)
    assert (found.life, found.is_verified) == (Life.SLEEPING, False)
    assert not found.waits_for_no_lock  # nothing is concluded from a process that may be another
    late = look(sleeper, process_start_ticks=None, start_host_mono_ns=1)
    assert late.life is Life.DEAD


@pytest.mark.parametrize(
    ("changes", "life"),
    [
        ({"host": "elsewhere"}, Life.UNKNOWN),
        ({"host": None}, Life.UNKNOWN),
        ({"pid": None}, Life.UNKNOWN),
        ({"pid": True}, Life.UNKNOWN),
        ({"pid": -1}, Life.UNKNOWN),
        ({"pid_namespace": 1}, Life.UNKNOWN),
        ({"clock_id": "another boot"}, Life.DEAD),
        ({"clock_id": None}, Life.SLEEPING),
    ],
)
def test_what_cannot_be_told_is_not_claimed(processes, changes, life):
    assert look(processes.sleeper(), **changes).life is life


def test_a_system_without_proc(processes, tmp_path):
    found = look_at_process(header_of(processes.sleeper()), this_machine(), proc=tmp_path)
    assert found.life is Life.UNKNOWN


def test_names_of_processes_are_not_taken_for_fields(tmp_path, processes):
    sleeper = processes.sleeper()
    (tmp_path / "self").mkdir()
    folder = tmp_path / str(sleeper.pid)
    folder.mkdir()
    rest = f"T {' '.join(['0'] * 18)} {sleeper.start_ticks} 0"
    (folder / "stat").write_text(f"{sleeper.pid} (a) S 1 (b) {rest}", encoding="utf-8")
    found = look_at_process(header_of(sleeper), this_machine(), proc=tmp_path)
    assert (found.life, found.is_verified) == (Life.STOPPED, True)
    (folder / "stat").write_text("nonsense", encoding="utf-8")
    found = look_at_process(header_of(sleeper), this_machine(), proc=tmp_path)
    assert found.life is Life.UNKNOWN
