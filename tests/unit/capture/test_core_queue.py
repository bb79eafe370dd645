import os
import threading
import time

import pytest

from meshscope.capture.hardware.core_queue import (
    CoreQueue,
    read_quota,
    read_schedstat,
    write_ranges,
)

pytestmark = pytest.mark.skipif(read_schedstat() is None, reason="the kernel does not count it")


def test_a_thread_that_shares_its_core_waits_for_it():
    """Two processes on one core: each waits for about half of the time, whatever else runs."""
    cores = os.sched_getaffinity(0)
    other = os.fork()
    if not other:
        os.sched_setaffinity(0, {min(cores)})
        end_s = time.monotonic() + 5
        while time.monotonic() < end_s:
            pass
        os._exit(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        lines = []
        queue = CoreQueue(lambda kind, **fields: lines.append((kind, fields["core_queue"])))
        start_s = time.monotonic()
        queue.visit(1)
        while time.monotonic() < start_s + 0.4:
            pass
        elapsed_ns = int((time.monotonic() - start_s) * 1e9)
        queue.visit(1 + elapsed_ns)
        queue.write()
        queue.write()  # nothing new
    finally:
        os.sched_setaffinity(0, cores)
        os.kill(other, 9)
        os.waitpid(other, 0)
    ((kind, found),) = lines
    assert kind == "update"
    assert found["elapsed_ns"] == elapsed_ns
    assert found["run_ns"] + found["queued_ns"] == pytest.approx(elapsed_ns, rel=0.1)
    assert found["queued_ns"] > 0.3 * elapsed_ns


def test_a_run_too_short_for_a_second_reading_is_read_at_its_end():
    lines = []
    queue = CoreQueue(lambda kind, **fields: lines.append(fields["core_queue"]["elapsed_ns"]))
    queue.close(10)  # no step ended
    queue.visit(1_000)
    queue.close(500_000_000)
    assert lines == [499_999_000]


def test_what_a_program_does_long_after_its_last_step_is_not_counted():
    lines = []
    queue = CoreQueue(lambda kind, **fields: lines.append(fields))
    queue.visit(1_000)
    queue.close(60_000_000_000)
    thread = threading.Thread(target=queue.close, args=(500_000_000,))
    thread.start()
    thread.join()
    assert not lines


def test_a_system_that_does_not_tell_is_left_alone(tmp_path):
    assert read_schedstat(str(tmp_path / "none")) is None
    (tmp_path / "strange").write_text("one")
    assert read_schedstat(str(tmp_path / "strange")) is None


def test_cores_are_written_as_ranges():
    assert write_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("text", "quota"),
    [("150000 100000\n", 2), ("50000 100000", 1), ("max 100000", None), ("", None)],
)
def test_a_containers_share_of_time_is_worth_so_many_cores(tmp_path, text, quota):
    (tmp_path / "cpu.max").write_text(text)
    assert read_quota(str(tmp_path / "cpu.max")) == quota
