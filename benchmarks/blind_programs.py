"""Training programs of the blind part of the fault matrix, which no other part has.

Ranks that sleep, as a host does whose device computes: a U-Net that accumulates and clips, FSDP2
whose layers are wrapped in different ways and computed in bfloat16, copies of shards that are
summed once a step, tensor parallel over scattered sequences by DTensor, experts to which tokens are
sent, contrastive learning with a momentum encoder, a GAN, rollouts and updates, every block held by
a rank of its own, a last rank that updates for all, statistics of batches summed in forward, heads
exchanged for sequences, adapters of a frozen model. One that really computes, on two ranks with one
thread each: a U-Net of convolutions. Stages are those of `client_programs`.

    lengths     a seed for lengths of sequences, or widths of images; their mean is the usual
    padding     tokens more that every rank sends to a rank's expert
    clip        gradients are clipped;  ema: weights are averaged;  workers: of the loader
    keys, critic, rollout    milliseconds of the momentum encoder, the critic, the environment
    ballast     floats more, whose gradients are sent
    rate        step from which the learning rate is ten times as high
    aside       the name of the phase in which ranks log
    rows_of_rank, extra, aux, sync, threads, bucket_mb, metrics, flat, barrier, background,
    microbatches, schedule, chunks, fair   as elsewhere
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.client_programs import (
    HIDDEN,
    SCRIPTS,
    Averaged,
    Block,
    SlowAdamW,
    do_after_step,
    make_blocks,
    wrap,
)
from benchmarks.later_programs import Ready, put_back, write_aside
from tests.distributed.fault_matrix import Scripted, slow_down
from tests.distributed.plain_torch_faults import Program, Trouble, collect_all, make_groups
from tests.distributed.plain_torch_meshes import Trainee, sum_flat, take_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

import meshscope


@dataclass(frozen=True, kw_only=True)
class Blind(Scripted):
    """A run of one of these programs."""

    def record(self, run_dir: Path, rank: int) -> None:
        if self.link is not None:
            assert self.program.layout is not None
            slow_down(self.link, self.program.layout)
        PROGRAMS.get(self.program.loop, train)(self.program, run_dir, rank)


# --- batches -------------------------------------------------------------------------------------

LENGTHS = (8, 16, 24, 32, 40, 48, 56)
USUAL_LENGTH = 32
NUM_LINES = 4
"""Sequences in a batch, where they have lengths."""


class Drawn(Ready):
    """Batches that are cut along an axis: to the usual length, or to drawn ones."""

    def __init__(
        self, program: Program, trouble: Trouble, rank: int, axis: int, *shape: int
    ) -> None:
        super().__init__(program, trouble, rank, *shape)
        seed = program.options.get("lengths")
        drawn = random.Random(f"{seed} {rank}")
        rounds = self.num_batches // len(LENGTHS) + 1
        lengths = [one for _ in range(rounds) for one in drawn.sample(LENGTHS, len(LENGTHS))]
        self.lengths = lengths if seed else [USUAL_LENGTH] * len(lengths)
        self.axis = axis

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index).narrow(self.axis, 0, self.lengths[index])


def load(program: Program, trouble: Trouble, rank: int) -> DataLoader[Tensor]:
    options = program.options
    rows = options.get("rows_of_rank", {}).get(rank, 8)
    if program.loop == "convolutions":
        data: Ready = Drawn(program, trouble, rank, 3, rows, 3, 32, LENGTHS[-1])
    elif "lengths" in options:
        data = Drawn(program, trouble, rank, 1, NUM_LINES, LENGTHS[-1], HIDDEN)
    elif program.loop == "sequences":
        data = Ready(program, trouble, rank, 2, 4, HIDDEN)
    else:
        data = Ready(program, trouble, rank, rows, HIDDEN)
    return DataLoader(data, batch_size=None, num_workers=options.get("workers", 0))


# --- the loop of most of them --------------------------------------------------------------------


def train(program: Program, run_dir: Path, rank: int) -> None:
    options = program.options
    trouble = Trouble(program, rank)
    trainee = BUILDERS[program.loop](program, trouble, rank)
    model = trainee.model
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer = SlowAdamW(learning, trouble, program.optimizer_ms)
    average = Averaged(model) if options.get("ema") else None
    recorder = meshscope.start(run_dir, layout=program.layout)
    recorder.attach(model, optimizer)
    batches = iter(load(program, trouble, rank))
    count = program.num_microbatches + options.get("extra", {}).get(rank, 0)
    for step in range(program.num_steps):
        trouble.step = step
        if step == options.get("rate"):
            optimizer.param_groups[0]["lr"] *= 10
        for index in range(count):
            batch = next(batches)
            with nullcontext() if index + 1 == count else trainee.no_sync():
                trainee.train(batch)
        trainee.finish()
        collect_all(trouble, "gc")
        trouble.strike("pause")
        if options.get("clip"):
            nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        trainee.settle()
        optimizer.zero_grad()
        if average is not None:
            average.update()
        trouble.strike("leak")
        write_aside(program, rank, step)
        if trouble.is_due("logging"):
            with recorder.phase(options.get("aside", "logging")):
                trouble.strike("logging")
        do_after_step(program, trouble, model, batch, rank, torch.zeros(()))
    recorder.close()


def learn(program: Program, trouble: Trouble, model: nn.Module, **values: Any) -> Trainee:
    """Whose loss is that of the model's output."""

    def step(batch: Tensor) -> None:
        loss = take_loss(model(batch).float(), trouble) / program.num_microbatches
        loss.backward()

    return Trainee(model=model, train=step, **values)


def learn_in_copies(program: Program, trouble: Trouble, inner: nn.Module) -> Trainee:
    """By DDP, which sums the gradients of the last microbatch's backward only, unless asked."""
    model = wrap(program, inner)
    held = nullcontext if program.options.get("sync") else model.no_sync
    return learn(program, trouble, model, no_sync=held)


def sum_over(model: nn.Module, group: Any = None) -> None:
    """This rank's part of the gradients, in one operation."""
    found = [one.grad for one in model.parameters() if one.grad is not None]
    sum_flat([getattr(one, "_local_tensor", one) for one in found], group)


# --- U-Nets --------------------------------------------------------------------------------------


class UNet(nn.Module):
    """What the way down keeps is added on the way up."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        blocks = make_blocks(program, trouble, 2 * program.num_layers)
        for one in blocks if "lengths" in program.options else ():
            one.usual_rows = NUM_LINES * USUAL_LENGTH  # type: ignore[assignment]
        self.down, self.up = blocks[: program.num_layers], blocks[program.num_layers :]

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x


def build_unet(program: Program, trouble: Trouble, rank: int) -> Trainee:
    return learn_in_copies(program, trouble, UNet(program, trouble))


CHANNELS = 20


class Convolutions(nn.Module):
    """A U-Net that really computes."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1) for _ in range(2)
        )
        self.middle = nn.ModuleList(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(program.num_layers)
        )
        self.up = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(CHANNELS, 3, 3, padding=1)
        self.trouble = trouble
        if "aux" in program.options:
            self.aux = nn.Parameter(torch.zeros(program.options["aux"]))
        if "ballast" in program.options:
            self.ballast = nn.Parameter(torch.zeros(program.options["ballast"]))

    def forward(self, x: Tensor) -> Tensor:
        self.trouble.strike("forward")
        x = F.silu(self.first(x))
        kept = []
        for one in self.down:
            kept.append(x)
            x = F.silu(one(x))
        for one in self.middle:
            x = x + F.silu(one(x))
        for one in self.up:
            x = F.silu(one(F.interpolate(x, scale_factor=2.0))) + kept.pop()
        y: Tensor = self.last(x)
        return y + self.ballast.mean() if hasattr(self, "ballast") else y


def build_convolutions(program: Program, trouble: Trouble, rank: int) -> Trainee:
    torch.set_num_threads(program.options.get("threads", 1))
    return learn_in_copies(program, trouble, Convolutions(program, trouble))


# --- FSDP2 ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Blocks, and two layers that belong to none of them."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        self.blocks = make_blocks(program, trouble)
        self.entry, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.entry(x)))  # type: ignore[no-any-return]


def build_mixed(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """The first two blocks gathered together, the last one kept until backward."""
    model = Mixed(program, trouble)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    first, second, *others = model.blocks
    fully_shard([first, second], mp_policy=policy)
    for one in others:
        is_given_back = one is not model.blocks[-1]
        fully_shard(one, mp_policy=policy, reshard_after_forward=is_given_back)
    fully_shard(model, mp_policy=policy)
    return learn(program, trouble, model)


def build_copies(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """Pairs of ranks hold shards and scatter every microbatch's; pairs are summed once a step."""
    mesh = init_device_mesh("cpu", (program.num_ranks // 2, 2), mesh_dim_names=("copies", "shards"))
    model: Any = make_blocks(program, trouble)
    for one in model:
        fully_shard(one, mesh=mesh)
    fully_shard(model, mesh=mesh)

    @contextmanager
    def hold() -> Iterator[None]:
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)

    return learn(program, trouble, model, no_sync=hold)


# --- tensor parallel over scattered sequences ----------------------------------------------------


def build_sequences(program: Program, trouble: Trouble, rank: int) -> Trainee:
    layout = program.layout
    assert layout is not None
    mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    model = make_blocks(program, trouble)
    for one in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(one, mesh["tp"], plan)  # type: ignore[arg-type]

    def finish() -> None:
        if layout.dp > 1:
            sum_over(model, mesh.get_group("dp"))

    return learn(program, trouble, model, finish=finish)


# --- experts -------------------------------------------------------------------------------------


class _Trade(torch.autograd.Function):
    """Rows to other ranks, as many to each as told, and gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: list[int], taken: list[int], group: Any) -> Tensor:
        ctx.given, ctx.taken, ctx.group = given, taken, group
        return _trade(x, given, taken, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _trade(grad, ctx.taken, ctx.given, ctx.group), None, None, None


def _trade(x: Tensor, given: list[int], taken: list[int], group: Any) -> Tensor:
    out = x.new_empty((sum(taken), x.shape[-1]))
    dist.all_to_all_single(out, x.contiguous(), taken, given, group=group)
    return out


TOKENS = 4
"""Of each rank for each expert."""


class Routed(nn.Module):
    """A block of this rank's, then each token's expert, on the rank that has it."""

    def __init__(self, program: Program, dense: Block, group: Any) -> None:
        super().__init__()
        self.dense = dense
        self.group = group
        self.count = dist.get_world_size(group)
        self.padding: dict[int, int] = program.options.get("padding", {})
        usual = TOKENS * self.count
        trouble = dense.trouble
        self.expert = Block(trouble, program.layer_ms, is_first=False, usual_rows=usual)

    def forward(self, x: Tensor) -> Tensor:
        given = [TOKENS + self.padding.get(one, 0) for one in range(self.count)]
        told = torch.tensor(given)
        came = torch.empty_like(told)
        dist.all_to_all_single(came, told, group=self.group)
        taken = came.tolist()
        y = _Trade.apply(self.dense(x), given, taken, self.group)  # type: ignore[no-untyped-call]
        return _Trade.apply(self.expert(y), taken, given, self.group)  # type: ignore[no-any-return,no-untyped-call]


def build_experts(program: Program, trouble: Trouble, rank: int) -> Trainee:
    layout = program.layout
    assert layout is not None
    group = make_groups(layout, "ep")
    model = nn.Sequential(*(Routed(program, one, group) for one in make_blocks(program, trouble)))
    rows = TOKENS * layout.ep + sum(program.options.get("padding", {}).values())

    def step(batch: Tensor) -> None:
        take_loss(model(batch[:1].expand(rows, HIDDEN)), trouble).backward()

    # Weights of experts differ; that all are summed is wrong for learning, and the same traffic.
    return Trainee(model=model, train=step, finish=lambda: sum_over(model))


# --- a momentum encoder --------------------------------------------------------------------------


class Keys(nn.Module):
    """Follows the encoder that learns."""

    def __init__(self, program: Program, trouble: Trouble) -> None:
        super().__init__()
        torch.manual_seed(16)
        self.block = Block(trouble, program.options["keys"], is_first=False)
        self.trouble = trouble

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.trouble.strike("keys")
        mine = F.normalize(self.block(x), dim=-1)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts)


def build_momentum(program: Program, trouble: Trouble, rank: int) -> Trainee:
    model = wrap(program, make_blocks(program, trouble))
    keys = Keys(program, trouble).requires_grad_(False)
    followed = list(model.module[-1].parameters())

    def step(batch: Tensor) -> None:
        told = F.normalize(model(batch), dim=-1) @ keys(batch).T
        F.cross_entropy(told / 0.2, torch.arange(len(batch)) + rank * len(batch)).backward()

    @torch.no_grad()
    def follow() -> None:
        for mine, one in zip(keys.block.parameters(), followed, strict=True):
            mine.lerp_(one, 0.01)

    return Trainee(model=model, train=step, settle=follow)


# --- blocks held by ranks ------------------------------------------------------------------------


def build_owned(program: Program, trouble: Trouble, rank: int) -> Trainee:
    """Gradients of a block go to the rank that holds it, and its new weights come from there."""
    model = make_blocks(program, trouble)
    parts = [list(one.parameters()) for one in model]

    def send() -> None:
        for number, part in enumerate(parts):
            owner = number % program.num_ranks
            held = [one.grad for one in part if one.grad is not None]
            flat = torch.cat([one.flatten() for one in held])
            dist.reduce(flat, dst=owner)
            if rank == owner:
                put_back(flat / program.num_ranks, held)
                continue
            for one in part:
                one.grad = None

    @torch.no_grad()
    def fetch() -> None:
        for number, part in enumerate(parts):
            flat = torch.cat([one.flatten() for one in part])
            dist.broadcast(flat, src=number % program.num_ranks)
            put_back(flat, list(part))

    return learn(program, trouble, model, finish=send, settle=fetch)


# --- statistics of batches -----------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """Of all ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Normed(nn.Module):
    """A block whose input is normed by the rows of all ranks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        told = torch.stack([x.mean(dim=0), x.square().mean(dim=0)])
        mean, square = _Sum.apply(told) / dist.get_world_size()  # type: ignore[no-untyped-call]
        return self.inner((x - mean) * (square - mean.square() + 1e-3).rsqrt())  # type: ignore[no-any-return]


def build_normed(program: Program, trouble: Trouble, rank: int) -> Trainee:
    inner = nn.Sequential(*(Normed(one) for one in make_blocks(program, trouble)))
    return learn_in_copies(program, trouble, inner)


# --- heads exchanged for sequences ---------------------------------------------------------------


class Turned(nn.Module):
    """Every rank has a part of the sequence; for attention it has all of it, of some heads."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner = inner
        self.group = group
        self.count = dist.get_world_size(group)

    def turn(self, x: Tensor) -> Tensor:
        given = [len(x) // self.count] * self.count
        return _Trade.apply(x, given, given, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        rows, heads = len(x), HIDDEN // self.count
        parts = x.view(rows, self.count, heads).transpose(0, 1)
        whole = self.turn(parts.reshape(self.count * rows, heads))
        back = self.turn(torch.softmax(whole @ whole.T, dim=-1) @ whole)
        seen = back.view(self.count, rows, heads).transpose(0, 1)
        return self.inner(x + seen.reshape(rows, HIDDEN))  # type: ignore[no-any-return]


def build_turned(program: Program, trouble: Trouble, rank: int) -> Trainee:
    layout = program.layout
    assert layout is not None
    group = make_groups(layout, "cp")
    model = nn.Sequential(*(Turned(one, group) for one in make_blocks(program, trouble)))
    return learn(program, trouble, model, finish=lambda: sum_over(model))


# --- adapters ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A block that does not learn, behind a small layer that does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.narrow = nn.Linear(HIDDEN, 2, bias=False)
        self.widen = nn.Linear(2, HIDDEN, bias=False)
        self.inner = inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.widen(self.narrow(x)))  # type: ignore[no-any-return]


def build_adapters(program: Program, trouble: Trouble, rank: int) -> Trainee:
    inner = nn.Sequential(*(Adapted(one) for one in make_blocks(program, trouble)))
    return learn_in_copies(program, trouble, inner)


# --- a GAN ---------------------------------------------------------------------------------------


def train_gan(program: Program, run_dir: Path, rank: int) -> None:
    """Two models, two optimizers; faults are the generator's."""
    trouble, none = Trouble(program, rank), Trouble(replace(program, delays=()), rank)
    maker = wrap(program, make_blocks(program, trouble))
    judge = Block(none, program.options["critic"], is_first=False)
    critic = wrap(program, nn.Sequential(judge, nn.Linear(HIDDEN, 1)))
    making = SlowAdamW(maker.parameters(), trouble, program.optimizer_ms)
    judging = SlowAdamW(critic.parameters(), none, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach([maker, critic], [making, judging])
    batches = iter(load(program, trouble, rank))
    for step in range(program.num_steps):
        trouble.step = step
        batch = next(batches)
        made = maker(batch.roll(1, 0))
        told = critic(torch.cat([batch, made.detach()]))
        real, false = told.chunk(2)
        (F.softplus(-real) + F.softplus(false)).mean().backward()
        judging.step()
        judging.zero_grad()
        critic.requires_grad_(False)
        F.softplus(-critic.module(made)).mean().backward()
        critic.requires_grad_(True)
        collect_all(trouble, "gc")
        trouble.strike("pause")
        making.step()
        making.zero_grad()
        do_after_step(program, trouble, maker, batch, rank, told)
    recorder.close()


# --- rollouts and updates ------------------------------------------------------------------------

NUM_UPDATES = 2


def train_rollouts(program: Program, run_dir: Path, rank: int) -> None:
    """A step is a rollout and two updates from it; the program marks steps, and three phases."""
    trouble, world = Trouble(program, rank), program.options["rollout"] / 1e3
    model = wrap(program, make_blocks(program, trouble))
    optimizer = SlowAdamW(model.parameters(), trouble, program.optimizer_ms)
    recorder = meshscope.start(run_dir)
    recorder.attach(model, optimizer)
    for step in range(program.num_steps):
        trouble.step = step
        with recorder.step(step):
            with recorder.phase("rollout"):
                time.sleep(world)
                trouble.strike("rollout")
                seen = torch.randn(8, HIDDEN)
            with recorder.phase("advantage"):
                trouble.strike("advantage")
                dist.all_reduce(torch.stack([seen.mean(), seen.square().mean()]))
            for _ in range(NUM_UPDATES):
                take_loss(model(seen), trouble).backward()
                optimizer.step()
                optimizer.zero_grad()
        do_after_step(program, trouble, model, seen, rank, torch.zeros(()))
    recorder.close()


# --- one rank that updates for all ---------------------------------------------------------------


def train_central(program: Program, run_dir: Path, rank: int) -> None:
    """The last rank gathers all gradients and sends new weights; the program marks its phases."""
    trouble, count = Trouble(program, rank), program.num_ranks
    server = count - 1
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
                loss = take_loss(model(batch), trouble)
            with recorder.phase("backward"):
                loss.backward()
            held = [one.grad for one in model.parameters() if one.grad is not None]
            flat = torch.cat([one.flatten() for one in held])
            with recorder.phase("collect"):
                parts = [torch.empty_like(flat) for _ in range(count)] if rank == server else None
                dist.gather(flat, parts, dst=server)
            with recorder.phase("update"):
                if parts is not None:
                    put_back(torch.stack(parts).mean(dim=0), held)
                    optimizer.step()
                    trouble.strike("update")
            with recorder.phase("spread"):
                weights = torch.cat([one.detach().flatten() for one in model.parameters()])
                dist.broadcast(weights, src=server)
                put_back(weights, list(model.parameters()))
            optimizer.zero_grad()
        do_after_step(program, trouble, model, batch, rank, loss)
    recorder.close()


BUILDERS: dict[str, Callable[[Program, Trouble, int], Trainee]] = {
    "unet": build_unet,
    "convolutions": build_convolutions,
    "mixed": build_mixed,
    "copies": build_copies,
    "sequences": build_sequences,
    "experts": build_experts,
    "momentum": build_momentum,
    "owned": build_owned,
    "normed": build_normed,
    "turned": build_turned,
    "adapters": build_adapters,
}
PROGRAMS: dict[str, Callable[[Program, Path, int], None]] = {
    "gan": train_gan,
    "rollouts": train_rollouts,
    "central": train_central,
    "stages": SCRIPTS["stages"],
}
