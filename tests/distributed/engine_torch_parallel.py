"""Trains under FSDP2, DDP and DTensor tensor parallel, and writes how far one process differs.

    python -m tests.distributed.engine_torch_parallel FOLDER

Leaves `FOLDER/<ranks>_<rank>.json` with what each rank of 2 and of 4 found for every case.
"""

import dataclasses
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.fork_ranks import import_everything, run_ranks
from tests.distributed.one_process import (
    CONFIGS,
    LEARNING_RATE,
    LLAMA,
    MICROBATCH_SIZE,
    MOMENTUM,
    NUM_STEPS,
    SEED,
    Reference,
    make_microbatches,
    train_reference,
    train_references,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from meshscope.core.schedule_builders import build_schedule
from meshscope.engine import (
    ModelConfig,
    Stage,
    build_stage,
    find_parameter_shards,
    gather_parameter,
    reduce_sequence_parallel_gradients,
)
from meshscope.engine.data_parallel.fully_sharded import FullyShardedDataParallel
from meshscope.engine.data_parallel.torch_ddp import (
    DataParallel,
    ReducedDataParallel,
    TorchDdp,
)
from meshscope.engine.memory.strategy import make_memory_strategy
from meshscope.engine.model.dtensor_parallel import (
    gather_full_tensors,
    load_full_tensors,
    parallelize_stage,
    reduce_partial_gradients,
)
from meshscope.engine.pipeline.pipeline import PipelineExecutor
from meshscope.engine.step_actions import StepActions
from meshscope.engine.update.gradient_norm import clip_gradient_norm, sync_tied_gradients
from meshscope.errors import UsageError

NUM_MICROBATCHES = 4

EVEN = ModelConfig(
    vocab_size=64,
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    ffn_hidden_size=128,
    sequence_length=4,
)
"""Everything divides by two, so that parts have no padding."""


REFERENCES: dict[tuple[ModelConfig, int, int], Reference] = {}
"""By model, dp and microbatches of a rank; these are of all dp ranks, one after the other."""


def make_references() -> dict[tuple[ModelConfig, int, int], Reference]:
    keys = {
        (case.model, case.dp, case.num_microbatches) for cases in CASES.values() for case in cases
    }
    return {
        (model, dp, count): train_reference(model, make_microbatches(dp * count))
        for model, dp, count in keys
    }


# --- one case ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of as many ranks as there are, and how it is trained."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    config: str = "llama"
    schedule: str = "gpipe"
    data_parallel: str = "reducer"
    """`reducer`, `ddp`, or `fsdp` with the ZeRO stage."""
    sequence_parallel: bool = False
    uses_dtensor: bool = False
    memory: str = "basic"
    """The memory strategy."""
    announces: bool = True
    """Whether the last backwards are announced."""

    @property
    def model(self) -> ModelConfig:
        """As small as the number of stages allows."""
        num_layers = 4 if self.schedule in ("interleaved_1f1b", "zb_v") else 2
        return dataclasses.replace(CONFIGS[self.config], num_layers=num_layers)

    @property
    def num_microbatches(self) -> int:
        return NUM_MICROBATCHES if self.pp > 1 and not self.uses_dtensor else 2

    @property
    def name(self) -> str:
        options = [self.data_parallel, self.schedule, self.config, self.memory]
        flags = ("sequence_parallel", "uses_dtensor")
        options += [flag for flag in flags if getattr(self, flag)]
        options += [] if self.announces else ["unannounced"]
        return f"{self.dp}x{self.tp}x{self.pp} {' '.join(options)}"


CASES = {
    2: [
        *(Case(dp=2, data_parallel=kind) for kind in ("reducer", "fsdp1", "fsdp2", "ddp")),
        Case(dp=2, data_parallel="fsdp1", config="tied", memory="standard", announces=False),
        Case(tp=2, uses_dtensor=True, sequence_parallel=True, memory="aggressive"),
    ],
    4: [
        Case(dp=2, pp=2, schedule="1f1b", data_parallel="fsdp3"),
        Case(dp=2, pp=2, schedule="zb_h1", data_parallel="fsdp1", config="gpt"),
        Case(dp=2, pp=2, schedule="zb_v", data_parallel="fsdp2", config="tied"),
        *(
            Case(dp=2, pp=2, schedule="interleaved_1f1b", config="tied", data_parallel=kind)
            for kind in ("reducer", "ddp")
        ),
        Case(dp=2, tp=2, config="gpt", data_parallel="ddp", sequence_parallel=True),
        Case(dp=2, tp=2, data_parallel="fsdp1", uses_dtensor=True, config="tied"),
    ],
}  # fmt: skip

PLAIN = Case(dp=2, data_parallel="fsdp1")
"""Whose model and reference measurements use."""


@dataclass
class Found:
    """What one rank saw; differences are the largest over all steps."""

    losses: list[list[float]] = field(default_factory=list)
    loss_difference: float = 0.0
    evaluation_difference: float = 0.0
    gradient_difference: float = 0.0
    worst_gradient: str = ""
    norm_difference: float = 0.0
    """Relative."""
    largest_gradient: float = 0.0
    num_gradients: int = 0
    num_early_buckets: int = 0
    """Of the reducer: sent before `finish`."""


_MESHES: dict[tuple[int, int, int], DeviceMesh] = {}


def get_mesh(case: Case) -> DeviceMesh:
    shape = (case.pp, case.dp, case.tp)
    if shape not in _MESHES:
        _MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    return _MESHES[shape]


def build_case_stage(case: Case, index: int, num_stages: int) -> Stage:
    mesh = get_mesh(case)
    stage = build_stage(
        case.model,
        index,
        num_stages,
        tp_group=None if case.uses_dtensor else mesh.get_group("tp"),
        sequence_parallel=case.sequence_parallel and not case.uses_dtensor,
        seed=SEED,
    )
    if case.uses_dtensor:
        parallelize_stage(stage, mesh["tp"], sequence_parallel=case.sequence_parallel)
    make_memory_strategy(case.memory, num_segments=1).prepare(stage)
    return stage


def make_parallel(case: Case, stages: dict[int, Stage]) -> DataParallel:
    mesh = get_mesh(case)
    if case.data_parallel == "reducer":
        return ReducedDataParallel(stages, mesh.get_group("dp"), bucket_bytes=10_000)
    if case.data_parallel == "ddp":
        return TorchDdp(stages, mesh.get_group("dp"), bucket_bytes=10_000)
    dp = mesh["dp"] if case.uses_dtensor else mesh.get_group("dp")
    return FullyShardedDataParallel(stages, dp, zero_stage=int(case.data_parallel[-1]))


def run_case(case: Case) -> Found:
    mesh = get_mesh(case)
    pp_rank, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    schedule = build_schedule(case.schedule, case.pp, case.num_microbatches)
    stages = {
        index: build_case_stage(case, index, schedule.num_stages)
        for index in schedule.stages_of(pp_rank)
    }
    parallel = make_parallel(case, stages)
    actions = StepActions(schedule, stages, parallel)
    executor = PipelineExecutor(
        schedule,
        parallel.modules,
        mesh.get_group("pp") if case.pp > 1 else None,
        hidden_shape=next(iter(stages.values())).hidden_shape(MICROBATCH_SIZE),
        record=actions if case.announces else None,
    )
    own = slice(dp_rank * case.num_microbatches, (dp_rank + 1) * case.num_microbatches)
    reference = REFERENCES[case.model, case.dp, case.num_microbatches]
    microbatches = make_microbatches(case.dp * case.num_microbatches)[own]
    optimizer = torch.optim.SGD(
        [p for stage in stages.values() for p in stage.parameters()],
        LEARNING_RATE,
        momentum=MOMENTUM,
    )
    found = Found()
    for step in range(NUM_STEPS):
        expected = reference.losses[step][own]
        # Between two steps, so that weights left whole or stale would be seen.
        evaluated = [loss.item() for loss in executor.evaluate(microbatches)] if step == 2 else []
        for loss, right in zip(evaluated, expected if evaluated else [], strict=True):
            found.evaluation_difference = max(found.evaluation_difference, abs(loss - right))
        optimizer.zero_grad()
        actions.begin_step()
        losses = [loss.item() for loss in executor.run_step(microbatches)]
        parallel.finish()
        found.losses.append(losses)
        for loss, right in zip(losses, expected if losses else [], strict=True):
            found.loss_difference = max(found.loss_difference, abs(loss - right))
        complete_gradients(case, stages)
        if step in (0, NUM_STEPS - 1):  # losses show what is wrong between
            compare_gradients(case, stages, reference.gradients[step], found)
        norm = clip_gradient_norm(
            list(stages.values()),
            None,
            tp_group=mesh.get_group("tp"),
            pp_group=mesh.get_group("pp"),
            dp_shard_group=parallel.shard_group,
        ).norm
        difference = abs(norm / reference.norms[step] - 1)
        found.norm_difference = max(found.norm_difference, difference)
        optimizer.step()
    if isinstance(parallel, ReducedDataParallel):
        found.num_early_buckets = parallel.statistics.num_early_buckets
    parallel.close()
    return found


def complete_gradients(case: Case, stages: dict[int, Stage]) -> None:
    mesh = get_mesh(case)
    for stage in stages.values():
        reduce_partial_gradients(stage)
        reduce_sequence_parallel_gradients(stage, mesh.get_group("tp"))
    tied = [stage.tied_weight for stage in stages.values() if stage.tied_weight is not None]
    if len(tied) == 1:
        sync_tied_gradients(tied[0], mesh.get_group("pp"))
    elif tied:  # first and last stage on one rank
        total = tied[0].grad + tied[1].grad
        for weight in tied:
            weight.grad = total.clone()


def compare_gradients(
    case: Case, stages: dict[int, Stage], expected: dict[str, Tensor], found: Found
) -> None:
    found.num_gradients = 0
    for name, full in gather_gradients(case, stages):
        difference = (full - expected[name]).abs().max().item()
        if not difference <= found.gradient_difference:  # nan is a difference as well
            found.gradient_difference, found.worst_gradient = difference, name
        found.largest_gradient = max(found.largest_gradient, full.abs().max().item())
        found.num_gradients += 1


def gather_gradients(case: Case, stages: dict[int, Stage]) -> Iterator[tuple[str, Tensor]]:
    for stage in stages.values():
        shards = find_parameter_shards(stage)
        if case.uses_dtensor:
            gathered = gather_full_tensors(stage, lambda parameter: parameter.grad)
            yield from ((rename(name, shards), full) for name, full in gathered.items())
            continue
        for name, parameter in stage.named_parameters():
            grad = parameter.grad
            over_dp = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            group = get_mesh(case).get_group("tp") if case.tp > 1 else None
            yield rename(name, shards), gather_parameter(over_dp, shards[name], group)


def rename(name: str, shards: Mapping[str, Any]) -> str:
    return (shards[name].tied_to if name in shards else None) or name


# --- measurements --------------------------------------------------------------------------------


class CollectiveCounter(TorchDispatchMode):
    """Counts by name what is sent, whether by torch.distributed or by DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.replace("_", "")
            kinds = ("allgather", "reducescatter", "allreduce", "broadcast", "alltoall", "send")
            self.counts += Counter(kind for kind in kinds if kind in name)
        return func(*args, **(kwargs or {}))


def count_collectives(step: Callable[[], object]) -> dict[str, int]:
    with CollectiveCounter() as counter:
        step()
    return dict(counter.counts)


def count_fsdp_collectives(zero_stage: int, mesh: DeviceMesh) -> dict[str, int]:
    """Of one step of 4 microbatches with 3 groups, all in flight, after a first step."""
    stage = build_stage(PLAIN.model, seed=SEED)
    parallel = FullyShardedDataParallel({0: stage}, mesh, zero_stage=zero_stage)
    schedule = build_schedule("gpipe", 1, NUM_MICROBATCHES)
    actions = StepActions(schedule, {0: stage}, parallel)
    executor = PipelineExecutor(schedule, {0: stage}, record=actions)
    microbatches = make_microbatches(NUM_MICROBATCHES)

    def step() -> None:
        actions.begin_step()
        executor.run_step(microbatches)
        parallel.finish()

    step()
    return count_collectives(step)


def count_dtensor_collectives(mesh: DeviceMesh, *, sequence_parallel: bool) -> dict[str, int]:
    """Of one forward, backward and summing of partial gradients."""
    stage = parallelize_stage(
        build_stage(PLAIN.model, seed=SEED), mesh, sequence_parallel=sequence_parallel
    )
    microbatch = make_microbatches(NUM_MICROBATCHES)[0]

    def step() -> None:
        stage(*microbatch).backward()
        reduce_partial_gradients(stage)

    step()
    stage.zero_grad()
    return count_collectives(step)


def measure_held_bytes() -> tuple[int, int]:
    """Of all parameters in this process, whole ones and parts, and of their gradients."""
    parameters: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for found in gc.get_objects():
        if not issubclass(type(found), Tensor) or not found.is_leaf or not found.requires_grad:
            continue
        for held, tensor in ((parameters, found), (gradients, found.grad)):
            if tensor is not None:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                storage = local.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(parameters.values()), sum(gradients.values())


def measure_zero_stage(zero_stage: int, mesh: DeviceMesh) -> dict[str, tuple[float, float]]:
    """Held at points of a step, in units of all parameters."""
    gc.collect()
    before = measure_held_bytes()
    stage = build_stage(EVEN, seed=SEED)
    whole = sum(p.nbytes for p in stage.parameters())
    parallel = FullyShardedDataParallel({0: stage}, mesh, zero_stage=zero_stage)
    ids = torch.zeros(1, 4, dtype=torch.long)
    found: dict[str, tuple[float, float]] = {}

    def measure(point: str) -> None:
        now = measure_held_bytes()
        found[point] = ((now[0] - before[0]) / whole, (now[1] - before[1]) / whole)

    measure("before")
    loss = stage(ids, ids)
    measure("after forward")
    loss.backward()
    stage(ids, ids).backward()
    loss = stage(ids, ids)
    measure("before the last backward")
    parallel.start_last_backward(0)
    loss.backward()
    parallel.finish()
    measure("after finish")
    with torch.no_grad():
        stage(ids, ids)
    measure("after evaluation")
    found["statistics"] = (
        parallel.statistics.whole_bytes / whole,
        parallel.statistics.shard_bytes / whole,
    )
    return found


def compare_plain_ddp(group: dist.ProcessGroup) -> dict[str, Any]:
    """Two microbatches in flight: DDP as it comes, and as it is used here."""
    from torch.nn.parallel import DistributedDataParallel

    expected = nn.Linear(3, 1, bias=False)
    nn.init.ones_(expected.weight)
    inputs = [torch.full((1, 3), 10.0**i * (1 + group.rank())) for i in range(2)]
    # Mean over ranks 1 and 2 of 1 + 10.
    right = 1.5 * 11.0

    def gradient(
        module: nn.Module, before_first: Callable[[], None], before_last: Callable[[], None]
    ) -> float:
        outputs = [module(x).sum() for x in inputs]
        before_first()
        outputs[0].backward()
        before_last()
        outputs[1].backward()
        found: float = expected.weight.grad[0, 0].item()
        expected.weight.grad = None
        return found

    def nothing() -> None:
        pass

    plain = DistributedDataParallel(expected, process_group=group)
    found = {"right": right, "plain": gradient(plain, nothing, nothing)}
    del plain
    parallel = TorchDdp({0: expected}, group)

    def announce() -> None:
        parallel.start_last_backward(0)

    parallel.start_accumulating()
    found["ours"] = gradient(parallel.module(0), nothing, announce)
    parallel.finish()
    messages = []
    for before_first in (announce, nothing):
        parallel.start_accumulating()
        gradient(parallel.module(0), before_first, nothing)
        try:
            parallel.finish()
        except UsageError as error:
            messages.append(str(error))
    return {**found, "messages": messages}


def check_mixed_precision(mesh: DeviceMesh) -> dict[str, Any]:
    """bfloat16 in forward and backward, float32 in sums, parts and gradients."""
    stage = build_stage(PLAIN.model, seed=SEED)
    parallel = FullyShardedDataParallel(
        {0: stage}, mesh, zero_stage=1, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    seen: set[str] = set()
    block = stage.layers["1"]
    block.register_forward_hook(lambda _, __, output: seen.add(str(output.dtype)))
    losses = []
    count = PLAIN.num_microbatches
    own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    for inputs, targets in make_microbatches(2 * count)[own]:
        loss = stage(inputs, targets)
        (loss / count).backward()
        losses.append(loss.item())
    parallel.finish()
    reference = REFERENCES[PLAIN.model, 2, PLAIN.num_microbatches]
    relative = []
    for name, parameter in stage.named_parameters():
        right = reference.gradients[0][name]
        difference = (parameter.grad.full_tensor() - right).norm() / right.norm()
        relative.append(difference.item())
    return {
        "dtypes": sorted(seen | {str(p.grad.dtype) for p in stage.parameters()}),
        "gradient difference": max(relative),
        "loss difference": max(
            abs(a - b) for a, b in zip(losses, reference.losses[0][own], strict=True)
        ),
    }


def check_refusals(mesh: DeviceMesh) -> list[str]:
    stage = parallelize_stage(build_stage(LLAMA, seed=SEED), mesh)
    group = mesh.get_group()
    attempts: list[Callable[[], object]] = [
        lambda: ReducedDataParallel({0: stage}, group),
        lambda: TorchDdp({0: stage}, group),
        lambda: FullyShardedDataParallel({0: stage}, group),
        lambda: FullyShardedDataParallel(
            {0: build_stage(LLAMA)}, group, zero_stage=4, cpu_offload=True
        ),
        lambda: parallelize_stage(stage, mesh),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("")
        except UsageError as error:
            messages.append(str(error))
    return messages


def check_loading(mesh: DeviceMesh) -> float:
    """Full weights of another seed put into a spread stage, and gathered again."""
    other = dict(build_stage(CONFIGS["gpt"], seed=99).named_parameters())
    stage = parallelize_stage(build_stage(CONFIGS["gpt"], seed=SEED), mesh)
    load_full_tensors(stage, {name: p.detach() for name, p in other.items()})
    gathered = gather_full_tensors(stage)
    assert gathered.keys() == other.keys()
    return max((gathered[name] - other[name]).abs().max().item() for name in other)


# --- the runs ------------------------------------------------------------------------------------


def run_cases(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        torch.manual_seed(rank)
        found: dict[str, Any] = {
            "cases": {case.name: dataclasses.asdict(run_case(case)) for case in CASES[num_ranks]}
        }
        if num_ranks == 2:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            found["fsdp collectives"] = {
                stage: count_fsdp_collectives(stage, mesh) for stage in (1, 2, 3)
            }
            found["dtensor collectives"] = [
                count_dtensor_collectives(mesh, sequence_parallel=flag) for flag in (False, True)
            ]
            found["held"] = {stage: measure_zero_stage(stage, mesh) for stage in (1, 2, 3)}
            found["plain ddp"] = compare_plain_ddp(mesh.get_group())
            found["mixed precision"] = check_mixed_precision(mesh)
            found["refusals"] = check_refusals(mesh)
            found["loading"] = check_loading(mesh)
        text = json.dumps(found, indent=1)
        (folder / f"{num_ranks}_{rank}.json").write_text(text, encoding="utf-8")

    return job


def main(folder: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import_everything()
    REFERENCES.update(train_references(folder, make_references))
    for num_ranks in CASES:
        exit_codes = run_ranks(run_cases(folder), num_ranks)
        if any(exit_codes):
            sys.exit(f"{num_ranks} ranks ended with {exit_codes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
