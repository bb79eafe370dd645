"""Operations on a real device, one NCCL rank: every kind of handle ends, nothing waits for it."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshscope.capture.operations import operation_stride
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.operations import EndSource, Kind, Outcome
from meshscope.store.read.run import open_run
from meshscope.store.schema import OperationFlag

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; run it where there is one"
)


@pytest.fixture
def nccl():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder(tmp_path: Path, nccl: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operation_stride, "MAX_SHARE", 1e9)  # mark every operation
    made = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    made.watch_communication()
    yield made
    made.close()
    assert made.guard.counts == {}, made.guard.first_messages


def finish(recorder: Recorder) -> list[dict[str, int]]:
    torch.cuda.synchronize()
    path = recorder.run_dir
    recorder.close()
    columns = open_run(path).last_attempt.ranks[0].read("collectives")
    found = [{n: int(v[i]) for n, v in columns.items()} for i in range(len(columns["kind"]))]
    return sorted(found, key=lambda row: row["enqueue_host_mono_ns"])


def test_blocking_and_asynchronous_operations_end_by_events(recorder):
    tensor = torch.ones(1 << 20, device="cuda")
    out = torch.empty_like(tensor)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(out, tensor)
    handle = dist.all_reduce(tensor, async_op=True)
    handle.wait()
    rows = finish(recorder)
    assert [row["kind"] for row in rows] == [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_REDUCE]
    assert {row["outcome"] for row in rows} == {Outcome.OK}
    assert {row["end_source"] for row in rows} == {EndSource.DEVICE}
    assert all(row["flags"] & OperationFlag.DEVICE for row in rows)
    assert all(
        row["enqueue_host_mono_ns"] <= row["start_host_mono_ns"] <= row["end_host_mono_ns"]
        for row in rows
    )
    assert rows[0]["size_bytes"] == 4 << 20


def test_a_handle_dropped_without_waiting_is_unseen(recorder):
    dist.all_reduce(torch.ones(8, device="cuda"), async_op=True)
    dist.all_reduce(torch.ones(8, device="cuda"))
    rows = finish(recorder)
    assert [row["outcome"] for row in rows] == [Outcome.UNSEEN, Outcome.OK]


def test_functional_collectives_end_at_their_wait(recorder):
    import torch.distributed._functional_collectives as functional

    result = functional.all_reduce(torch.ones(1 << 20, device="cuda"), "sum", dist.group.WORLD)
    assert float((result + 0).sum()) == 1 << 20
    [row] = finish(recorder)
    assert row["outcome"] == Outcome.OK
    assert row["end_source"] in (EndSource.DEVICE, EndSource.DEVICE_LATE)


def test_the_reducer_of_ddp_is_seen(recorder):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
    for _ in range(3):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
    rows = finish(recorder)
    reduced = [row for row in rows if row["flags"] & OperationFlag.ENGINE]
    assert len(reduced) == 3
    assert {row["outcome"] for row in rows} == {Outcome.OK}


def test_batched_messages_to_oneself(recorder):
    tensor, other = torch.ones(1024, device="cuda"), torch.empty(1024, device="cuda")
    handles = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, 0), dist.P2POp(dist.irecv, other, 0)]
    )
    for handle in handles:
        handle.wait()
    rows = finish(recorder)
    assert sorted(row["kind"] for row in rows) == [Kind.SEND, Kind.RECV]
    assert all(row["flags"] & OperationFlag.COALESCED for row in rows)
    assert {row["outcome"] for row in rows} == {Outcome.OK}


def test_a_captured_graph_stays_whole(recorder):
    tensor = torch.ones(1024, device="cuda")
    dist.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dist.all_reduce(tensor)
    torch.cuda.current_stream().wait_stream(stream)
    time.sleep(0.1)  # a reading is due: it must not happen inside the capture
    with torch.cuda.graph(graph):
        tensor.add_(1)
        dist.all_reduce(tensor)
    graph.replay()
    rows = finish(recorder)
    # The second one ran on a stream of the program's own, where nothing is marked.
    assert [row["outcome"] for row in rows] == [Outcome.OK, Outcome.UNSEEN, Outcome.UNSEEN]


def test_memory_is_not_kept_longer(recorder):
    def step() -> int:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            out = torch.empty(1 << 24, device="cuda")
            handle = dist.all_reduce(out, async_op=True)
            handle.wait()
            del out, handle
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    recorded = step()
    recorder.configure(communication=False)
    plain = step()
    assert recorded <= plain + (1 << 26)  # at most the one whose handle is still held
