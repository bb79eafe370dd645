"""Functional collectives of a group that is taken for a device's: seen in Python, once, and
nothing of ours in the dispatcher."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode

from meshscope.capture.operations import process_groups
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.operations import Kind, Outcome
from meshscope.store.read.run import open_run

OPERATIONS = torch.ops._c10d_functional


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(process_groups, "_HOST_BACKENDS", frozenset())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder(tmp_path, alone):
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    made.watch_communication()
    yield made
    made.close()
    assert made.guard.counts == {}


def read_rows(recorder):
    path = recorder.run_dir
    recorder.close()
    columns = open_run(path).last_attempt.ranks[0].read("collectives")
    names = ("kind", "size_bytes", "peer", "outcome", "sequence")
    return sorted(zip(*(columns[name].tolist() for name in names), strict=True), key=lambda r: r[4])


def list_kernels():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    ours = [n for n in names if n.startswith(("c10d::", "_c10d_functional"))]
    return [name for name in ours if has_kernel(name, "BackendSelect")]


def test_every_function_is_seen_once_without_a_kernel(recorder):
    world, data = dist.group.WORLD, torch.ones(8)
    ok = int(Outcome.OK)
    for result in (
        functional.all_reduce(data, "sum", world),
        OPERATIONS.all_gather_into_tensor(data, 1, world.group_name),
        OPERATIONS.reduce_scatter_tensor(data, "sum", 1, world.group_name),
        functional.broadcast(data, 0, world),
        functional.all_to_all_single(data, None, None, world),
        functional.permute_tensor(data, [0], world),
        functional.all_reduce_coalesced([data, data], "sum", world)[0],
        OPERATIONS.all_reduce_(data.clone(), "sum", world.group_name),
        OPERATIONS.all_reduce.default(input=data, reduce_op="sum", group_name=world.group_name),
    ):
        assert torch.equal(functional.wait_tensor(result) + 0, data)
    assert list_kernels() == []
    assert read_rows(recorder) == [
        (Kind.ALL_REDUCE, 32, -1, ok, 0),
        (Kind.ALL_GATHER, 32, -1, ok, 1),
        (Kind.REDUCE_SCATTER, 32, -1, ok, 2),
        (Kind.BROADCAST, 32, 0, ok, 3),
        (Kind.ALL_TO_ALL, 32, -1, ok, 4),
        (Kind.ALL_TO_ALL, 32, -1, ok, 5),
        (Kind.ALL_REDUCE, 64, -1, ok, 6),
        (Kind.ALL_REDUCE, 32, -1, ok, 7),
        (Kind.ALL_REDUCE, 32, -1, ok, 8),
    ]


def test_backward_is_seen_and_a_program_that_only_looks_is_not_counted_twice(recorder):
    weight = torch.ones(3, requires_grad=True)
    functional.all_reduce(weight, "sum", dist.group.WORLD).sum().backward()
    with CommDebugMode() as mode:
        functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD).sum()
    assert mode.get_total_counts() == 1
    with FakeTensorMode():
        functional.all_reduce(torch.ones(7), "sum", dist.group.WORLD).sum()
    functional.all_reduce(torch.ones(9, device="meta"), "sum", dist.group.WORLD)
    assert [row[1] for row in read_rows(recorder)] == [12, 12, 20]


def test_a_compiled_program_has_one_graph_and_its_operations_are_seen(recorder):
    world = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compute(data):
        return functional.all_reduce(data * 2, "sum", world) + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests in this process
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert float(compute(torch.ones(6)).sum()) == 18
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert list_kernels() == []
    assert [row[:2] for row in read_rows(recorder)] == [(Kind.ALL_REDUCE, 24)] * 2


def test_with_kernels_for_a_reducer_an_operation_is_still_one(recorder):
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    functional.all_reduce(torch.ones(11), "sum", dist.group.WORLD).sum()
    assert [row[1] for row in read_rows(recorder) if row[0] == Kind.ALL_REDUCE] == [44]


def test_an_operation_hashes_as_before_and_is_torchs_own_again_afterwards(tmp_path, alone):
    owners = [OPERATIONS.all_reduce, OPERATIONS.all_reduce.default, OPERATIONS.wait_tensor.default]
    before = [(owner._op, hash(owner)) for owner in owners]
    table = dict.fromkeys(owners, "known")
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    assert all(owner._op is not op for owner, (op, _) in zip(owners, before, strict=True))
    assert [hash(owner) for owner in owners] == [number for _, number in before]
    assert all(table[owner] == "known" for owner in owners)
    assert OPERATIONS.all_reduce._op.__module__ == before[0][0].__module__
    recorder.close()
    assert [(owner._op, hash(owner)) for owner in owners] == before


def test_a_call_that_fails_is_recorded_as_failed(recorder):
    with pytest.raises(RuntimeError):
        OPERATIONS.all_reduce(torch.ones(3), "no such reduction", dist.group.WORLD.group_name)
    [row] = read_rows(recorder)
    assert row[3] == Outcome.ERROR
