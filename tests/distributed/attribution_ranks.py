"""Two gloo ranks whose memory is attributed and held against the allocator.

    python -m tests.distributed.attribution_ranks FOLDER

writes FOLDER/{case}.rank{g}.json: the points' sums, and what freeing the graph returned.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from tests.distributed.fork_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshscope.capture.attribution.memory_profile import MemoryProfile
from meshscope.capture.guard import Guard

VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, BATCH, LENGTH = 1000, 64, 4, 2, 16, 128
WORLD_SIZE = 2
TOGETHER = ("ddp", "fsdp", "fsdp_checkpoint", "tp")
ALONE = (("plain", "non_reentrant"), ("reentrant",))
"""By rank: what needs no other one."""


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, checkpointing=None):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointing = checkpointing

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


def make_model(case):
    torch.manual_seed(0)
    if case == "ddp":
        return nn.parallel.DistributedDataParallel(Gpt())
    if case.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        model = Gpt("non_reentrant" if case == "fsdp_checkpoint" else None)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if case == "tp":
        return split(Gpt())
    return Gpt(None if case == "plain" else case)


def split(model):
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    columns = dict.fromkeys(("attention.query", "attention.key", "attention.value", "up"))
    rows = ("attention.out", "down")
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
    return model


def train_step(model, optimizer, tokens):
    find_loss(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def find_loss(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def measure(case):
    """Points of one step, and of a forward whose graph is dropped."""
    model = make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    for _ in range(2 if case == "ddp" else 1):  # caches fill, DDP builds its buckets again
        train_step(model, optimizer, tokens)
    guard = Guard()
    profile = MemoryProfile(torch, [model], [optimizer], guard=guard, steps=2).open()
    train_step(model, optimizer, tokens)
    loss = find_loss(model, tokens)
    before = profile.point("before_freeing")
    del loss
    gc.collect()
    after = profile.point("freed")
    profile.close()
    return {
        "errors": guard.first_messages,
        "allocator": profile._allocator.why_missing,
        "points": [describe(point) for point in profile.points],
        "freed_bytes": before.allocated_bytes - after.allocated_bytes,
        "activations_bytes": sums(before).get("activations", 0) - sums(after).get("activations", 0),
    }


def describe(point):
    return {
        "name": point.name,
        "categories": sums(point),
        "allocated_bytes": point.allocated_bytes,
        "residual_bytes": point.residual_bytes,
    }


def sums(point):
    return {name: sum(paths.values()) for name, paths in point.categories.items()}


def run_cases(folder, cases_of):
    """Processes of their own: what an earlier case leaves to be freed later would count here."""

    def on_rank(rank, world_size):
        for case in cases_of(rank):
            path = folder / f"{case}.rank{rank}.json"
            path.write_text(json.dumps(measure(case)), encoding="utf-8")

    assert run_ranks(on_rank, WORLD_SIZE) == [0] * WORLD_SIZE


if __name__ == "__main__":
    for case in TOGETHER:
        run_cases(Path(sys.argv[1]), lambda rank, case=case: [case])
    for place in range(max(map(len, ALONE))):
        run_cases(Path(sys.argv[1]), lambda rank, place=place: ALONE[rank][place : place + 1])
