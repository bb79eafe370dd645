"""Training programs of the later part of the fault matrix, which no other part has.

Ranks that sleep, as a host does whose device computes: two towers whose outputs are gathered in
forward, neighbours that average their weights, one rank that holds the weights, sums started by
hooks while backward goes on, activations computed again in backward, tensor parallel over rows that
are scattered between layers. One that really computes, on two ranks with one thread each. Batches
are drawn before training: a step only takes the next one. Stages are those of `client_programs`.

    rows_of_rank    rows a rank's batches have;  extra: microbatches more that a rank accumulates
    apart           a sum for each parameter that is waited for, and not one for each block
    sharded         FSDP2 in place of DDP;  background: ms that a thread writes, beside training
    lengths         a seed for lengths of sequences, which differ on ranks; their mean is the usual
    aux, sync, threads, metrics, flat, barrier, microbatches, schedule, chunks, fair   as elsewhere
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.client_programs import (
    HIDDEN,
    SCRIPTS,
    Block,
    SlowAdamW,
    do_after_step,
    make_blocks,
    wrap,
)
from tests.distributed.fault_matrix import Scripted, slow_down
from tests.distributed.plain_torch_faults import Program, Trouble, collect_all, make_groups
from tests.distributed.plain_torch_meshes import sum_flat
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader, Dataset

import meshscope
from meshscope.core.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Later(Scripted):
    """A run of one of these programs."""

    def record(self, run_dir: Path, rank: int) -> None:
        if self.link is not None:
            assert self.program.layout is not None
            slow_down(self.link, self.program.layout)
        PROGRAMS[self.program.loop](self.program, run_dir, rank)


# --- what they share -----------------------------------------------------------------------------

NUM_DRAWN = 8
"""Batches that a rank has; they come again and again."""


class Ready(Dataset[Tensor]):
    """Batches that were drawn before: to take one costs next to nothing."""

    def __init__(self, program: Program, trouble: Trouble, rank: int, *shape: int) -> None:
        per_step = program.num_microbatches + program.options.get("extra", {}).get(rank, 0)
        self.num_batches = program.num_steps * per_step
        self.trouble = trouble
        drawn = torch.Generator().manual_seed(100 + rank)
        self.batches = torch.randn((NUM_DRAWN, *shape), generator=drawn)

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Tensor:
        self.trouble.strike("data")
        batch = self.batches[index % NUM_DRAWN]
        return batch * float("nan") if self.trouble.is_due("nan_batch") else batch


def load(program: Program, trouble: Trouble, rank: int) -> DataLoader[Tensor]:
    rows = program.options.get("rows_of_rank", {}).get(rank, 8)
    return DataLoader(Ready(program, trouble, rank, rows, HIDDEN), batch_size=None)


def start(
    program: Program, run_dir: Path, model: nn.Module, trouble: Trouble, layout: Layout | None
) -> tuple[Any, SlowAdamW]:
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir, layout=layout)
    recorder.attach(model, optimizer)
    return recorder, optimizer


def run(
    program: Program,
    run_dir: Path,
    rank: int,
    model: nn.Module,
    trouble: Trouble,
    *,
    compute_loss: Callable[[Tensor], Tensor],
    sum_gradients: Callable[[], None] = lambda: None,
    settle: Callable[[], None] = lambda: None,
) -> None:
    """The loop of all of them: forward, backward, sums, optimizer, what comes after a step."""
    recorder, optimizer = start(program, run_dir, model, trouble, program.layout)
    for step, batch in enumerate(load(program, trouble, rank)):
        loss = compute_loss(batch)
        loss.backward()
        sum_gradients()
        collect_all(trouble, "gc")
        trouble.strike("pause")
        optimizer.step()
        settle()
        optimizer.zero_grad()
        trouble.strike("leak")
        write_aside(program, rank, step)
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step = step + 1
    recorder.close()


def write_aside(program: Program, rank: int, step: int) -> None:
    """Rank 0 saves in a thread, every eighth step: nobody waits for it."""
    ms = program.options.get("background")
    if ms and rank == 0 and step % 8 == 5:
        threading.Thread(target=time.sleep, args=(ms / 1e3,), daemon=True).start()


# --- two towers ----------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """The rows of all ranks; backward: the sum of what all ranks say of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Towers(nn.Module):
    """Each rank's rows are told from those of all ranks."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        self.images = make_blocks(program, trouble)
        torch.manual_seed(12)
        self.words = Block(trouble, program.layer_ms, is_first=False)

    def forward(self, batch: Tensor) -> Tensor:
        return self.images(batch) @ _Gather.apply(self.words(batch)).T  # type: ignore[no-any-return,no-untyped-call]


def train_towers(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    model = wrap(program, Towers(program, trouble))

    def compute_loss(batch: Tensor) -> Tensor:
        told = model(batch)
        return F.cross_entropy(told, torch.arange(len(batch)) + rank * len(batch))

    run(program, run_dir, rank, model, trouble, compute_loss=compute_loss)


# --- neighbours ----------------------------------------------------------------------------------


def train_neighbours(program: Program, run_dir: Path, rank: int) -> None:
    """Weights are averaged with those of the rank before and the rank after; nothing is summed."""
    trouble = Trouble(program, rank)
    model = make_blocks(program, trouble)
    count = program.num_ranks
    before, after = (rank - 1) % count, (rank + 1) % count

    @torch.no_grad()
    def mix() -> None:
        mine = torch.cat([one.flatten() for one in model.parameters()])
        came = [torch.empty_like(mine), torch.empty_like(mine)]
        operations = [
            dist.P2POp(dist.isend, mine, before),
            dist.P2POp(dist.isend, mine, after),
            dist.P2POp(dist.irecv, came[0], before),
            dist.P2POp(dist.irecv, came[1], after),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        put_back((mine + came[0] + came[1]) / 3, list(model.parameters()))

    run(
        program, run_dir, rank, model, trouble,
        compute_loss=lambda batch: model(batch).square().mean(), settle=mix,
    )  # fmt: skip


@torch.no_grad()
def put_back(flat: Tensor, targets: list[Tensor]) -> None:
    for target, part in zip(targets, flat.split([one.numel() for one in targets]), strict=True):
        target.copy_(part.view_as(target))


# --- one rank holds the weights ------------------------------------------------------------------


def train_served(program: Program, run_dir: Path, rank: int) -> None:
    """Gradients go to rank 0, and the weights that it made come back."""
    trouble = Trouble(program, rank)
    model = make_blocks(program, trouble)

    def send_gradients() -> None:
        held = [one.grad for one in model.parameters() if one.grad is not None]
        flat = torch.cat([one.flatten() for one in held])
        dist.reduce(flat, dst=0)
        put_back(flat / program.num_ranks, held)

    @torch.no_grad()
    def fetch_weights() -> None:
        flat = torch.cat([one.flatten() for one in model.parameters()])
        dist.broadcast(flat, src=0)
        put_back(flat, list(model.parameters()))

    run(
        program, run_dir, rank, model, trouble,
        compute_loss=lambda batch: model(batch).square().mean(), sum_gradients=send_gradients,
        settle=fetch_weights,
    )  # fmt: skip


# --- sums started by hooks -----------------------------------------------------------------------


class Started:
    """Sums of gradients that begin while backward goes on: one for each block, or, waited for at
    once, one for each parameter."""

    def __init__(self, model: nn.Sequential, *, is_apart: bool) -> None:
        self.begun: list[tuple[Any, Tensor, list[Tensor]]] = []
        self.is_apart = is_apart
        for block in model:
            parameters = list(block.parameters())
            for part in [[one] for one in parameters] if is_apart else [parameters]:
                self._watch(part)

    def _watch(self, part: list[nn.Parameter]) -> None:
        ready: list[nn.Parameter] = []

        def note(one: nn.Parameter) -> None:
            ready.append(one)
            if len(ready) < len(part):
                return
            ready.clear()
            grads = [each.grad for each in part if each.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            work = dist.all_reduce(flat, async_op=True)
            if self.is_apart:
                work.wait()
            self.begun.append((work, flat, grads))

        for one in part:
            one.register_post_accumulate_grad_hook(note)

    def finish(self) -> None:
        for work, flat, grads in self.begun:
            work.wait()
            put_back(flat / dist.get_world_size(), grads)
        self.begun.clear()


def train_hooked(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    model = make_blocks(program, trouble)
    started = Started(model, is_apart=bool(program.options.get("apart")))
    run(
        program, run_dir, rank, model, trouble,
        compute_loss=lambda batch: model(batch).square().mean(), sum_gradients=started.finish,
    )  # fmt: skip


# --- activations computed again ------------------------------------------------------------------


class Again(nn.Module):
    """Its forward is done once more, as a whole, in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def train_again(program: Program, run_dir: Path, rank: int) -> None:
    """All blocks but the first, in which faults are: these happen once."""
    trouble = Trouble(program, rank)
    first, *others = make_blocks(program, trouble)
    blocks = nn.Sequential(first, *(Again(one) for one in others))
    if program.options.get("sharded"):
        for one in blocks:
            fully_shard(one)
        fully_shard(blocks)
    model: nn.Module = blocks if program.options.get("sharded") else wrap(program, blocks)
    run(
        program, run_dir, rank, model, trouble,
        compute_loss=lambda batch: model(batch).square().mean(),
    )  # fmt: skip


# --- tensor parallel over scattered rows ---------------------------------------------------------


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_rows(grad, ctx.group), None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_rows(grad, ctx.group), None


def _gather_rows(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty((len(x) * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter_rows(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty((len(x) // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class Scattered(nn.Module):
    """All rows come together for a block, and its sums are scattered again."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner = inner
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        rows = _AllRows.apply(x, self.group)  # type: ignore[no-untyped-call]
        return _OwnRows.apply(self.inner(rows), self.group)  # type: ignore[no-any-return,no-untyped-call]


def train_scattered(program: Program, run_dir: Path, rank: int) -> None:
    layout = program.layout
    assert layout is not None
    trouble = Trouble(program, rank)
    tp_group, dp_group = make_groups(layout, "tp"), make_groups(layout, "dp")
    model = nn.Sequential(*(Scattered(one, tp_group) for one in make_blocks(program, trouble)))

    def sum_gradients() -> None:
        if layout.dp > 1:
            sum_flat([one.grad for one in model.parameters() if one.grad is not None], dp_group)

    run(
        program, run_dir, rank, model, trouble,
        compute_loss=lambda batch: model(batch).square().mean(), sum_gradients=sum_gradients,
    )  # fmt: skip


# --- real compute --------------------------------------------------------------------------------

WIDTH = 128
LENGTHS = (8, 16, 24, 32, 40, 48, 56)


class Sentences(Ready):
    """Rows of words; of several lengths where asked, whose mean is that of the others."""

    def __init__(self, program: Program, trouble: Trouble, rank: int) -> None:
        rows = program.options.get("rows_of_rank", {}).get(rank, 10)
        super().__init__(program, trouble, rank, rows, LENGTHS[-1], WIDTH)
        drawn = random.Random(f"{program.options.get('lengths')} {rank}")
        rounds = [drawn.sample(LENGTHS, len(LENGTHS)) for _ in range(program.num_steps)]
        self.lengths = [length for part in rounds for length in part]
        self.is_drawn = bool(program.options.get("lengths"))

    def __getitem__(self, index: int) -> Tensor:
        length = self.lengths[index] if self.is_drawn else LENGTHS[len(LENGTHS) // 2]
        return super().__getitem__(index)[:, :length]


class Gated(nn.Module):
    """A residual block whose one half lets the other through."""

    def __init__(self, trouble: Trouble, *, is_first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.trouble = trouble
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.trouble.strike("forward")
        return x + self.down(F.glu(self.up(self.norm(x))))


class Gates(nn.Module):
    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.blocks = nn.Sequential(
            *(Gated(trouble, is_first=number == 0) for number in range(program.num_layers))
        )
        if "aux" in program.options:
            self.aux = nn.Parameter(torch.zeros(program.options["aux"]))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def train_gates(program: Program, run_dir: Path, rank: int) -> None:
    options = program.options
    torch.set_num_threads(options.get("threads", 1))
    trouble = Trouble(program, rank)
    inner = Gates(program, trouble)
    if options.get("sharded"):
        for one in inner.blocks:
            fully_shard(one)
        fully_shard(inner)
    model: nn.Module = inner if options.get("sharded") else wrap(program, inner)
    recorder, optimizer = start(program, run_dir, model, trouble, None)
    data = Sentences(program, trouble, rank)
    per_step = len(data) // program.num_steps
    is_held_back = not options.get("sharded") and not options.get("sync")
    for index, batch in enumerate(DataLoader(data, batch_size=None)):
        is_last = (index + 1) % per_step == 0
        held = model.no_sync() if is_held_back and not is_last else contextlib.nullcontext()  # type: ignore[operator]
        with held:
            loss = F.mse_loss(model(batch), batch.flip(-1)) / per_step
            loss.backward()
        if not is_last:
            continue
        trouble.strike("pause")
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step += 1
    recorder.close()


PROGRAMS: dict[str, Callable[[Program, Path, int], None]] = {
    "towers": train_towers,
    "neighbours": train_neighbours,
    "served": train_served,
    "started": train_hooked,
    "again": train_again,
    "scattered": train_scattered,
    "gates": train_gates,
    "stages": SCRIPTS["stages"],
}
