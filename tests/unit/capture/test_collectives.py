"""The tap on torch.distributed, in one process; several ranks are in tests/distributed."""

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshscope.capture.communication.clock_calibration import measure_offset
from meshscope.capture.operations import collectives, following, operation_shapes
from meshscope.capture.operations.operation_log import Operation
from meshscope.capture.operations.operation_shapes import covers, find_shapes, kind_of
from meshscope.capture.operations.waits import WaitTaps
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.operations import Kind, Outcome
from meshscope.store.read.run import open_run
from meshscope.store.schema import BUILTIN_NAMES, OperationFlag, WaitSource


@pytest.fixture
def recorder(tmp_path: Path, alone: None):
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    made.watch_communication()
    assert made.guard.first_messages == {}
    yield made
    made.close()
    assert made.guard.counts == {}


def rows(recorder: Recorder, table: str = "collectives") -> list[dict[str, int]]:
    path = recorder.run_dir
    recorder.close()
    columns = open_run(path).last_attempt.ranks[0].read(table)
    size = len(next(iter(columns.values())))
    found = [{name: int(v[i]) for name, v in columns.items()} for i in range(size)]
    return sorted(found, key=lambda row: row.get("enqueue_host_mono_ns", 0))


@pytest.mark.parametrize(
    ("op_name", "kind"),
    [
        ("allreduce_", Kind.ALL_REDUCE),
        ("allreduce_coalesced_", Kind.ALL_REDUCE),
        ("_allgather_base_", Kind.ALL_GATHER),
        ("allgather_into_tensor_coalesced_", Kind.ALL_GATHER),
        ("_reduce_scatter_base_", Kind.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced_", Kind.REDUCE_SCATTER),
        ("gather_into_tensor_", Kind.GATHER),
        ("alltoall_base_", Kind.ALL_TO_ALL),
        ("recv_any_source_", Kind.RECV),
        ("monitored_barrier_", Kind.BARRIER),
        ("teleport_", Kind.CUSTOM),
    ],
)
def test_the_kind_follows_from_the_name_in_torch(op_name, kind):
    assert kind_of(op_name) is kind


def test_every_operation_of_this_torch_is_recognised():
    shapes = find_shapes(torch)
    assert {shape.op_name for shape in shapes if shape.kind is Kind.CUSTOM} == set()
    assert len(shapes) >= 20


@pytest.mark.parametrize(
    ("op_name", "arguments", "size_bytes"),
    [
        ("allreduce_", ([torch.ones(6)],), 24),
        ("allreduce_coalesced_", ([torch.ones(6), torch.ones(2, dtype=torch.float64)],), 40),
        ("allgather_", ([[torch.ones(3)] * 4], [torch.ones(3)]), 48),
        ("_allgather_base_", (torch.ones(12), torch.ones(3)), 48),
        ("reduce_scatter_", ([torch.ones(3)], [[torch.ones(3)] * 4]), 48),
        ("_reduce_scatter_base_", (torch.ones(3), torch.ones(12)), 48),
        ("gather_", ([], [torch.ones(3)]), 48),
        ("scatter_", ([torch.ones(3)], []), 48),
        ("broadcast_", ([torch.ones(3, dtype=torch.bfloat16)],), 6),
        ("alltoall_", ([torch.ones(1)] * 4, [torch.ones(2)] * 4), 32),
        ("alltoall_base_", (torch.ones(9), torch.ones(5)), 20),
        ("send", ([torch.ones(3, dtype=torch.bool)],), 3),
        ("barrier", (torch.ones(1),), 0),
        ("allreduce_", ([torch.eye(4).to_sparse()],), 4 * 4 + 2 * 4 * 8),
        ("allreduce_", ([torch.ones(0)],), 0),
    ],
)
def test_the_size_is_the_whole_array_counted_once(op_name, arguments, size_bytes):
    shape = next(shape for shape in find_shapes(torch) if shape.op_name == op_name)
    assert shape.measure(arguments, 4)[0] == size_bytes


def test_a_blocking_and_an_asynchronous_operation(recorder):
    tensor = torch.ones(16)
    dist.all_reduce(tensor)
    handle = dist.all_reduce(tensor, async_op=True)
    handle.wait()
    found = rows(recorder)
    assert [(row["kind"], row["outcome"], row["flags"]) for row in found] == [
        (Kind.ALL_REDUCE, Outcome.OK, 0),
        (Kind.ALL_REDUCE, Outcome.OK, 1),
    ]
    assert [row["sequence"] for row in found] == [0, 1]
    assert all(row["end_host_mono_ns"] >= row["enqueue_host_mono_ns"] for row in found)


def test_a_wait_is_a_row_of_its_own(recorder):
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    [wait] = rows(recorder, "waits")
    assert wait["operation_enqueue_host_mono_ns"] > 0
    assert wait["duration_ns"] >= 0


def test_a_call_that_returns_late_is_a_wait_too(recorder, monkeypatch):
    monkeypatch.setattr(following, "SLOW_CALL_NS", -1)  # every call is late
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    path = recorder.run_dir
    waits = rows(recorder, "waits")
    operations = open_run(path).last_attempt.ranks[0].read("collectives")
    last = max(operations["enqueue_host_mono_ns"].tolist())
    late = [wait for wait in waits if wait["source"] == WaitSource.CALL]
    # Not the first, which sets things up, and not the one that blocks: it is a wait as a whole.
    assert [wait["operation_enqueue_host_mono_ns"] for wait in late] == [last]
    assert [wait["start_host_mono_ns"] for wait in late] == [last]
    assert len(waits) == 3


def test_another_recorder_is_told_apart(recorder, tmp_path, caplog):
    second = Recorder(tmp_path / "second", config=RecorderConfig(provenance=False))
    second.watch_communication()
    assert "another recorder" in second.guard.first_messages["communication"]
    second.close()


def test_an_old_torch_is_told_and_timed_blocks_remain(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    assert "older than 2.11" in caplog.text
    assert "meshscope.communication()" in caplog.text
    recorder.close()


def test_nothing_seen_in_the_test_is_loud(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(collectives, "METHODS", {})
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    assert "a test operation went by unseen" in caplog.text
    recorder.close()


def test_without_the_dispatchers_keys_it_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.delattr(torch._C, "_dispatch_keyset_full_after")
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    assert "has no _dispatch_keyset_full_after" in caplog.text
    recorder.close()


def test_an_operation_this_version_does_not_know_is_custom_with_its_name(
    tmp_path, monkeypatch, alone
):
    monkeypatch.setattr(collectives, "covers", lambda shapes: False)
    monkeypatch.setattr(
        operation_shapes,
        "_KINDS",
        {name: kind for name, kind in operation_shapes._KINDS.items() if name != "allreduce"},
    )
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    dist.all_reduce(torch.ones(2))
    assert recorder.operations.num_unrecognised == 1
    recorder.close()
    recording = open_run(tmp_path / "run").last_attempt.ranks[0]
    assert recording.read("collectives")["kind"].tolist() == [Kind.CUSTOM]
    [name_id] = recording.read("operation_notes")["name_id"].tolist()
    assert recording.name_of(name_id) == "allreduce_"


@pytest.mark.parametrize("has_future", [False, True])
def test_what_a_communication_hook_reduces_is_the_engines(has_future):
    """Also where its end is asked of torch anyway, as of every eighth: one callback is enough."""
    operation = Operation()
    operation.a, operation.has_future = BUILTIN_NAMES["backward"] << 48, has_future
    asked = []
    follower = SimpleNamespace(
        find=lambda work: [operation], device=None, add_callback=lambda *told: asked.append(told)
    )
    taps = WaitTaps(torch, SimpleNamespace(is_on=True), None, follower, None, time.monotonic_ns)
    assert taps.make_get_future(lambda work: "its future")("its handle") == "its future"
    assert operation.a >> 24 & OperationFlag.ENGINE
    assert asked == ([] if has_future else [([operation], "its future")])


def test_closing_gives_everything_back(tmp_path, alone):
    before = (dist.Work.wait, dist.Work.is_completed, dist.Work.get_future)
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    assert dist.Work.wait is not before[0]
    dist.all_reduce(torch.ones(2))
    recorder.close()
    assert (dist.Work.wait, dist.Work.is_completed, dist.Work.get_future) == before
    num_rows = len(open_run(tmp_path / "run").last_attempt.ranks[0].read("collectives")["kind"])
    dist.all_reduce(torch.ones(2))
    assert num_rows == 1


def test_clocks_are_measured_through_the_store():
    store = dist.HashStore()
    ahead_ns = 3_000_000_000
    found = {}

    def ask(rank: int) -> None:
        def clock() -> int:
            return time.monotonic_ns() + rank * ahead_ns

        found[rank] = measure_offset(store, rank, 3, clock, "test")

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].offset_ns == 0
    for rank in (1, 2):
        offset = found[rank]
        assert abs(offset.offset_ns - rank * ahead_ns) <= offset.uncertainty_ns
        assert offset.uncertainty_ns < ahead_ns / 10


def test_calibration_is_in_the_journal(recorder):
    assert recorder.calibrate_clocks() is not None
    path = recorder.run_dir
    recorder.close()
    updates = open_run(path).last_attempt.ranks[0].updates
    [found] = [line["clock_calibration"] for line in updates if "clock_calibration" in line]
    assert found["reference_rank"] == 0
    assert found["offset_ns"] == 0


def test_an_operation_without_a_known_method_is_seen_by_the_dispatcher(
    tmp_path, monkeypatch, alone
):
    shapes = find_shapes(torch)
    assert covers(shapes)
    strange = dataclasses.replace(shapes[0], op_name="teleport_")
    assert not covers([*shapes, strange])


@pytest.mark.parametrize(
    "call",
    [
        lambda group, tensor: group.allreduce([tensor]),
        lambda group, tensor: group.allreduce(tensor),
        lambda group, tensor: group.allreduce(tensor, dist.ReduceOp.SUM),
        lambda group, tensor: group.allreduce(tensors=[tensor]),
        lambda group, tensor: group.broadcast(tensor, 0),
        lambda group, tensor: group.broadcast(tensor, root=0),
        lambda group, tensor: group.allgather([[tensor]], [tensor]),
        lambda group, tensor: group.allgather([tensor], tensor),
        lambda group, tensor: group.gather([tensor], tensor, 0),
    ],
)
def test_every_form_of_a_groups_method_is_recorded(recorder, call):
    call(dist.group.WORLD, torch.ones(16)).wait()
    [row] = rows(recorder)
    assert (row["size_bytes"], row["outcome"], row["flags"]) == (64, Outcome.OK, 1)
    assert row["peer"] in (-1, 0)


def test_the_dispatcher_takes_over_before_something_in_c_communicates(recorder):
    import torch.distributed._functional_collectives as functional

    dist.all_reduce(torch.ones(4))
    result = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
    assert float((result + 0).sum()) == 8
    dist.all_reduce(torch.ones(2))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    found = [row for row in rows(recorder) if row["kind"] == Kind.ALL_REDUCE]
    assert [row["size_bytes"] for row in found] == [16, 32, 8, 24]
    assert [row["sequence"] for row in found][:3] == [0, 1, 2]
    assert {row["outcome"] for row in found} == {Outcome.OK}


@pytest.mark.parametrize("init_sync", [True, False])
def test_a_reducer_warns_at_its_makers_line_and_is_seen(recorder, init_sync):
    with pytest.warns(FutureWarning, match="broadcast_buffers") as caught:
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 2), broadcast_buffers=False, init_sync=init_sync
        )
    assert {warning.filename for warning in caught} == {__file__}
    model(torch.ones(1, 2)).sum().backward()
    assert rows(recorder)[-1]["kind"] == Kind.ALL_REDUCE


@pytest.mark.parametrize("has_communicated", [True, False])
def test_a_reducer_made_before_the_recorder_is_seen(tmp_path, alone, has_communicated):
    wrapper = torch.nn.parallel.DistributedDataParallel
    original = wrapper._pre_forward
    model = wrapper(torch.nn.Linear(2, 2), init_sync=has_communicated)
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    model(torch.ones(1, 2)).sum().backward()
    assert wrapper._pre_forward is original
    recorder.close()
    kinds = open_run(tmp_path / "run").last_attempt.ranks[0].read("collectives")["kind"].tolist()
    assert kinds == [Kind.ALL_REDUCE]


def test_the_heap_is_not_searched_before_anything_was_communicated(alone, tmp_path, monkeypatch):
    def search():
        raise AssertionError("searched")

    monkeypatch.setattr(collectives.gc, "get_objects", search)
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    assert recorder.guard.counts == {}
    dist.all_reduce(torch.ones(4))
    assert [row["kind"] for row in rows(recorder)] == [Kind.ALL_REDUCE]


def test_a_method_that_the_program_wrapped_is_not_counted_twice(recorder, monkeypatch):
    ours = dist.ProcessGroup.allreduce
    monkeypatch.setattr(
        dist.ProcessGroup, "allreduce", lambda group, *args: ours(group, *args), raising=True
    )
    dist.all_reduce(torch.ones(4))
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))  # kernels from here on
    dist.all_reduce(torch.ones(2))
    found = [row for row in rows(recorder) if row["kind"] == Kind.ALL_REDUCE]
    assert [row["size_bytes"] for row in found] == [16, 8]


@pytest.mark.parametrize("sees_all", [False, True])
def test_a_dropped_handle_is_unseen_however_soon_its_operation_was_over(recorder, sees_all):
    if sees_all:
        collectives._installed.see_all()
    for _ in range(5):  # the first has a callback
        dist.all_reduce(torch.ones(2), async_op=True)
        time.sleep(0.005)
    held = dist.all_reduce(torch.ones(2), async_op=True)
    time.sleep(0.005)
    dist.all_reduce(torch.ones(2), async_op=True)
    held.wait()
    del held
    outcomes = [Outcome(row["outcome"]) for row in rows(recorder)]
    assert outcomes[:6] == [Outcome.OK, *[Outcome.UNSEEN] * 4, Outcome.OK]
