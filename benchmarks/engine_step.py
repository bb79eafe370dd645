"""How fast is the engine's 2×2×2 step beside the least plain torch that does the same?

    python benchmarks/engine_step.py [--output FILE] [--rounds N] [--steps N] [--size tiny|small]

Eight gloo ranks, one torch thread each, dp 2 × tp 2 × pp 2, 1F1B over 4 microbatches, SGD,
gradients clipped by the norm over the whole mesh, the loss known to every rank. Three forms of one
model with the same weights (their losses must agree over three steps): the engine; the engine with
DTensor tensor parallel and FSDP2 (DTensors are not for the reducer); and the least code that does
it in plain torch, written out below without layers, options, checks or overlap: Megatron's two
autograd functions, sends in 1F1B's order, one flat buffer of gradients summed at the end.
Blocks of steps take turns; ratios are of blocks of the same round, by the
slowest rank; CPU time is the sum over ranks.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fork_ranks import run_ranks
from recorder_overhead import describe_machine
from torch import Tensor

from meshscope.core.config.train_config import (
    BatchConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from meshscope.engine import ModelConfig, build_stage
from meshscope.engine.engine import Engine
from meshscope.engine.mesh import Mesh, Role

MICROBATCH_SIZE = 2
NUM_MICROBATCHES = 4
LEARNING_RATE = 0.1
MAX_NORM = 1.0
SIZES = {
    "tiny": ModelConfig(
        vocab_size=512,
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        ffn_hidden_size=176,
        sequence_length=64,
    ),
    "small": ModelConfig(
        vocab_size=2048,
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=8,
        ffn_hidden_size=704,
        sequence_length=128,
    ),
}

Step = Callable[[Tensor], float]


def make_engine(config: ModelConfig, mesh: Mesh, **parallel: str) -> Step:
    engine = Engine(
        TrainConfig(
            model=config,
            device="cpu",
            parallel=ParallelConfig(dp=2, tp=2, pp=2, **parallel),
            batch=BatchConfig(microbatch_size=MICROBATCH_SIZE, num_microbatches=NUM_MICROBATCHES),
            optimizer=OptimizerConfig(
                kind="sgd", learning_rate=LEARNING_RATE, max_gradient_norm=MAX_NORM
            ),
        ),
        mesh=mesh,
    )
    return lambda tokens: engine.train_step(tokens).loss


# --- the least code ------------------------------------------------------------------------------


def make_written_out(config: ModelConfig, mesh: Mesh) -> Step:
    tp_group, tp_rank = mesh.group_of(Role.MATRICES), mesh.here.tp
    is_first, is_last = mesh.here.pp == 0, mesh.here.pp == 1
    peer = mesh.layout.rank_of(mesh.here, pp=1 - mesh.here.pp)

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous()
            dist.all_reduce(grad, group=tp_group)
            return grad

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dist.all_reduce(x, group=tp_group)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    weights = build_stage(config, mesh.here.pp, 2, tp_group=tp_group)
    rotation = weights.rotation
    parameters = list(weights.parameters())
    sharded = {id(p) for n, p in weights.named_parameters() if "norm" not in n}
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)

    def localize(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        first = tp_rank * num_rows
        is_elsewhere = (ids < first) | (ids >= first + num_rows)
        return is_elsewhere, (ids - first).masked_fill(is_elsewhere, 0)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (config.hidden_size,), weight, config.norm_eps)

    def embed(ids: Tensor) -> Tensor:
        table = weights.token_embedding.weight
        is_elsewhere, ids = localize(ids, len(table))
        return Reduce.apply(F.embedding(ids, table).masked_fill(is_elsewhere[..., None], 0.0))

    def run_layers(x: Tensor) -> Tensor:
        for block in weights.layers.values():
            qkv = F.linear(
                Copy.apply(norm(x, block.attention_norm.weight)), block.attention.qkv.weight
            )
            q, k, v = (y.view(*y.shape[:2], -1, config.head_size) for y in qkv.chunk(3, -1))
            q, k = rotation(q), rotation(k)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            out = block.attention.output.weight
            x = x + Reduce.apply(F.linear(mixed.transpose(1, 2).flatten(2), out))
            up = F.linear(Copy.apply(norm(x, block.mlp_norm.weight)), block.mlp.up.weight)
            gate, value = up.chunk(2, -1)
            x = x + Reduce.apply(F.linear(F.silu(gate) * value, block.mlp.down.weight))
        return x

    def compute_loss(x: Tensor, targets: Tensor) -> Tensor:
        head = weights.head.weight
        logits = F.linear(Copy.apply(norm(x, weights.final_norm.weight)), head)
        peak = logits.detach().amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp_group)
        logits = logits - peak[..., None]
        is_elsewhere, ids = localize(targets, len(head))
        target = logits.gather(-1, ids[..., None])[..., 0].masked_fill(is_elsewhere, 0.0)
        total, target = Reduce.apply(torch.stack([logits.exp().sum(-1), target]))
        return (total.log() - target).mean()

    shape = (MICROBATCH_SIZE, config.sequence_length, config.hidden_size)
    sent = []

    def send(x: Tensor) -> None:
        sent.append((dist.isend(x, peer), x))

    def run_first(parts: Tensor) -> float:
        waiting = []

        def back() -> None:
            grad = torch.empty(shape)
            dist.recv(grad, peer)
            waiting.pop(0).backward(grad)

        for index, part in enumerate(parts):
            hidden = run_layers(embed(part[:, :-1]))
            send(hidden.detach())
            waiting.append(hidden)
            if index > 0:
                back()
        back()
        return 0.0

    def run_last(parts: Tensor) -> float:
        loss_sum = 0.0
        for part in parts:
            hidden = torch.empty(shape)
            dist.recv(hidden, peer)
            hidden.requires_grad_()
            loss = compute_loss(run_layers(hidden), part[:, 1:])
            (loss / NUM_MICROBATCHES).backward()
            send(hidden.grad)
            loss_sum += loss.item() / NUM_MICROBATCHES
        return loss_sum

    def step(parts: Tensor) -> float:
        optimizer.zero_grad()
        loss = run_first(parts) if is_first else run_last(parts)
        while sent:
            sent.pop()[0].wait()
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=mesh.group_of(Role.REPLICAS))
        flat /= 2
        square = 0.0
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(grad.view_as(p))
            if id(p) in sharded or tp_rank == 0:
                square += grad.square().sum().item()
        own = [square if mesh.here.dp == 0 else 0.0, loss / 2 if is_last and tp_rank == 0 else 0.0]
        totals = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(totals)
        ratio = min(1.0, MAX_NORM / (totals[0].sqrt().item() + 1e-6))
        for p in parameters:
            p.grad.mul_(ratio)
        optimizer.step()
        return totals[1].item()

    return step


# --- measuring -----------------------------------------------------------------------------------


def measure(
    config: ModelConfig, output: Path, rounds: int, num_steps: int
) -> Callable[[int, int], None]:
    def job(rank: int, world_size: int) -> None:
        mesh = Mesh(ParallelConfig(dp=2, tp=2, pp=2).layout)
        steps = {
            "engine": make_engine(config, mesh),
            "written out": make_written_out(config, mesh),
            "engine, DTensor and FSDP2": make_engine(
                config, mesh, tensor_parallel="dtensor", data_parallel="fsdp"
            ),
        }
        shape = (2, NUM_MICROBATCHES, MICROBATCH_SIZE, config.sequence_length + 1)
        tokens = torch.randint(
            0, config.vocab_size, shape, generator=torch.Generator().manual_seed(1)
        )[mesh.here.dp]
        losses = {name: [step(tokens) for _ in range(3)] for name, step in steps.items()}
        for name, found in losses.items():
            difference = max(abs(a - b) for a, b in zip(found, losses["engine"], strict=True))
            assert difference < 1e-4, (name, losses)
        times: dict[str, list[float]] = {name: [] for name in steps}
        cpu_times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds):
            order = list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]
            for name in order:
                dist.barrier()
                begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
                for _ in range(num_steps):
                    steps[name](tokens)
                cpu_ms = torch.tensor((time.process_time_ns() - begin_cpu_ns) / num_steps / 1e6)
                dist.all_reduce(cpu_ms)
                times[name].append((time.perf_counter_ns() - begin_ns) / num_steps / 1e6)
                cpu_times[name].append(cpu_ms.item())
        if rank == 0:
            found = {"losses": losses, "times_ms": times, "cpu_times_ms": cpu_times}
            output.write_text(json.dumps(found), encoding="utf-8")

    return job


def summarize(found: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    result: dict[str, object] = {"first_losses": found["losses"]}
    for prefix, times in (("", found["times_ms"]), ("cpu_", found["cpu_times_ms"])):
        ratios = {
            f"{name} / written out": [
                a / b for a, b in zip(times[name], times["written out"], strict=True)
            ]
            for name in times
            if name != "written out"
        }
        result |= {
            f"{prefix}step_ms_median": {
                n: round(statistics.median(t), 2) for n, t in times.items()
            },
            f"{prefix}ratio_median": {n: round(statistics.median(r), 3) for n, r in ratios.items()},
            f"{prefix}ratio_quartiles": {
                name: [round(value, 3) for value in statistics.quantiles(r, n=4)[::2]]
                for name, r in ratios.items()
            },
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    arguments = parser.parse_args()
    sizes = list(SIZES) if arguments.size == "all" else [arguments.size]
    result: dict[str, object] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "times.json"
            job = measure(SIZES[size], path, arguments.rounds, arguments.steps)
            codes = run_ranks(job, 8, rank_timeout_s=1200)
            assert not any(codes), codes
            result[size] = summarize(json.loads(path.read_text(encoding="utf-8")))
    result["machine"] = describe_machine("cpu")
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
