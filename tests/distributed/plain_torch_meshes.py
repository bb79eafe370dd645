"""More training loops in plain torch for the fault matrix: one loop, many ways to be parallel.

DDP (also with a hook of its own), FSDP2 (also in groups that are copies of each other), parameters
averaged after the optimizer, tensor parallel × FSDP2 by DTensor, torch's pipelines, context and
expert parallel by hand. What a program does between its steps (logging, evaluation, saving,
collections, sums of a subgroup) is here, too. `plain_torch_faults` has the layers that sleep and
what `Delay` means. `Program.options` says what a program has of the following.

    width, rows     real matrix products of that size in place of sleeps; threads: of torch
    ballast         floats more in each layer, whose gradients are sent
    unused          floats that no layer uses
    bucket_mb       of DDP;  flat: gradients are summed in one operation, by hand
    via             how these sums are made, a key of `SUMS`, where it is not an all-reduce
    sync            every microbatch's gradients are summed: no `no_sync`
    rows_of_rank    rows a rank's batches have;  lengths: a seed for random lengths of sequences
    workers         of the loader;  schedule, chunks: of a pipeline
    rate            step from which the learning rate is ten times as high
    aside           the name of the phase in which ranks log
    untold          the recorder is told no layout;  everything: it finds model and optimizer
    barrier         ranks meet after what they do between steps
    fair            ranks have no real-time priority: many transfers of DDP at once then never end
"""

import io
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.plain_torch_faults import (
    BATCH,
    WIDTH,
    Program,
    SleepLayer,
    SleepSGD,
    Trouble,
    collect_all,
    make_groups,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import meshscope
from meshscope.core.layout import Layout

TrainStep = Callable[[Tensor], None]
"""Forward and backward of a batch; sums gradients where torch does not."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What a loop trains."""

    model: nn.Module
    train: TrainStep
    finish: Callable[[], None] = lambda: None
    """After the last microbatch of a step."""
    settle: Callable[[], None] = lambda: None
    """After the optimizer's step."""
    no_sync: Callable[[], Any] = nullcontext


# --- layers and data -----------------------------------------------------------------------------


class Layer(SleepLayer):
    """A sleeping layer with more parameters, used or not."""

    def __init__(self, program: Program, trouble: Trouble, *, is_first: bool) -> None:
        options = program.options
        is_scaled = "rows_of_rank" in options or "lengths" in options
        super().__init__(
            program.layer_ms / 1e3,
            trouble,
            is_first=is_first,
            usual_rows=(BATCH * LENGTH if "lengths" in options else BATCH) if is_scaled else None,
        )
        if "ballast" in options:
            self.ballast = nn.Parameter(torch.zeros(options["ballast"]))
        if is_first and "unused" in options:
            self.unused = nn.Parameter(torch.zeros(options["unused"]))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.ballast.mean() if hasattr(self, "ballast") else y


class Product(nn.Module):
    """A layer that really computes."""

    def __init__(self, width: int, trouble: Trouble, *, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.trouble = trouble
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.trouble.strike("forward")
        return torch.tanh(self.linear(x))


class Pair(SleepLayer):
    """Two linear layers, a column and a row for tensor parallel."""

    def __init__(self, program: Program, trouble: Trouble, *, is_first: bool) -> None:
        super().__init__(program.layer_ms / 1e3, trouble, is_first=is_first)
        del self.linear
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.linear = lambda x: self.down(torch.tanh(self.up(x)))


def make_layers(
    program: Program, trouble: Trouble, kind: Any = Layer, num_layers: int | None = None
) -> nn.Sequential:
    torch.manual_seed(3)
    count = program.num_layers if num_layers is None else num_layers
    return nn.Sequential(*(kind(program, trouble, is_first=i == 0) for i in range(count)))


LENGTH = 16
"""Usual length of a sequence, where batches have one."""


class Samples(torch.utils.data.Dataset[Tensor]):
    """Batches; a worker of the loader is slow where `starve` is due."""

    def __init__(self, program: Program, trouble: Trouble, rank: int) -> None:
        self.program = program
        self.trouble = trouble
        self.rank = rank
        self.copied = torch.zeros(0)

    def __len__(self) -> int:
        return self.program.num_steps * self.program.num_microbatches

    def __getitem__(self, index: int) -> Tensor:
        options = self.program.options
        step = index // self.program.num_microbatches
        if options.get("workers"):
            self.trouble.step = step
        if self.program.data_ms:
            time.sleep(self.program.data_ms / 1e3)
        self.trouble.strike("data")
        if self.trouble.is_due("copy"):
            self.copied = torch.ones(options["copied"]).clone()
        rows = options.get("rows_of_rank", {}).get(self.rank, BATCH)
        shape: tuple[int, ...] = (rows, WIDTH)
        if "lengths" in options:
            drawn = random.Random(f"{options['lengths']} {index} {self.rank}")
            length = LENGTH if not options["lengths"] else drawn.randrange(4, 29)
            shape = (BATCH, length, WIDTH)
        if "width" in options:
            shape = (options["rows"], options["width"])
        if self.program.loop == "pipelining":
            shape = (BATCH * options.get("microbatches", 8), WIDTH)
        generator = torch.Generator().manual_seed(1000 * self.rank + index)
        batch = torch.randn(shape, generator=generator)
        if self.trouble.is_due("nan_batch"):
            batch[0, 0] = float("nan")
        return batch


def take_loss(output: Tensor, trouble: Trouble) -> Tensor:
    offset = 2.0 if trouble.is_due("spike") else 1.0
    loss = (output + offset).square().mean()
    return loss * float("nan") if trouble.is_due("nan") else loss


# --- ways to be parallel -------------------------------------------------------------------------


def build_data_parallel(program: Program, trouble: Trouble, rank: int) -> Trainee:
    options = program.options
    if "width" in options:
        width = options["width"]
        layers: nn.Module = nn.Sequential(
            *(Product(width, trouble, is_first=i == 0) for i in range(program.num_layers))
        )
    else:
        layers = make_layers(program, trouble)
    model = DistributedDataParallel(
        layers,
        bucket_cap_mb=options.get("bucket_mb"),
        find_unused_parameters="unused" in options,
    )

    def train(batch: Tensor) -> None:
        take_loss(model(batch), trouble).backward()

    return Trainee(
        model=model, train=train, no_sync=nullcontext if options.get("sync") else model.no_sync
    )


def build_hooked(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """DDP whose gradients are sent in half the bytes, by torch's own hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    trainee = build_data_parallel(program, trouble, rank)
    trainee.model.register_comm_hook(None, fp16_compress_hook)  # type: ignore[operator]
    return trainee


def build_averaged(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """Ranks step on their own and average their parameters afterwards: nothing is sent before."""
    model = make_layers(program, trouble)

    def train(batch: Tensor) -> None:
        take_loss(model(batch), trouble).backward()

    def average() -> None:
        with torch.no_grad():
            sum_flat([one.data for one in model.parameters()])
            for one in model.parameters():
                one /= dist.get_world_size()

    return Trainee(model=model, train=train, settle=average)


def build_summed(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """Data parallel by hand: a sum for each parameter, or one for all."""
    model = make_layers(program, trouble)
    add = SUMS[program.options.get("via", "all-reduce")]

    def train(batch: Tensor) -> None:
        take_loss(model(batch), trouble).backward()

    def finish() -> None:
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        if program.options.get("flat"):
            sum_flat(gradients, add=add)
            return
        for gradient in gradients:
            add(gradient, None)

    return Trainee(model=model, train=train, finish=finish)


Add = Callable[[Tensor, Any], Any]
"""Sums a tensor over a group, in place."""


def sum_flat(gradients: list[Tensor], group: Any = None, add: Add | None = None) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    (add or SUMS["all-reduce"])(flat, group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _add_at_root(flat: Tensor, group: Any) -> None:
    dist.reduce(flat, dst=1, group=group)
    dist.broadcast(flat, src=1, group=group)


def _add_gathered(flat: Tensor, group: Any) -> None:
    """Rank 0 takes them all and sends the sum back."""
    count, is_root = dist.get_world_size(group), dist.get_rank(group) == 0
    parts = [torch.empty_like(flat) for _ in range(count)] if is_root else None
    dist.gather(flat, parts, dst=0, group=group)
    total = None if parts is None else [torch.stack(parts).sum(0)] * count
    dist.scatter(flat, total, src=0, group=group)


def _add_along(flat: Tensor, group: Any) -> None:
    """From rank to rank, and the sum from the last one."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank > 0:
        came = torch.empty_like(flat)
        dist.recv(came, rank - 1, group=group)
        flat += came
    if rank < last:
        dist.send(flat, rank + 1, group=group)
    dist.broadcast(flat, src=last, group=group)


def _add_as_they_come(flat: Tensor, group: Any) -> None:
    """Rank 0 takes what comes, from anyone, and sends the sum to each."""
    others = range(1, dist.get_world_size(group))
    if dist.get_rank(group) > 0:
        dist.send(flat, 0, group=group)
        dist.recv(flat, 0, group=group)
        return
    came = torch.empty_like(flat)
    for _ in others:
        dist.recv(came, group=group)
        flat += came
    for other in others:
        dist.send(flat, other, group=group)


SUMS: dict[str, Add] = {
    "all-reduce": lambda flat, group: dist.all_reduce(flat, group=group),
    "root": _add_at_root,
    "gathered": _add_gathered,
    "along": _add_along,
    "anyone": _add_as_they_come,
}


def build_fully_sharded(program: Program, trouble: Trouble, rank: int) -> Trainee:
    model = make_layers(program, trouble)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return Trainee(model=model, train=lambda x: take_loss(model(x), trouble).backward())


def build_copied(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """FSDP2 in pairs of ranks; the pairs are copies of each other."""
    mesh = init_device_mesh("cpu", (program.num_ranks // 2, 2), mesh_dim_names=("copies", "shards"))
    model = make_layers(program, trouble)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainee(model=model, train=lambda x: take_loss(model(x), trouble).backward())


def build_tensor_parallel(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """DTensor along tp, FSDP2 along dp."""
    layout = program.layout
    assert layout is not None
    mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    model = make_layers(program, trouble, Pair)
    for layer in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)  # type: ignore[arg-type]
        if layout.dp > 1:
            fully_shard(layer, mesh=mesh["dp"])
    if layout.dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    return Trainee(model=model, train=lambda x: take_loss(model(x), trouble).backward())


def build_pipelining(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """torch's own pipelines; gradients along dp are summed by hand."""
    from torch.distributed import pipelining as torch_pipelines

    layout = program.layout
    assert layout is not None
    options = program.options
    place = layout.coordinates(rank).pp
    chunks = options.get("chunks", 1)
    num_stages = layout.pp * chunks
    sizes = program.stage_sizes or (program.num_layers // num_stages,) * num_stages
    pp_group = make_groups(layout, "pp")
    dp_group = make_groups(layout, "dp") if layout.dp > 1 else None
    numbers = [place + layout.pp * chunk for chunk in range(chunks)]
    parts = [make_layers(program, trouble, num_layers=sizes[number]) for number in numbers]
    stages = [
        torch_pipelines.PipelineStage(part, number, num_stages, torch.device("cpu"), group=pp_group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    kind = getattr(torch_pipelines, options.get("schedule", "Schedule1F1B"))
    schedule = kind(
        stages if chunks > 1 else stages[0],
        options.get("microbatches", 8),
        loss_fn=lambda output, target: take_loss(output, trouble),
    )
    model = parts[0] if chunks == 1 else nn.ModuleList(parts)

    def train(batch: Tensor) -> None:
        if num_stages - 1 in numbers:
            schedule.step(*([batch] if 0 in numbers else []), target=batch)
        elif 0 in numbers:
            schedule.step(batch)
        else:
            schedule.step()

    def finish() -> None:
        if dp_group is not None:
            sum_flat([p.grad for p in model.parameters() if p.grad is not None], dp_group)

    return Trainee(model=model, train=train, finish=finish)


class _Exchange(torch.autograd.Function):
    """Every rank's rows to all, or a part of them to each, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, kind: str) -> Tensor:
        ctx.group, ctx.kind = group, kind
        return _exchange(x, group, kind)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, ctx.group, ctx.kind), None, None


def _exchange(x: Tensor, group: Any, kind: str) -> Tensor:
    if kind == "ep":
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return x + 0.0 * torch.stack(parts).mean(dim=0)


class Exchanging(nn.Module):
    """A layer after whose work ranks of a group exchange what they have."""

    def __init__(self, inner: nn.Module, group: Any, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.group = group
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return _Exchange.apply(self.inner(x), self.group, self.kind)  # type: ignore[no-untyped-call]


def build_exchanging(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """Context parallel (all ranks gather) or expert parallel (all to all), by hand."""
    layout = program.layout
    assert layout is not None
    kind = "cp" if layout.cp > 1 else "ep"
    group = make_groups(layout, kind)
    layers = [Exchanging(layer, group, kind) for layer in make_layers(program, trouble)]
    model = nn.Sequential(*layers)

    def train(batch: Tensor) -> None:
        take_loss(model(batch), trouble).backward()

    def finish() -> None:
        sum_flat([one.grad for one in model.parameters() if one.grad is not None])

    return Trainee(model=model, train=train, finish=finish)


BUILDERS: dict[str, Callable[[Program, Trouble, int], Trainee]] = {
    "ddp2": build_data_parallel,
    "summed": build_summed,
    "hooked": build_hooked,
    "averaged": build_averaged,
    "fsdp2": build_fully_sharded,
    "hsdp": build_copied,
    "dtensor": build_tensor_parallel,
    "pipelining": build_pipelining,
    "exchanging": build_exchanging,
}


# --- the loop ------------------------------------------------------------------------------------


def run_loop(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    options = program.options
    subgroup = dist.new_group([0, 1]) if "subgroup" in options else None
    if "threads" in options:
        torch.set_num_threads(options["threads"])
    trainee = BUILDERS[program.loop](program, trouble, rank)
    optimizer = SleepSGD(trainee.model.parameters(), program.optimizer_ms / 1e3, trouble)
    recorder = meshscope.start(run_dir, layout=choose_layout(program))
    if options.get("everything"):
        recorder.watch_everything()
    else:
        recorder.attach(trainee.model, optimizer)
    batches = make_batches(program, trouble, rank)
    for step in range(program.num_steps):
        trouble.step = step
        if step == options.get("rate"):
            optimizer.param_groups[0]["lr"] *= 10
        for index in range(program.num_microbatches):
            is_last = index + 1 == program.num_microbatches
            with nullcontext() if is_last else trainee.no_sync():
                trainee.train(next(batches))
        trainee.finish()
        collect_all(trouble, "gc")
        trouble.strike("pause")
        optimizer.step()
        trainee.settle()
        optimizer.zero_grad()
        do_aside(program, trainee.model, trouble, recorder, subgroup)
    recorder.close()


def choose_layout(program: Program) -> Layout | None:
    return None if program.options.get("untold") else program.layout


def make_batches(program: Program, trouble: Trouble, rank: int) -> Iterator[Tensor]:
    return iter(
        torch.utils.data.DataLoader(
            Samples(program, trouble, rank),
            batch_size=None,
            num_workers=program.options.get("workers", 0),
        )
    )


def do_aside(
    program: Program, model: nn.Module, trouble: Trouble, recorder: Any, subgroup: Any
) -> None:
    """What a program does after its optimizer's step."""
    trouble.strike("between")
    collect_all(trouble, "gc_between")
    if trouble.is_due("logging"):
        with recorder.phase(program.options.get("aside", "logging")):
            trouble.strike("logging")
    if trouble.is_due("evaluation"):
        evaluate(program, model, trouble)
    if trouble.is_due("saving"):
        torch.save(model.state_dict(), SlowFile(trouble))
    if subgroup is not None and trouble.is_due("subgroup"):
        for _ in range(program.options["subgroup"]):
            dist.all_reduce(torch.ones(64), group=subgroup)
    if program.options.get("barrier"):
        dist.barrier()


def evaluate(program: Program, model: nn.Module, trouble: Trouble) -> None:
    """The inner model on two batches, without gradients."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.eval()
    with torch.no_grad():
        for _ in range(2):
            inner(torch.zeros(BATCH, WIDTH))
        trouble.strike("evaluation")
    inner.train()


class SlowFile(io.BytesIO):
    """Takes the stated time once."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self._trouble: Trouble | None = trouble

    def write(self, data: Any) -> int:
        if self._trouble is not None:
            self._trouble.strike("saving")
            self._trouble = None
        return super().write(data)
