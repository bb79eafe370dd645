"""Programs that torch.profiler records on this machine's CPU, with what is known of each.

    python tests/recorded_traces.py "plain loop" FOLDER   # writes a trace, or one for each rank

Known by construction: how many steps, with which numbers, how steps are to be found, how many
products of matrices and how many FLOPs they take, which ranges of the program's own there are, and
of several ranks how many collectives. Times are held against `trace_oracle`.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, BATCH = 64, 32
LAYER_FLOPS = 2 * BATCH * WIDTH * WIDTH
"""Of one product: forward has one a layer, backward two but in the first (no gradient of input)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One way to record; `None` is not known."""

    name: str
    run: Callable[[Path], None]
    """Writes a trace; of several ranks one each, below the folder."""
    num_ranks: int = 1
    step_source: str = "profiler"
    step_numbers: tuple[int, ...] | None = None
    num_files: int = 1
    matmul_flops: int | None = None
    """Of all products that are in a file."""
    num_collectives: int | None = None
    """Of each rank's host."""
    phases: frozenset[str] | None = None
    """That the report must have."""


def _model(layers: int = 3) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*parts)


def _train(model: Any, optimizer: Any) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()


def _profile(
    folder: Path, *, name: str = "t.pt.trace.json", schedule: Any = None, **more: Any
) -> Any:
    import torch

    def write(one: Any) -> None:
        count = len(list(folder.glob("*.json*")))
        one.export_chrome_trace(str(folder / (name if not count else f"{count}.{name}")))

    more.setdefault("activities", [torch.profiler.ProfilerActivity.CPU])
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write, **more)


def plain_loop(folder: Path) -> None:
    import torch

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        _train(model, optimizer)
    with _profile(folder, record_shapes=True, with_flops=True):
        for _ in range(4):
            _train(model, optimizer)


def schedule_with_gaps(folder: Path) -> None:
    """Two cycles of wait 2, warm-up 1, active 3: steps 3–5 and 9–11, in a file each."""
    import torch

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=2)
    with _profile(folder, schedule=schedule, record_shapes=True) as profiler:
        for _ in range(14):
            _train(model, optimizer)
            profiler.step()


def everything_on(folder: Path) -> None:
    import torch

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with _profile(
        folder, schedule=schedule, record_shapes=True, with_stack=True, with_modules=True,
        profile_memory=True, with_flops=True,
        experimental_config=torch._C._profiler._ExperimentalConfig(verbose=True),
    ) as profiler:  # fmt: skip
        for _ in range(6):
            _train(model, optimizer)
            profiler.step()


def named_ranges(folder: Path) -> None:
    import torch

    model = _model()
    with _profile(folder, record_shapes=True):
        for place in range(3):
            with torch.profiler.record_function(f"iteration {place}"):
                with torch.profiler.record_function("forward pass"):
                    loss = model(torch.ones(BATCH, WIDTH)).square().mean()
                with torch.profiler.record_function("backward pass"):
                    loss.backward()
                with torch.profiler.record_function("update"), torch.no_grad():
                    for one in model.parameters():
                        one -= 0.1 * one.grad
                        one.grad = None


def inference(folder: Path) -> None:
    import torch

    model = _model().eval()
    with _profile(folder, record_shapes=True), torch.inference_mode():
        for place in range(5):
            with torch.profiler.record_function(f"decode_step {place}"):
                model(torch.ones(BATCH, WIDTH))


def compiled(folder: Path) -> None:
    import torch

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, backend="aot_eager")
    _train(step, optimizer)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with _profile(folder, schedule=schedule, record_shapes=True) as profiler:
        for _ in range(4):
            _train(step, optimizer)
            profiler.step()


def two_optimizers(folder: Path) -> None:
    """A GAN: two backwards and two optimizers an iteration."""
    import torch

    made, judged = _model(2), _model(3)
    first = torch.optim.Adam(judged.parameters())
    second = torch.optim.Adam(made.parameters())
    noise = torch.ones(BATCH, WIDTH)
    with _profile(folder, record_shapes=True):
        for _ in range(4):
            first.zero_grad()
            (judged(noise).mean() - judged(made(noise).detach()).mean()).backward()
            first.step()
            second.zero_grad()
            judged(made(noise)).mean().backward()
            second.step()


def accumulation(folder: Path) -> None:
    import torch

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _profile(folder, record_shapes=True):
        for _ in range(3):
            for _ in range(4):
                model(torch.ones(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def threads_and_loader(folder: Path) -> None:
    import torch

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(6 * BATCH, WIDTH))
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with _profile(folder, schedule=schedule, record_shapes=True) as profiler:
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=1):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            profiler.step()


def _on_ranks(folder: Path, work: Callable[[Path, int], None], num: int = 2) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_be_rank, args=(work, folder, rank, num, port))
        for rank in range(num)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(240)
        if one.exitcode:
            raise RuntimeError(f"a rank ended with {one.exitcode}")


def _be_rank(
    work: Callable[[Path, int], None], folder: Path, rank: int, num: int, port: int
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num),
        LOCAL_RANK=str(rank),
    )  # fmt: skip
    torch.distributed.init_process_group("gloo")
    work(folder, rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _ddp(folder: Path, rank: int) -> None:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=3, repeat=1)
    own = folder / f"rank{rank}"
    own.mkdir(parents=True)
    with _profile(own, schedule=schedule, record_shapes=True) as profiler:
        for _ in range(5):
            _train(model, optimizer)
            profiler.step()


def ddp_over_gloo(folder: Path) -> None:
    _on_ranks(folder, _ddp)


def _fsdp2(folder: Path, rank: int) -> None:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=3, repeat=1)
    own = folder / f"rank{rank}"
    own.mkdir(parents=True)
    with _profile(own, schedule=schedule, record_shapes=True) as profiler:
        for _ in range(5):
            _train(model, optimizer)
            profiler.step()


def fsdp2_over_gloo(folder: Path) -> None:
    _on_ranks(folder, _fsdp2)


def _pipeline(folder: Path, rank: int) -> None:
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    part = _model(2)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, _: out.square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    own = folder / f"rank{rank}"
    own.mkdir(parents=True)
    with _profile(
        own, schedule=torch.profiler.schedule(wait=0, warmup=2, active=3, repeat=1),
        record_shapes=True,
    ) as profiler:  # fmt: skip
        for _ in range(5):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(torch.ones(BATCH, WIDTH))
            else:
                schedule.step(target=torch.ones(BATCH, WIDTH))
            optimizer.step()
            profiler.step()


def pipeline_over_gloo(folder: Path) -> None:
    _on_ranks(folder, _pipeline)


TRAINED = 3 + 3 + 2
"""Products of a step of three layers: forward, gradients of weights, gradients of inputs."""
PROGRAMS = (
    Program(
        name="plain loop", run=plain_loop, step_source="optimizer", step_numbers=(0, 1, 2, 3),
        matmul_flops=4 * TRAINED * LAYER_FLOPS,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
    Program(
        name="schedule with gaps", run=schedule_with_gaps, step_numbers=(3, 4, 5, 9, 10, 11),
        num_files=2, matmul_flops=6 * TRAINED * LAYER_FLOPS,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
    Program(
        name="everything on", run=everything_on, step_numbers=(2, 3, 4),
        matmul_flops=3 * TRAINED * LAYER_FLOPS,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
    Program(
        name="named ranges", run=named_ranges, step_source="range", step_numbers=(0, 1, 2),
        matmul_flops=3 * TRAINED * LAYER_FLOPS, phases=frozenset({"forward", "backward"}),
    ),
    Program(
        name="inference", run=inference, step_source="range", step_numbers=(0, 1, 2, 3, 4),
        matmul_flops=5 * 3 * LAYER_FLOPS,
    ),
    Program(
        name="compiled", run=compiled, step_numbers=(1, 2, 3),
        matmul_flops=3 * TRAINED * LAYER_FLOPS,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
    Program(
        name="two optimizers", run=two_optimizers, step_source="optimizer",
        step_numbers=(0, 1, 2, 3),
        # Judge, twice: 3 layers forward and 3 + 2 backward; made's forward without a backward, 2;
        # then both: 5 forward, 5 weights, 4 inputs.
        matmul_flops=4 * (2 * TRAINED + 2 + 5 + 5 + 4) * LAYER_FLOPS,
    ),
    Program(
        name="accumulation", run=accumulation, step_source="optimizer", step_numbers=(0, 1, 2),
        matmul_flops=3 * 4 * TRAINED * LAYER_FLOPS,
    ),
    Program(
        name="threads and loader", run=threads_and_loader, step_numbers=(2, 3, 4),
        matmul_flops=3 * TRAINED * LAYER_FLOPS,
        phases=frozenset({"data", "forward", "backward", "optimizer"}),
    ),
    Program(
        name="DDP over gloo", run=ddp_over_gloo, num_ranks=2, num_files=2,
        step_numbers=(2, 3, 4, 2, 3, 4), matmul_flops=2 * 3 * TRAINED * LAYER_FLOPS,
        num_collectives=3,  # all parameters are in one bucket
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
    Program(
        name="FSDP2 over gloo", run=fsdp2_over_gloo, num_ranks=2, num_files=2,
        step_numbers=(2, 3, 4, 2, 3, 4), matmul_flops=2 * 3 * TRAINED * LAYER_FLOPS,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
    Program(
        name="pipeline over gloo", run=pipeline_over_gloo, num_ranks=2, num_files=2,
        step_numbers=(2, 3, 4, 2, 3, 4),
        # Two layers a stage, 4 microbatches of a quarter each; stage 1 also gives the gradient of
        # its input, stage 0's input needs none.
        matmul_flops=3 * ((2 + 2 + 1) + (2 + 2 + 2)) * LAYER_FLOPS,
        num_collectives=None,
        phases=frozenset({"forward", "backward", "optimizer"}),
    ),
)  # fmt: skip

if __name__ == "__main__":
    wanted = next(one for one in PROGRAMS if one.name == sys.argv[1])
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    wanted.run(target)
