"""What one process computes, for ranks of any layout to be compared with.

Plain SGD with momentum at a real learning rate: Adam would hide wrong scales.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.distributed.fork_ranks import run_ranks
from torch import Tensor

from meshscope.engine import ModelConfig, build_stage
from meshscope.engine.pipeline.pipeline import Microbatch

NUM_STEPS = 5
LEARNING_RATE = 0.5
MOMENTUM = 0.9
SEED = 5
MICROBATCH_SIZE = 2

LLAMA = ModelConfig(
    vocab_size=61,
    num_layers=8,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    sequence_length=16,
    init_std=0.14,  # where five steps at this learning rate amplify rounding little
)
GPT = dataclasses.replace(
    LLAMA, num_kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True
)
CONFIGS = {
    "llama": LLAMA,
    "tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "gpt": GPT,
    "tied_gpt": dataclasses.replace(GPT, tie_embeddings=True),
}
TINY_LLAMA = dataclasses.replace(
    LLAMA, num_layers=4, hidden_size=16, ffn_hidden_size=24, sequence_length=8
)
TINY_GPT = dataclasses.replace(
    TINY_LLAMA,
    num_kv_heads=4,
    norm="layernorm",
    position="learned",
    activation="gelu",
    bias=True,
    tie_embeddings=True,
)


@dataclass
class Reference:
    """How a model trained in one process."""

    losses: list[list[float]] = field(default_factory=list)
    """Of each step, of each microbatch."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def make_tokens(*shape: int) -> Tensor:
    """The same samples whenever it is called: one batch for all steps, so that it learns."""
    shape = (*shape, LLAMA.sequence_length + 1)
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(3))


def make_microbatches(num_microbatches: int) -> list[Microbatch]:
    return [(part[:, :-1], part[:, 1:]) for part in make_tokens(num_microbatches, MICROBATCH_SIZE)]


def train_reference(config: ModelConfig, microbatches: Sequence[Microbatch]) -> Reference:
    model = build_stage(config, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)
    found = Reference()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [model(*microbatch) for microbatch in microbatches]
        torch.stack(losses).mean().backward()
        found.losses.append([loss.item() for loss in losses])
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        squares = [p.grad.double().square().sum() for p in model.parameters()]
        found.norms.append(torch.stack(squares).sum().sqrt().item())
        optimizer.step()
    found.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def train_references(folder: Path, train: Callable[[], dict[Any, Reference]]) -> Any:
    """What `train` gives, from a process of its own, before ranks are forked: a CUDA build of torch
    cannot run a backward after a fork if its parent has."""
    path = folder / "references.pt"
    assert run_ranks(lambda rank, num_ranks: torch.save(train(), path), 1) == [0]
    return torch.load(path, weights_only=False)
