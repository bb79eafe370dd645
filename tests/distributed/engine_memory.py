"""Trains models under every memory strategy, and writes gradients' differences and memory's peaks.

    python -m tests.distributed.engine_memory FOLDER

Leaves `FOLDER/<rank>.json` with what each of two ranks found: as two pipeline stages under several
schedules, as tensor-parallel halves, and under FSDP2. The known answers are one process's.
"""

import json
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.fork_ranks import import_everything, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshscope.core.schedule import count_peak_activations
from meshscope.core.schedule_builders import build_schedule
from meshscope.engine import (
    ModelConfig,
    build_stage,
    find_parameter_shards,
    gather_parameter,
    reduce_sequence_parallel_gradients,
)
from meshscope.engine.memory.strategy import MemoryStrategy, make_memory_strategy
from meshscope.engine.model.transformer import IGNORED_TARGET
from meshscope.engine.pipeline.pipeline import Microbatch, PipelineExecutor

STRATEGIES = ("basic", "standard", "aggressive", "extreme")
MEASURED_SCHEDULES = ("1f1b", "zb_h1")
NUM_RANKS = 2
NUM_MICROBATCHES = 4
MICROBATCH_SIZE = 2
SEED = 5
CONFIG = ModelConfig(
    vocab_size=307,  # no multiple of 2, and more than an MLP is wide: the loss has 4 chunks
    num_layers=8,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    sequence_length=50,
    tie_embeddings=True,
    init_std=0.14,
)


class TensorPeak(TorchDispatchMode):
    """The most bytes that tensors had at once: those given, and all that is made inside."""

    def __init__(self, existing: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()
        for tensor in existing:
            self._add(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        made = function(*arguments, **(keywords or {}))
        for value in tree_iter(made):
            if isinstance(value, Tensor):
                self._add(value)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._seen:
            self._seen.add(address)
            weakref.finalize(storage, self._remove, address, storage.nbytes())
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self.live_bytes -= num_bytes


def make_microbatches() -> list[Microbatch]:
    """With targets to be ignored, not equally many in each."""
    shape = (NUM_MICROBATCHES, MICROBATCH_SIZE, CONFIG.sequence_length + 1)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    microbatches = []
    for index, part in enumerate(tokens):
        targets = part[:, 1:].clone()
        targets[0, : 5 * index] = IGNORED_TARGET
        microbatches.append((part[:, :-1], targets))
    return microbatches


@contextmanager
def strategy_in(folder: Path, name: str, stages: Sequence[nn.Module], **options: Any) -> Any:
    strategy = make_memory_strategy(name, offload_dir=folder / "activations", **options)
    for stage in stages:
        names = list(stage.state_dict())
        strategy.prepare(stage)
        assert list(stage.state_dict()) == names
    try:
        yield strategy
    finally:
        strategy.close()


def train_reference() -> dict[str, Any]:
    """The mean loss's gradients on one process, with nothing recomputed."""
    model = build_stage(CONFIG, seed=SEED)
    losses = [model(*microbatch) for microbatch in make_microbatches()]
    torch.stack(losses).mean().backward()
    return {
        "losses": [loss.item() for loss in losses],
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
    }


def compare(
    stages: Sequence[nn.Module],
    losses: Sequence[Tensor],
    reference: dict[str, Any],
    read: Callable[[nn.Module, str, nn.Parameter], Tensor],
) -> dict[str, Any]:
    """The largest differences, of gradients relative to the parameter's largest one."""
    worst, worst_name = 0.0, ""
    for stage in stages:
        for name, parameter in stage.named_parameters():
            expected = reference["gradients"][tied_name(name)]
            difference = (read(stage, name, parameter) - expected).abs().max()
            relative = (difference / expected.abs().max()).item()
            if not relative <= worst:  # nan is a difference as well
                worst, worst_name = relative, name
    expected_losses = reference["losses"] if losses else []
    return {
        "gradient_difference": worst,
        "worst_gradient": worst_name,
        "loss_difference": max(
            (abs(a.item() - b) for a, b in zip(losses, expected_losses, strict=True)), default=0.0
        ),
    }


def tied_name(name: str) -> str:
    return "token_embedding.weight" if name == "head.weight" else name


# --- pipeline -------------------------------------------------------------------------------------


def run_pipeline(
    schedule_name: str,
    strategy_name: str,
    folder: Path,
    reference: dict[str, Any],
    *,
    is_cast: bool = False,
) -> dict[str, Any]:
    """Two steps, so that the second has gradients to add to; its peak is the one that counts."""
    rank, world = dist.get_rank(), dist.group.WORLD
    schedule = build_schedule(schedule_name, NUM_RANKS, NUM_MICROBATCHES)
    stages = {
        index: build_stage(CONFIG, index, schedule.num_stages, seed=SEED)
        for index in schedule.stages_of(rank)
    }
    in_flight = count_peak_activations(schedule)[rank]
    with strategy_in(folder, strategy_name, list(stages.values()), num_in_flight=in_flight) as s:
        s.follow(schedule, rank)
        executor = PipelineExecutor(
            schedule,
            stages,
            world,
            hidden_shape=(MICROBATCH_SIZE, CONFIG.sequence_length, CONFIG.hidden_size),
            forward_context=lambda: enter_both(s, is_cast=is_cast),
        )
        executor.run_step(make_microbatches())
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        for parameter in parameters:
            parameter.grad.zero_()
        with TensorPeak([*parameters, *(p.grad for p in parameters)]) as peak:
            losses = executor.run_step(make_microbatches())
        sum_tied(list(stages.values()))
        found = compare(list(stages.values()), losses, reference, lambda _s, _n, p: p.grad)
        return found | {
            "peak_bytes": peak.peak_bytes,
            "left_bytes": peak.live_bytes - sum(2 * p.nbytes for p in parameters),
            "num_stages": len(stages),
            "statistics": describe(s),
        }


def enter_both(strategy: MemoryStrategy, *, is_cast: bool) -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(strategy.forward_context())
    # The hidden states between stages stay in float32: they are sums of residuals.
    stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=is_cast))
    return stack


def sum_tied(stages: Sequence[nn.Module]) -> None:
    tied = [stage.tied_weight for stage in stages if stage.tied_weight is not None]
    if tied:
        total = torch.stack([weight.grad for weight in tied]).sum(0)
        if len(tied) == 1:
            dist.all_reduce(total)
        for weight in tied:
            weight.grad.copy_(total)


def describe(strategy: MemoryStrategy) -> dict[str, Any]:
    statistics = strategy.statistics
    return {
        "num_forwards": statistics.num_forwards,
        "saved_bytes": statistics.saved_bytes if strategy.name != "basic" else 0,
        "written_bytes": statistics.written_bytes,
        "read_bytes": statistics.read_bytes,
        "recompute_ns": statistics.recompute_ns,
    }


# --- tensor parallel and FSDP2 --------------------------------------------------------------------


def run_tensor_parallel(
    strategy_name: str, folder: Path, reference: dict[str, Any], *, sequence_parallel: bool
) -> dict[str, Any]:
    world = dist.group.WORLD
    stage = build_stage(CONFIG, tp_group=world, sequence_parallel=sequence_parallel, seed=SEED)
    shards = find_parameter_shards(stage)

    def read(_: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
        return gather_parameter(parameter.grad, shards[name], world)

    with strategy_in(folder, strategy_name, [stage]) as strategy:
        losses = []
        for inputs, targets in make_microbatches():
            with strategy.forward_context():
                # As the engine calls it, to average over unequal microbatches.
                num_targets = (targets != IGNORED_TARGET).sum()
                loss = stage(inputs, targets, num_targets)
            (loss / NUM_MICROBATCHES).backward()
            losses.append(loss.detach())
        reduce_sequence_parallel_gradients(stage, world)
        return compare([stage], losses, reference, read)


def run_fsdp(strategy_name: str, folder: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """Both ranks see the same microbatches, so that the mean over them is one process's."""
    stage = build_stage(CONFIG, seed=SEED)
    with strategy_in(folder, strategy_name, [stage]) as strategy:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in stage.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(stage, mesh=mesh)
        losses = []
        for inputs, targets in make_microbatches():
            with strategy.forward_context():
                loss = stage(inputs, targets)
            (loss / NUM_MICROBATCHES).backward()
            losses.append(loss.detach())
        return compare([stage], losses, reference, lambda _s, _n, p: p.grad.full_tensor())


# --- the runs -------------------------------------------------------------------------------------


def run_cases(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        reference = train_reference()
        found: dict[str, Any] = {}
        for name in STRATEGIES:
            for schedule in MEASURED_SCHEDULES:
                found[f"{schedule}, {name}"] = run_pipeline(schedule, name, folder, reference)
        for name in ("basic", "extreme"):
            found[f"1f1b, bf16, {name}"] = run_pipeline(
                "1f1b", name, folder, reference, is_cast=True
            )
        found["zb_v, extreme"] = run_pipeline("zb_v", "extreme", folder, reference)
        for name, is_sp in (("aggressive", False), ("extreme", True)):
            found[f"tp, {name}"] = run_tensor_parallel(
                name, folder, reference, sequence_parallel=is_sp
            )
        for name in ("standard", "extreme"):
            found[f"fsdp, {name}"] = run_fsdp(name, folder, reference)
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")

    return job


def main(folder: Path) -> None:
    import_everything()
    exit_codes = run_ranks(run_cases(folder), NUM_RANKS)
    if any(exit_codes):
        sys.exit(f"ranks ended with {exit_codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
