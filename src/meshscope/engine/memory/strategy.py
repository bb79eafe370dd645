"""Memory strategies: what a stage keeps between forward and backward, and what that costs.

    strategy = make_memory_strategy("extreme", offload_dir=folder, device=device, num_in_flight=4)
    strategy.prepare(stage)                                   # before fully_shard and compile
    executor = PipelineExecutor(…, forward_context=strategy.forward_context)
    ...
    strategy.statistics                                       # bytes and time so far
    strategy.close()

    basic         keeps everything
    standard      keeps each layer's input; backward runs the layer again
    aggressive    keeps the inputs of segments of layers; backward runs a segment again, keeping the
                  inputs of attentions and MLPs, then each of these; head and loss in chunks
    extreme       as aggressive, and what is kept waits on disk
    cpu_offload   recomputes nothing; what autograd saves waits in pinned host memory

Gradients are those of basic: recomputed tensors have the same bits, and only the chunks of the
head add in another order. Under zero-bubble schedules recomputation is part of I, and what linear
layers keep from I to W is in memory under every strategy.

Wrong where layers must not be called twice (see `recompute`). A stage without a
`runner`, unlike those of `model` and `user_model`, has its layers recomputed one by one.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshscope.core.config.layer_memory import (
    HOST_WINDOW_BYTES,
    WEIGHT_ON_DISK,
    choose_num_segments,
)
from meshscope.core.schedule import ActionKind, Schedule
from meshscope.core.unavailable import Unavailable, need, or_unavailable
from meshscope.engine.memory.limits import MemoryStrategyName, find_memory_problems
from meshscope.engine.memory.offload import (
    Offloader,
    Packed,
    is_of_parameter,
    refer_to_storage,
)
from meshscope.engine.memory.recompute import (
    Recompute,
    RecomputeTimer,
    StageRunner,
)
from meshscope.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatistics:
    """Totals of all forwards with gradients so far."""

    num_forwards: int
    """Stage forwards; one for each microbatch and stage."""
    basic_bytes: int | Unavailable
    """What basic would have kept until backward, added up over the forwards."""
    kept_bytes: int | Unavailable
    """What was kept in the device's memory instead; without what is on its way to or from disk."""
    written_bytes: int
    """To disk or to host memory."""
    read_bytes: int
    recompute_ns: int
    """In backward; on CUDA of the device, of what it has finished."""
    wait_ns: int
    """Time in which forward or backward waited for writes or reads."""

    @property
    @or_unavailable
    def saved_bytes(self) -> int:
        """What basic would have kept and this did not."""
        return need(self.basic_bytes) - need(self.kept_bytes)


def make_memory_strategy(
    name: str,
    *,
    device: torch.device | str = "cpu",
    offload_dir: Path | str | None = None,
    num_in_flight: int = 1,
    num_segments: int | None = None,
    needed_bytes: int | None = None,
) -> "MemoryStrategy":
    """Raises UsageError with every problem.

    `num_in_flight`: the most forwards of a stage that wait for their backwards at once; from it
    follows in how many segments layers are recomputed, if `num_segments` does not say it.
    """
    problems = find_memory_problems(
        name, torch.device(device).type, offload_dir=offload_dir, needed_bytes=needed_bytes
    )
    for what, number in (("num_in_flight", num_in_flight), ("num_segments", num_segments)):
        if number is not None and number < 1:
            problems.append(f"{what} is {number}, expected at least 1")
    if problems:
        raise UsageError("; ".join(problems))
    device = torch.device(device)
    offloader = None
    weight: float = num_in_flight
    if name == MemoryStrategyName.EXTREME:
        weight = WEIGHT_ON_DISK
        folder = Path(str(offload_dir))
        folder.mkdir(parents=True, exist_ok=True)
        offloader = Offloader(device, folder=folder)
    elif name == MemoryStrategyName.CPU_OFFLOAD:
        offloader = Offloader(
            device, max_waiting_bytes=HOST_WINDOW_BYTES, ahead_bytes=HOST_WINDOW_BYTES
        )
    return MemoryStrategy(
        MemoryStrategyName(name),
        device,
        offloader,
        choose_segments=(
            partial(choose_num_segments, num_in_flight=weight)
            if num_segments is None
            else lambda _: num_segments
        ),
    )


_RECOMPUTES: Mapping[MemoryStrategyName, Recompute] = {
    MemoryStrategyName.BASIC: Recompute.NOTHING,
    MemoryStrategyName.STANDARD: Recompute.LAYERS,
    MemoryStrategyName.AGGRESSIVE: Recompute.SEGMENTS,
    MemoryStrategyName.EXTREME: Recompute.SEGMENTS,
    MemoryStrategyName.CPU_OFFLOAD: Recompute.NOTHING,
}


class MemoryStrategy:
    """One strategy for the stages of one process."""

    def __init__(
        self,
        name: MemoryStrategyName,
        device: torch.device,
        offloader: Offloader | None,
        choose_segments: Callable[[int], int],
    ) -> None:
        self.name = name
        self.recompute = _RECOMPUTES[name]
        self._offloader = offloader
        self._choose_segments = choose_segments
        self._observer = _Observer(device)

    def prepare(self, stage: nn.Module) -> None:
        """Once for each stage, before it is sharded; parameters keep their names."""
        if self.name is MemoryStrategyName.BASIC:
            return
        layers = stage.layers
        if not isinstance(layers, nn.ModuleDict):
            raise UsageError(
                f"{type(stage).__name__}.layers is {type(layers).__name__}, expected nn.ModuleDict"
            )
        self._observer.watch(stage)
        if self.recompute is Recompute.NOTHING:
            return
        if not isinstance(getattr(stage, "runner", None), StageRunner):
            self._prepare_each(layers)
            return
        runner = StageRunner(
            self.recompute,
            num_segments=self._choose_segments(len(layers)),
            # Layers of ours draw no random numbers, those of users may.
            keeps_random_state=not all(hasattr(layer, "runner") for layer in layers.values()),
            observer=self._observer,
        )
        for owner in (stage, *layers.values()):
            if isinstance(getattr(owner, "runner", None), StageRunner):
                owner.runner = runner  # type: ignore[assignment]  # a module takes any attribute

    def _prepare_each(self, layers: nn.ModuleDict) -> None:
        runner = StageRunner(Recompute.LAYERS, observer=self._observer)
        for layer in layers.values():
            layer.forward = partial(_run_one, runner, layer.forward)

    def forward_context(self) -> AbstractContextManager[None]:
        """Enter it around every forward of a stage, inside or outside of autocast."""
        return nullcontext() if self._offloader is None else self._offloader.around_forward()

    def follow(self, schedule: Schedule, rank: int) -> None:
        """Optional: sets the order of backwards, for reading ahead."""
        if self._offloader is None:
            return
        row = schedule.actions[rank]
        forwards = [(a.stage, a.microbatch) for a in row if a.kind is ActionKind.FORWARD]
        kinds = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
        order = [forwards.index((a.stage, a.microbatch)) for a in row if a.kind in kinds]
        self._offloader.expect_backwards(order)

    @property
    def statistics(self) -> MemoryStatistics:
        """What has been measured so far."""
        observer, offloader = self._observer, self._offloader
        unmeasured = None
        if self.name is MemoryStrategyName.BASIC:
            unmeasured = Unavailable("basic does not look at what autograd keeps")
        elif _read_top_hooks is None:
            unmeasured = Unavailable("this torch does not tell which saved-tensor hooks are set")
        return MemoryStatistics(
            num_forwards=observer.num_forwards,
            basic_bytes=unmeasured or observer.basic_bytes,
            kept_bytes=unmeasured or observer.kept_bytes,
            written_bytes=0 if offloader is None else offloader.written_bytes,
            read_bytes=0 if offloader is None else offloader.read_bytes,
            recompute_ns=observer.timer.read_ns(),
            wait_ns=0 if offloader is None else offloader.wait_ns,
        )

    def close(self) -> None:
        """Ends threads and frees files. Graphs that still need a backward cannot be used."""
        if self._offloader is not None:
            self._offloader.close()


def _run_one(runner: StageRunner, forward: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return runner.run_layers([forward], *arguments)


# --- what would be kept, and what is --------------------------------------------------------------


def _find_top_hooks_reader() -> Any:
    """Not public, but the only way to look at what is saved under a checkpoint's own hooks."""
    reader: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    try:
        return reader if reader is not None and reader(False) is None else None
    except TypeError:  # other parameters than those known here
        return None


_read_top_hooks = _find_top_hooks_reader()


class _UniqueBytes:
    """Adds up storages, each once; does not keep them."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: dict[int, Any] = {}

    def add(self, x: Tensor) -> None:
        reference = refer_to_storage(x)
        if reference.cdata not in self._seen:
            self._seen[reference.cdata] = reference
            self.total += x.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class _Count:
    """Counts of one forward."""

    basic: _UniqueBytes
    kept: _UniqueBytes


class _Observer:
    """Measures the first forward of each shape and stage, and counts the others alike."""

    def __init__(self, device: torch.device) -> None:
        self.timer = RecomputeTimer(device)
        self.num_forwards = 0
        self.basic_bytes = 0
        self.kept_bytes = 0
        self._counts: dict[Any, _Count] = {}
        self._counting: _Count | None = None
        self._current: Any = None
        self._is_input = False
        self._hooks = ExitStack()

    def watch(self, stage: nn.Module) -> None:
        stage.register_forward_pre_hook(self._begin)
        stage.register_forward_hook(self._end, always_call=True)

    def _begin(self, stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        is_cast = any(torch.is_autocast_enabled(x.device.type) for x in tensors)
        self._current = (id(stage), is_cast, *((x.shape, x.dtype) for x in tensors))
        if self._current not in self._counts and _read_top_hooks is not None:
            self._counting = _Count(_UniqueBytes(), _UniqueBytes())
            self._hooks.enter_context(self._count_saved(is_kept=True))

    def _end(self, *_: object) -> None:
        if self._current is None:
            return
        self._hooks.close()
        if self._counting is not None:
            self._counts[self._current] = self._counting
        self.num_forwards += 1
        if self._current in self._counts:
            count = self._counts[self._current]
            self.basic_bytes += count.basic.total
            self.kept_bytes += count.kept.total
        self._counting = self._current = None

    def before_checkpoint(self) -> None:
        self._is_input = True

    def in_forward(self) -> AbstractContextManager[object]:
        return _Entering(self) if self._counting is not None else nullcontext()

    def in_recompute(self) -> AbstractContextManager[object]:
        return self.timer

    def enter_part(self) -> AbstractContextManager[object]:
        """Inputs have been saved; what follows is what basic would keep."""
        self._is_input = False
        return self._count_saved(is_kept=False)

    def _count_saved(self, *, is_kept: bool) -> AbstractContextManager[object]:
        """Looks at what is saved, and leaves it to the hooks that were there before."""
        hooks = _read_top_hooks(False)
        pack, unpack = hooks if hooks is not None else (torch.detach, lambda x: x)

        def count_and_pack(x: Tensor) -> Any:
            packed = pack(x)
            count = self._counting
            if count is None or type(x) is not Tensor or is_of_parameter(x):
                return packed
            if not self._is_input:
                count.basic.add(x)
            if is_kept and not isinstance(packed, Packed):
                count.kept.add(x)
            return packed

        return saved_tensors_hooks(count_and_pack, unpack)


class _Entering:
    """A context whose inside is made when it is entered: above the checkpoint's own hooks."""

    def __init__(self, observer: _Observer) -> None:
        self._observer = observer
        self._inside = ExitStack()

    def __enter__(self) -> None:
        self._inside.enter_context(self._observer.enter_part())

    def __exit__(self, *_: object) -> None:
        self._inside.close()
