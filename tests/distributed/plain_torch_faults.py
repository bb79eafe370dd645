"""Training loops in plain torch, nothing of the engine, in which one thing is slow on purpose.

Layers sleep for a stated time in forward and backward, so that several ranks fit on few cores; the
fault is a `time.sleep` more, in the place and on the ranks that `Delay` says. Each program is what
a user would write: `meshscope.start`, `attach`, a loop. None tells the recorder of its fault.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshscope
from meshscope.core.layout import Layout

WIDTH = 8
BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Delay:
    """What is slow: `ms` more, at `where`, on `ranks`, in every `every`-th step from `first` on."""

    where: str
    ranks: tuple[int, ...] | None = None
    """None is all of them."""
    ms: float = 0.0
    every: int = 1
    first: int = 0
    last: int | None = None
    leak_bytes: int = 0
    shape: str = "steady"
    """How `ms` changes over the run, a key of `SHAPES`."""
    burns: bool = False
    """Keeps its core busy instead of sleeping."""

    def is_due(self, where: str, rank: int, step: int) -> bool:
        """Whether it happens there and then."""
        is_here = self.where == where and (self.ranks is None or rank in self.ranks)
        is_over = self.last is not None and step > self.last
        return is_here and step >= self.first and not is_over and step % self.every == 0

    def find_ms(self, step: int, num_steps: int) -> float:
        """How much more it is in this step."""
        return self.ms * SHAPES[self.shape](step - self.first, num_steps - self.first)


SHAPES: dict[str, Callable[[int, int], float]] = {
    "steady": lambda step, num_steps: 1.0,
    "drift": lambda step, num_steps: step / (num_steps - 1),
    "swing": lambda step, num_steps: 0.5 + 0.5 * math.sin(2 * math.pi * step / 12),
    "bursts": lambda step, num_steps: float(step % 15 < 5),
    "down": lambda step, num_steps: 1.0 - step / (num_steps - 1),
    "half": lambda step, num_steps: float(random.Random(f"half {step}").random() < 0.5),
    "chance": lambda step, num_steps: float(random.Random(f"chance {step}").random() < 0.2),
    "noisy": lambda step, num_steps: random.Random(f"noisy {step}").expovariate(1.0),
}
"""Shares of a delay's time: step after its first, steps in all. The last three are drawn."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A plain torch program: which loop, on how many ranks, how long its parts take."""

    loop: str
    num_ranks: int
    num_steps: int = 40
    num_layers: int = 4
    layer_ms: float = 3.0
    """Of a layer's forward; backward takes as long."""
    num_microbatches: int = 1
    optimizer_ms: float = 1.0
    data_ms: float = 0.0
    layout: Layout | None = None
    stage_sizes: tuple[int, ...] | None = None
    delays: tuple[Delay, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


NUM_ALIVE, NUM_COLLECTIONS = 150_000, 12
"""Objects that a rank keeps where collections are the fault, and how often they are looked at: 40
to 50 ms of a core each time. With more objects the other ranks would lose their caches, too."""


class Trouble:
    """This rank's delays, told the step by the loop."""

    def __init__(self, program: Program, rank: int) -> None:
        self.step = 0
        self.kept: list[bytes] = []
        self._delays = program.delays
        self._rank = rank
        self._num_steps = program.num_steps
        is_collected = any(delay.where.startswith("gc") for delay in program.delays)
        self.alive: list[list[int]] = [[] for _ in range(NUM_ALIVE if is_collected else 0)]

    def strike(self, where: str) -> None:
        """Everything that is to happen here in this step."""
        for delay in self._delays:
            if not delay.is_due(where, self._rank, self.step):
                continue
            if delay.leak_bytes:
                self.kept.append(b"\x01" * delay.leak_bytes)
            if delay.ms:
                wait = burn if delay.burns else time.sleep
                wait(delay.find_ms(self.step, self._num_steps) / 1e3)

    def is_due(self, where: str) -> bool:
        """Whether anything is to happen here in this step."""
        return any(delay.is_due(where, self._rank, self.step) for delay in self._delays)


def burn(seconds: float) -> None:
    """Counts until the time is over."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "SleepLayer") -> Tensor:
        ctx.layer = layer
        time.sleep(layer.find_seconds(x))
        if layer.is_first:
            layer.trouble.strike("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer: SleepLayer = ctx.layer
        time.sleep(layer.find_seconds(grad))
        if layer.is_first:
            layer.trouble.strike("backward")
        return grad, None


class SleepLayer(nn.Module):
    """A small linear layer that takes a stated time; the first one of a model has its faults.

    With `usual_rows` the time is that of as many rows, and others take more or less.
    """

    def __init__(
        self, seconds: float, trouble: Trouble, *, is_first: bool, usual_rows: int | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds
        self.trouble = trouble
        self.is_first = is_first
        self.usual_rows = usual_rows

    def find_seconds(self, x: Tensor) -> float:
        if self.usual_rows is None:
            return self.seconds
        return self.seconds * x.numel() / (self.usual_rows * x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(torch.tanh(self.linear(x)), self)  # type: ignore[no-untyped-call]


class SleepSGD(torch.optim.SGD):
    """Takes a stated time."""

    def __init__(self, parameters: Any, seconds: float, trouble: Trouble) -> None:
        super().__init__(parameters, lr=0.01)
        self.seconds = seconds
        self.trouble = trouble

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        self.trouble.strike("optimizer")
        return super().step(closure)


def make_model(program: Program, trouble: Trouble, num_layers: int | None = None) -> nn.Sequential:
    torch.manual_seed(3)
    count = program.num_layers if num_layers is None else num_layers
    seconds = program.layer_ms / 1e3
    return nn.Sequential(*(SleepLayer(seconds, trouble, is_first=i == 0) for i in range(count)))


def make_loader(program: Program, trouble: Trouble) -> torch.utils.data.DataLoader[Tensor]:
    """torch's own loader, whose collate function takes the stated time."""

    def collate(samples: list[Tensor]) -> Tensor:
        if program.data_ms:
            time.sleep(program.data_ms / 1e3)
        trouble.strike("data")
        return torch.stack(samples)

    count = BATCH * program.num_steps * program.num_microbatches
    data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return torch.utils.data.DataLoader(list(data), batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]


def take_loss(output: Tensor, trouble: Trouble) -> Tensor:
    loss = output.square().mean()
    return loss * float("nan") if trouble.is_due("nan") else loss


def collect_garbage(trouble: Trouble) -> None:
    collect_all(trouble, "gc")
    trouble.strike("pause")
    trouble.strike("leak")


def collect_all(trouble: Trouble, where: str) -> None:
    """Real collections, where they are due: of all that the rank keeps alive."""
    for _ in range(NUM_COLLECTIONS if trouble.is_due(where) else 0):
        gc.collect()


# --- loops ---------------------------------------------------------------------------------------


def run_data_parallel(program: Program, run_dir: Path, rank: int) -> None:
    """DistributedDataParallel, with gradient accumulation where there are several microbatches."""
    trouble = Trouble(program, rank)
    model = DistributedDataParallel(make_model(program, trouble))
    optimizer = SleepSGD(model.parameters(), program.optimizer_ms / 1e3, trouble)
    recorder = meshscope.start(run_dir, layout=program.layout)
    recorder.attach(model, optimizer)
    batches = iter(make_loader(program, trouble))
    for step in range(program.num_steps):
        trouble.step = step
        trouble.strike("between")
        for index in range(program.num_microbatches):
            is_last = index + 1 == program.num_microbatches
            with nullcontext() if is_last else model.no_sync():
                take_loss(model(next(batches)), trouble).backward()
        collect_garbage(trouble)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def run_fully_sharded(program: Program, run_dir: Path, rank: int) -> None:
    """FSDP2, a group for each layer."""
    trouble = Trouble(program, rank)
    model = make_model(program, trouble)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = SleepSGD(model.parameters(), program.optimizer_ms / 1e3, trouble)
    recorder = meshscope.start(run_dir, layout=program.layout)
    recorder.attach(model, optimizer)
    for step, batch in enumerate(make_loader(program, trouble)):
        trouble.step = step
        take_loss(model(batch), trouble).backward()
        collect_garbage(trouble)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


class _SumForward(torch.autograd.Function):
    """All-reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumBackward(torch.autograd.Function):
    """Nothing in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class TensorParallelLayer(nn.Module):
    """A column and a row of a linear pair; sums in forward and backward, by hand."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner = inner
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x = _SumBackward.apply(x, self.group)  # type: ignore[no-untyped-call]
        return _SumForward.apply(self.inner(x), self.group)  # type: ignore[no-untyped-call]


def make_groups(layout: Layout, axis: str) -> Any:
    """This rank's group along an axis; every rank makes all of them."""
    mine = None
    rank = dist.get_rank()
    done: set[tuple[int, ...]] = set()
    for other in range(layout.world_size):
        members = tuple(sorted(layout.group_ranks(axis, other)))
        if members in done:
            continue
        done.add(members)
        group = dist.new_group(list(members))
        mine = group if rank in members else mine
    return mine


def run_tensor_parallel(program: Program, run_dir: Path, rank: int) -> None:
    """dp × tp by hand: sums over tp in every layer, gradients over dp after backward."""
    layout = program.layout
    assert layout is not None
    trouble = Trouble(program, rank)
    tp_group, dp_group = make_groups(layout, "tp"), make_groups(layout, "dp")
    layers = [TensorParallelLayer(layer, tp_group) for layer in make_model(program, trouble)]
    model = nn.Sequential(*layers)
    optimizer = SleepSGD(model.parameters(), program.optimizer_ms / 1e3, trouble)
    recorder = meshscope.start(run_dir, layout=None if program.options.get("untold") else layout)
    recorder.attach(model, optimizer)
    for step, batch in enumerate(make_loader(program, trouble)):
        trouble.step = step
        take_loss(model(batch), trouble).backward()
        for parameter in model.parameters():
            if layout.dp > 1:
                dist.all_reduce(parameter.grad, group=dp_group)
        collect_garbage(trouble)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def run_pipeline(program: Program, run_dir: Path, rank: int) -> None:
    """GPipe by hand with blocking sends and receives; dp, if any, after it."""
    layout = program.layout or Layout(pp=program.num_ranks)
    trouble = Trouble(program, rank)
    here = layout.coordinates(rank)
    ranks = layout.group_ranks("pp", rank)
    sizes = program.stage_sizes or (program.num_layers // layout.pp,) * layout.pp
    stage = make_model(program, trouble, sizes[here.pp])
    optimizer = SleepSGD(stage.parameters(), program.optimizer_ms / 1e3, trouble)
    dp_group = make_groups(layout, "dp") if layout.dp > 1 else None
    recorder = meshscope.start(run_dir, layout=None if program.options.get("untold") else layout)
    recorder.attach(stage, optimizer)
    before = ranks[here.pp - 1] if here.pp > 0 else None
    after = ranks[here.pp + 1] if here.pp + 1 < layout.pp else None
    batches = iter(make_loader(program, trouble))
    for step in range(program.num_steps):
        trouble.step = step
        _run_schedule(program, stage, batches, trouble, before, after, here.pp, layout.pp)
        for parameter in stage.parameters():
            if dp_group is not None:
                dist.all_reduce(parameter.grad, group=dp_group)
        collect_garbage(trouble)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def _run_schedule(
    program: Program,
    stage: nn.Module,
    batches: Iterator[Tensor],
    trouble: Trouble,
    before: int | None,
    after: int | None,
    place: int,
    num_stages: int,
) -> None:
    """GPipe, or 1F1B where the options say so."""
    count = program.num_microbatches
    is_gpipe = program.options.get("schedule") != "1f1b"
    num_ahead = count if is_gpipe else min(num_stages - 1 - place, count)
    saved: list[tuple[Tensor, Tensor]] = []
    sent: list[Any] = []

    def send(tensor: Tensor, peer: int) -> None:
        # Two neighbours that both wait for their send to be taken would wait for ever in 1F1B.
        work = dist.isend(tensor, peer)
        if is_gpipe:
            work.wait()
        else:
            sent.append((work, tensor))

    def forward() -> None:
        x = torch.zeros(BATCH, WIDTH) if before is not None else next(batches)
        if before is not None:
            dist.recv(x, before)
            x.requires_grad_()
        y = stage(x)
        if after is not None:
            send(y.detach(), after)
        saved.append((x, y if after is not None else take_loss(y, trouble)))

    def backward() -> None:
        x, y = saved.pop(0)
        if after is None:
            (y / count).backward()
        else:
            grad = torch.zeros(BATCH, WIDTH)
            dist.recv(grad, after)
            y.backward(grad)
        if before is not None:
            assert x.grad is not None
            send(x.grad, before)

    for _ in range(num_ahead):
        forward()
    for _ in range(count - num_ahead):
        forward()
        backward()
    for _ in range(num_ahead):
        backward()
    for work, _ in sent:
        work.wait()


LOOPS: dict[str, Callable[[Program, Path, int], None]] = {
    "ddp": run_data_parallel,
    "fsdp": run_fully_sharded,
    "tp": run_tensor_parallel,
    "pipeline": run_pipeline,
}
