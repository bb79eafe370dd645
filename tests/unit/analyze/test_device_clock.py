"""Times of a device's operations, placed by kernel samples: closed forms."""

from pathlib import Path

import numpy as np

from kernel_builders import T0, US, SampleBuilder
from meshscope.analyze.job.operations import load_operations, load_waits
from meshscope.analyze.rank.device_clock import UsedOffsets
from meshscope.store.read.run import open_run
from meshscope.store.schema import MISSING, OperationFlag, WaitSource

LAG = 500
"""By so many µs the device is behind its host, and its times were placed too early."""


def make_run(path: Path) -> None:
    made = SampleBuilder(path)
    made.group(1, range(1))
    made.writer.journal.write(
        "update", device_offset={"from_host_mono_ns": T0 - 10**9, "offset_ns": 10**9}
    )
    for step in (1, 2, 3):
        at = 100 * step
        made.step(step, at, at + 100)
        # Kernels back to back: 40 µs before the operation's event, 60 behind it.
        made.work(at + LAG, at + LAG + 40, at + 1)
        made.work(at + LAG + 40, at + LAG + 100, at + 20)
        made.operation(at + 10, at + 70, start_ns=T0 + (at + 40) * US, flags=OperationFlag.DEVICE)
        made.writer.table("waits").put(
            WaitSource.STREAM, T0 + (at + 10) * US, T0 + (at + 14) * US, US, 5 * US,
            T0 + (at + 40) * US + 1, step + 1,
        )  # fmt: skip
    made.close(3, 1000)


def test_operations_and_waits_are_moved_to_where_they_belong(tmp_path: Path) -> None:
    make_run(tmp_path)
    attempt = open_run(tmp_path).last_attempt
    operations = load_operations(attempt)
    start = (operations.rows.start_ns - T0) / US
    end = (operations.rows.end_ns - T0) / US
    assert start.tolist() == [140 + LAG, 240 + LAG, 340 + LAG]
    assert end.tolist() == [170 + LAG, 270 + LAG, 370 + LAG]
    waits = load_waits(attempt, operations)
    assert ((waits.device_end_ns - T0) / US).tolist() == start.tolist()


def test_an_offset_holds_from_its_moment_on() -> None:
    used = UsedOffsets(from_ns=np.array([0, 10**9]), offset_ns=np.array([5, 7]))
    times = np.array([-5, 10**8, 2 * 10**9, MISSING])
    assert used.find(times).tolist() == [5, 5, 7, 5]
