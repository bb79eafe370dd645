"""Programs that communicate, recorded by meshscope and counted by torch.profiler at the same time.

    python -m tests.distributed.communication_scenarios FOLDER [SCENARIO …]

Every scenario forks its ranks and leaves `FOLDER/<scenario>/run` (the recording), a
`rank<n>.json` with what the profiler saw (operation, tensors, scalars: the expected sizes are
worked out from them by the test, not here) and `exit_codes.json`.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.distributed.fork_ranks import import_everything, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import meshscope

NUM_RANKS = 8
NUM_STEPS = 3


@dataclass
class Rank:
    """One forked process of a scenario."""

    rank: int
    world_size: int
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """What goes into `rank<n>.json`."""

    def start(self, name: str = "run", **settings: Any) -> Any:
        return meshscope.start(self.folder / name, **settings)

    def save(self) -> None:
        path = self.folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(self.facts), encoding="utf-8")


# --- what torch.profiler saw ------------------------------------------------------------------


@contextlib.contextmanager
def profiled(found: list[dict[str, Any]]) -> Iterator[None]:
    """Adds every c10d operation called inside to `found`, in order."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found += sorted(_walk(tree, {}), key=lambda event: event["start_ns"])


def _walk(events: list[Any], labels: dict[str, str]) -> Iterator[dict[str, Any]]:
    for event in events:
        inner = labels
        key, _, value = event.name.partition("=")
        if value and key in ("group", "handle", "size"):
            inner = {**labels, key: value}
        if event.name.startswith("c10d::"):
            yield {
                "op": event.name.removeprefix("c10d::"),
                "start_ns": event.start_time_ns,
                "inputs": [_describe(value) for value in event.extra_fields.inputs],
                **labels,
            }
        yield from _walk(event.children, inner)


def _describe(value: Any) -> Any:
    """A tensor as its shape and type, a list of tensors as a list of those, a scalar as it is."""
    if isinstance(value, list):
        return [_describe(item) for item in value]
    if hasattr(value, "sizes"):
        dtype = value.dtype
        return {"sizes": list(value.sizes), "dtype": str(dtype), "itemsize": dtype.itemsize}
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def label(text: str) -> Any:
    """`group=…`, `handle=…` or `size=…`, beside every operation called inside."""
    return record_function(text)


# --- plain torch.distributed ------------------------------------------------------------------


def plain(rank: Rank) -> None:
    """Every function of torch.distributed, in three groups, with and without handles."""
    groups = {"world": dist.group.WORLD}
    for name, members in {
        "half": _halves(rank.world_size),
        "other": _others(rank.world_size),
    }.items():
        made = [dist.new_group(ranks, group_desc=f"{name}_{ranks[0]}") for ranks in members]
        groups[name] = next(g for g, ranks in zip(made, members, strict=True) if rank.rank in ranks)
    rank.facts["groups"] = {
        group.group_name: {
            "ranks": dist.get_process_group_ranks(group), "description": group.group_desc
        }
        for group in groups.values()
    }  # fmt: skip
    recorder = rank.start()
    events: list[dict[str, Any]] = []
    with profiled(events):
        for group in groups.values():
            with label(f"group={group.group_name}"):
                _collectives(group, is_async=False)
                _collectives(group, is_async=True)
                _point_to_point(group)
        with label(f"group={dist.group.WORLD.group_name}"):
            _number_formats()
            _coalesced()
            _objects(rank)
            _handles()
            _functional()
            _modes()
    rank.facts["profiled"] = events
    recorder.close()


def _halves(world_size: int) -> list[list[int]]:
    return [list(range(world_size // 2)), list(range(world_size // 2, world_size))]


def _others(world_size: int) -> list[list[int]]:
    return [list(range(first, world_size, 2)) for first in (0, 1)]


def _collectives(group: Any, *, is_async: bool) -> None:
    size, me = group.size(), group.rank()
    members = dist.get_process_group_ranks(group)
    root = members[1]
    is_root = me == 1
    options: dict[str, Any] = {"group": group, "async_op": is_async}
    rows = [torch.full((3,), float(index)) for index in range(size)]
    splits = [1 + (me + index) % 2 for index in range(size)]
    works = [
        dist.all_reduce(torch.ones(2, 3), **options),
        dist.all_reduce(torch.ones(5), op=dist.ReduceOp.MAX, **options),
        dist.all_gather([torch.empty(3) for _ in range(size)], torch.ones(3), **options),
        dist.all_gather_into_tensor(torch.empty(4 * size), torch.ones(4), **options),
        dist.reduce_scatter(torch.empty(3), rows, **options),
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size), **options),
        dist.broadcast(torch.ones(7), src=root, **options),
        dist.reduce(torch.ones(9), dst=root, **options),
        dist.scatter(torch.empty(3), rows if is_root else None, src=root, **options),
        dist.gather(
            torch.ones(3),
            [torch.empty(3) for _ in range(size)] if is_root else None,
            dst=root,
            **options,
        ),
        dist.all_to_all(
            [torch.empty(2) for _ in range(size)], [torch.ones(2) for _ in range(size)], **options
        ),
        dist.all_to_all_single(torch.empty(size), torch.ones(size), **options),
        dist.all_to_all_single(
            torch.empty(sum(splits)), torch.ones(sum(splits)), splits, splits, **options
        ),
        dist.barrier(**options),
    ]
    for work in works:
        assert (work is not None) == is_async
        if work is not None:
            work.wait()
    if not is_async:
        dist.monitored_barrier(group=group)


def _point_to_point(group: Any) -> None:
    """A ring, each way, with every function and with tags, and one receive from anyone."""
    size, me = group.size(), group.rank()
    members = dist.get_process_group_ranks(group)
    right, left = members[(me + 1) % size], members[(me - 1) % size]
    for tag in (0, 3):
        if me % 2:
            dist.send(torch.ones(6), right, group=group, tag=tag)
            dist.recv(torch.empty(6), left, group=group, tag=tag)
        else:
            dist.recv(torch.empty(6), left, group=group, tag=tag)
            dist.send(torch.ones(6), right, group=group, tag=tag)
    works = [
        dist.isend(torch.ones(8 + me), right, group=group, tag=5),
        dist.isend(torch.ones(2), left, group=group),
        dist.irecv(torch.empty(2), right, group=group),
        dist.irecv(torch.empty(8 + (me - 1) % size), left, group=group, tag=5),
    ]
    for work in works:
        work.wait()
    batch = [
        dist.P2POp(dist.isend, torch.ones(3), right, group),
        dist.P2POp(dist.irecv, torch.empty(3), left, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    works = [dist.isend(torch.ones(1), right, group=group, tag=tag) for tag in (127, 500, 900)]
    works += [dist.irecv(torch.empty(1), left, group=group, tag=tag) for tag in (127, 500, 900)]
    for work in works:
        work.wait()
    if me == 0:
        assert dist.recv(torch.empty(2), group=group, tag=9) == members[1]
    elif me == 1:
        dist.send(torch.ones(2), members[0], group=group, tag=9)


def _number_formats() -> None:
    for dtype in (
        torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
        torch.uint8, torch.complex64, torch.complex128,
    ):  # fmt: skip
        dist.all_reduce(torch.ones(3, dtype=dtype))
    for dtype in (torch.bool, torch.float16, torch.int8):
        dist.broadcast(torch.ones(5, dtype=dtype), src=0)
    dist.all_reduce(torch.empty(0))
    dist.broadcast(torch.empty(0, 4), src=0)
    dist.all_reduce(torch.tensor(1.0))  # no dimensions: one element
    dist.all_reduce(torch.ones(4, 4).t())
    with label("size=60"):  # three numbers and their two 64-bit indices
        dist.all_reduce(torch.eye(3).to_sparse())


def _coalesced() -> None:
    size = dist.get_world_size()
    with _coalescing_manager():
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(5))
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_gather_single(torch.empty(2 * size), torch.ones(2))
        dist.all_gather_single(torch.empty(3 * size), torch.ones(3))
    manager.wait()
    with _coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_single(torch.empty(2), torch.ones(2 * size))
        dist.reduce_scatter_single(torch.empty(1), torch.ones(size))
    manager.wait()
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(4)])
    dist.all_gather_coalesced(
        [[torch.empty(2), torch.empty(3)] for _ in range(size)], [torch.ones(2), torch.ones(3)]
    )


def _objects(rank: Rank) -> None:
    size = rank.world_size
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank.rank})
    assert [item["rank"] for item in everyone] == list(range(size))
    shared = ["text", 17] if rank.rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    dist.gather_object("mine", everyone if rank.rank == 0 else None, dst=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank.rank == 0 else None, src=0)
    assert mine == [rank.rank]
    if rank.rank == 0:
        dist.send_object_list(["a", {"b": 1}], dst=1)
    elif rank.rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["a", {"b": 1}]


def _handles() -> None:
    """Handles that are not simply waited for."""
    for _ in range(9):
        with label("handle=dropped"):
            dist.all_reduce(torch.ones(11), async_op=True)
    for _ in range(3):
        with label("handle=dropped"):
            dist.all_reduce(torch.ones(11), async_op=True)
        time.sleep(0.01)  # it is complete when the next one comes, and nobody has waited for it
    dist.barrier()
    for _ in range(3):
        work = dist.all_reduce(torch.ones(12), async_op=True)
        while not work.is_completed():
            time.sleep(0.0005)
        del work
    for _ in range(3):
        dist.all_reduce(torch.ones(13), async_op=True).get_future().wait()
    works = [dist.all_reduce(torch.ones(14), async_op=True) for _ in range(5)]
    for work in reversed(works):  # not in the order they were issued, and twice
        work.wait()
        work.wait()


def _functional() -> None:
    size, world = dist.get_world_size(), dist.group.WORLD
    for _ in range(3):
        assert functional.all_reduce(torch.ones(15), "sum", world).sum() == 15 * size
    assert functional.all_gather_tensor(torch.ones(2), 0, world).sum() == 2 * size
    assert functional.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, world).sum() == 2 * size
    assert functional.broadcast(torch.ones(16), 0, world).sum() == 16
    assert functional.all_to_all_single(torch.ones(size), None, None, world).sum() == size
    parts = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", world)
    assert sum(part.sum() for part in parts) == 5 * size
    empty = [functional.all_reduce(torch.empty(0), "sum", world) for _ in range(5)]
    assert all(part.sum() == 0 for part in empty)
    late = [functional.all_reduce(torch.ones(17), "sum", world) for _ in range(4)]
    assert sum(part.sum() for part in reversed(late)) == 4 * 17 * size
    for _ in range(9):
        with label("handle=dropped"):
            functional.all_reduce(torch.ones(21), "sum", world)
    for function, arguments in (  # their backward communicates as well
        (functional.all_gather_tensor_autograd, (0, world)),
        (functional.reduce_scatter_tensor_autograd, ("sum", 0, world)),
        (functional.all_to_all_single_autograd, (None, None, world)),
    ):
        for _ in range(2):
            weight = torch.ones(size, 2, requires_grad=True)
            function(weight, *arguments).sum().backward()
            assert weight.grad is not None


def _modes() -> None:
    with torch.inference_mode():
        dist.all_reduce(torch.ones(18))
        dist.all_reduce(torch.ones(18), async_op=True).wait()
    with torch.no_grad():
        dist.all_reduce(torch.ones(19))
    dist.all_reduce(torch.ones(20, requires_grad=True).detach())


def threads(rank: Rank) -> None:
    """Three threads communicate at the same time, each in a group of its own; then handles of
    one thread are waited for by another."""
    groups = [dist.new_group(group_desc=f"thread_{index}") for index in range(4)]
    recorder = rank.start()
    errors = []

    def communicate(group: Any, num_elements: int) -> None:
        try:
            with label(f"group={group.group_name}"):
                for turn in range(40):
                    work = dist.all_reduce(torch.ones(num_elements), group=group, async_op=turn % 2)
                    if work is not None:
                        work.wait()
        except BaseException:
            errors.append(traceback.format_exc())
            raise

    others = [
        threading.Thread(target=communicate, args=(group, 5 + index))
        for index, group in enumerate(groups[1:3], 1)
    ]
    for other in others:
        other.start()
    communicate(groups[0], 5)
    for other in others:
        other.join()
    assert not errors
    works = [dist.all_reduce(torch.ones(8), group=groups[3], async_op=True) for _ in range(40)]
    waiter = threading.Thread(target=lambda: [work.wait() for work in works])
    waiter.start()
    waiter.join()
    rank.facts["groups"] = {
        group.group_name: {"description": group.group_desc, "num_elements": 5 + index}
        for index, group in enumerate(groups)
    }
    recorder.close()


def regrouped(rank: Rank) -> None:
    """All groups are given up and made again: torch uses their names a second time."""
    recorder = rank.start()
    rank.facts["groups"] = []
    halves, others = _halves(rank.world_size), _others(rank.world_size)
    for turn, members in enumerate((halves, others, halves)):
        if turn:
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rank.folder}/store{turn}",
                rank=rank.rank,
                world_size=rank.world_size,
            )
        made = [dist.new_group(ranks) for ranks in members]
        mine = next(g for g, ranks in zip(made, members, strict=True) if rank.rank in ranks)
        for _ in range(2):
            dist.all_reduce(torch.ones(1 + turn), group=mine)
            dist.broadcast(torch.ones(1 + turn), dist.get_process_group_ranks(mine)[-1], group=mine)
        rank.facts["groups"].append(
            {"name": mine.group_name, "ranks": dist.get_process_group_ranks(mine)}
        )
    recorder.close()


# --- training ---------------------------------------------------------------------------------


def compare_training(rank: Rank, train: Callable[[Rank, Any], list[float]]) -> None:
    """Trains without a recorder and then with one: the same losses, the same operations."""
    bare: list[dict[str, Any]] = []
    recorded: list[dict[str, Any]] = []
    torch.manual_seed(1)
    with profiled(bare):
        rank.facts["losses_bare"] = train(rank, None)
    recorder = rank.start()
    torch.manual_seed(1)
    with profiled(recorded):
        rank.facts["losses"] = train(rank, recorder)
    recorder.close()
    rank.facts["profiled_bare"] = bare
    rank.facts["profiled"] = recorded


def _attach(recorder: Any, model: Any, optimizer: Any) -> None:
    if recorder is not None:
        recorder.attach(model, optimizer)


def _exact(loss: Any) -> float:
    return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())


def _train_ddp(rank: Rank, recorder: Any, hook: Any = None) -> list[float]:
    """Two microbatches a step, the first without synchronisation; buckets of 1 KiB; buffers."""
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    net = torch.nn.Sequential(*layers[:2], torch.nn.BatchNorm1d(16), *layers[2:])
    model = DistributedDataParallel(net, bucket_cap_mb=1 / 1024)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _attach(recorder, model, optimizer)
    losses = []
    for step in range(NUM_STEPS):
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(8 * step + rank.rank))
        with model.no_sync():
            model(data[:2]).pow(2).mean().backward()
        loss = model(data[2:]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_exact(loss))
    return losses


def ddp(rank: Rank) -> None:
    """DistributedDataParallel."""
    compare_training(rank, _train_ddp)


def ddp_hook(rank: Rank) -> None:
    """DistributedDataParallel that sends its gradients in half precision."""
    compare_training(rank, lambda r, recorder: _train_ddp(r, recorder, fp16_compress_hook))


def _train_fsdp2(rank: Rank, recorder: Any) -> list[float]:
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp",))
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _attach(recorder, model, optimizer)
    losses = []
    for step in range(NUM_STEPS):
        data = torch.randn(2, 16, generator=torch.Generator().manual_seed(8 * step + rank.rank))
        loss = model(data).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_exact(loss))
    return losses


def fsdp2(rank: Rank) -> None:
    """Fully sharded over all ranks."""
    compare_training(rank, _train_fsdp2)


def _make_tensor_parallel(mesh: Any) -> Any:
    """Norm on the sequence, then a column-wise and a row-wise layer."""
    block = torch.nn.Sequential(
        torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
    )
    parallelize_module(
        block,
        mesh,
        {
            "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        },
    )
    parallelize_module(
        block,
        mesh,
        PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)),
    )
    return block


def _train_tp(rank: Rank, recorder: Any) -> list[float]:
    """2 × 4: gradients are averaged over dp by hand."""
    mesh = init_device_mesh("cpu", (2, rank.world_size // 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(*(_make_tensor_parallel(mesh["tp"]) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _attach(recorder, model, optimizer)
    losses = []
    for step in range(NUM_STEPS):
        seed = 8 * step + mesh.get_local_rank("dp")
        data = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))
        loss = model(data).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_exact(loss))
    return losses


def tp(rank: Rank) -> None:
    """DTensor tensor parallelism with sequence parallelism."""
    compare_training(rank, _train_tp)


def _train_pp(rank: Rank, recorder: Any) -> list[float]:
    torch.manual_seed(rank.rank)
    layer = torch.nn.Linear(8, 8)
    stage = PipelineStage(layer, rank.rank, rank.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, rank.world_size, loss_fn=lambda out, want: (out - want).pow(2).mean()
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    _attach(recorder, layer, optimizer)
    losses = []
    for step in range(NUM_STEPS):
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        found: list[Any] = []
        if rank.rank == 0:
            schedule.step(data)
        elif rank.rank == rank.world_size - 1:
            schedule.step(target=data, losses=found)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        losses += [_exact(loss) for loss in found] or [float(layer.weight.detach().sum())]
    return losses


def pp(rank: Rank) -> None:
    """Eight stages, eight microbatches, 1F1B."""
    compare_training(rank, _train_pp)


def _train_mesh(rank: Rank, recorder: Any) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    if recorder is None:
        rank.facts["mesh"] = {
            name: torch.distributed.get_process_group_ranks(mesh.get_group(name))
            for name in ("pp", "dp", "tp")
        }
    stage_index = mesh.get_local_rank("pp")
    torch.manual_seed(stage_index)
    block = _make_tensor_parallel(mesh["tp"])
    fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(block, stage_index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, want: (out - want).pow(2).mean())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    _attach(recorder, block, optimizer)
    losses = []
    for step in range(NUM_STEPS):
        seed = 8 * step + mesh.get_local_rank("dp")
        data = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(seed))
        found: list[Any] = []
        if stage_index == 0:
            schedule.step(data)
        else:
            schedule.step(target=data, losses=found)
        optimizer.step()
        optimizer.zero_grad()
        losses += [_exact(loss) for loss in found]
    return losses


def mesh(rank: Rank) -> None:
    """2 × 2 × 2: pipeline, fully sharded, tensor parallel."""
    compare_training(rank, _train_mesh)


def _train_compiled(rank: Rank, recorder: Any) -> list[float]:
    torch._dynamo.reset()
    world = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compute(weight: Any, data: Any) -> Any:
        gathered = functional.all_gather_tensor(weight, 0, world)
        out = data @ gathered
        return functional.all_reduce(out, "sum", world)

    weight = torch.randn(2, 4)
    losses = []
    for step in range(NUM_STEPS):
        # Left behind on purpose: a result that nobody looks at while the next step is traced.
        unused = functional.all_reduce(torch.ones(3), "sum", world)
        generator = torch.Generator().manual_seed(8 * step + rank.rank)
        data = torch.randn(3, 2 * rank.world_size, generator=generator)
        losses.append(_exact(compute(weight, data).sum()))
        assert float(unused.sum()) == 3 * rank.world_size
    return losses


def compiled(rank: Rank) -> None:
    """Functional collectives in a compiled function."""
    compare_training(rank, _train_compiled)


# --- faults -----------------------------------------------------------------------------------


def _message_of(call: Callable[[], Any]) -> str:
    """What `call` raises; empty when it does not."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def faults(rank: Rank) -> None:
    """Wrong shapes, a rank that does not come, and one that is killed in the middle."""
    last = rank.world_size - 1
    # A pair of ranks that breaks cannot be used again: every fault has groups of its own.
    groups = {
        name: dist.new_group(timeout=timedelta(seconds=seconds), group_desc=name)
        for name, seconds in {
            "shapes": 60, "late": 2, "late_future": 2, "late_handle": 2, "killed": 60, "gone": 60
        }.items()
    }  # fmt: skip
    recorder = rank.start()
    messages = rank.facts["messages"] = {}
    dist.all_reduce(torch.ones(1), group=groups["shapes"])
    messages["shapes"] = _message_of(
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.ones(2), group=groups["shapes"])
    )
    dist.all_reduce(torch.ones(1), group=groups["shapes"])
    # Of handles every eighth, the first included, also has a callback.
    dist.all_reduce(torch.ones(2), group=groups["late_handle"])
    if rank.rank != last:
        works = {
            name: dist.all_reduce(torch.ones(2), group=groups[name], async_op=True)
            for name in ("late_future", "late_handle")
        }
        messages["late"] = _message_of(lambda: dist.all_reduce(torch.ones(2), group=groups["late"]))
        for name, work in works.items():
            messages[name] = _message_of(work.wait)
    dist.barrier()
    dist.all_reduce(torch.ones(3), group=groups["killed"])
    gone = dist.irecv(torch.empty(5), last, group=groups["gone"]) if rank.rank != last else None
    if rank.rank == last:
        pending = dist.irecv(torch.empty(4), 0, group=groups["killed"])
        rank.save()
        time.sleep(0.3)  # the others are waiting by now
        os.kill(os.getpid(), signal.SIGKILL)
        pending.wait()
    messages["killed"] = _message_of(lambda: dist.all_reduce(torch.ones(3), group=groups["killed"]))
    messages["gone"] = _message_of(gone.wait)
    recorder.close()
    rank.save()
    os._exit(0)  # the final barrier of `run_ranks` would miss the dead rank


# --- the recorder's controls ------------------------------------------------------------------


def controls(rank: Rank) -> None:
    """Pause, configure, fork, reset, close, and a second recorder in the same process."""
    originals = _taps()
    groups = {
        name: dist.new_group(group_desc=name)
        for name in ("paused", "configured", "forked", "reset", "second", "off")
    }

    def reduce(name: str, num_times: int, num_elements: int) -> None:
        for _ in range(num_times):
            dist.all_reduce(torch.ones(num_elements), group=groups[name])

    reduce("paused", 1, 9)  # before the recorder: not recorded, not counted
    recorder = rank.start()
    rank.facts["is_tapped"] = _taps() != originals
    reduce("paused", 2, 1)
    if rank.rank == 0:  # one rank alone: the others go on
        recorder.pause()
    reduce("paused", 3, 2)
    if rank.rank == 0:
        recorder.resume()
    reduce("paused", 2, 3)

    reduce("configured", 1, 1)
    begun = dist.all_reduce(torch.ones(2), group=groups["configured"], async_op=True)
    recorder.configure(communication=False)
    begun.wait()
    del begun
    reduce("configured", 2, 3)
    recorder.configure(communication=True)
    reduce("configured", 1, 4)

    rank.facts["fork"] = _fork(rank, recorder)
    reduce("forked", 2, 1)
    reduce("reset", 1, 1)
    pending = dist.all_reduce(torch.ones(2), group=groups["reset"], async_op=True)
    pending_too = dist.all_reduce(torch.ones(3), group=groups["reset"], async_op=True)
    recorder.reset()  # the rest belongs to a second attempt
    pending.wait()
    reduce("reset", 2, 4)
    pending_too.wait()
    recorder.close()
    rank.facts["num_errors"] = dict(recorder.guard.counts)
    rank.facts["is_restored"] = _taps() == originals
    reduce("second", 1, 1)

    again = rank.start("second")
    reduce("second", 3, 2)
    again.close()
    rank.facts["is_restored_again"] = _taps() == originals

    off = rank.start("off", communication=False)
    reduce("off", 1, 1)
    rank.facts["is_off"] = _taps() == originals
    off.configure(communication=True)
    reduce("off", 2, 2)
    off.close()


def _taps() -> list[Any]:
    """Everything the recorder puts itself in front of."""
    names = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("c10d::", "_c10d_functional::"))
    }
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    kernels = [name for name in sorted(names) if has_kernel(name, "BackendSelect")]
    work, group = dist.Work, dist.ProcessGroup
    functional_names = [n.partition("::")[2] for n in names if n.startswith("_c10d_functional::")]
    packets = [getattr(torch.ops._c10d_functional, name) for name in sorted(functional_names)]
    return [
        kernels,
        *(owner._op for packet in packets for owner in (packet, packet.default)),
        *(getattr(work, name) for name in ("wait", "synchronize", "is_completed", "get_future")),
        *(getattr(group, name) for name in ("_start_coalescing", "_end_coalescing")),
    ]


def _fork(rank: Rank, recorder: Any) -> dict[str, Any]:
    """A child of a recording process communicates in a group of one, then is done."""
    directory = recorder.run_dir / f"rank{rank.rank:05d}"
    before = _contents(directory)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store = dist.HashStore()
            alone = dist.ProcessGroup(store, 0, 1)
            backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
            gloo = dist.ProcessGroup.BackendType.GLOO
            alone._register_backend(torch.device("cpu"), gloo, backend)
            alone._set_default_backend(gloo)
            for _ in range(3):
                alone.allreduce([torch.ones(77)]).wait()
            with recorder.step(), recorder.phase("child"):
                pass
            recorder.close()
            code = 0
        except BaseException:  # noqa: BLE001 - a forked child must not go on in the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "is_unchanged": _contents(directory) == before,
    }


def _contents(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_bytes().hex()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# --- running them -----------------------------------------------------------------------------

SCENARIOS: dict[str, tuple[Callable[[Rank], None], int]] = {
    "plain": (plain, NUM_RANKS),
    "threads": (threads, 2),
    "regrouped": (regrouped, 4),
    "ddp": (ddp, NUM_RANKS),
    "ddp_hook": (ddp_hook, NUM_RANKS),
    "fsdp2": (fsdp2, NUM_RANKS),
    "tp": (tp, NUM_RANKS),
    "pp": (pp, NUM_RANKS),
    "mesh": (mesh, NUM_RANKS),
    "compiled": (compiled, NUM_RANKS),
    "faults": (faults, 4),
    "controls": (controls, 2),
}
"""With the number of ranks of each."""


def run_scenario(folder: Path, name: str) -> list[int]:
    """Exit codes of its ranks."""
    function, num_ranks = SCENARIOS[name]
    home = folder / name
    home.mkdir(parents=True)

    def run(number: int, world_size: int) -> None:
        rank = Rank(number, world_size, home)
        function(rank)
        rank.save()

    exit_codes = run_ranks(run, num_ranks)
    (home / "exit_codes.json").write_text(json.dumps(exit_codes), encoding="utf-8")
    return exit_codes


def main() -> None:
    """Runs the scenarios one after the other."""
    folder, *names = sys.argv[1:]
    import_everything()
    gc.freeze()  # ranks would look through all that was imported, and copy its pages by doing so
    for name in names or SCENARIOS:
        begin = time.monotonic()
        exit_codes = run_scenario(Path(folder), name)
        print(f"{name}: {exit_codes}, {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
