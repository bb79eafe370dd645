"""Training scripts as other people write them, in which one thing can be slow.

Each is what somebody might have before attaching a recorder: epochs over a loader, augmentation on
the host, clipping, moving averages of weights, schedules of the rate, evaluation and checkpoints by
rank 0, metrics summed after the step. Two really compute (a convolutional network and a small
transformer, two ranks on two cores); the others have blocks that sleep, as a host does whose device
computes. `Program.options` says what a script does besides:

    rows_of_rank    rows a rank's batches have;  extra: microbatches more that a rank accumulates
    lengths         a seed for the bucketed lengths of batches;  aux: floats of a head nobody uses
    sync            every microbatch's gradients are summed;  threads: of torch
    bucket_mb       of DDP;  ema: weights are averaged;  bar: a line is written in each step
    barrier         ranks meet after what one of them does alone;  profiled: rank 0, first steps
    metrics         numbers that are summed one by one after each step (flat: in one sum)
    head            milliseconds that the last stage's head takes in each microbatch
    schedule, chunks, microbatches   of a pipeline;  period: of averaging;  fair: as elsewhere
"""

import contextlib
import io
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.fault_matrix import Scripted, slow_down
from tests.distributed.plain_torch_faults import Program, Trouble, collect_all, make_groups
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import meshscope

HIDDEN = 16


@dataclass(frozen=True, kw_only=True)
class Client(Scripted):
    """A run of one of these scripts."""

    def record(self, run_dir: Path, rank: int) -> None:
        if self.link is not None:
            assert self.program.layout is not None
            slow_down(self.link, self.program.layout)
        SCRIPTS[self.program.loop](self.program, run_dir, rank)


# --- what scripts share ---------------------------------------------------------------------------


class _Nap(torch.autograd.Function):
    """Sleeps in forward and backward, and strikes there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "Block") -> Tensor:
        ctx.block = block
        time.sleep(block.find_seconds(x))
        if block.is_first:
            block.trouble.strike("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        block: Block = ctx.block
        time.sleep(block.find_seconds(grad))
        if block.is_first:
            block.trouble.strike("backward")
        return grad, None


class Block(nn.Module):
    """Norm, two linear layers and a residual, of a stated time."""

    def __init__(self, trouble: Trouble, ms: float, *, is_first: bool, usual_rows: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.trouble = trouble
        self.ms = ms
        self.is_first = is_first
        self.usual_rows = usual_rows

    def find_seconds(self, x: Tensor) -> float:
        rows = x.numel() // HIDDEN
        return self.ms / 1e3 * (rows / self.usual_rows if self.usual_rows else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return _Nap.apply(y, self)  # type: ignore[no-untyped-call]


def make_blocks(program: Program, trouble: Trouble, count: int | None = None) -> nn.Sequential:
    torch.manual_seed(11)
    num_blocks = program.num_layers if count is None else count
    usual = 8 if "rows_of_rank" in program.options else 0
    return nn.Sequential(
        *(
            Block(trouble, program.layer_ms, is_first=number == 0, usual_rows=usual)
            for number in range(num_blocks)
        )
    )


class Averaged:
    """A moving average of the weights that a model uses."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_parameters()
        self.source = [one for name, one in named if not name.endswith("aux")]
        self.kept = [one.detach().clone() for one in self.source]

    @torch.no_grad()
    def update(self) -> None:
        for kept, one in zip(self.kept, self.source, strict=True):
            kept.lerp_(one.detach(), 0.01)


class SlowAdamW(torch.optim.AdamW):
    """With what is to happen in its step."""

    def __init__(self, parameters: Any, trouble: Trouble, ms: float) -> None:
        super().__init__(parameters, lr=1e-3)
        self.trouble = trouble
        self.ms = ms

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.ms / 1e3)
        self.trouble.strike("optimizer")
        return super().step(closure)


class Disk(io.BytesIO):
    """A file system that takes its time."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.trouble: Trouble | None = trouble

    def write(self, data: Any) -> int:
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            trouble.strike("saving")
        return super().write(data)


class Bar:
    """A progress bar, as scripts have: a line to nowhere."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.out = io.StringIO()

    def show(self, step: int, **values: float) -> None:
        told = " ".join(f"{name}={value:.4f}" for name, value in values.items())
        self.out.write(f"\r{step}/{self.total} |{'#' * (20 * step // self.total):20}| {told}")


def evaluate(model: nn.Module, batch: Any, trouble: Trouble) -> float:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.eval()
    with torch.no_grad():
        loss = inner(batch).float().square().mean()
        trouble.strike("evaluation")
    inner.train()
    return float(loss)


def do_after_step(
    program: Program, trouble: Trouble, model: nn.Module, batch: Any, rank: int, loss: Tensor
) -> None:
    """What a script does once its weights are new."""
    options = program.options
    trouble.strike("between")
    collect_all(trouble, "gc_between")
    count = options.get("metrics", 0)
    if count and options.get("flat"):
        dist.all_reduce(torch.ones(count))
    for _ in range(0 if options.get("flat") else count):
        dist.all_reduce(torch.ones(1))
    if trouble.is_due("evaluation"):
        evaluate(model, batch, trouble)
    if trouble.is_due("saving"):
        torch.save({"model": model.state_dict(), "step": trouble.step}, Disk(trouble))
    if options.get("barrier"):
        dist.barrier()


@contextlib.contextmanager
def watch_first_steps(program: Program, rank: int) -> Iterator[Callable[[], None]]:
    """torch's own profiler on rank 0, which is over after three steps; nothing where not asked."""
    if not program.options.get("profiled") or rank:
        yield lambda: None
        return
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(schedule=schedule) as profile:
        yield profile.step


def wrap(program: Program, model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        bucket_cap_mb=program.options.get("bucket_mb"),
        find_unused_parameters="aux" in program.options,
    )


# --- images: real convolutions --------------------------------------------------------------------


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Augmented on the host, sample by sample."""

    def __init__(self, program: Program, trouble: Trouble, rows: int) -> None:
        self.program = program
        self.trouble = trouble
        self.rows = rows

    def __len__(self) -> int:
        return self.program.num_steps * self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        image = torch.randn((3, 36, 36), generator=drawn)
        if index % 2:
            image = image.flip(-1)
        top = index % 5
        image = image[:, top : top + 32, top : top + 32]
        if index % self.rows == 0:
            self.trouble.strike("data")
        if self.trouble.is_due("nan_batch") and index % self.rows == 0:
            image = image * float("nan")
        return image, torch.tensor(index % 10)


class Network(nn.Module):
    """A few convolutions, and a head that may go unused."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.middle = nn.ModuleList(
            nn.Conv2d(32, 32, 3, padding=1) for _ in range(program.num_layers)
        )
        self.head = nn.Linear(32, 10)
        self.trouble = trouble
        if "aux" in program.options:
            self.aux = nn.Parameter(torch.zeros(program.options["aux"]))

    def forward(self, x: Tensor) -> Tensor:
        self.trouble.strike("forward")
        x = F.relu(self.first(x))
        for one in self.middle:
            x = F.relu(one(x)) + x
        return self.head(x.mean(dim=(2, 3)))


def train_images(program: Program, run_dir: Path, rank: int) -> None:
    options = program.options
    torch.set_num_threads(options.get("threads", 1))
    torch.manual_seed(5)
    trouble = Trouble(program, rank)
    model = wrap(program, Network(program, trouble))
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=program.num_steps + 1
    )
    average = Averaged(model)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    rows = options.get("rows_of_rank", {}).get(rank, 12)
    loader = DataLoader(Images(program, trouble, rows), batch_size=rows)
    bar, history = Bar(program.num_steps), []
    with watch_first_steps(program, rank) as mark:
        for step, (images, labels) in enumerate(loader):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            average.update()
            bar.show(step, loss=loss.item(), norm=norm.item())
            if trouble.is_due("leak"):
                # As in `losses.append(loss)`: what the graph saved stays.
                history.append((loss, model.module.middle[0](torch.randn(8, 32, 48, 48))))
            do_after_step(program, trouble, model, images, rank, loss)
            mark()
            trouble.step = step + 1
    recorder.close()


# --- text: a real transformer, accumulation, lengths in buckets -----------------------------------


class Text(nn.Module):
    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 96)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)
            for _ in range(program.num_layers)
        )
        self.trouble = trouble
        if "aux" in program.options:
            self.aux = nn.Parameter(torch.zeros(program.options["aux"]))

    def forward(self, tokens: Tensor) -> Tensor:
        self.trouble.strike("forward")
        x = self.embedding(tokens)
        for one in self.blocks:
            x = one(x)
        return x @ self.embedding.weight.T


class Tokens(Dataset[Tensor]):
    """Batches of one length each, drawn from buckets."""

    def __init__(self, program: Program, trouble: Trouble, rank: int, count: int) -> None:
        self.program = program
        self.trouble = trouble
        self.rank = rank
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        options = self.program.options
        length = 48
        if options.get("lengths"):
            drawn = random.Random(f"{options['lengths']} {index} {self.rank}")
            length = drawn.choice((16, 32, 64, 96))
        self.trouble.strike("data")
        rows = options.get("rows_of_rank", {}).get(self.rank, 8)
        return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(index))


def train_text(program: Program, run_dir: Path, rank: int) -> None:
    options = program.options
    torch.set_num_threads(options.get("threads", 1))
    torch.manual_seed(7)
    trouble = Trouble(program, rank)
    inner = Text(program, trouble)
    if options.get("sharded"):
        for one in inner.blocks:
            fully_shard(one)
        fully_shard(inner)
    model: nn.Module = inner if options.get("sharded") else wrap(program, inner)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, program.num_steps)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    per_step = program.num_microbatches + options.get("extra", {}).get(rank, 0)
    loader = DataLoader(
        Tokens(program, trouble, rank, per_step * program.num_steps), batch_size=None
    )
    is_held_back = isinstance(model, DistributedDataParallel) and not options.get("sync")
    for index, tokens in enumerate(loader):
        is_last = (index + 1) % per_step == 0
        held = model.no_sync() if is_held_back and not is_last else contextlib.nullcontext()
        with held:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / per_step
            loss.backward()
        if not is_last:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, tokens[:, :-1], rank, loss)
        trouble.step += 1
    recorder.close()


# --- many ranks whose device computes: DDP or FSDP2 -----------------------------------------------


class Rows(Dataset[Tensor]):
    def __init__(self, program: Program, trouble: Trouble, rank: int) -> None:
        self.program = program
        self.trouble = trouble
        self.rows = program.options.get("rows_of_rank", {}).get(rank, 8)

    def __len__(self) -> int:
        return self.program.num_steps * self.rows

    def __getitem__(self, index: int) -> Tensor:
        if index % self.rows == 0:
            time.sleep(self.program.data_ms / 1e3)
            self.trouble.strike("data")
        return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(index))


def train_blocks(program: Program, run_dir: Path, rank: int) -> None:
    options = program.options
    trouble = Trouble(program, rank)
    blocks = make_blocks(program, trouble)
    if options.get("sharded"):
        for one in blocks:
            fully_shard(one)
        fully_shard(blocks)
    model: nn.Module = blocks if options.get("sharded") else wrap(program, blocks)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    average = Averaged(model) if options.get("ema") else None
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    data = Rows(program, trouble, rank)
    bar = Bar(program.num_steps)
    with watch_first_steps(program, rank) as mark:
        for step, batch in enumerate(DataLoader(data, batch_size=data.rows)):
            trouble.strike("pause")
            loss = model(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            collect_all(trouble, "gc")
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
            if average is not None:
                average.update()
            if options.get("bar"):
                bar.show(step, loss=loss.item())
            do_after_step(program, trouble, model, batch, rank, loss)
            mark()
            trouble.step = step + 1
    recorder.close()


# --- a thread that fetches ahead, no loader of torch ----------------------------------------------


def fetch_ahead(program: Program, trouble: Trouble, depth: int = 2) -> Iterator[Tensor]:
    """A queue filled by a thread of the script's own."""
    ready: queue.Queue[Tensor | None] = queue.Queue(depth)

    def fill() -> None:
        for step in range(program.num_steps):
            # The fetcher is ahead; its faults are steady, so it does not matter by how much.
            trouble.strike("fetch")
            ready.put(torch.full((8, HIDDEN), float(step % 7)))
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


def train_fetched(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    model = wrap(program, make_blocks(program, trouble))
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    for step, batch in enumerate(fetch_ahead(program, trouble)):
        trouble.step = step
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        do_after_step(program, trouble, model, batch, rank, loss)
    recorder.close()


# --- local steps, weights averaged now and then ---------------------------------------------------


def train_locally(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    model = make_blocks(program, trouble)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    period = program.options.get("period", 4)
    data = Rows(program, trouble, rank)
    for step, batch in enumerate(DataLoader(data, batch_size=data.rows)):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % period == period - 1:
            with torch.no_grad():
                flat = torch.cat([one.flatten() for one in model.parameters()])
                dist.all_reduce(flat)
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step = step + 1
    recorder.close()


# --- a recommender: tables on all ranks, rows exchanged -------------------------------------------


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class Recommender(nn.Module):
    def __init__(self, program: Program, trouble: Trouble, group: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(64, HIDDEN)
        self.bottom = make_blocks(program, trouble)
        self.top = nn.Linear(HIDDEN, 1)
        self.group = group

    def forward(self, keys: Tensor) -> Tensor:
        rows = self.bottom(self.table(keys))
        return self.top(_Swap.apply(rows, self.group))  # type: ignore[no-untyped-call]


def train_recommender(program: Program, run_dir: Path, rank: int) -> None:
    layout = program.layout
    assert layout is not None
    trouble = Trouble(program, rank)
    torch.manual_seed(2)
    model = Recommender(program, trouble, make_groups(layout, "ep"))
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir, layout=layout)
    recorder.attach(model, optimizer)
    rows = 4 * dist.get_world_size()

    def collate(samples: list[int]) -> Tensor:
        trouble.strike("data")
        return torch.tensor([[one % 64] for one in samples]).squeeze(1)

    keys = list(range(program.num_steps * rows))
    for step, batch in enumerate(DataLoader(keys, batch_size=rows, collate_fn=collate)):  # type: ignore[arg-type]
        loss = model(batch).square().mean()
        loss.backward()
        flat = torch.cat([one.grad.flatten() for one in dense if one.grad is not None])
        dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step = step + 1
    recorder.close()


# --- stages ---------------------------------------------------------------------------------------


class Head(nn.Module):
    """After the last block: large, as that of a vocabulary."""

    def __init__(self, trouble: Trouble, ms: float) -> None:
        super().__init__()
        self.block = Block(trouble, ms, is_first=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def train_stages(program: Program, run_dir: Path, rank: int) -> None:
    from torch.distributed import pipelining

    layout = program.layout
    assert layout is not None
    options = program.options
    trouble = Trouble(program, rank)
    chunks, place = options.get("chunks", 1), layout.coordinates(rank).pp
    num_stages = layout.pp * chunks
    group = make_groups(layout, "pp")
    copies = make_groups(layout, "dp") if layout.dp > 1 else None
    numbers = [place + layout.pp * chunk for chunk in range(chunks)]
    per_stage = program.num_layers // num_stages
    parts = [make_blocks(program, trouble, per_stage) for _ in numbers]
    if numbers[-1] == num_stages - 1 and options.get("head"):
        parts[-1].append(Head(trouble, options["head"]))
    stages = [
        pipelining.PipelineStage(part, number, num_stages, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    kind = getattr(pipelining, options.get("schedule", "Schedule1F1B"))
    count = options.get("microbatches", 8)
    schedule = kind(
        stages if chunks > 1 else stages[0], count, loss_fn=lambda out, _: out.square().mean()
    )
    model = nn.ModuleList(parts)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir, layout=layout)
    recorder.attach(model, optimizer)
    data = Rows(program, trouble, rank)
    data.rows = 2 * count
    for step, batch in enumerate(DataLoader(data, batch_size=data.rows)):
        losses: list[Tensor] = []
        taken = (batch,) if 0 in numbers else ()
        if num_stages - 1 in numbers:
            schedule.step(*taken, target=batch, losses=losses)
        else:
            schedule.step(*taken)
        if copies is not None:
            for one in model.parameters():
                if one.grad is not None:
                    dist.all_reduce(one.grad, group=copies)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        trouble.strike("between")
        if trouble.is_due("saving"):
            torch.save(model.state_dict(), Disk(trouble))
        trouble.step = step + 1
    recorder.close()


SCRIPTS: dict[str, Callable[[Program, Path, int], None]] = {
    "images": train_images,
    "text": train_text,
    "blocks": train_blocks,
    "fetched": train_fetched,
    "locally": train_locally,
    "recommender": train_recommender,
    "stages": train_stages,
}
