"""The training programs that `nccl_*.py` run: plain torch and the engine, one rank and several.

A `Program` builds a `Training` on every rank; `step` does one step, `attach` and `detach` put a
recorder in and take it out. Faults act at moments of a step, on some ranks and in some steps.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from nccl_bench import Place, Task
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, IterableDataset

import meshscope
from meshscope.capture.recorder import Recorder
from meshscope.core.layout import Layout

NUM_BATCHES = 4


# --- faults ----------------------------------------------------------------------------------


class Moment(StrEnum):
    """Where in a step a fault acts."""

    FETCH = "fetch"
    """In the loader's iterator."""
    BEFORE_FORWARD = "before forward"
    IN_FORWARD = "in forward"
    """At the middle block."""
    BEFORE_BACKWARD = "before backward"
    IN_BACKWARD = "in backward"
    """At the middle block."""
    BEFORE_OPTIMIZER = "before optimizer"
    IN_OPTIMIZER = "in optimizer"
    """At the end of its step."""
    AFTER_OPTIMIZER = "after optimizer"
    IN_MATRICES = "in matrices"
    """After every linear layer, forward and backward: `act` gets it through `training.linear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something done to a program; not all of it is wrong (a checkpoint is not)."""

    moment: Moment
    act: Callable[["Training"], None]
    ranks: tuple[int, ...] | None = None
    """None: all."""
    every: int = 1
    since: int = 0
    """Its first step."""
    until: int | None = None
    """The step before which it ends."""
    phase: str = ""
    """What people call it, if it is a part of training: `checkpoint`, `eval`."""

    def strikes(self, step: int) -> bool:
        is_time = self.since <= step and (self.until is None or step < self.until)
        return is_time and step % self.every == self.every - 1


# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    layers: int = 4
    width: int = 512
    words: int = 4096
    length: int = 1024
    batch: int = 16

    def shrink(self) -> "Size":
        """For a CPU, where only the path counts."""
        return replace(self, width=32, words=64, length=32, batch=min(self.batch, 8))


SHARED = Size()
"""Several ranks on one GPU: 17 million parameters, a DDP step of about 60 ms on 4 ranks."""
SHARED_TP = Size(length=512, batch=8)
"""The same, where activations are communicated."""
SHORT = Size(layers=10, width=768, words=16384)
"""About 25 ms on an H200 of its own."""
LONG = Size(layers=24, width=1024, words=32768)
"""About 100 ms."""
TINY = Size(layers=12, width=128, words=512, length=64, batch=2)
"""The host needs longer to launch it than the device to compute it."""
COMPILED = Size(layers=2, width=768, words=16384)
"""Few layers: compiling is quick."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 8, width // 8).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def measure_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


class Gpt(nn.Module):
    """Gives its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return measure_loss(self.head(x), tokens)


class GptStage(nn.Module):
    """The part of one pipeline rank; the last gives logits."""

    def __init__(self, size: Size, sizes: Sequence[int], stage: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width) if stage == 0 else nn.Identity()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(sizes[stage]))
        is_last = stage == len(sizes) - 1
        self.head = nn.Linear(size.width, size.words, bias=False) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# --- a program at work -----------------------------------------------------------------------


class Batches(IterableDataset):
    """The same few batches for ever, through a real loader."""

    def __init__(self, training: "Training", size: Size, seed: int) -> None:
        self.training = training
        generator = torch.Generator().manual_seed(seed)
        shape = (size.batch, size.length)
        made = [
            torch.randint(0, size.words, shape, generator=generator) for _ in range(NUM_BATCHES)
        ]
        self.tokens = [one.pin_memory() for one in made] if training.place.is_cuda else made

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            for tokens in self.tokens:
                self.training.reach(Moment.FETCH)
                yield tokens


class Training:
    """A program on one rank."""

    layout: Layout | None = None
    """Told to the recorder, where a user would have to."""
    block_type: type[nn.Module] = Block
    """Its layers."""

    def __init__(self, place: Place, size: Any) -> None:
        self.place = place
        self.size = size if place.is_cuda else size.shrink()
        self.num_steps = 0
        self.loss: Tensor | None = None
        self.kept: list[Any] = []
        """What faults keep."""
        self.linear: nn.Module | None = None
        """The layer that reached IN_MATRICES."""
        self.is_steady = False
        """Whether shapes stay as they are."""
        self._faults: list[Fault] = []
        self._handles: list[Any] = []
        torch.manual_seed(0)

    # What subclasses have.
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        raise NotImplementedError

    def attach(self, recorder: Recorder) -> None:
        recorder.attach(self.model, self.optimizer)

    def detach(self) -> None:
        """After the recorder is closed."""

    def close(self) -> None:
        self.set_faults(())

    def start_recording(self, folder: Any, **settings: Any) -> Recorder:
        recorder = meshscope.start(folder, layout=self.layout, **settings)
        self.attach(recorder)
        return recorder

    def stop_recording(self, recorder: Recorder) -> dict[str, int]:
        """What the recorder caught and hid, by where."""
        recorder.close()
        self.detach()
        return dict(recorder.guard.counts)

    # Faults.

    def set_faults(self, faults: Sequence[Fault]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.kept.clear()
        rank = self.place.rank
        self._faults = [one for one in faults if one.ranks is None or rank in one.ranks]
        moments = {fault.moment for fault in self._faults}
        if Moment.IN_FORWARD in moments:
            block = self.find_middle_block()
            hook = lambda *_: self.reach(Moment.IN_FORWARD)  # noqa: E731
            self._handles.append(block.register_forward_pre_hook(hook))
        if Moment.IN_BACKWARD in moments:
            block = self.find_middle_block()
            hook = lambda *_: self.reach(Moment.IN_BACKWARD)  # noqa: E731
            self._handles.append(block.register_full_backward_hook(hook))
        if Moment.IN_OPTIMIZER in moments:
            hook = lambda *_: self.reach(Moment.IN_OPTIMIZER)  # noqa: E731
            self._handles.append(self.optimizer.register_step_post_hook(hook))
        if Moment.IN_MATRICES in moments:
            self._hook_matrices()

    def _hook_matrices(self) -> None:
        def reach(linear: nn.Module, *_: Any) -> None:
            self.linear = linear
            self.reach(Moment.IN_MATRICES)

        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                self._handles.append(module.register_forward_hook(reach))
                self._handles.append(module.register_full_backward_hook(reach))

    def find_middle_block(self) -> nn.Module:
        blocks = [one for one in self.model.modules() if isinstance(one, self.block_type)]
        return blocks[len(blocks) // 2]

    def reach(self, moment: Moment) -> None:
        for fault in self._faults:
            if fault.moment is moment and fault.strikes(self.num_steps):
                fault.act(self)

    def autocast(self, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype) if self.place.is_cuda else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a plain loop may have."""

    accumulate: int = 1
    has_scaler: bool = False
    compile_mode: str = ""
    """A mode of torch.compile; empty does not compile."""
    new_length_every: int = 0
    """Steps after which sequences become shorter, so that a compiled model compiles again."""
    bucket_mib: float = 25.0
    """Of DistributedDataParallel."""


Wrap = Callable[[nn.Module, Place, LoopSettings], nn.Module]


class Loop(Training):
    """Forward, backward, optimizer; the wrapped model communicates."""

    def __init__(self, place: Place, size: Size, wrap: Wrap, settings: LoopSettings) -> None:
        super().__init__(place, size)
        self.settings = settings
        self.num_fetched = 0
        """Batches that could change their length."""
        self.model = wrap(Gpt(self.size).to(place.device), place, settings)
        self.run: Callable[[Tensor], Tensor] = self.model
        if settings.compile_mode:
            torch._dynamo.config.cache_size_limit = 1000
            self.model = self.run = self._compile()
        self.optimizer = make_optimizer(self.model)
        self.scaler = torch.amp.GradScaler(place.device.type) if settings.has_scaler else None
        loader = DataLoader(Batches(self, self.size, self._find_seed()), batch_size=None)
        self.batches = iter(loader)

    def _find_seed(self) -> int:
        """Ranks that share a batch have the same."""
        mesh = getattr(self.model, "bench_mesh", None)
        return self.place.rank if mesh is None else mesh.get_local_rank("dp")

    def _compile(self) -> Any:
        mode = self.settings.compile_mode
        is_dynamic = False if self.settings.new_length_every else None
        if not self.place.is_cuda:
            # The path is the same, and there may be no C++ compiler.
            return torch.compile(self.model, backend="aot_eager", dynamic=is_dynamic)
        return torch.compile(self.model, mode=mode, dynamic=is_dynamic)

    def fetch(self) -> Tensor:
        tokens = next(self.batches).to(self.place.device, non_blocking=True)
        every = self.settings.new_length_every
        if not every:
            return tokens
        if not self.is_steady:
            self.num_fetched += 1
        unit = self.size.length // 64 or 1
        cut = unit * (self.num_fetched // every) % (self.size.length // 2)
        return tokens[:, : self.size.length - cut].contiguous()

    def step(self) -> None:
        settings = self.settings
        if settings.compile_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        dtype = torch.float16 if self.scaler is not None else torch.bfloat16
        for _ in range(settings.accumulate):
            tokens = self.fetch()
            self.reach(Moment.BEFORE_FORWARD)
            with self.autocast(dtype):
                self.loss = self.run(tokens) / settings.accumulate
            self.reach(Moment.BEFORE_BACKWARD)
            (self.loss if self.scaler is None else self.scaler.scale(self.loss)).backward()
        self.reach(Moment.BEFORE_OPTIMIZER)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.reach(Moment.AFTER_OPTIMIZER)
        self.num_steps += 1


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One group for each mesh: a fused update takes tensors of one mesh only."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault(None if mesh is None else mesh.mesh_dim_names, []).append(parameter)
    return torch.optim.AdamW([{"params": one} for one in groups.values()], fused=True)


def keep_whole(model: nn.Module, place: Place, settings: LoopSettings) -> nn.Module:
    return model


def wrap_ddp(model: nn.Module, place: Place, settings: LoopSettings) -> nn.Module:
    ids = [place.device.index] if place.is_cuda else None
    return nn.parallel.DistributedDataParallel(
        model, device_ids=ids, bucket_cap_mb=settings.bucket_mib
    )


def wrap_fsdp2(model: nn.Module, place: Place, settings: LoopSettings) -> nn.Module:
    mesh = init_device_mesh(place.device.type, (place.num_ranks,), mesh_dim_names=("dp",))
    return _shard(model, mesh)


def wrap_fsdp2_kept(model: nn.Module, place: Place, settings: LoopSettings) -> nn.Module:
    """What forward gathered is kept for backward."""
    mesh = init_device_mesh(place.device.type, (place.num_ranks,), mesh_dim_names=("dp",))
    return _shard(model, mesh, reshard_after_forward=False)


def wrap_tp_fsdp2(model: nn.Module, place: Place, settings: LoopSettings) -> nn.Module:
    """Tensor parallel in the feed-forward layers, FSDP2 across."""
    shape = (place.num_ranks // 2, 2)
    mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrapped = _shard(model, mesh["dp"])
    wrapped.bench_mesh = mesh
    return wrapped


def _shard(model: nn.Module, mesh: Any, **settings: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


class Pipelined(Training):
    """torch.distributed.pipelining."""

    def __init__(
        self,
        place: Place,
        size: Size,
        stage_layers: Sequence[int],
        num_microbatches: int,
        make_schedule: Callable[..., Any],
    ) -> None:
        super().__init__(place, size)
        self.layout = Layout(pp=place.num_ranks)
        rank, self.is_first, self.is_last = place.rank, place.rank == 0, False
        self.is_last = rank == place.num_ranks - 1
        self.model = GptStage(self.size, stage_layers, rank).to(place.device)
        self.optimizer = make_optimizer(self.model)
        stage = PipelineStage(self.model, rank, place.num_ranks, place.device)
        count = min(num_microbatches, self.size.batch)
        self.schedule = make_schedule(stage, n_microbatches=count, loss_fn=measure_loss)
        loader = DataLoader(Batches(self, self.size, seed=0), batch_size=None)
        self.batches = iter(loader)

    def step(self) -> None:
        tokens = next(self.batches).to(self.place.device, non_blocking=True)
        self.reach(Moment.BEFORE_FORWARD)
        losses: list[Tensor] = []
        with self.autocast():
            if self.is_first:
                self.schedule.step(tokens)
            elif self.is_last:
                self.schedule.step(target=tokens, losses=losses)
            else:
                self.schedule.step()
        self.loss = losses[-1] if losses else None
        self.reach(Moment.BEFORE_OPTIMIZER)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reach(Moment.AFTER_OPTIMIZER)
        self.num_steps += 1


class EngineTraining(Training):
    """`meshscope.engine` in a loop of one's own. It takes its recorder when it is made, so that
    recording is another engine on the same groups."""

    def __init__(
        self, place: Place, size: Size, degrees: dict[str, int], num_microbatches: int, fault: str
    ) -> None:
        super().__init__(place, size)
        from meshscope.engine.mesh import Mesh

        self.config = self._configure(degrees, num_microbatches, fault)
        self.layout = self.config.layout
        self.mesh = Mesh(self.layout, place.device)
        count = self.config.num_microbatches
        shape = (count, self.config.batch.microbatch_size, self.size.length + 1)
        generator = torch.Generator().manual_seed(self.mesh.here.dp)
        self.tokens = torch.randint(0, self.size.words, shape, generator=generator)
        self.engine = self.bare = self._make(None)
        self._use(self.bare)

    def _configure(self, degrees: dict[str, int], num_microbatches: int, fault: str) -> Any:
        from meshscope.core.config.train_config import (
            BatchConfig,
            OptimizerConfig,
            ParallelConfig,
            PrecisionConfig,
            TrainConfig,
        )
        from meshscope.engine import ModelConfig
        from meshscope.engine.faults.text import parse_fault

        size = self.size
        return TrainConfig(
            model=ModelConfig(
                vocab_size=size.words,
                num_layers=size.layers,
                hidden_size=size.width,
                num_heads=8,
                num_kv_heads=8,
                ffn_hidden_size=4 * size.width,
                sequence_length=size.length,
            ),
            device=self.place.device.type,
            parallel=ParallelConfig(**degrees),
            precision=PrecisionConfig(compute="bf16" if self.place.is_cuda else "fp32"),
            batch=BatchConfig(
                microbatch_size=max(1, size.batch // num_microbatches),
                num_microbatches=num_microbatches,
            ),
            optimizer=OptimizerConfig(learning_rate=1e-3),
            faults=(parse_fault(fault),) if fault else (),
        )

    def _make(self, recorder: Recorder | None) -> Any:
        from meshscope.engine import Engine

        return Engine(self.config, mesh=self.mesh, device=self.place.device, recorder=recorder)

    def _use(self, engine: Any) -> None:
        self.engine = engine
        self.model = nn.ModuleList(engine.stages.values())
        self.optimizer = engine.optimizer

    def attach(self, recorder: Recorder) -> None:
        self._use(self._make(recorder))

    def detach(self) -> None:
        self.engine.close()
        self._use(self.bare)

    def close(self) -> None:
        super().close()
        self.bare.close()

    def read(self) -> Tensor:
        self.reach(Moment.FETCH)
        return self.tokens

    def step(self) -> None:
        self.engine.train_step(self.read)
        self.reach(Moment.AFTER_OPTIMIZER)
        self.num_steps += 1


# --- the list --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training program and how many ranks it takes."""

    name: str
    num_ranks: int
    make: Callable[[Place], Training]
    faults: tuple[Fault, ...] = ()
    """What it always does besides training."""
    period: int = 1
    """Steps after which it has done everything that it does."""
    recompiles: bool = False

    @property
    def task(self) -> Task:
        return Task(name=self.name, num_ranks=self.num_ranks)

    def build(self, place: Place) -> Training:
        training = self.make(place)
        training.set_faults(self.faults)
        return training

    @property
    def phases(self) -> list[str]:
        """What it does besides training, in words."""
        named = [fault.phase for fault in self.faults if fault.phase]
        return [*named, *(["compile"] if self.recompiles else [])]

    def limit(self, training: Training, phases: Sequence[str]) -> None:
        """From now on it does only these of its phases."""
        kept = [fault for fault in self.faults if not fault.phase or fault.phase in phases]
        training.set_faults(kept)
        training.is_steady = "compile" not in phases


def plain(name: str, size: Size, *, faults: Sequence[Fault] = (), **settings: Any) -> Program:
    """One process without torch.distributed."""
    chosen = LoopSettings(**settings)
    return Program(
        name=name,
        num_ranks=1,
        make=lambda place: Loop(place, size, keep_whole, chosen),
        faults=tuple(faults),
        period=max([chosen.new_length_every, 1, *(fault.every for fault in faults)]),
        recompiles=chosen.new_length_every > 0,
    )


def wrapped(
    name: str, wrap: Wrap, *, size: Size = SHARED, num_ranks: int = 4, **settings: Any
) -> Program:
    chosen = LoopSettings(**settings)
    return Program(
        name=name, num_ranks=num_ranks, make=lambda place: Loop(place, size, wrap, chosen)
    )


def pipelined(
    name: str,
    *,
    stage_layers: tuple[int, ...] = (2, 2, 2, 2),
    num_microbatches: int = 8,
    size: Size = SHARED,
    make_schedule: Callable[..., Any] = Schedule1F1B,
) -> Program:
    whole = replace(size, layers=sum(stage_layers))
    return Program(
        name=name,
        num_ranks=len(stage_layers),
        make=lambda place: Pipelined(place, whole, stage_layers, num_microbatches, make_schedule),
    )


def engine(
    name: str, *, size: Size = SHARED, num_microbatches: int = 1, fault: str = "", **degrees: int
) -> Program:
    return Program(
        name=name,
        num_ranks=math.prod(degrees.values()),
        make=lambda place: EngineTraining(place, size, degrees, num_microbatches, fault),
    )
