"""Trains data-parallel models and their single-process twins, and writes how far they differ.

    python -m tests.distributed.engine_data_parallel FOLDER

Leaves `FOLDER/world<n>.json`, written by rank 0, for 2, 3, 4 and 8 gloo ranks: all-reduce
strategies against torch's, training under the reducer, compressors, and norms over a mesh.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.fork_ranks import import_everything, run_ranks
from torch import Tensor, nn

from meshscope.core.unavailable import Unavailable
from meshscope.engine import ModelConfig, build_stage, find_parameter_shards
from meshscope.engine.data_parallel import channel as channel_module
from meshscope.engine.data_parallel.allreduce import (
    AdaptiveAllReduce,
    HierarchicalAllReduce,
    Strategy,
    StrategyTable,
    StrategyTimes,
    make_candidates,
    make_node_groups,
    make_strategy,
    measure_strategies,
    share_table,
)
from meshscope.engine.data_parallel.channel import GradientChannel, Transfer
from meshscope.engine.data_parallel.compression import (
    CastCompressor,
    Compressor,
    Int8Compressor,
    PowerSgdCompressor,
    TopKCompressor,
)
from meshscope.engine.data_parallel.data_parallel import GradientReducer
from meshscope.engine.data_parallel.gradient_buckets import make_bucket, mark_reduced_elsewhere
from meshscope.engine.update.gradient_norm import clip_gradient_norm, sync_tied_gradients
from meshscope.errors import UsageError

NUM_STEPS = 5
LEARNING_RATE = 0.5
MOMENTUM = 0.9
WORLDS = (2, 3, 4, 8)
SIZES = (1, 3, 7, 64, 1001)


def same_on_all_ranks(x: Tensor) -> bool:
    """Whether every rank has the same bits."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return len(set(everyone)) == 1


def all_ranks(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# --- strategies -------------------------------------------------------------------------------


def make_all_strategies(world: int) -> dict[str, Strategy]:
    group = dist.group.WORLD
    found: dict[str, Strategy] = dict(make_candidates())
    for local in (2, 3, 4):
        nodes = make_node_groups(group, local)
        found[f"hierarchical, {local} per node"] = HierarchicalAllReduce(nodes=nodes)
        found[f"hierarchical by leaders, {local} per node"] = HierarchicalAllReduce(
            nodes=nodes, by_parts=False
        )
    rows = [
        StrategyTimes(size_bytes=4, duration_ns={"tree": 1, "ring": 2}),
        StrategyTimes(size_bytes=4096, duration_ns={"tree": 2, "ring": 1}),
    ]
    table = StrategyTable(num_ranks=world, rows=tuple(rows))
    found["adaptive"] = make_strategy("adaptive", group, table=table, local_world_size=2)
    return found


def check_strategies(world: int) -> dict[str, Any]:
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for name, strategy in make_all_strategies(world).items():
        is_exact = is_same = True
        for size in SIZES:
            generator = torch.Generator().manual_seed(size + 31 * rank)
            # Integers: sums are exact in any order.
            x = torch.randint(-1000, 1000, (size,), generator=generator).float()
            expected = x.clone()
            dist.all_reduce(expected)
            Transfer(strategy.steps(x, GradientChannel(dist.group.WORLD))).wait()
            is_exact &= torch.equal(x, expected)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(1001, generator=generator).to(dtype)
            Transfer(strategy.steps(x, GradientChannel(dist.group.WORLD))).wait()
            is_same &= same_on_all_ranks(x)
        results[name] = {"exact": all(all_ranks(is_exact)), "same bits": is_same}
    return results


def check_interleaving(world: int) -> bool:
    """Several transfers of several strategies under way at once, advanced in turn."""
    strategies = list(make_all_strategies(world).values())
    tensors = [torch.full((97 + i,), float(dist.get_rank() + i)) for i in range(len(strategies))]
    transfers: list[Transfer] = []
    for strategy, x in zip(strategies, tensors, strict=True):
        for transfer in transfers:
            transfer.advance()
        transfers.append(Transfer(strategy.steps(x, GradientChannel(dist.group.WORLD))))
    while not all(transfer.is_done for transfer in transfers):
        for transfer in transfers:
            transfer.go_on()
    expected = [sum(rank + i for rank in range(world)) for i in range(len(strategies))]
    is_right = all((x == value).all() for x, value in zip(tensors, expected, strict=True))
    return all(all_ranks(bool(is_right)))


def count_strategy_bytes() -> dict[str, Any]:
    """For 4,000 bytes: what was counted, and what the messages really were."""
    found = {}
    for name in ("flat", "ring", "tree"):
        channel = GradientChannel(dist.group.WORLD)
        with counting_bytes() as seen:
            Transfer(make_candidates()[name].steps(torch.zeros(1000), channel)).wait()
        found[name] = all_ranks({**dataclasses.asdict(channel.traffic), "seen": seen[0]})
    return found


def check_measured_table(world: int) -> dict[str, Any]:
    group = dist.group.WORLD
    table = measure_strategies(group, (256, 1 << 16), num_repeats=2)
    again = StrategyTable.from_document(json.loads(json.dumps(table.to_document())))
    # Only the first rank's counts: without it ranks would choose differently and hang.
    own = table if dist.get_rank() == 0 else make_contrary(table)
    strategy = AdaptiveAllReduce(table=share_table(own, group), candidates=make_candidates())
    x = torch.ones(77)
    Transfer(strategy.steps(x, GradientChannel(group))).wait()
    return {
        "same": all_ranks(table.to_document()) == [table.to_document()] * world,
        "round trip": again == table,
        "rows": [sorted(row.duration_ns) for row in table.rows],
        "sum": x.tolist() == [world] * 77,
        "wrong size": raises(lambda: share_table(dataclasses.replace(table, num_ranks=99), group)),
    }


def make_contrary(table: StrategyTable) -> StrategyTable:
    rows = [
        StrategyTimes(
            size_bytes=row.size_bytes,
            duration_ns={name: 10**12 - spent for name, spent in row.duration_ns.items()},
        )
        for row in table.rows
    ]
    return dataclasses.replace(table, rows=tuple(rows))


def raises(run: Callable[[], Any]) -> str:
    try:
        run()
    except UsageError as error:
        return str(error)
    return ""


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Sums the sizes of the tensors that reach torch, whoever counts what elsewhere."""
    seen = [0]
    places = [
        (dist, "all_reduce", 0),
        (dist, "all_to_all_single", 1),
        (channel_module, "_all_gather_single", 1),
        (channel_module, "_reduce_scatter_single", 1),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def wrap(function: Any, position: int) -> Any:
        def counted(*tensors: Any, **named: Any) -> Any:
            seen[0] += tensors[position].nbytes
            return function(*tensors, **named)

        return counted

    batch = dist.batch_isend_irecv

    def counted_batch(messages: Any) -> Any:
        seen[0] += sum(m.tensor.nbytes for m in messages if m.op is dist.isend)
        return batch(messages)

    for (owner, name, position), (_, _, function) in zip(places, originals, strict=True):
        setattr(owner, name, wrap(function, position))
    dist.batch_isend_irecv = counted_batch
    try:
        yield seen
    finally:
        dist.batch_isend_irecv = batch
        for owner, name, function in originals:
            setattr(owner, name, function)


# --- training ---------------------------------------------------------------------------------


class Net(nn.Module):
    """Odd sizes, a layer used twice, one that some rows use, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.unused = nn.Linear(5, 3)
        self.first = nn.Linear(13, 37)
        self.shared = nn.Linear(37, 37)
        self.left = nn.Linear(37, 7)
        self.right = nn.Linear(37, 7)
        self.some = nn.Linear(37, 7, bias=False)
        self.tied = nn.Linear(37, 37)
        self.tied.weight = self.shared.weight

    def forward(self, x: Tensor, num_some: int, *, flipped: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.tied(torch.tanh(self.shared(hidden))))
        branches = [self.right, self.left] if flipped else [self.left, self.right]
        parts = [branch(hidden) for branch in branches]
        y = parts[1] - parts[0] if flipped else parts[0] - parts[1]
        if num_some:
            y = torch.cat([y[:num_some] + self.some(hidden[:num_some]), y[num_some:]])
        return y


ROWS_PER_RANK = 6


def make_batch(world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    num_rows = ROWS_PER_RANK * world
    return (
        torch.randn(num_rows, 13, generator=generator),
        torch.randn(num_rows, 7, generator=generator),
    )


def train(world: int, *, num_microbatches: int = 1, **options: Any) -> dict[str, Any]:
    """Against one process: largest differences over five steps."""
    rank = dist.get_rank()
    model, twin = Net(), Net()
    reducer = GradientReducer(model.parameters(), dist.group.WORLD, **options)
    optimizers = [
        torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=MOMENTUM) for net in (model, twin)
    ]
    x, y = make_batch(world)
    own = slice(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK)
    microbatches = list(
        zip(x[own].chunk(num_microbatches), y[own].chunk(num_microbatches), strict=True)
    )
    difference, largest, losses = 0.0, 0.0, []
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Rows of rank 0 use `some`, but in step 2 nobody does.
        num_some = 0 if step == 2 else ROWS_PER_RANK
        loss = F.mse_loss(twin(x, num_some), y)
        loss.backward()
        losses.append(loss.item())
        own_some = num_some // num_microbatches if rank == 0 else 0
        reducer.start_accumulating()
        for index, (mx, my) in enumerate(microbatches):
            if index == num_microbatches - 1:
                reducer.start_last_backward()
            predicted = model(mx, own_some, flipped=rank % 2 == 1)
            (F.mse_loss(predicted, my) / num_microbatches).backward()
        reducer.finish()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            if p.grad is None or q.grad is None:
                is_fine = p.grad is q.grad if options.get("keeps_unused") else not p.grad.any()
                difference = max(difference, 0.0 if is_fine else 1e9)
                continue
            assert p.grad.shape == q.grad.shape, name
            difference = max(difference, (p.grad - q.grad).abs().max().item())
            largest = max(largest, q.grad.abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
        if not options.get("keeps_unused"):  # there zero is not None: the momentum goes on
            twin.some.weight.data.copy_(model.some.weight.data)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    twin_weights = torch.cat([p.detach().flatten() for p in twin.parameters()])
    statistics = reducer.statistics
    reducer.close()
    return {
        "gradient difference": max(all_ranks(difference)),
        "weight difference": (weights - twin_weights).abs().max().item(),
        "largest gradient": largest,
        "losses": losses,
        "same bits": same_on_all_ranks(weights),
        "buckets": len(statistics.buckets),
        "early": statistics.num_early_buckets,
        "traffic": dataclasses.asdict(statistics.traffic),
        "spent": min(statistics.launch_ns, statistics.wait_ns, statistics.write_back_ns) > 0,
        "size": sum(bucket.size_bytes for bucket in statistics.buckets),
    }


def train_all(world: int) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {
        "flat": {},
        "small buckets": {"bucket_bytes": 2000},
        "one parameter each": {"bucket_bytes": 1},
        "accumulation": {"num_microbatches": 3, "bucket_bytes": 2000},
        "float64 buckets": {"gradient_dtype": torch.float64},
        "unused kept": {"keeps_unused": True, "bucket_bytes": 2000},
        "ring": {"strategy": "ring", "bucket_bytes": 2000},
        "tree": {"strategy": "tree", "bucket_bytes": 2000, "num_microbatches": 2},
        "hierarchical": {
            "strategy": "hierarchical",
            "local_world_size": 2,
            "bucket_bytes": 2000,
        },
        "adaptive": {"strategy": "adaptive", "bucket_bytes": 2000},
    }
    if world in (3, 8):
        kept = ("flat", "accumulation", "ring", "tree", "hierarchical")
        cases = {name: cases[name] for name in kept}
    return {name: train(world, **options) for name, options in cases.items()}


# --- the reducer's manners --------------------------------------------------------------------


def count_gradient_bytes(reducer: GradientReducer, model: nn.Module) -> int:
    """Of buckets and gradients, each storage once."""
    held = [bucket.buffer for bucket in reducer.buckets]
    held += [p.grad for p in model.parameters() if p.grad is not None]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(storages.values())


def check_manners() -> dict[str, Any]:
    """On two ranks: things that are not done every step."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found: dict[str, Any] = {}

    def backward(model: nn.Module) -> None:
        model(torch.full((2, 3), float(rank + 1))).sum().backward()

    model = nn.Linear(3, 2)
    reducer = GradientReducer(model.parameters(), group)
    backward(model)
    backward(model)  # a second one that nobody announced
    found["unannounced backward"] = raises(reducer.finish)
    model.zero_grad()
    backward(model)
    reducer.finish()
    found["works after an error"] = model.weight.grad.tolist()

    model.zero_grad()
    with reducer.accumulating():
        backward(model)
        found["copies while accumulating"] = count_gradient_bytes(reducer, model) / sum(
            p.nbytes for p in model.parameters()
        )
    backward(model)
    found["copies when sent"] = count_gradient_bytes(reducer, model) / sum(
        p.nbytes for p in model.parameters()
    )
    reducer.finish()

    model.zero_grad()
    backward(model)  # sends, and then nobody calls finish
    found["next step"] = raises(reducer.start_accumulating)
    reducer.finish()

    model.zero_grad()
    backward(model)
    model.weight.grad.mul_(2.0)
    found["changed gradient"] = raises(reducer.finish)

    model.bias.requires_grad_(False)
    model.zero_grad()
    backward(model)
    found["frozen"] = raises(reducer.finish)
    reducer.rebuild()
    model.zero_grad()
    backward(model)
    reducer.finish()
    found["after rebuild"] = [model.weight.grad.tolist(), model.bias.grad]

    extra = nn.Linear(3, 1)
    reducer.rebuild([*model.parameters(), *extra.parameters()])
    backward(extra)
    reducer.finish()
    found["other parameters"] = extra.weight.grad.tolist()

    reducer.close()
    model.zero_grad()
    backward(model)
    found["closed"] = model.weight.grad.tolist() == [[2.0 * (rank + 1)] * 3] * 2

    expert = nn.Linear(3, 2)
    mark_reduced_elsewhere(expert.weight)
    reducer = GradientReducer(expert.parameters(), group, average=False)
    backward(expert)
    reducer.finish()
    found["marked"] = expert.weight.grad.tolist() == [[2.0 * (rank + 1)] * 3] * 2
    found["sum"] = expert.bias.grad.tolist()
    reducer.close()

    # Gradients that no hook sees, as of weights computed apart.
    late = nn.Linear(3, 2)
    reducer = GradientReducer(late.parameters(), group, bucket_bytes=1)
    for parameter in late.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
        reducer.mark_ready([parameter])
    reducer.finish()
    found["marked ready"] = [
        late.weight.grad.unique().tolist(),
        reducer.statistics.num_early_buckets,
    ]
    reducer.close()

    mixed = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2)])
    reducer = GradientReducer(mixed.parameters(), group)
    for parameter in mixed.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    reducer.finish()
    found["dtypes"] = [
        [bucket.num_parameters for bucket in reducer.statistics.buckets],
        {str(p.grad.dtype): p.grad.unique().tolist() for p in mixed.parameters()},
    ]
    reducer.close()

    checkpointed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    reducer = GradientReducer(checkpointed.parameters(), group, bucket_bytes=1)
    inputs = torch.full((2, 3), float(rank + 1))
    torch.utils.checkpoint.checkpoint(checkpointed, inputs, use_reentrant=False).sum().backward()
    reducer.finish()
    found["checkpointed"] = same_on_all_ranks(checkpointed[0].weight.grad)
    reducer.close()
    return {key: all_ranks(value) for key, value in found.items()}


# --- compression ------------------------------------------------------------------------------

COMPRESSORS: dict[str, Callable[[], Compressor | None]] = {
    "none": lambda: None,
    "fp16": lambda: CastCompressor(torch.float16),
    "bf16": lambda: CastCompressor(torch.bfloat16),
    "int8": Int8Compressor,
    "int8, small blocks": lambda: Int8Compressor(block_size=32),
    "topk 1 %": lambda: TopKCompressor(0.01),
    "topk 10 %": lambda: TopKCompressor(0.1),
    "powersgd 1": lambda: PowerSgdCompressor(1),
    "powersgd 4": lambda: PowerSgdCompressor(4),
    "powersgd 2 after 3": lambda: PowerSgdCompressor(2, num_exact_steps=3),
}
SHAPES = ((33, 65), (65,), (8, 3, 5), (2, 2), (1,))


def count_compressed_bytes(make: Callable[[], Compressor | None]) -> dict[str, Any]:
    """Two steps of one bucket: counted, seen, the error against the exact sum, and bits."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    compressor = make()
    reducer = GradientReducer(parameters, dist.group.WORLD, compression=compressor)
    is_same, errors = True, []
    with counting_bytes() as seen:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            exact = torch.cat([p.grad.flatten() for p in parameters])
            reducer.finish()
            before = seen[0]
            dist.all_reduce(exact)
            found = torch.cat([p.grad.flatten() for p in parameters])
            is_same &= same_on_all_ranks(found)
            errors.append(((found - exact / world).norm() / (exact / world).norm()).item())
            seen[0] = before
    error = reducer.statistics.buckets[0].compression_error
    reducer.close()
    return {
        "traffic": dataclasses.asdict(reducer.statistics.traffic),
        "seen": seen[0],
        "same bits": is_same,
        "errors": errors,
        "own error": str(error) if isinstance(error, Unavailable) else error,
        "num_elements": sum(parameter.numel() for parameter in parameters),
    }


def converge(make: Callable[[], Compressor | None], num_steps: int = 60) -> dict[str, Any]:
    """A student learns a teacher's function: loss at the beginning, halfway and at the end."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(4)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    student = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(64 * world, 16)
    with torch.no_grad():
        y = teacher(x) + 0.5 * x[:, :8]
    reducer = GradientReducer(
        student.parameters(), dist.group.WORLD, compression=make(), bucket_bytes=3000
    )
    optimizer = torch.optim.SGD(student.parameters(), 0.05, momentum=0.9)
    own, losses = slice(rank * 64, (rank + 1) * 64), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        F.mse_loss(student(x[own]), y[own]).backward()
        reducer.finish()
        optimizer.step()
        with torch.no_grad():
            losses.append(F.mse_loss(student(x), y).item())
    reducer.close()
    weights = torch.cat([p.detach().flatten() for p in student.parameters()])
    return {
        "losses": [losses[0], losses[num_steps // 2], losses[-1]],
        "same bits": same_on_all_ranks(weights),
        "handed_bytes": reducer.statistics.traffic.handed_bytes,
    }


def check_error_feedback(
    make: Callable[[], Compressor | None], *, last_scale: float = 1.0
) -> float:
    """The same gradient thirty times: what was left out comes later, so the mean is right.

    For the last twenty it is larger by `last_scale`, as when a loss scale changes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    compressor = make()
    parameter = nn.Parameter(torch.zeros(24, 40))
    bucket = make_bucket(0, [parameter])
    grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(rank))
    exact = grad.clone()
    dist.all_reduce(exact)
    total, num_rounds, scale = torch.zeros(24, 40), 30, 1.0
    for index in range(num_rounds):
        if index == 10 and last_scale != scale:
            compressor.rescale(last_scale / scale)
            scale = last_scale
        bucket.views[0].copy_(grad * scale)
        compressor.reduce(bucket, GradientChannel(dist.group.WORLD)).wait()
        total += bucket.views[0] / scale
    assert world > 1
    return ((total / num_rounds - exact).norm() / exact.norm()).item()


def survive_nan(make: Callable[[], Compressor | None], bad: float) -> dict[str, Any]:
    """One rank has a bad gradient in the second of four steps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(24, 40)
    reducer = GradientReducer(model.parameters(), dist.group.WORLD, compression=make())
    finite, steps = [], 0
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step == 1 and rank == 1:
            model.weight.grad[3, 4] = bad
        reducer.finish()
        health = clip_gradient_norm(model, 1.0, tp_group=None, pp_group=None)
        finite.append(health.is_finite)
        if health.is_finite:
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad
            steps += 1
    reducer.close()
    return {
        "finite": all_ranks(finite),
        "steps": all_ranks(steps),
        "same bits": same_on_all_ranks(model.weight),
        "weights finite": bool(model.weight.isfinite().all()),
    }


def check_compressors(world: int) -> dict[str, Any]:
    compressed = {name: make for name, make in COMPRESSORS.items() if name != "none"}
    found: dict[str, Any] = {
        "bytes": {name: count_compressed_bytes(make) for name, make in COMPRESSORS.items()},
    }
    if world == 4:
        for bad in ("nan", "inf"):
            found[bad] = {name: survive_nan(make, float(bad)) for name, make in COMPRESSORS.items()}
        found["convergence"] = {name: converge(make) for name, make in COMPRESSORS.items()}
        found["feedback"] = {name: check_error_feedback(make) for name, make in compressed.items()}
        found["feedback, rescaled"] = {
            name: check_error_feedback(make, last_scale=2.0**-8)
            for name, make in compressed.items()
        }
        by_ring = train(world, strategy="ring", compression="fp16", bucket_bytes=2000)
        found["fp16 by ring"] = by_ring
        by_tree = train(
            world, strategy="tree", compression=PowerSgdCompressor(3), bucket_bytes=6000
        )
        found["powersgd by tree"] = by_tree
    return found


# --- norms over a mesh ------------------------------------------------------------------------

TINY = ModelConfig(
    vocab_size=53, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_hidden_size=24,
    sequence_length=8, bias=True, norm="layernorm", position="learned", activation="gelu",
    tie_embeddings=True,
)  # fmt: skip


def make_full_gradients() -> tuple[nn.Module, dict[str, Tensor]]:
    """The whole model on one process, with gradients; the tied table under both its names."""
    torch.manual_seed(0)
    whole = build_stage(TINY, seed=3)
    tokens = torch.randint(0, 53, (2, 9))
    (30.0 * whole(tokens[:, :-1], tokens[:, 1:])).backward()
    grads = {name: p.grad.clone() for name, p in whole.named_parameters()}
    grads["head.weight"] = grads["token_embedding.weight"]
    return whole, grads


def check_mesh_norm(pp: int, dp: int, tp: int, *, bad_rank: int | None = None) -> dict[str, Any]:
    """Every rank gets its part of known gradients, unlike on each dp rank; then sync and clip."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    whole, grads = make_full_gradients()
    pp_rank, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    stage = build_stage(TINY, pp_rank, pp, tp_group=mesh.get_group("tp"), seed=3)
    shards = find_parameter_shards(stage)
    weight = 1.0 + (0.5 if dp_rank == 0 else -0.5 / (dp - 1)) if dp > 1 else 1.0
    reducer = GradientReducer(stage.parameters(), mesh.get_group("dp"), bucket_bytes=3000)
    for name, parameter in stage.named_parameters():
        full = grads[name]
        if parameter is stage.tied_weight:
            full = full * (0.25 if pp_rank == 0 else 0.75)
        parameter.grad = weight * shards[name].take(full).clone()
    if dist.get_rank() == bad_rank:
        next(iter(stage.parameters())).grad.view(-1)[5] = float("nan")
    reducer.finish()
    reducer.close()
    sync_tied_gradients(stage.tied_weight, mesh.get_group("pp"))
    health = clip_gradient_norm(
        stage, 1.0, tp_group=mesh.get_group("tp"), pp_group=mesh.get_group("pp")
    )
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()
    clipped = {name: p.grad for name, p in whole.named_parameters()}
    clipped["head.weight"] = clipped["token_embedding.weight"]
    difference = max(
        (p.grad - shards[name].take(clipped[name])).abs().max().item()
        for name, p in stage.named_parameters()
    )
    return {
        "norm": norm,
        "found": all_ranks(health.norm),
        "finite": all_ranks(health.is_finite),
        "ratio": health.clip_ratio,
        "difference": max(all_ranks(difference)),
    }


def check_fsdp_norm(dp: int, tp: int) -> dict[str, Any]:
    """FSDP2 over dp, tensor parallel within: real backward, norm against one process."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    config = dataclasses.replace(TINY, tie_embeddings=False)
    tokens = torch.randint(0, 53, (2 * dp, 9), generator=torch.Generator().manual_seed(1))
    whole = build_stage(config, seed=3)
    whole(tokens[:, :-1], tokens[:, 1:]).backward()
    stage = build_stage(config, tp_group=mesh.get_group("tp"), seed=3)
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])
    own = tokens.chunk(dp)[mesh.get_local_rank("dp")]
    stage(own[:, :-1], own[:, 1:]).backward()
    reducer = GradientReducer(stage.parameters(), mesh.get_group("dp"))  # leaves DTensors alone
    reducer.finish()
    health = clip_gradient_norm(
        stage,
        0.1,
        tp_group=mesh.get_group("tp"),
        pp_group=None,
        dp_shard_group=mesh.get_group("dp"),
    )
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item()
    again = clip_gradient_norm(
        stage,
        None,
        tp_group=mesh.get_group("tp"),
        pp_group=None,
        dp_shard_group=mesh.get_group("dp"),
    )
    return {
        "norm": norm,
        "found": all_ranks(health.norm),
        "clipped": again.norm,
        "buckets": len(reducer.buckets),
    }


def check_norms(world: int) -> dict[str, Any]:
    if world == 2:
        return {"1×1×2": check_mesh_norm(1, 1, 2), "2×1×1": check_mesh_norm(2, 1, 1)}
    if world == 4:
        return {
            "1×2×2": check_mesh_norm(1, 2, 2),
            "2×1×2": check_mesh_norm(2, 1, 2),
            "fsdp": check_fsdp_norm(2, 2),
        }
    if world == 8:
        return {
            "2×2×2": check_mesh_norm(2, 2, 2),
            "2×2×2, NaN on rank 4": check_mesh_norm(2, 2, 2, bad_rank=4),
            # A whole parameter that only the first tp rank counts.
            "2×2×2, NaN on rank 5": check_mesh_norm(2, 2, 2, bad_rank=5),
        }
    return {}


def run_cases(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, world: int) -> None:
        found: dict[str, Any] = {
            "strategies": check_strategies(world),
            "interleaving": check_interleaving(world),
            "strategy bytes": count_strategy_bytes(),
            "training": train_all(world),
            "norms": check_norms(world),
        }
        if world in (3, 4):
            found["compression"] = check_compressors(world)
        if world == 4:
            found["table"] = check_measured_table(world)
        if world == 2:
            found["manners"] = check_manners()
        if rank == 0:
            text = json.dumps(found, indent=1)
            (folder / f"world{world}.json").write_text(text, encoding="utf-8")

    return job


if __name__ == "__main__":
    import_everything()
    target = Path(sys.argv[1])
    worlds = [int(argument) for argument in sys.argv[2:]] or WORLDS
    codes = [code for world in worlds for code in run_ranks(run_cases(target), world)]
    sys.exit(any(codes))
