"""Communication by axis and kind, per device and per step: parts that sum, by closed forms."""

from pathlib import Path

import pytest

from made_traces import call, groups, kernel, nccl, step, summarize
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.kineto import read_trace

TABLE = groups(g0__default_pg=[0, 1, 2, 3], g1__mesh_tp=[0, 1], g2__undefined=[0, 2])
LAYOUT = Layout(dp=2, tp=2)


def rows_of(table):
    return {(row.axis, row.kind): row for row in table}


def test_rows_sum_to_the_device_where_collectives_overlap(tmp_path) -> None:
    """tp 0..10, dp 5..15 beside compute 8..12: tp has 0..10, dp what is left, 10..15."""
    events = [
        nccl("allreduce", 0, 10, group="1", num_elements=500),
        nccl("_allgather_base", 5, 10, group="2", ranks="[0, 2, ...]", stream=21),
        kernel("gemm", 8, 4),
    ]
    (device,) = summarize(
        tmp_path / "t.json", events, world_size=4, table=TABLE, layout=LAYOUT
    ).devices
    rows = rows_of(device.communication)
    tp, dp = rows["tp", "all_reduce"], rows["dp", "all_gather"]
    assert (tp.total_ns, tp.communication_ns, tp.exposed_ns) == (10_000, 10_000, 8_000)
    assert (dp.total_ns, dp.communication_ns, dp.exposed_ns) == (10_000, 5_000, 3_000)
    assert (tp.size_bytes, dp.size_bytes) == (2_000, 4_000)
    time = device.breakdown.time
    assert tp.communication_ns + dp.communication_ns == time.communication_ns == 15_000
    assert tp.exposed_ns + dp.exposed_ns == time.exposed_ns == 11_000
    assert device.exposed_spans == ((0, 8_000), (12_000, 15_000))


def test_steps_have_tables_of_their_own(tmp_path) -> None:
    """What step 2 launches hides nothing of step 1, as in the step's own times."""
    events = [
        step(1, 0, 10),
        step(2, 10, 10),
        call("cudaLaunchKernel", 1, 11),
        call("cudaLaunchKernel", 2, 12),
        call("cudaLaunchKernel", 12, 13),
        nccl("allreduce", 20, 10, group="0", correlation=11),
        kernel("gemm", 25, 2, correlation=12),
        kernel("gemm", 28, 10, correlation=13),
    ]
    (device,) = summarize(tmp_path / "t.json", events, world_size=4, table=TABLE).devices
    first, second = device.steps
    (row,) = first.communication
    assert (row.axis, row.count, row.exposed_ns) == ("world", 1, 8_000)
    assert device.breakdown.steps[0].time.exposed_ns == 8_000
    assert second.communication == ()
    assert device.communication[0].exposed_ns == 6_000
    assert device.collectives[0].step == 1


def test_sizes_that_are_not_said_are_not_zero(tmp_path) -> None:
    events = [nccl("allreduce", 0, 1, num_elements=None), nccl("allreduce", 2, 1)]
    (device,) = summarize(tmp_path / "t.json", events, world_size=8).devices
    (row,) = device.communication
    assert (row.axis, row.size_bytes, row.num_unsized) == ("unknown", 4_000, 1)
    (device,) = summarize(tmp_path / "u.json", events[:1]).devices
    assert isinstance(device.communication[0].size_bytes, Unavailable)


def test_a_kernel_without_arguments_has_those_of_its_record(tmp_path) -> None:
    record = {
        **nccl("allreduce", 0, 2, group="1", num_elements=10),
        "cat": "cpu_op",
        "name": "record_param_comms",
        "pid": 100,
        "tid": 1,
    }
    record["args"] = {**record["args"], "External id": 5, "Seq": 17}
    bare = kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 5, 3, 20, **{"External id": 5})
    (device,) = summarize(tmp_path / "t.json", [record, bare], world_size=4, table=TABLE).devices
    (one,) = device.collectives
    assert (one.axis, one.ranks, one.size_bytes, one.sequence) == ("tp", (0, 1), 40, 17)


TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"


@pytest.mark.parametrize(
    "name",
    [
        "a100-ddp-rank0of2",
        "b200-rank0of8",
        "mi300-resnet-ckpt-rank0of8",
        "sampled-128gpu-rank0",
        "sampled-128gpu-rank1",
        "torch-compile-triton",
    ],
)
def test_parts_of_real_traces_sum_to_the_nanosecond(name) -> None:
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip("the shared traces are not on this machine")
    (device,) = summarize_trace(read_trace(path)).devices
    wholes = [(device.breakdown.time, device.communication, device.idle)]
    wholes += [
        (one.time, part.communication, part.idle)
        for one, part in zip(device.breakdown.steps, device.steps, strict=True)
    ]
    for time, rows, idle in wholes:
        assert sum(row.communication_ns for row in rows) == time.communication_ns
        assert sum(row.exposed_ns for row in rows) == time.exposed_ns
        assert sum(row.count for row in rows) == time.num_collectives
        causes = (idle.host_ns, idle.synchronising_ns, idle.communicating_ns)
        rest = (idle.launch_ns, idle.dependency_ns, idle.unknown_ns)
        assert sum((*causes, *rest)) == idle.total_ns == time.idle_ns
