"""A device's time by closed forms, and names of kernels as libraries give them."""

import json
from pathlib import Path

import pytest

from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.traces.trace_kernels import Work, classify_kernels, name_kind
from meshscope.ingest.traces.trace_steps import assign_steps, find_launches, find_steps
from meshscope.ingest.traces.trace_time import DeviceBreakdown, break_down_devices


def kernel(name: str, begin_us: float, dur_us: float, stream: int = 7, **arguments: object) -> dict:
    correlation = arguments.pop("correlation", 0)
    return {
        "ph": "X",
        "cat": arguments.pop("cat", "kernel"),
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": begin_us,
        "dur": dur_us,
        "args": {"device": 0, "stream": stream, "correlation": correlation, **arguments},
    }


def step(number: int, begin_us: float, dur_us: float) -> dict:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{number}",
        "pid": 100,
        "tid": 100,
        "ts": begin_us,
        "dur": dur_us,
    }


def launch(begin_us: float, correlation: int) -> dict:
    event = kernel("cudaLaunchKernel", begin_us, 1, correlation=correlation, cat="cuda_runtime")
    return {**event, "pid": 100, "tid": 100}


def write(path: Path, events: list[dict], **header: object) -> Trace:
    path.write_text(json.dumps({**header, "traceEvents": events}), encoding="utf-8")
    return read_trace(path)


def break_down(trace: Trace) -> tuple[DeviceBreakdown, ...]:
    steps = find_steps(trace)
    step_of = assign_steps(trace, steps, find_launches(trace))
    return break_down_devices(trace, classify_kernels(trace), steps, step_of)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_parts_of_a_device_sum_to_its_time(tmp_path) -> None:
    events = [
        kernel("gemm", 0, 10),
        kernel(NCCL, 5, 10, stream=20),
        kernel("gemm", 12, 2),
        kernel("Memcpy HtoD", 14, 4, cat="gpu_memcpy", stream=8),
        kernel("Memset", 30, 5, cat="gpu_memset"),
    ]
    (device,) = break_down(write(tmp_path / "t.json", events))
    time = device.time
    assert time.total_ns == 35_000
    assert time.compute_ns == 17_000  # 0..10, 12..14, 30..35
    assert time.communication_ns == 10_000
    assert time.exposed_ns == 3_000  # 10..12, 14..15
    assert time.exposed_beside_copy_ns == 1_000  # 14..15
    assert time.overlapped_ns == 7_000
    assert time.copy_ns == 4_000
    assert time.exposed_copy_ns == 3_000  # 15..18
    assert time.idle_ns == 12_000
    assert [stream.stream for stream in device.streams] == [7, 8, 20]


def test_device_work_belongs_to_the_step_that_launched_it(tmp_path) -> None:
    events = [
        step(4, 0, 10),
        step(5, 10, 10),
        launch(5, 1),
        launch(11, 2),
        kernel("late", 15, 2, correlation=1),
        kernel("own", 18, 4, correlation=2),
        kernel("alone", 50, 1),
    ]
    (device,) = break_down(write(tmp_path / "t.json", events))
    assert [(one.step, one.time.total_ns) for one in device.steps] == [(4, 2_000), (5, 4_000)]
    assert device.num_outside_steps == 1


def test_work_of_other_steps_is_no_idle_time(tmp_path) -> None:
    """Step 4 runs 15..17 and 40..42; in between step 5 runs 18..22 and 30..35."""
    events = [
        step(4, 0, 10),
        step(5, 10, 10),
        launch(5, 1),
        launch(6, 2),
        launch(11, 3),
        launch(12, 4),
        kernel("early", 15, 2, correlation=1),
        kernel("next", 18, 4, correlation=3),
        kernel("next", 30, 5, correlation=4, stream=8),
        kernel("late", 40, 2, correlation=2),
    ]
    trace = write(tmp_path / "t.json", events)
    (device,) = summarize_trace(trace).devices
    first, second = (one.time for one in device.breakdown.steps)
    assert (first.total_ns, first.compute_ns, first.other_ns) == (27_000, 4_000, 9_000)
    assert first.idle_ns == 14_000  # 17..18, 22..30, 35..40
    assert (second.total_ns, second.other_ns, second.idle_ns) == (17_000, 0, 8_000)
    assert [one.idle.total_ns for one in device.steps] == [14_000, 8_000]
    assert (device.breakdown.time.other_ns, device.breakdown.time.idle_ns) == (0, 14_000)


def test_a_step_that_begins_with_an_event_without_length_has_all_its_idle_time(tmp_path) -> None:
    events = [
        step(4, 0, 10),
        step(5, 10, 10),
        launch(5, 1),
        launch(11, 2),
        launch(12, 3),
        kernel("early", 15, 2, correlation=1),
        kernel("nothing", 20, 0, correlation=2),
        kernel("next", 25, 5, correlation=3),
    ]
    trace = write(tmp_path / "t.json", events)
    (device,) = summarize_trace(trace).devices
    second = device.breakdown.steps[1].time
    assert (second.total_ns, second.idle_ns, device.steps[1].idle.total_ns) == (
        10_000,
        5_000,
        5_000,
    )


@pytest.mark.parametrize(
    ("name", "work", "kind"),
    [
        (NCCL, Work.COMMUNICATION, "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", Work.COMMUNICATION, "all_reduce"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", Work.COMMUNICATION, "unknown"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", Work.COMMUNICATION, "send_recv"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", Work.COMMUNICATION, "all_gather"),
        ("void rcclGenericKernel<1, false>(ncclDevComm*)", Work.COMMUNICATION, "unknown"),
        ("void deep_ep::intranode::dispatch<8>(int4*)", Work.COMMUNICATION, "all_to_all"),
        ("oneapi::ccl::allreduce_kernel", Work.COMMUNICATION, "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<float, 2>", Work.COMMUNICATION, "all_reduce"),
        ("void x::ep::internode::cached_notify<false>(int)", Work.COMMUNICATION, "all_to_all"),
        ("void deep_ep::layout::get_dispatch_layout<256>(long const*)", Work.COMPUTE, None),
        ("mscclKernel_Sum_half_LL_false(ncclDevComm*)", Work.COMMUNICATION, "unknown"),
        ("void mscclpp::collective::allreduceAllPairs<float>", Work.COMMUNICATION, "all_reduce"),
        ("AllreduceMediumKernel_LocalSync<sycl::half>", Work.COMMUNICATION, "all_reduce"),
        ("typeinfo name for oneccl_allgatherv_small<int>", Work.COMMUNICATION, "all_gather"),
        ("void mori::moe::EpDispatchIntraNodeKernel<float>", Work.COMMUNICATION, "all_to_all"),
        ("void aiter::reduce_scatter_cross_device_store<2>", Work.COMMUNICATION, "reduce_scatter"),
        ("void aiter::allgather_lastdim<__half, 8>", Work.COMMUNICATION, "all_gather"),
        ("void quickreduce::allreduce_prototype_twoshot<x>", Work.COMMUNICATION, "all_reduce"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs<8>", Work.COMMUNICATION, "unknown"),
        ("hcom_reduceScatter__904_1", Work.COMMUNICATION, "reduce_scatter"),
        ("collective-permute-done.3", Work.COMMUNICATION, "send_recv"),
        ("all-gather-start.1", Work.COMMUNICATION, "all_gather"),
        ("void aiter::local_device_load_rmsnorm_naive<x>", Work.COMPUTE, None),
        ("void sync_clock_kernel(SyncClock)", Work.COMPUTE, None),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 4>", Work.COMPUTE, None),
        ("triton_red_fused_all_reduce_free_mean_0", Work.COMPUTE, None),
        ("void moe_align_block_size_kernel<int>", Work.COMPUTE, None),
        ("dma_request", Work.COPY, None),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>", Work.COMPUTE, None),
        ("void at::native::reduce_kernel<512, 1, at::ReduceOp>", Work.COMPUTE, None),
        ("void cub::DeviceReduceKernel", Work.COMPUTE, None),
        ("embedding_scatter_accumulate", Work.COMPUTE, None),
        ("__amd_rocclr_copyBuffer.kd", Work.COPY, None),
        ("__amd_rocclr_fillBufferAligned.kd", Work.COMPUTE, None),
    ],
)
def test_kernels_are_told_by_their_names(tmp_path, name, work, kind) -> None:
    classes = classify_kernels(write(tmp_path / "t.json", [kernel(name, 0, 1)]))
    assert classes.work[0] == work
    assert (classes.kinds[classes.kind[0]] if classes.kind[0] >= 0 else None) == kind
    assert classes.recognition.num_collectives == (work == Work.COMMUNICATION)


def test_a_collectives_own_arguments_tell_more_than_the_kernels_name(tmp_path) -> None:
    event = kernel("some_new_kernel", 0, 1, **{"Collective name": "_reduce_scatter_base"})
    classes = classify_kernels(write(tmp_path / "t.json", [event]))
    assert classes.kinds[classes.kind[0]] == "reduce_scatter"


def test_a_distributed_trace_without_collectives_is_loud(tmp_path) -> None:
    trace = write(
        tmp_path / "t.json", [kernel("gemm", 0, 1)], distributedInfo={"rank": 1, "world_size": 8}
    )
    (warning,) = classify_kernels(trace).recognition.warnings
    assert "no communication kernel recognised" in warning


def test_kinds_of_collectives() -> None:
    assert name_kind("nccl:_all_gather_base") == "all_gather"
    assert name_kind("all_to_allv") == "all_to_all"
    assert name_kind("nothing") == "unknown"


TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"

TRACELENS_US = {
    "a100-ddp-rank0of2": (116046.6, 39529.3, 1924.2, 503050.9, 46876.5),
    "b200-rank0of8": (10771.7, 22.0, 802.8, 72890.7, 22.0),
    "mi300-resnet-ckpt-rank0of8": (26175.0, 55371.2, 2455.8, 2565.6, 71516.5),
    "sampled-128gpu-rank0": (210348.0, 336981.0, 327.0, 675191.0, 396199.0),
    "sampled-128gpu-rank1": (272004.0, 303520.0, 4526.0, 651136.0, 379053.0),
    "torch-compile-triton": (12549.0, 0.0, 0.0, 0.0, 0.0),
}
"""Compute, exposed communication, exposed copies, idle, communication: TraceLens's answers."""


@pytest.mark.parametrize("name", TRACELENS_US)
def test_shared_traces_give_the_answers_of_tracelens(name) -> None:
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip("the shared traces are not on this machine")
    (device,) = break_down(read_trace(path))
    time = device.time
    found = (time.compute_ns, time.exposed_ns, time.exposed_copy_ns, time.idle_ns)
    ours = [ns / 1e3 for ns in (*found, time.communication_ns)]
    assert ours == pytest.approx(TRACELENS_US[name], abs=0.2)
