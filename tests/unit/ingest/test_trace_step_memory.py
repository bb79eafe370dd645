"""Memory of steps from `[memory]` events, by hand, and as a rank's table."""

import numpy as np

from meshscope.analyze.memory.memory import Place
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, need
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_columns import TraceMemory
from meshscope.ingest.traces.trace_recording import record_trace
from meshscope.ingest.traces.trace_run import make_run
from meshscope.ingest.traces.trace_step_memory import sample_steps
from meshscope.ingest.traces.trace_steps import TraceSteps
from trace_builders import MS, RankTrace

MIB = 1 << 20
CPU, CUDA = 0, 1
NO_EVENTS = "the traces have no [memory] events: profile with profile_memory=True"


def numbers(*values):
    return np.array(values, dtype=np.int64)


def steps_of(*number):
    begin = 100 * np.arange(len(number), dtype=np.int64)
    return TraceSteps(number=numbers(*number), begin_ns=begin, end_ns=begin + 100)


def memory_of(*events):
    """Each is (time, device type, device, allocated, reserved)."""
    columns = numbers(*(value for event in events for value in event)).reshape(-1, 5).T
    time, kind, device, allocated, reserved = columns
    return TraceMemory(
        time_ns=time,
        device_type=kind,
        device=device,
        changed_bytes=allocated,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )


def test_a_step_has_its_last_and_its_highest_amount():
    memory = memory_of(
        (10, CUDA, 0, 5, 20),
        (20, CUDA, 0, 9, 20),
        (30, CUDA, 1, 77, 99),
        (40, CPU, 0, 88, -1),
        (90, CUDA, 0, 3, 18),
        (250, CUDA, 0, 4, 30),
        (500, CUDA, 0, 1_000, 1_000),
    )
    found = sample_steps(memory, steps_of(7, 8, 9), 0)
    assert found is not None
    assert found.place.tolist() == [0, 2]
    assert found.allocated_bytes.tolist() == [3, 4]
    assert found.reserved_bytes.tolist() == [18, 30]
    assert found.peak_allocated_bytes.tolist() == [9, 4]
    assert found.peak_reserved_bytes.tolist() == [20, 30]


def test_what_was_not_said_stays_missing():
    found = sample_steps(memory_of((10, CUDA, 0, 5, -1), (20, CUDA, 0, -1, 9)), steps_of(0), 0)
    assert found is not None
    assert found.allocated_bytes.tolist() == [5]
    assert found.peak_reserved_bytes.tolist() == [-1]


def test_a_device_without_events_in_steps_has_none():
    steps = steps_of(0)
    assert sample_steps(memory_of(), steps, 0) is None
    assert sample_steps(memory_of((10, CPU, 0, 5, -1)), steps, 0) is None
    assert sample_steps(memory_of((900, CUDA, 0, 5, -1)), steps, 0) is None


def make_trace(path, changes, *, device_type=CUDA, has_device=True):
    """Two steps of 10 ms, a kernel in each, and (ms, MiB allocated, MiB reserved)."""
    trace = RankTrace(0, 1)
    for step in range(2):
        begin = 100 * MS + 10 * MS * step
        trace.add("user_annotation", f"ProfilerStep#{step}", begin, begin + 10 * MS)
        trace.add("cpu_op", "aten::mm", begin, begin + 2 * MS)
        if has_device:
            trace.launch("gemm", begin + MS, begin + 2 * MS, begin + 8 * MS)
    for moment, allocated, reserved in changes:
        trace.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100,
             "tid": 100, "ts": (100 * MS + moment * MS) / 1e3,
             "args": {"Total Allocated": allocated * MIB, "Total Reserved": reserved * MIB,
                      "Bytes": MIB, "Device Type": device_type, "Device Id": 0, "Addr": 1}}
        )  # fmt: skip
    return trace.write(path)


def study_of(path):
    made = make_run([record_trace(read_trace(path), max_spans=1_000)], path)
    return Study(made.run.last_attempt)


CHANGES = [(1, 100, 400), (2, 300, 500), (9, 50, 500), (12, 250, 500), (19, 60, 450)]


def test_a_runs_memory_is_that_of_its_traces(tmp_path):
    study = study_of(make_trace(tmp_path / "rank0.json.gz", CHANGES))
    (rank,) = need(study.memory).ranks
    assert (rank.place, rank.peak_bytes, rank.peak_step) == (Place.DEVICE, 300 * MIB, 0)
    assert (rank.first_bytes, rank.last_bytes) == (50 * MIB, 60 * MIB)
    assert need(rank.allocator).peak_reserved_bytes == 500 * MIB
    assert study.ranks[0].peak_device_bytes == 300 * MIB
    assert isinstance(study.ranks[0].peak_rss_bytes, Unavailable)


def test_why_a_trace_has_no_memory_is_said(tmp_path):
    without = study_of(make_trace(tmp_path / "without.json.gz", []))
    assert without.memory == Unavailable(NO_EVENTS)
    assert without.ranks[0].peak_device_bytes == Unavailable(NO_EVENTS)
    host = make_trace(tmp_path / "host.json.gz", CHANGES, device_type=CPU, has_device=False)
    memory = study_of(host).memory
    assert isinstance(memory, Unavailable)
    assert "`meshscope trace FILE`" in memory.reason


def test_windows_that_are_numbered_anew_keep_their_memory(tmp_path):
    """Places, not numbers, are kept until the run is made."""
    path = make_trace(tmp_path / "rank0.json.gz", CHANGES)
    recording = record_trace(read_trace(path), max_spans=1_000)
    assert recording.memory is not None
    assert recording.memory.place.tolist() == [0, 1]
