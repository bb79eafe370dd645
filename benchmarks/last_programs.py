"""Training programs of the last part of the fault matrix, which no other part has.

Ranks that sleep, as a host does whose device computes: a student that learns from a frozen teacher,
ZeRO-1 (torch's own optimizer that is sharded), FSDP2 that keeps its parameters and accumulates,
tensor parallel by DTensor with one sum over dp by hand, a ring that passes blocks around, steps and
phases marked by the program. Two that really compute, on two ranks with one thread each: a
recurrent network, and FSDP2 over matrix products. Stages are those of `client_programs`.

    group           layers that FSDP2 gathers together;  teacher: milliseconds of the teacher
    rows_of_rank    rows a rank's batches have;  lengths: a seed for random lengths
    aux             floats of a head nobody uses
    sync, extra, bucket_mb, barrier, metrics, fair   as in `client_programs`
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.client_programs import (
    HIDDEN,
    SCRIPTS,
    Block,
    Rows,
    SlowAdamW,
    do_after_step,
    make_blocks,
    wrap,
)
from tests.distributed.fault_matrix import Scripted, slow_down
from tests.distributed.plain_torch_faults import Program, Trouble, collect_all, make_groups
from tests.distributed.plain_torch_meshes import Pair, sum_flat
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset

import meshscope


@dataclass(frozen=True, kw_only=True)
class Last(Scripted):
    """A run of one of these programs."""

    def record(self, run_dir: Path, rank: int) -> None:
        if self.link is not None:
            assert self.program.layout is not None
            slow_down(self.link, self.program.layout)
        PROGRAMS[self.program.loop](self.program, run_dir, rank)


def load(program: Program, trouble: Trouble, rank: int) -> DataLoader[Tensor]:
    data = Rows(program, trouble, rank)
    return DataLoader(data, batch_size=data.rows)


# --- a student and its teacher -------------------------------------------------------------------


class Teacher(nn.Module):
    """Takes its time, learns nothing."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.block = Block(trouble, program.options["teacher"], is_first=False)
        self.trouble = trouble

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.trouble.strike("teacher")
        return self.block(x)  # type: ignore[no-any-return]


def train_student(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    teacher = Teacher(program, trouble).eval().requires_grad_(False)
    model = wrap(program, make_blocks(program, trouble))
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    for step, batch in enumerate(load(program, trouble, rank)):
        told = model(batch)
        loss = F.mse_loss(told, teacher(batch))
        loss.backward()
        collect_all(trouble, "gc")
        trouble.strike("pause")
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step = step + 1
    recorder.close()


# --- ZeRO-1 --------------------------------------------------------------------------------------


class SlowShards(ZeroRedundancyOptimizer):
    """Each rank updates its part and sends it to the others."""

    def __init__(self, parameters: Any, trouble: Trouble, ms: float) -> None:
        super().__init__(parameters, optimizer_class=torch.optim.Adam, lr=1e-3)
        self.trouble = trouble
        self.ms = ms

    def step(self, closure: Any = None, **values: Any) -> Any:
        self.trouble.strike("optimizer")
        return super().step(closure, **values)


def train_zero(program: Program, run_dir: Path, rank: int) -> None:
    trouble = Trouble(program, rank)
    model = wrap(program, make_blocks(program, trouble))
    optimizer = SlowShards(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    for step, batch in enumerate(load(program, trouble, rank)):
        loss = model(batch).square().mean()
        loss.backward()
        collect_all(trouble, "gc")
        trouble.strike("pause")
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step = step + 1
    recorder.close()


# --- FSDP2 that keeps what it gathered -----------------------------------------------------------


def train_kept(program: Program, run_dir: Path, rank: int) -> None:
    """Layers gathered in groups, parameters kept until backward, one reduction a step."""
    trouble = Trouble(program, rank)
    blocks = make_blocks(program, trouble)
    size = program.options.get("group", 2)
    model = nn.Sequential(
        *(nn.Sequential(*blocks[at : at + size]) for at in range(0, len(blocks), size))
    )
    for one in model:
        fully_shard(one, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    count = program.num_microbatches
    longer = replace(program, num_steps=program.num_steps * count)
    for index, batch in enumerate(load(longer, trouble, rank)):
        is_last = (index + 1) % count == 0
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        loss = model(batch).square().mean() / count
        loss.backward()
        if not is_last:
            continue
        collect_all(trouble, "gc")
        trouble.strike("pause")
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step += 1
    recorder.close()


# --- tensor parallel, one sum over dp ------------------------------------------------------------


def train_columns(program: Program, run_dir: Path, rank: int) -> None:
    layout = program.layout
    assert layout is not None
    trouble = Trouble(program, rank)
    mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(6)
    model = nn.Sequential(
        *(Pair(program, trouble, is_first=number == 0) for number in range(program.num_layers))
    )
    for one in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(one, mesh["tp"], plan)  # type: ignore[arg-type]
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir, layout=layout)
    recorder.attach(model, optimizer)
    # All ranks of a tensor-parallel group train on the same rows; a rank is slow on its own.
    for step, batch in enumerate(load(program, trouble, rank)):
        loss = model(batch[:, :8]).square().mean()
        loss.backward()
        if layout.dp > 1:
            found = [one.grad for one in model.parameters() if one.grad is not None]
            sum_flat([getattr(one, "_local_tensor", one) for one in found], mesh.get_group("dp"))
        collect_all(trouble, "gc")
        trouble.strike("pause")
        optimizer.step()
        optimizer.zero_grad()
        trouble.strike("between")
        trouble.step = step + 1
    recorder.close()


# --- a ring --------------------------------------------------------------------------------------


class _Pass(torch.autograd.Function):
    """A block goes once around the ring in forward, and back in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: list[int], group: Any) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _go_around(x, ranks, group, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _go_around(grad, ctx.ranks, ctx.group, -1), None, None


def _go_around(x: Tensor, ranks: list[int], group: Any, way: int) -> Tensor:
    place = ranks.index(dist.get_rank())
    after = ranks[(place + way) % len(ranks)]
    before = ranks[(place - way) % len(ranks)]
    held, total = x.contiguous(), x.clone()
    for _ in range(len(ranks) - 1):
        came = torch.empty_like(held)
        operations = [
            dist.P2POp(dist.isend, held, after, group),
            dist.P2POp(dist.irecv, came, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        held, total = came, total + came
    return total / len(ranks)


class Passing(nn.Module):
    def __init__(self, inner: nn.Module, ranks: list[int], group: Any) -> None:
        super().__init__()
        self.inner = inner
        self.ranks = ranks
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return _Pass.apply(self.inner(x), self.ranks, self.group)  # type: ignore[no-untyped-call]


def train_ring(program: Program, run_dir: Path, rank: int) -> None:
    layout = program.layout
    assert layout is not None
    trouble = Trouble(program, rank)
    group, ranks = make_groups(layout, "cp"), list(layout.group_ranks("cp", rank))
    model = nn.Sequential(*(Passing(one, ranks, group) for one in make_blocks(program, trouble)))
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir, layout=layout)
    recorder.attach(model, optimizer)
    for step, batch in enumerate(load(program, trouble, rank)):
        loss = model(batch).square().mean()
        loss.backward()
        sum_flat([one.grad for one in model.parameters() if one.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step = step + 1
    recorder.close()


# --- steps and phases that the program marks -----------------------------------------------------


def train_marked(program: Program, run_dir: Path, rank: int) -> None:
    """No hook finds its phases: it says where they are."""
    trouble = Trouble(program, rank)
    model = make_blocks(program, trouble)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    batches = iter(load(program, trouble, rank))
    for step in range(program.num_steps):
        trouble.step = step
        with recorder.step(step):
            with recorder.phase("data"):
                batch = next(batches)
            with recorder.phase("forward"):
                loss = model(batch).square().mean()
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("sum"):
                sum_flat([one.grad for one in model.parameters() if one.grad is not None])
            with recorder.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        trouble.strike("between")
    recorder.close()


# --- real compute --------------------------------------------------------------------------------


class Sequences(Dataset[Tensor]):
    """Random sequences; of random lengths where asked."""

    def __init__(self, program: Program, trouble: Trouble, rank: int) -> None:
        self.program = program
        self.trouble = trouble
        self.rank = rank

    def __len__(self) -> int:
        return self.program.num_steps * self.program.num_microbatches

    def __getitem__(self, index: int) -> Tensor:
        options = self.program.options
        self.trouble.strike("data")
        rows = options.get("rows_of_rank", {}).get(self.rank, 12)
        drawn = random.Random(f"{options.get('lengths')} {index} {self.rank}")
        length = drawn.randrange(8, 57) if options.get("lengths") else 32
        batch = torch.randn(rows, length, 96, generator=torch.Generator().manual_seed(index))
        return batch * float("nan") if self.trouble.is_due("nan_batch") else batch


class Recurrent(nn.Module):
    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        self.cell = nn.LSTM(96, 128, num_layers=program.num_layers, batch_first=True)
        self.head = nn.Linear(128, 96)
        self.trouble = trouble
        if "aux" in program.options:
            self.aux = nn.Parameter(torch.zeros(program.options["aux"]))

    def forward(self, x: Tensor) -> Tensor:
        self.trouble.strike("forward")
        return self.head(self.cell(x)[0])  # type: ignore[no-any-return]


class Products(nn.Module):
    """A residual pair of matrix products."""

    def __init__(self, trouble: Trouble, *, is_first: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 768), nn.Linear(768, 96)
        self.trouble = trouble
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.trouble.strike("forward")
        return x + self.down(F.gelu(self.up(x)))


def make_real(program: Program, trouble: Trouble) -> nn.Module:
    torch.manual_seed(8)
    if program.loop == "recurrent":
        return wrap(program, Recurrent(program, trouble))
    layers = nn.Sequential(
        *(Products(trouble, is_first=number == 0) for number in range(program.num_layers))
    )
    for one in layers:
        fully_shard(one)
    fully_shard(layers)
    return layers


def train_real(program: Program, run_dir: Path, rank: int) -> None:
    options = program.options
    torch.set_num_threads(options.get("threads", 1))
    trouble = Trouble(program, rank)
    model = make_real(program, trouble)
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    count = program.num_microbatches
    is_held_back = program.loop == "recurrent" and not options.get("sync")
    for index, batch in enumerate(DataLoader(Sequences(program, trouble, rank), batch_size=None)):
        is_last = (index + 1) % count == 0
        held = model.no_sync() if is_held_back and not is_last else contextlib.nullcontext()  # type: ignore[operator]
        with held:
            loss = F.mse_loss(model(batch), batch) / count
            loss.backward()
        if not is_last:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trouble.strike("pause")
        optimizer.step()
        optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
        trouble.step += 1
    recorder.close()


PROGRAMS: dict[str, Callable[[Program, Path, int], None]] = {
    "student": train_student,
    "zero": train_zero,
    "kept": train_kept,
    "columns": train_columns,
    "ring": train_ring,
    "marked": train_marked,
    "recurrent": train_real,
    "products": train_real,
    "stages": SCRIPTS["stages"],
}
assert HIDDEN >= 8, "tensor parallel takes the first columns of a row"
