"""What a host did without a device: parts that sum, by closed forms and on a real trace."""

import subprocess
import sys
from pathlib import Path

import pytest

from made_traces import groups, host, step, summarize
from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.kineto import read_trace

PAIR = groups(g0__default_pg=[0, 1])


def parts(time):
    return (time.operator_ns, time.exposed_ns, time.loading_ns, time.optimizer_ns, time.other_ns)


def test_the_main_thread_is_divided_into_parts_that_sum(tmp_path) -> None:
    """Loading 0..10 with an operator in it; operators 20..40; a collective 30..70 on another
    thread, hidden up to 40 and by the optimizer's operator 60..65; the optimizer 55..80."""
    events = [
        step(3, 0, 100),
        host("user_annotation", "enumerate(DataLoader)#X.__next__", 0, 10),
        host("cpu_op", "aten::stack", 2, 3),
        host("cpu_op", "aten::mm", 20, 20),
        host("cpu_op", "aten::empty", 25, 5),
        host("user_annotation", "gloo:all_reduce", 30, 40, 2),
        host("cpu_op", "aten::add", 45, 5, 2),
        host("user_annotation", "Optimizer.step#Adam.step", 55, 25),
        host("cpu_op", "aten::addcdiv_", 60, 5),
    ]
    found = summarize(tmp_path / "t.json", events, table=PAIR).host
    (one,) = found.steps
    assert one.step == 3
    assert parts(one.time) == (20_000, 25_000, 10_000, 15_000, 30_000)
    assert sum(parts(one.time)) == one.time.total_ns == 100_000
    assert one.time.communication_ns == 40_000
    (row,) = one.communication
    assert (row.axis, row.kind, row.communication_ns, row.exposed_ns) == (
        "world",
        "all_reduce",
        40_000,
        25_000,
    )


def test_a_collective_across_two_steps_is_counted_where_it_begins(tmp_path) -> None:
    events = [
        step(1, 0, 50),
        step(2, 50, 50),
        host("cpu_op", "c10d::allreduce_", 38, 2),
        host("user_annotation", "gloo:all_reduce", 40, 30, 2),
    ]
    found = summarize(tmp_path / "t.json", events, table=PAIR).host
    for one in found.steps:
        rows = one.communication
        assert sum(row.exposed_ns for row in rows) == one.time.exposed_ns
        assert sum(row.communication_ns for row in rows) == one.time.communication_ns
    kinds = [[(row.kind, row.count) for row in one.communication] for one in found.steps]
    assert kinds == [[("all_reduce", 1), ("call", 1)], [("all_reduce", 0)]]
    assert [one.step for one in found.collectives] == [1]


def test_a_message_that_is_under_way_hides_no_operators(tmp_path) -> None:
    """gloo draws a message on the thread that posted it, until it is there: 10..90, with operators
    20..50 and 60..70 behind which it travels."""
    events = [
        step(1, 0, 100),
        host("cpu_op", "c10d::recv_", 8, 2),
        host("user_annotation", "gloo:recv", 10, 80),
        host("cpu_op", "aten::mm", 20, 30),
        host("cpu_op", "aten::add", 60, 10),
    ]
    (one,) = summarize(tmp_path / "t.json", events, table=PAIR).host.steps
    assert parts(one.time) == (40_000, 42_000, 0, 0, 18_000)
    assert one.time.communication_ns == 82_000


def test_an_operator_that_waits_for_its_collective_is_seen_through(tmp_path) -> None:
    """An autograd function 10..80 computes 10..30, asks for a sum 30..32 and waits for it, 31..75,
    while an operator in it runs 40..50. One without a collective in it hides what runs behind."""
    events = [
        step(1, 0, 100),
        host("cpu_op", "_ReduceFromRegion", 10, 70),
        host("cpu_op", "aten::mm", 10, 20),
        host("cpu_op", "c10d::allreduce_", 30, 2),
        host("user_annotation", "gloo:all_reduce", 31, 44, 2),
        host("cpu_op", "aten::mul", 40, 10),
        host("cpu_op", "MyFunction", 85, 10),
        host("user_annotation", "gloo:all_reduce", 85, 10, 2),
    ]
    (one,) = summarize(tmp_path / "t.json", events, table=PAIR).host.steps
    # 10..30, 40..50, 75..80 and 85..95; exposed 30..40 and 50..75.
    assert parts(one.time) == (45_000, 35_000, 0, 0, 20_000)


def test_calls_of_hccl_communicate(tmp_path) -> None:
    events = [step(1, 0, 50), host("user_annotation", "hccl:all_reduce", 10, 20)]
    (one,) = summarize(tmp_path / "t.json", events, table=PAIR).host.steps
    assert (one.time.communication_ns, one.time.exposed_ns) == (20_000, 20_000)


def test_operators_have_time_of_their_own(tmp_path) -> None:
    """linear 0..100 calls addmm 10..70, which calls copy 20..30 and 40..50; threads are apart."""
    events = [
        host("cpu_op", "aten::linear", 0, 100, **{"Input Dims": [[2, 3]]}),
        host("cpu_op", "aten::addmm", 10, 60),
        host("cpu_op", "aten::copy_", 20, 10),
        host("cpu_op", "aten::copy_", 40, 10),
        host("cpu_op", "aten::copy_", 45, 10, 2),
    ]
    rows = {row.name: row for row in summarize(tmp_path / "t.json", events).host.operators}
    assert (rows["aten::linear"].self_ns, rows["aten::linear"].total_ns) == (40_000, 100_000)
    assert rows["aten::linear"].shapes == "[[2, 3]]"
    assert (rows["aten::addmm"].self_ns, rows["aten::addmm"].count) == (40_000, 1)
    assert (rows["aten::copy_"].self_ns, rows["aten::copy_"].count) == (30_000, 3)
    assert sum(row.share_ratio for row in rows.values()) == pytest.approx(1)


def test_sizes_of_gloo_are_those_of_its_inputs(tmp_path) -> None:
    said = {"Input Dims": [[10, 5]], "Input type": ["float"]}
    events = [
        host("user_annotation", "gloo:all_reduce", 0, 1, **said),
        host("user_annotation", "gloo:all_gather", 2, 1, **said),
        host("user_annotation", "gloo:barrier", 4, 1),
        host("user_annotation", "gloo:recv", 6, 1, **said),
    ]
    found = summarize(tmp_path / "t.json", events, rank=1, table=PAIR).host.collectives
    assert [one.size_bytes for one in found[:2]] == [200, 400]
    assert isinstance(found[2].size_bytes, Unavailable)
    assert found[3].messages == ((0, 1),)


def test_a_message_of_gloo_is_for_whom_torchs_call_says(tmp_path) -> None:
    """The peer is its place in the group, which is not always its rank."""

    def post(name: str, begin: float, peer: str, *, is_recorded: bool = True) -> list[dict]:
        values = {"Concrete Inputs": ["", "", peer, "0"]} if is_recorded else {}
        kind = "gloo:send" if name == "send" else "gloo:recv"
        return [
            host("cpu_op", f"c10d::{name}", begin, 5, **values),
            host("user_annotation", kind, begin + 3, 20),
        ]

    events = [
        *post("send", 0, "2"),
        *post("recv_", 10, "0"),
        *post("recv_", 40, "0", is_recorded=False),
        *post("send", 70, "9"),
        *post("send", 100, "x"),
        *post("recv_any_source_", 130, "0"),
    ]
    table = groups(**{"0": [4, 6, 9]})
    found = summarize(tmp_path / "t.json", events, rank=6, world_size=12, table=table).host
    messages = [one.messages for one in found.collectives]
    assert messages == [((6, 9),), ((4, 6),), (), (), (), ()]


def test_an_empty_host_has_nothing(tmp_path) -> None:
    found = summarize(tmp_path / "t.json", []).host
    assert (found.total_ns, found.steps, found.operators, found.collectives) == (0, (), (), ())


PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(40, 64)), batch_size=8)
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
    on_trace_ready=lambda made: made.export_chrome_trace(sys.argv[1]),
) as profiler:
    for (batch,) in data:
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
# Not an orderly end: a gloo thread of torch 2.13 may abort it, see examples/train_gpt.py.
os._exit(0)
"""


def test_a_real_trace_of_torch_has_every_part(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    program = [sys.executable, "-c", PROGRAM, str(path)]
    subprocess.run(program, check=True, capture_output=True, timeout=120)
    found = summarize_trace(read_trace(path)).host
    assert [one.step for one in found.steps] == [1, 2, 3]
    for one in found.steps:
        assert sum(parts(one.time)) == one.time.total_ns
        assert min(parts(one.time)) > 0
        assert sum(row.exposed_ns for row in one.communication) == one.time.exposed_ns
        (row,) = (row for row in one.communication if row.kind == "all_reduce")
        assert row.count == 2  # weight and bias
    assert "aten::addmm" in {row.name for row in found.operators}
