"""Trains models in pipeline stages and whole, and writes how far they differ.

    python -m tests.distributed.engine_pipeline FOLDER

Leaves `FOLDER/<ranks>_<rank>.json` with what each rank of 2 and of 4 found for every case, and
`FOLDER/raise_<rank>.json` with what became of ranks one of which raised in the middle of a step.
"""

import dataclasses
import json
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tests.distributed.fork_ranks import import_everything, run_ranks
from tests.distributed.one_process import (
    CONFIGS,
    LEARNING_RATE,
    LLAMA,
    MICROBATCH_SIZE,
    MOMENTUM,
    SEED,
    Reference,
    make_microbatches,
    train_reference,
    train_references,
)
from torch import Tensor, nn

from meshscope.core.schedule import Schedule, count_peak_activations
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.engine import (
    ModelConfig,
    build_stage,
    find_parameter_shards,
    gather_parameter,
    reduce_sequence_parallel_gradients,
)
from meshscope.engine.pipeline.pipeline import (
    ActionLog,
    PipelineError,
    PipelineExecutor,
)
from meshscope.engine.pipeline.torch_schedule import TORCH_SCHEDULES, TorchScheduleExecutor
from meshscope.errors import UsageError

NUM_MICROBATCHES = {2: 6, 4: 8}
RAISE_TIMEOUT_SECONDS = 2.0

REFERENCES: dict[tuple[str, int], Reference] = {}
"""By model and microbatches; filled before ranks are forked."""


def make_references() -> dict[tuple[str, int], Reference]:
    return {
        (name, count): train_reference(CONFIGS[name], make_microbatches(count))
        for name in ("llama", "tied", "gpt")
        for count in NUM_MICROBATCHES.values()
    }


@dataclass
class Case:
    """One layout, and what one of its ranks saw; differences are the largest over all steps."""

    losses: list[list[float]] = field(default_factory=list)
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    worst_gradient: str = ""
    weight_difference: float = 0.0
    ran_as_scheduled: bool = True
    peaks: list[int] = field(default_factory=list)
    expected_peak: int = 0
    largest_gradient: float = 0.0
    evaluation_difference: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where this rank stands."""

    pp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None = None
    tied_group: dist.ProcessGroup | None = None
    """First and last pipeline rank."""
    sequence_parallel: bool = False
    stage_sizes: tuple[int, ...] | None = None


def build_stages(
    config: ModelConfig, indices: tuple[int, ...], num_stages: int, layout: Layout
) -> dict[int, nn.Module]:
    return {
        index: build_stage(
            config,
            index,
            num_stages,
            stage_sizes=layout.stage_sizes,
            tp_group=layout.tp_group,
            sequence_parallel=layout.sequence_parallel,
            seed=SEED,
        )
        for index in indices
    }


def hidden_shape(config: ModelConfig, layout: Layout) -> tuple[int, ...]:
    parts = 2 if layout.sequence_parallel else 1
    return MICROBATCH_SIZE, config.sequence_length // parts, config.hidden_size


def compare_schedule(schedule: Schedule, config_name: str, layout: Layout) -> Case:
    config = CONFIGS[config_name]
    rank = layout.pp_group.rank()
    stages = build_stages(config, schedule.stages_of(rank), schedule.num_stages, layout)
    log = ActionLog()
    executor = PipelineExecutor(
        schedule, stages, layout.pp_group, hidden_shape=hidden_shape(config, layout), record=log
    )
    microbatches = make_microbatches(schedule.num_microbatches)
    reference = REFERENCES[config_name, schedule.num_microbatches]
    case = Case(expected_peak=count_peak_activations(schedule)[rank])
    evaluated = [loss.item() for loss in executor.evaluate(microbatches)]
    for loss, expected in zip(evaluated, reference.losses[0] if evaluated else [], strict=True):
        case.evaluation_difference = max(case.evaluation_difference, abs(loss - expected))

    def step() -> list[Tensor]:
        log.runs.clear()
        losses = executor.run_step(microbatches)
        case.peaks.append(executor.peak_activations)
        ran = tuple(span.action for span in log.runs)
        case.ran_as_scheduled &= ran == schedule.actions[rank]
        return losses

    compare_training(step, stages, reference, layout, case)
    return case


def compare_training(
    step: Callable[[], list[Tensor]],
    stages: Mapping[int, nn.Module],
    reference: Reference,
    layout: Layout,
    case: Case,
) -> None:
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE, momentum=MOMENTUM)
    for gradients, expected_losses in zip(reference.gradients, reference.losses, strict=True):
        optimizer.zero_grad()
        losses = [loss.item() for loss in step()]
        case.losses.append(losses)
        for loss, expected in zip(losses, expected_losses if losses else [], strict=True):
            case.loss_difference = max(case.loss_difference, abs(loss - expected))
        for stage in stages.values():
            reduce_sequence_parallel_gradients(stage, layout.tp_group)
        sum_tied(stages, layout.tied_group)
        for name, full in gather_all(stages, layout, lambda parameter: parameter.grad):
            difference = (full - gradients[name]).abs().max().item()
            if not difference <= case.gradient_difference:  # nan is a difference as well
                case.gradient_difference, case.worst_gradient = difference, name
            case.largest_gradient = max(case.largest_gradient, full.abs().max().item())
        optimizer.step()
    for name, full in gather_all(stages, layout, Tensor.detach):
        difference = (full - reference.weights[name]).abs().max().item()
        case.weight_difference = max(case.weight_difference, difference)


def sum_tied(stages: Mapping[int, nn.Module], group: dist.ProcessGroup | None) -> None:
    tied = [stage.tied_weight for stage in stages.values() if stage.tied_weight is not None]
    if not tied:
        return
    total = torch.stack([weight.grad for weight in tied]).sum(0)
    if len(tied) == 1:
        dist.all_reduce(total, group=group)
    for weight in tied:
        weight.grad.copy_(total)


def gather_all(
    stages: Mapping[int, nn.Module], layout: Layout, read: Callable[[nn.Parameter], Tensor]
) -> list[tuple[str, Tensor]]:
    found = []
    for stage in stages.values():
        shards = find_parameter_shards(stage)
        for name, parameter in stage.named_parameters():
            full = gather_parameter(read(parameter), shards[name], layout.tp_group)
            found.append((shards[name].tied_to or name, full))
    return found


def compare_torch_schedule(name: str, layout: Layout) -> Case:
    group = layout.pp_group
    num_microbatches = NUM_MICROBATCHES[group.size()]
    num_stages = TORCH_SCHEDULES[name].num_stages(group.size())
    indices = TORCH_SCHEDULES[name].stages_of(group.rank(), group.size())
    stages = build_stages(LLAMA, indices, num_stages, layout)
    log = ActionLog()
    executor = TorchScheduleExecutor(
        name,
        stages,
        group,
        num_microbatches=num_microbatches,
        hidden_shape=hidden_shape(LLAMA, layout),
        record=log,
    )
    microbatches = make_microbatches(num_microbatches)
    case = Case()

    def step() -> list[Tensor]:
        log.runs.clear()
        losses = executor.run_step(microbatches)
        ran = sorted(str(span.action) for span in log.runs)
        kinds = {span.action.kind.value for span in log.runs}
        case.ran_as_scheduled &= len(ran) == len(set(ran)) and "F" in kinds
        forwards = [action for action in ran if "F" in action]
        case.ran_as_scheduled &= len(forwards) == num_microbatches * len(indices)
        return losses

    reference = REFERENCES["llama", num_microbatches]
    compare_training(step, stages, reference, layout, case)
    return case


# --- any number of microbatches -------------------------------------------------------------------


class _Held:
    """Lives as long as the graph of one forward."""


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: _Held) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class UnsteadyStage(nn.Module):
    """Takes random time, and counts the graphs that are alive."""

    alive: ClassVar["weakref.WeakSet[_Held]"] = weakref.WeakSet()
    most_alive = 0

    def __init__(self, index: int, random_source: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 1.0 + index / 16))
        self._random = random_source

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        time.sleep(self._random.choice((0, 0, 0.0005, 0.002)))
        held = _Held()
        self.alive.add(held)
        UnsteadyStage.most_alive = max(UnsteadyStage.most_alive, len(self.alive))
        y = _Hold.apply(x * self.weight, held)
        return y if targets is None else (y - targets).square().mean()


def run_unsteadily(name: str, num_microbatches: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """A step with stages of random speed: whether it ends, and with the right gradients."""
    schedule = build_schedule(name, group.size(), num_microbatches)
    rank = group.rank()
    source = random.Random(f"{name} {num_microbatches} {rank}")
    stages = {index: UnsteadyStage(index, source) for index in schedule.stages_of(rank)}
    microbatches = [
        (torch.full((256, 64), 1.0 + i), torch.zeros(256, 64)) for i in range(num_microbatches)
    ]
    UnsteadyStage.most_alive = 0
    executor = PipelineExecutor(
        schedule, stages, group, hidden_shape=(256, 64), max_receives_ahead=source.choice((1, 2, 9))
    )
    executor.run_step(microbatches)
    scale = torch.tensor([1.0 + i / 16 for i in range(schedule.num_stages)]).double().prod()
    mean_square = sum((1.0 + i) ** 2 for i in range(num_microbatches)) / num_microbatches
    wrong = 0.0
    for stage in stages.values():
        weight = stage.weight.detach()[0].double()
        expected = 2 * scale**2 / weight * mean_square / 64
        wrong = max(wrong, (stage.weight.grad.double() / expected - 1).abs().max().item())
    return {
        "name": name,
        "microbatches": num_microbatches,
        "is split": any(action.kind == "I" for action in schedule.actions[rank]),
        "most alive": UnsteadyStage.most_alive,
        "alive at the end": len(UnsteadyStage.alive),
        "peak": executor.peak_activations,
        "expected peak": count_peak_activations(schedule)[rank],
        "relative difference": wrong,
    }


def run_all_unsteadily(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    source = random.Random(group.size())
    found = []
    for name in BUILDERS:
        for num_microbatches in source.sample(range(1, 12), 3):
            try:
                found.append(run_unsteadily(name, num_microbatches, group))
            except UsageError:  # interleaved_1f1b does not take every number
                assert name == "interleaved_1f1b"
    return found


# --- the runs -------------------------------------------------------------------------------------


def run_cases(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        world = dist.group.WORLD
        m = NUM_MICROBATCHES[num_ranks]
        # Made by all ranks, those outside of them too.
        tied_group = dist.new_group([0, num_ranks - 1])
        plain = Layout(pp_group=world)
        tied = Layout(pp_group=world, tied_group=tied_group)
        cases: dict[str, Case] = {}
        for name in BUILDERS:
            schedule = build_schedule(name, num_ranks, m)
            cases[name] = compare_schedule(schedule, "llama", plain)
        uneven = {2: (5, 3), 4: (1, 3, 1, 3)}[num_ranks]
        for name in ("1f1b", "zb_h1"):
            layout = dataclasses.replace(plain, stage_sizes=uneven)
            schedule = build_schedule(name, num_ranks, m)
            cases[f"{name}, uneven"] = compare_schedule(schedule, "gpt", layout)
        for name in ("1f1b", "interleaved_1f1b", "zb_v"):
            schedule = build_schedule(name, num_ranks, m)
            cases[f"{name}, tied"] = compare_schedule(schedule, "tied", tied)
        if num_ranks == 4:
            cases |= compare_tensor_parallel()
        else:
            for name in TORCH_SCHEDULES:
                with suppress(UsageError):  # not with this torch
                    cases[f"torch {name}"] = compare_torch_schedule(name, plain)
        found = {name: dataclasses.asdict(case) for name, case in cases.items()}
        text = json.dumps({"cases": found, "unsteady": run_all_unsteadily(world)})
        (folder / f"{num_ranks}_{rank}.json").write_text(text, encoding="utf-8")

    return job


def compare_tensor_parallel() -> dict[str, Case]:
    """pp 2 × tp 2 with sequence parallel: tp groups (0, 1) and (2, 3)."""
    rank = dist.get_rank()
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cases = {}
    for name, config in (("1f1b", "llama"), ("interleaved_1f1b", "gpt"), ("zb_h1", "tied"),
                         ("zb_v", "gpt")):  # fmt: skip
        layout = Layout(
            pp_group=pp_groups[rank % 2],
            tp_group=tp_groups[rank // 2],
            tied_group=pp_groups[rank % 2],
            sequence_parallel=True,
        )
        schedule = build_schedule(name, 2, NUM_MICROBATCHES[2])
        cases[f"{name}, tp 2, {config}"] = compare_schedule(schedule, config, layout)
    return cases


class RaisingStage(UnsteadyStage):
    calls = 0

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        RaisingStage.calls += 1
        if RaisingStage.calls == 3:
            raise ValueError("planted")
        return super().forward(x, targets)


def run_raising(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        schedule = build_schedule("1f1b", num_ranks, 8)
        kind = RaisingStage if rank == 1 else UnsteadyStage
        stages = {rank: kind(rank, random.Random(rank))}
        executor = PipelineExecutor(schedule, stages, dist.group.WORLD, hidden_shape=(256, 64))
        microbatches = [(torch.ones(256, 64), torch.zeros(256, 64))] * 8
        messages = []
        start_s = time.monotonic()
        for _ in range(2):
            try:
                executor.run_step(microbatches)
            except PipelineError as error:
                messages.append(str(error))
        found = {"messages": messages, "seconds": time.monotonic() - start_s}
        (folder / f"raise_{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        # The one that raised stays, so that only their timeout ends the others' waits.
        while len(list(folder.glob("raise_*.json"))) < num_ranks:
            time.sleep(0.05)
        os._exit(0)

    return job


def main(folder: Path) -> None:
    import_everything()
    REFERENCES.update(train_references(folder, make_references))
    for num_ranks in NUM_MICROBATCHES:
        exit_codes = run_ranks(run_cases(folder), num_ranks)
        if any(exit_codes):
            sys.exit(f"{num_ranks} ranks ended with {exit_codes}")
    exit_codes = run_ranks(run_raising(folder), 4, timeout_s=RAISE_TIMEOUT_SECONDS)
    if any(exit_codes):
        sys.exit(f"ranks beside one that raised ended with {exit_codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
