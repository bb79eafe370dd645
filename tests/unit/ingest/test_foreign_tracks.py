"""Traces of torch_npu and XLA, where only the names of lines tell device work; merged ranks."""

import json
from pathlib import Path

from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.traces.trace_kernels import Work, classify_kernels
from meshscope.ingest.traces.trace_steps import assign_steps, find_launches, find_steps
from meshscope.ingest.traces.trace_time import DeviceBreakdown, break_down_devices


def name_line(pid: int, process: str, tid: int, thread: str) -> list[dict[str, object]]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}},
    ]


def event(pid: int, tid: int, name: str, begin_us: float, dur_us: float) -> dict[str, object]:
    """torch_npu writes times as text."""
    fields: dict[str, object] = {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": dur_us}
    return {**fields, "ts": f"{begin_us:.3f}"}


def read(path: Path, events: list[dict[str, object]]) -> Trace:
    path.write_text(json.dumps(events), encoding="utf-8")
    return read_trace(path)


def break_down(trace: Trace) -> tuple[DeviceBreakdown, ...]:
    steps = find_steps(trace)
    step_of = assign_steps(trace, steps, find_launches(trace))
    return break_down_devices(trace, classify_kernels(trace), steps, step_of)


def test_ascend_streams_and_collectives_are_one_device(tmp_path) -> None:
    events = [
        *name_line(1, "Python", 1, "Thread 1"),
        *name_line(800, "Ascend Hardware", 3, "Stream 3"),
        *name_line(800, "Ascend Hardware", 5, "Stream 5"),
        *name_line(900, "Communication", 2, "Group 0 Communication"),
        *name_line(900, "Communication", 4, "Plane 0"),
        *name_line(950, "Overlap Analysis", 0, "Computing"),
        event(800, 3, "aclnnMatmul_MatMulV2", 100, 10),
        event(800, 3, "MEMCPY_ASYNC", 112, 2),
        event(800, 5, "EVENT_WAIT", 100, 60),
        event(900, 2, "hcom_allReduce__123_0", 105, 20),
        event(900, 4, "Notify_Wait", 105, 18),
        event(950, 0, "Computing", 100, 10),
        event(1, 1, "aten::mm", 90, 3),
    ]
    trace = read(tmp_path / "t.json", events)
    (device,) = break_down(trace)
    assert device.device == 0
    assert device.time.compute_ns == 10_000
    assert device.time.communication_ns == 20_000
    assert device.time.exposed_ns == 15_000
    assert device.time.copy_ns == 2_000
    assert device.time.total_ns == 25_000
    classes = classify_kernels(trace)
    assert classes.recognition.num_collectives == 1
    assert "all_reduce" in {classes.kinds[kind] for kind in classes.kind.tolist() if kind >= 0}


def test_of_xlas_operators_the_innermost_count(tmp_path) -> None:
    events = [
        *name_line(3, "/device:TPU:0", 1, "XLA Modules"),
        *name_line(3, "/device:TPU:0", 2, "XLA Ops"),
        *name_line(4, "/device:TPU:1", 2, "XLA Ops"),
        *name_line(9, "/host:CPU", 2, "XLA Ops"),
        event(3, 1, "jit_step(1)", 0, 100),
        event(3, 2, "while.1", 10, 80),
        event(3, 2, "fusion.1", 10, 20),
        event(3, 2, "all-reduce.1", 40, 30),
        event(4, 2, "fusion.1", 10, 25),
        event(9, 2, "host work", 0, 500),
    ]
    first, second = break_down(read(tmp_path / "t.json", events))
    assert (first.device, first.time.compute_ns) == (0, 20_000)
    assert (first.time.communication_ns, first.time.exposed_ns) == (30_000, 30_000)
    assert first.time.idle_ns == 10_000
    assert (second.device, second.time.compute_ns) == (1, 25_000)


def test_xlas_streams_on_a_gpu_are_its_streams(tmp_path) -> None:
    events = [
        *name_line(1, "/device:GPU:0", 14, "Stream #14(Compute)"),
        *name_line(1, "/device:GPU:0", 15, "Stream #15(MemcpyD2H)"),
        *name_line(1, "/device:GPU:0", 20, "XLA Ops"),
        event(1, 14, "loop_fusion", 0, 10),
        event(1, 14, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 10, 10),
        event(1, 15, "MemcpyD2H", 15, 10),
        event(1, 20, "fusion", 0, 20),
    ]
    (device,) = break_down(read(tmp_path / "t.json", events))
    assert [stream.stream for stream in device.streams] == [14, 15]
    assert device.time.compute_ns == 10_000
    assert device.time.communication_ns == 10_000
    assert device.time.exposed_copy_ns == 5_000
    assert device.time.idle_ns == 0


def kernel(pid: object, device: int, begin_us: float) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "pid": pid,
        "tid": 7,
        "ts": begin_us,
        "dur": 10,
        "args": {"device": device, "stream": 7},
    }


def test_one_device_number_of_two_processes_is_two_devices(tmp_path) -> None:
    trace = read(tmp_path / "t.json", [kernel("rank 0", 0, 1), kernel("rank 1", 0, 6)])
    devices = break_down(trace)
    assert [(device.device, device.time.total_ns) for device in devices] == [
        (0, 10_000),
        (1, 10_000),
    ]
    assert any("put together" in warning for warning in trace.warnings)


def test_several_devices_of_a_trace_stay_as_they_are(tmp_path) -> None:
    trace = read(tmp_path / "t.json", [kernel(0, 0, 1), kernel(3, 3, 6), kernel(3, 3, 20)])
    assert [device.device for device in break_down(trace)] == [0, 3]
    assert trace.warnings == ()


def test_a_streams_wait_is_no_work_and_a_dma_request_is_a_copy(tmp_path) -> None:
    def mtia(name: str, begin_us: float, dur_us: float) -> dict[str, object]:
        fields: dict[str, object] = {"ph": "X", "cat": "mtia_ccp_events", "pid": 17, "tid": 1}
        return {**fields, "name": name, "ts": begin_us, "dur": dur_us, "args": {"stream": 4}}

    trace = read(
        tmp_path / "t.json",
        [
            mtia("event_wait", 0, 100),
            mtia("fc-dtype_Float", 100, 10),
            mtia("dma_request", 105, 10),
            mtia("event_record", 115, 1),
        ],
    )
    classes = classify_kernels(trace)
    assert classes.work.tolist() == [Work.NONE, Work.COMPUTE, Work.COPY, Work.NONE]
    assert classes.recognition.num_kernels == 1
    (device,) = break_down(trace)
    assert (device.time.num_kernels, device.time.num_copies) == (1, 1)
    assert (device.time.total_ns, device.time.exposed_copy_ns) == (15_000, 5_000)


def test_ranks_without_a_device_that_were_put_together_are_said(tmp_path) -> None:
    def ranges(pid: int) -> list[dict[str, object]]:
        fields = {"ph": "X", "cat": "user_annotation", "pid": pid, "tid": 1, "dur": 5}
        return [{**fields, "name": f"ProfilerStep#{n}", "ts": 10 * n} for n in range(3)]

    (said,) = read(tmp_path / "both.json", ranges(1) + ranges(2)).warnings
    assert said.startswith("ranges of 2 processes are in it")
    assert not read(tmp_path / "one.json", ranges(1)).warnings
