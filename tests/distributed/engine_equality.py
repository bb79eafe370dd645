"""Trains whole engines in many layouts, and the same model in one process, and compares.

    python -m tests.distributed.engine_equality FOLDER [--full | --cuda]

Leaves `FOLDER/results.jsonl`, one line for each case: the largest differences of losses, gradients
and weights from the single-process model over all steps and ranks.
"""

import dataclasses
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tests.distributed.fork_ranks import import_everything, run_ranks
from tests.distributed.one_process import (
    CONFIGS,
    LEARNING_RATE,
    LLAMA,
    MOMENTUM,
    NUM_STEPS,
    SEED,
    Reference,
    make_tokens,
    train_reference,
    train_references,
)
from torch import Tensor

from meshscope.core.config.train_config import (
    BatchConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import BUILDERS
from meshscope.core.schedule_search import StageCosts, search_schedule
from meshscope.engine import find_parameter_shards
from meshscope.engine.engine import Engine
from meshscope.engine.mesh import Mesh
from meshscope.engine.model.dtensor_parallel import gather_full_tensors

GLOBAL_BATCH_SIZE = 16
TOLERANCE = 1e-5
SECONDS_PER_CASE = 60
NUM_MICROBATCHES = {1: 8, 2: 8, 4: 4}
"""By dp: with pp 4 every schedule needs at least 4."""

MODELS = {"llama": LLAMA, "gpt tied": CONFIGS["tied_gpt"]}
OFFLOAD_DIR = Path(tempfile.gettempdir()) / "meshscope-equality"
UNEVEN_SIZES = {1: (8,), 2: (5, 3), 4: (3, 1, 2, 2), 8: (1,) * 8}
"""Layers of each stage, by the number of stages."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train the model."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    is_uneven: bool = False
    data_parallel: str = "reducer"
    zero_stage: int = 3
    tensor_parallel: str = "plain"
    memory: str = "basic"
    sequence_parallel: bool = False
    order: tuple[str, ...] = ("pp", "dp", "tp")
    model: str = "llama"
    by_hand: bool = False
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        builder = BUILDERS.get(self.schedule)
        return self.pp * (builder.default_chunks if builder else 1)

    @property
    def name(self) -> str:
        data_parallel = self.data_parallel
        if data_parallel == "fsdp":
            data_parallel += f" zero {self.zero_stage}"
        parts = [
            f"{self.dp}×{self.tp}×{self.pp}",
            self.schedule.split(maxsplit=1)[0],  # of a text, its name
            "uneven" if self.is_uneven else "",
            data_parallel,
            self.memory,
            "SP" if self.sequence_parallel else "",
            "DTensor" if self.tensor_parallel == "dtensor" else "",
            ",".join(self.order) if self.order != ("pp", "dp", "tp") else "",
            self.model,
            "by hand" if self.by_hand else "",
            self.device if self.device != "cpu" else "",
        ]
        return " ".join(part for part in parts if part)

    def make_config(self) -> TrainConfig:
        num_microbatches = NUM_MICROBATCHES[self.dp]
        return TrainConfig(
            model=MODELS[self.model],
            num_steps=NUM_STEPS,
            seed=SEED,
            device=self.device,
            parallel=ParallelConfig(
                dp=self.dp,
                tp=self.tp,
                pp=self.pp,
                order=self.order,
                schedule=self.schedule,
                stage_sizes=UNEVEN_SIZES[self.num_stages] if self.is_uneven else None,
                data_parallel=self.data_parallel,
                zero_stage=self.zero_stage,
                tensor_parallel=self.tensor_parallel,
                sequence_parallel=self.sequence_parallel,
            ),
            batch=BatchConfig(
                microbatch_size=GLOBAL_BATCH_SIZE // self.dp // num_microbatches,
                num_microbatches=num_microbatches,
            ),
            memory=MemoryConfig(
                strategy=self.memory,
                offload_dir=OFFLOAD_DIR if self.memory == "extreme" else None,
            ),
            optimizer=OptimizerConfig(
                kind="sgd",
                learning_rate=LEARNING_RATE,
                momentum=MOMENTUM,
                max_gradient_norm=None,
            ),
        )


REFERENCES: dict[str, Reference] = {}
"""Filled before ranks are forked."""


def make_references() -> dict[str, Reference]:
    tokens = make_tokens(GLOBAL_BATCH_SIZE)
    batch = tokens[:, :-1], tokens[:, 1:]
    return {name: train_reference(config, [batch]) for name, config in MODELS.items()}


@dataclass
class Differences:
    """The largest over steps; of gradients and weights, over elements."""

    loss: float = 0.0
    gradient: float = 0.0
    worst_gradient: str = ""
    weight: float = 0.0
    norm: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    seconds: float = 0.0


def pair_up(
    engine: Engine, what: str, reference: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What this rank holds of each gradient or weight, and the same part of the reference's."""

    def read(parameter: torch.nn.Parameter) -> Tensor:
        return parameter.grad if what == "grad" else parameter.detach()

    dp_rank, dp = engine.mesh.here.dp, engine.layout.dp
    for stage in engine.stages.values():
        shards = find_parameter_shards(stage)
        if engine.config.parallel.tensor_parallel == "dtensor":
            for name, full in gather_full_tensors(stage, read).items():
                yield name, full, reference[name]
            continue
        for name, parameter in stage.named_parameters():
            whole_name = shards[name].tied_to or name
            value, expected = read(parameter), shards[name].take(reference[whole_name])
            if hasattr(value, "to_local"):  # FSDP2 cuts rows as torch.chunk does
                parts = expected.chunk(dp)
                value = value.to_local()
                expected = parts[dp_rank] if dp_rank < len(parts) else expected[:0]
            yield whole_name, value.cpu(), expected


def take_step(engine: Engine, case: Case, tokens: Tensor) -> Any:
    """This dp rank's part of the batch, at once or microbatch by microbatch."""
    config = engine.config
    own = tokens.unflatten(0, (case.dp, config.num_microbatches, -1))[engine.mesh.here.dp]
    if not case.by_hand:
        return engine.train_step(own)
    engine.begin_step()
    for index, part in enumerate(own):
        engine.forward(index, part[:, :-1], part[:, 1:])
    for index in range(len(own)):
        engine.backward(index)
    return engine.finish_step()


def measure_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return (found - expected).abs().max().item() if found.numel() else 0.0


def compare(case: Case, mesh: Mesh) -> Differences:
    began = time.monotonic()
    reference = REFERENCES[case.model]
    engine = Engine(case.make_config(), mesh=mesh, device=mesh.device)
    tokens = make_tokens(GLOBAL_BATCH_SIZE)
    found = Differences()

    def widen(name: str, difference: float, culprit: str = "") -> None:
        if not difference <= getattr(found, name):  # nan is a difference as well
            setattr(found, name, difference)
            if culprit:
                found.worst_gradient = culprit

    for step in range(NUM_STEPS):
        result = take_step(engine, case, tokens)
        found.first_loss, found.last_loss = found.first_loss or result.loss, result.loss
        widen("loss", abs(result.loss - reference.losses[step][0]))
        widen("norm", abs(result.gradient_norm - reference.norms[step]))
        for name, found_part, expected in pair_up(engine, "grad", reference.gradients[step]):
            widen("gradient", measure_difference(found_part, expected), f"{name} step {step}")
    for _, found_part, expected in pair_up(engine, "weight", reference.weights):
        widen("weight", measure_difference(found_part, expected))
    engine.close()
    found.seconds = time.monotonic() - began
    return found


def run_cases(cases: Sequence[Case], folder: Path) -> None:
    """Cases of one world size."""

    def job(rank: int, world_size: int) -> None:
        meshes: dict[Layout, Mesh] = {}
        with open(folder / f"{world_size}_{rank}.jsonl", "w", encoding="utf-8") as out:
            for case in cases:
                layout = case.make_config().layout
                if layout not in meshes:
                    meshes[layout] = Mesh(layout, case.device)
                line: dict[str, Any] = {"case": case.name, **asdict(case)}
                try:
                    line["differences"] = asdict(compare(case, meshes[layout]))
                except Exception as error:
                    traceback.print_exc()
                    line["error"] = f"{type(error).__name__}: {error}"
                    print(json.dumps(line), file=out, flush=True)
                    raise  # ranks are out of step now
                print(json.dumps(line), file=out, flush=True)

    world_size = cases[0].world_size
    codes = run_ranks(job, world_size, timeout_s=120, rank_timeout_s=SECONDS_PER_CASE * len(cases))
    if any(codes):
        print(f"{world_size} ranks: exit codes {codes}", file=sys.stderr)


def merge(folder: Path, world_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The worst rank of every case."""
    merged: dict[str, dict[str, Any]] = {}
    for world_size in world_sizes:
        for rank in range(world_size):
            path = folder / f"{world_size}_{rank}.jsonl"
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                known = merged.setdefault(line["case"], line)
                known.setdefault("num_ranks_done", 0)
                if "error" in line:
                    known["error"] = line["error"]
                    continue
                known["num_ranks_done"] += 1
                for name in ("loss", "gradient", "weight", "norm"):
                    value = line["differences"][name]
                    known["differences"][name] = max(known["differences"][name], value)
    return list(merged.values())


# --- which cases ---------------------------------------------------------------------------------

LAYOUTS = (
    {"dp": 1, "tp": 1, "pp": 1},
    {"dp": 2, "tp": 1, "pp": 1},
    {"dp": 1, "tp": 2, "pp": 1},
    {"dp": 1, "tp": 1, "pp": 2},
    {"dp": 2, "tp": 2, "pp": 2},
    {"dp": 1, "tp": 2, "pp": 4},
    {"dp": 1, "tp": 1, "pp": 4},
    {"dp": 4, "tp": 2, "pp": 1},
    {"dp": 1, "tp": 1, "pp": 2, "is_uneven": True},
    {"dp": 2, "tp": 1, "pp": 2, "is_uneven": True},
)


def make_full_cross() -> list[Case]:
    """Every schedule × layout × data parallelism × checkpointing × sequence parallelism."""
    cases = []
    for number, (layout, schedule, data_parallel, memory, is_sp) in enumerate(
        itertools.product(
            LAYOUTS,
            BUILDERS,
            ("reducer", "fsdp"),
            ("basic", "standard"),
            (False, True),
        )
    ):
        if is_sp and layout["tp"] == 1:
            continue  # nothing to cut the sequence over
        if data_parallel == "fsdp" and layout == LAYOUTS[0]:
            continue  # one process has no process group
        cases.append(
            Case(
                **layout,
                schedule=schedule,
                data_parallel=data_parallel,
                # Every ZeRO stage and both models meet every layout.
                zero_stage=1 + number // 4 % 3,
                model=tuple(MODELS)[number // 2 % 2],
                memory=memory,
                sequence_parallel=is_sp,
            )
        )
    return cases


def search_text(num_ranks: int, num_microbatches: int) -> str:
    """An automatic schedule for uneven stages, of which each holds another number."""
    stages = [
        StageCosts(forward_ns=10 + rank, input_grad_ns=11, weight_grad_ns=6, max_held=3 + rank)
        for rank in range(num_ranks)
    ]
    return search_schedule(stages, num_microbatches, communication_ns=1).schedule.to_text()


def make_covering_selection() -> list[Case]:
    """Every value of every dimension, most pairs of them, in few cases."""
    tied = "gpt tied"
    return [
        Case(schedule="zb_v", memory="standard", model=tied),
        Case(dp=2, data_parallel="ddp"),
        Case(dp=2, data_parallel="fsdp", zero_stage=3, memory="aggressive", model=tied),
        Case(tp=2, sequence_parallel=True, memory="standard"),
        Case(pp=2, schedule="gpipe", model=tied, by_hand=True),
        Case(pp=2, is_uneven=True, memory="extreme"),
        Case(pp=4, schedule="interleaved_1f1b", model=tied),
        Case(dp=2, pp=2, schedule="looped_bfs", is_uneven=True, data_parallel="fsdp", zero_stage=2),
        Case(dp=2, tp=2, pp=2, model=tied, sequence_parallel=True),
        Case(dp=2, tp=2, pp=2, schedule="zb_h1", order=("dp", "tp", "pp"), memory="standard"),
        Case(tp=2, pp=4, schedule="zb_h2", model=tied),
        Case(pp=2, schedule=search_text(2, NUM_MICROBATCHES[1]), is_uneven=True),
        Case(
            dp=4,
            tp=2,
            schedule="round_robin",
            data_parallel="fsdp",
            zero_stage=1,
            sequence_parallel=True,
        ),
    ]


def make_cuda_selection() -> list[Case]:
    """For ranks that share one GPU and talk over gloo, which has no reduce-scatter there."""
    tied = "gpt tied"
    cases = [
        Case(model=tied),
        Case(memory="aggressive"),
        Case(memory="extreme"),
        Case(memory="cpu_offload", model=tied),
        Case(dp=2, memory="standard"),
        Case(dp=2, data_parallel="ddp", model=tied),
        Case(tp=2, model=tied),
        Case(pp=2, model=tied, memory="cpu_offload"),
        Case(pp=2, schedule="zb_v", memory="extreme"),
        Case(dp=2, pp=2, schedule="zb_h1", model=tied),
    ]
    return [dataclasses.replace(case, device="cuda") for case in cases]


def main(folder: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    import_everything()
    folder.mkdir(parents=True, exist_ok=True)
    REFERENCES.update(train_references(folder, make_references))
    world_sizes = sorted({case.world_size for case in cases})
    for world_size in world_sizes:
        run_cases([case for case in cases if case.world_size == world_size], folder)
    results = merge(folder, world_sizes)
    lines = [json.dumps(line) for line in results]
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    make_cases = {"--full": make_full_cross, "--cuda": make_cuda_selection}
    make = make_cases.get(sys.argv[-1], make_covering_selection)
    main(Path(sys.argv[1]), make())
