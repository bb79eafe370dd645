"""Programs that say nothing of their layout, each on a few gloo ranks: DDP, FSDP2, TP, pipelines.

    python -m tests.distributed.mesh_ranks FOLDER

records FOLDER/{case}; CASES has the layout that each program's own calls make.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tests.distributed.fork_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from meshscope.capture.recorder import Recorder
from meshscope.core.layout import Layout

WIDTH, VOCABULARY, BATCH, LENGTH, NUM_STEPS = 16, 32, 4, 8, 6
CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(ids)).relu())


def make_ids() -> torch.Tensor:
    return torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(NUM_STEPS):
        model(make_ids()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_ddp() -> None:
    """The optimizer first, as Trainer and Accelerate do."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(DistributedDataParallel(model), optimizer)


def train_by_hand() -> None:
    """Gradients are summed by the program: no object says what the group is for."""
    model = Model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    train(model)


def train_fsdp() -> None:
    train(fully_shard(Model()))


def train_fsdp_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    train(fully_shard(_cut(Model(), mesh["tp"]), mesh=mesh["dp"]))


def train_tp() -> None:
    train(_cut(Model(), init_device_mesh("cpu", (2,))))


def _cut(model: nn.Module, mesh: object) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def train_pipeline() -> None:
    _run_pipeline(dist.get_rank(), None)


def train_pipeline_fsdp() -> None:
    """Groups by hand, with pipelines of neighbours: ranks 0 and 1, ranks 2 and 3."""
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    index, stage = divmod(dist.get_rank(), 2)
    _run_pipeline(stage, pipelines[index], replicas[stage])


def _run_pipeline(stage: int, group: object, replicas: object = None) -> None:
    torch.manual_seed(0)
    whole = Model()
    model = whole.embed if stage == 0 else nn.Sequential(whole.up, whole.down)
    del whole  # a rank has its own stage only
    if replicas is not None:
        fully_shard(model, mesh=DeviceMesh.from_group(replicas, "cpu"))
    schedule = ScheduleGPipe(
        PipelineStage(model, stage, 2, CPU, group=group),
        n_microbatches=2,
        loss_fn=lambda output, target: output.square().mean(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(NUM_STEPS):
        if stage == 0:
            schedule.step(make_ids())
        else:
            schedule.step(target=torch.zeros(BATCH, LENGTH, WIDTH))
        optimizer.step()
        optimizer.zero_grad()


CASES: dict[str, tuple[Callable[[], None], Layout]] = {
    "ddp": (train_ddp, Layout(dp=2)),
    "by_hand": (train_by_hand, Layout(dp=2)),
    "fsdp": (train_fsdp, Layout(dp=2)),
    "fsdp_tp": (train_fsdp_tp, Layout(dp=2, tp=2)),
    "tp": (train_tp, Layout(tp=2)),
    "pipeline": (train_pipeline, Layout(pp=2)),
    "pipeline_fsdp": (train_pipeline_fsdp, Layout(dp=2, pp=2, order=("dp", "pp"))),
}
TOKENS_PER_STEP = BATCH * LENGTH
"""Of one replica."""


def main() -> None:
    folder = Path(sys.argv[1])
    for case, (function, layout) in CASES.items():

        def record(rank: int, world_size: int, case=case, function=function) -> None:
            recorder = Recorder(folder / case)
            recorder.watch_everything()
            function()
            recorder.close()

        codes = run_ranks(record, layout.world_size)
        if any(codes):
            raise SystemExit(f"{case} ended with {codes}")


if __name__ == "__main__":
    main()
