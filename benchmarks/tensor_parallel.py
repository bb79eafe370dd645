"""How fast is a tensor-parallel step of the engine, beside DTensor and a hand-written loop?

    python benchmarks/tensor_parallel.py [--output FILE] [--rounds N] [--steps N]

Two gloo ranks, one torch thread each, one Llama-like model in four forms with the same weights
(their first losses must agree): the engine's, without and with sequence parallel; a plain model
under DTensor's `parallelize_module` with `loss_parallel`; and the least code that does Megatron's
tensor parallelism, written out below without layers, options or overlap. Blocks of steps take
turns; ratios are of blocks of the same round.
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
from torch import Tensor, nn

from meshscope.engine import ModelConfig, build_stage, reduce_sequence_parallel_gradients
from meshscope.engine.model.transformer import Rotation, Stage

TP = 2
BATCH_SIZE = 4
CONFIG = ModelConfig(
    vocab_size=2048,
    num_layers=4,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=8,
    ffn_hidden_size=704,
    sequence_length=128,
)
LEARNING_RATE = 0.01

Step = Callable[[Tensor, Tensor], float]


def make_step(forward: Callable[[Tensor, Tensor], Tensor], parameters: list[Tensor]) -> Step:
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# --- the engine ----------------------------------------------------------------------------------


def make_engine(*, sequence_parallel: bool) -> Step:
    model = build_stage(CONFIG, tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        if sequence_parallel:
            reduce_sequence_parallel_gradients(model, dist.group.WORLD)
        optimizer.step()
        return loss.item()

    return step


# --- Megatron's tensor parallelism, written out --------------------------------------------------


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def make_written_out(whole: Stage, rotation: Rotation) -> Step:
    rank, sizes = dist.get_rank(), [CONFIG.hidden_size] * 3

    def rows(weight: Tensor, parts: list[int]) -> Tensor:
        pieces = [part.chunk(TP)[rank] for part in weight.detach().split(parts)]
        return torch.cat(pieces).clone().requires_grad_()

    def columns(weight: Tensor) -> Tensor:
        return weight.detach().chunk(TP, 1)[rank].clone().requires_grad_()

    def copy(weight: Tensor) -> Tensor:
        return weight.detach().clone().requires_grad_()

    table = rows(whole.token_embedding.weight, [CONFIG.vocab_size])
    head = rows(whole.head.weight, [CONFIG.vocab_size])
    final_norm = copy(whole.final_norm.weight)
    layers = [
        (
            copy(block.attention_norm.weight),
            rows(block.attention.qkv.weight, sizes),
            columns(block.attention.output.weight),
            copy(block.mlp_norm.weight),
            rows(block.mlp.up.weight, [CONFIG.ffn_hidden_size] * 2),
            columns(block.mlp.down.weight),
        )
        for block in whole.layers.values()
    ]
    first_row = rank * len(table)

    def localize(ids: Tensor) -> tuple[Tensor, Tensor]:
        is_elsewhere = (ids < first_row) | (ids >= first_row + len(table))
        return is_elsewhere, (ids - first_row).masked_fill(is_elsewhere, 0)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (CONFIG.hidden_size,), weight, CONFIG.norm_eps)

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        is_elsewhere, ids = localize(inputs)
        x = Reduce.apply(F.embedding(ids, table).masked_fill(is_elsewhere[..., None], 0.0))
        for norm_1, qkv, out, norm_2, up, down in layers:
            q, k, v = F.linear(Copy.apply(norm(x, norm_1)), qkv).chunk(3, -1)
            q, k, v = (y.view(*y.shape[:2], -1, CONFIG.head_size) for y in (q, k, v))
            q, k = rotation(q), rotation(k)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            x = x + Reduce.apply(F.linear(mixed.transpose(1, 2).flatten(2), out))
            gate, value = F.linear(Copy.apply(norm(x, norm_2)), up).chunk(2, -1)
            x = x + Reduce.apply(F.linear(F.silu(gate) * value, down))
        logits = F.linear(Copy.apply(norm(x, final_norm)), head)
        peak = logits.detach().amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        logits = logits - peak[..., None]
        is_elsewhere, ids = localize(targets)
        target = logits.gather(-1, ids[..., None])[..., 0].masked_fill(is_elsewhere, 0.0)
        total, target = Reduce.apply(torch.stack([logits.exp().sum(-1), target]))
        return (total.log() - target).mean()

    return make_step(forward, [table, head, final_norm, *(w for layer in layers for w in layer)])


# --- DTensor -------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        size, inner = CONFIG.hidden_size, CONFIG.ffn_hidden_size
        self.norm_1, self.norm_2 = (nn.RMSNorm(size, CONFIG.norm_eps) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(size, size, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)
        self.rotate = rotation.forward

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (
            part.view(*part.shape[:2], -1, CONFIG.head_size)
            for part in (self.query(y), self.key(y), self.value(y))
        )
        q, k = self.rotate(q), self.rotate(k)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_dtensor(whole: Stage, rotation: Rotation) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model = nn.Sequential(
        nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size),
        *(PlainBlock(rotation) for _ in range(CONFIG.num_layers)),
        nn.RMSNorm(CONFIG.hidden_size, CONFIG.norm_eps),
        nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False),
    )
    with torch.no_grad():
        model[0].weight.copy_(whole.token_embedding.weight)
        model[-1].weight.copy_(whole.head.weight)
        for plain, block in zip(model[1:-2], whole.layers.values(), strict=True):
            for linear, weight in zip(
                (plain.query, plain.key, plain.value),
                block.attention.qkv.weight.chunk(3),
                strict=True,
            ):
                linear.weight.copy_(weight)
            gate, up = block.mlp.up.weight.chunk(2)
            plain.gate.weight.copy_(gate)
            plain.up.weight.copy_(up)
            plain.out.weight.copy_(block.attention.output.weight)
            plain.down.weight.copy_(block.mlp.down.weight)
    mesh = init_device_mesh("cpu", (TP,))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        str(len(model) - 1): ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(1, 1 + CONFIG.num_layers):
        plan |= {f"{index}.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {f"{index}.{name}": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{index}.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return value.item()

    return step


# --- measuring -----------------------------------------------------------------------------------


def measure(output: Path, rounds: int, num_steps: int) -> Callable[[int, int], None]:
    def job(rank: int, world_size: int) -> None:
        whole = build_stage(CONFIG)
        steps = {
            "engine": make_engine(sequence_parallel=False),
            "engine, sequence parallel": make_engine(sequence_parallel=True),
            "written out": make_written_out(whole, whole.rotation),
            "DTensor": make_dtensor(whole, whole.rotation),
        }
        generator = torch.Generator().manual_seed(1)
        shape = (BATCH_SIZE, CONFIG.sequence_length + 1)
        tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        losses = {name: [step(*batch) for _ in range(3)] for name, step in steps.items()}
        for name, found in losses.items():
            difference = max(abs(a - b) for a, b in zip(found, losses["engine"], strict=True))
            assert difference < 1e-4, (name, losses)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds):
            order = list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]
            for name in order:
                dist.barrier()
                begin = time.perf_counter_ns()
                for _ in range(num_steps):
                    steps[name](*batch)
                times[name].append((time.perf_counter_ns() - begin) / num_steps / 1e6)
        if rank == 0:
            output.write_text(json.dumps({"losses": losses, "times_ms": times}), encoding="utf-8")

    return job


def summarize(found: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    times = found["times_ms"]
    ratios = {
        f"{over} / {under}": [a / b for a, b in zip(times[over], times[under], strict=True)]
        for over, under in (
            ("engine", "written out"),
            ("engine", "DTensor"),
            ("engine, sequence parallel", "engine"),
        )
    }
    return {
        "first_losses": found["losses"],
        "step_ms_median": {name: round(statistics.median(t), 2) for name, t in times.items()},
        "ratio_median": {name: round(statistics.median(r), 3) for name, r in ratios.items()},
        "ratio_quartiles": {
            name: [round(value, 3) for value in statistics.quantiles(r, n=4)[::2]]
            for name, r in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        codes = run_ranks(measure(path, arguments.rounds, arguments.steps), TP)
        assert not any(codes), codes
        result = summarize(json.loads(path.read_text(encoding="utf-8")))
    result["machine"] = describe_machine("cpu")
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
