"""How fast is the engine on one GPU, beside a training loop written by hand?

    python benchmarks/engine_gpu.py [--output FILE] [--rounds N] [--steps N] [--batch-size N]

A GPT of 355 million parameters in bf16 (autocast, float32 weights), sequences of 1024, fused AdamW,
gradients clipped. Four forms with the same initial weights, whose losses must agree: a plain GPT
with the usual loop, written out below, and the engine; each as it is and under torch.compile.
Blocks of steps take turns on one device; tokens per second by the wall clock around blocks that end
with a synchronisation. MFU is the model's FLOPs (`ModelConfig.count_flops_per_token`: 6 per weight,
12·h·s per layer for attention, whole square) over the device's dense bf16 peak from its data sheet.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from recorder_overhead import describe_machine
from torch import Tensor, nn

from meshscope.core.config.train_config import (
    BatchConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
)
from meshscope.engine import ModelConfig, StepResult, build_stage
from meshscope.engine.engine import Engine

CONFIG = ModelConfig(
    vocab_size=50304,
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=16,
    ffn_hidden_size=4096,
    sequence_length=1024,
    norm="layernorm",
    position="learned",
    activation="gelu",
    bias=True,
    tie_embeddings=True,
)
DENSE_BF16_FLOPS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12}
"""By torch's exact device name; others have no MFU here."""
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
MAX_NORM = 1.0

Step = Callable[[Tensor], Tensor | StepResult]


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = CONFIG.hidden_size
        self.norm_1, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up = nn.Linear(size, CONFIG.ffn_hidden_size)
        self.down = nn.Linear(CONFIG.ffn_hidden_size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = (
            part.view(batch, length, CONFIG.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(size, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, size))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size)
        self.positions = nn.Embedding(CONFIG.sequence_length, CONFIG.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(CONFIG.num_layers))
        self.norm = nn.LayerNorm(CONFIG.hidden_size)
        self.head = nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def copy_weights(plain: PlainGpt) -> None:
    whole = build_stage(CONFIG, device="cuda")
    plain.tokens.weight.copy_(whole.token_embedding.weight)
    plain.positions.weight.copy_(whole.position_embedding.weight)
    plain.norm.load_state_dict(whole.final_norm.state_dict())
    for block, source in zip(plain.blocks, whole.layers.values(), strict=True):
        for ours, theirs in (
            (block.norm_1, source.attention_norm),
            (block.norm_2, source.mlp_norm),
            (block.qkv, source.attention.qkv),
            (block.out, source.attention.output),
            (block.up, source.mlp.up),
            (block.down, source.mlp.down),
        ):
            ours.load_state_dict(theirs.state_dict())


def make_by_hand(*, is_compiled: bool) -> Step:
    model = PlainGpt().cuda()
    copy_weights(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
    )
    run = torch.compile(model) if is_compiled else model

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens[0, :, :-1], tokens[0, :, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


def make_engine(batch_size: int, *, is_compiled: bool) -> Step:
    engine = Engine(
        TrainConfig(
            model=CONFIG,
            device="cuda",
            compile=is_compiled,
            precision=PrecisionConfig(compute="bf16"),
            batch=BatchConfig(microbatch_size=batch_size, num_microbatches=1),
            optimizer=OptimizerConfig(
                kind="adamw", learning_rate=LEARNING_RATE, betas=BETAS, max_gradient_norm=MAX_NORM
            ),
        )
    )
    # Not read: a loop by hand does not wait for its loss either.
    return engine.train_step


def read(result: Tensor | StepResult) -> float:
    return result.item() if isinstance(result, Tensor) else result.loss


def measure(batch_size: int, rounds: int, num_steps: int) -> dict[str, object]:
    torch.set_float32_matmul_precision("high")
    steps = {
        "by hand": make_by_hand(is_compiled=False),
        "engine": make_engine(batch_size, is_compiled=False),
        "by hand, compiled": make_by_hand(is_compiled=True),
        "engine, compiled": make_engine(batch_size, is_compiled=True),
    }
    generator = torch.Generator().manual_seed(1)
    shape = (1, batch_size, CONFIG.sequence_length + 1)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator).cuda()
    losses = {name: [read(step(tokens)) for _ in range(3)] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        order = list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]
        for name in order:
            torch.cuda.synchronize()
            begin_ns = time.perf_counter_ns()
            for _ in range(num_steps):
                steps[name](tokens)
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter_ns() - begin_ns) / num_steps / 1e9)
    num_tokens = batch_size * CONFIG.sequence_length
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    peak = DENSE_BF16_FLOPS.get(torch.cuda.get_device_name())
    flops = CONFIG.count_flops_per_token() * num_tokens
    ratios = {
        "engine / by hand": ("by hand", "engine"),
        "engine / by hand, compiled": ("by hand, compiled", "engine, compiled"),
    }
    by_round = {
        label: [a / b for a, b in zip(seconds[under], seconds[over], strict=True)]
        for label, (under, over) in ratios.items()
    }
    return {
        "num_parameters": CONFIG.num_parameters,
        "batch_size": batch_size,
        "losses": losses,
        "step_ms_median": {name: round(s * 1e3, 3) for name, s in medians.items()},
        "tokens_per_second": {name: round(num_tokens / s) for name, s in medians.items()},
        "mfu": None
        if peak is None
        else {name: round(flops / s / peak, 4) for name, s in medians.items()},
        "peak_flops": peak,
        "throughput_ratio_median": {k: round(statistics.median(v), 4) for k, v in by_round.items()},
        "throughput_ratio_quartiles": {
            k: [round(q, 4) for q in statistics.quantiles(v, n=4)[::2]] for k, v in by_round.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    result = measure(arguments.batch_size, arguments.rounds, arguments.steps)
    result["machine"] = describe_machine("cuda")
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
