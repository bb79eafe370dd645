"""Two gloo ranks whose memory is attributed and held against the allocator.

    python -m tests.distributed.attribution_ranks FOLDER [--cuda]

writes FOLDER/{case}.rank{g}.json: the points' sums, and what freeing the graph returned. With
--cuda the ranks share one device and still talk over gloo, but for one case of a single NCCL rank.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
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

from meshscope.capture.guard import Guard
from meshscope.capture.memory import memory_profile
from meshscope.capture.memory.memory_profile import MemoryProfile

VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS, BATCH, LENGTH = 1000, 64, 4, 2, 16, 128
WORLD_SIZE = 2
EVERY_OPERATOR = "ddp_every_operator"
"""DDP holds a lock while operators run, also in them nothing may wait for it."""
TOGETHER = ("ddp", EVERY_OPERATOR, "fsdp", "fsdp_checkpoint", "tp")
ALONE = (("plain", "non_reentrant"), ("reentrant",))
"""By rank: what needs no other one."""
TOGETHER_ON_CUDA = (*TOGETHER, "tp_checkpoint")
NCCL_CASE = "fsdp_nccl"
CUDA_SCALE = 16
"""How many times larger batches are there."""


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


def make_model(case, device):
    torch.manual_seed(0)
    model = Gpt(find_checkpointing(case)).to(device)
    if case.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model)
    if case.startswith("fsdp"):
        return shard(model, device, needs_own_transfers=device == "cuda" and case != NCCL_CASE)
    return split(model, device) if case.startswith("tp") else model


def find_checkpointing(case):
    if case.endswith("checkpoint"):
        return "non_reentrant"
    return case if case.endswith("reentrant") else None


def shard(model, device, *, needs_own_transfers):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    parts = [fully_shard(block, mesh=mesh) for block in model.blocks]
    for part in (*parts, fully_shard(model, mesh=mesh)):
        if needs_own_transfers:
            part.set_custom_all_gather(GatherByParts())
            part.set_custom_reduce_scatter(ReduceAndCut())
    return model


class GatherByParts:
    """FSDP2's all-gather for gloo on a device."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)


class ReduceAndCut(GatherByParts):
    """FSDP2's reduce-scatter, which gloo does not have there."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def split(model, device):
    mesh = init_device_mesh(device, (WORLD_SIZE,))
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


def measure(case, device="cpu"):
    """Points of one step, and of a forward whose graph is dropped."""
    model = make_model(case, device)
    # Some parameters are DTensors and some are not: several at once do not mix.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=not case.startswith("tp"))
    batch = BATCH if device == "cpu" else CUDA_SCALE * BATCH
    tokens = torch.randint(0, VOCABULARY, (batch, LENGTH), device=device)
    for _ in range(2 if case.startswith("ddp") else 1):  # caches fill, DDP builds its buckets again
        train_step(model, optimizer, tokens)
    guard = Guard()
    if case == EVERY_OPERATOR:
        memory_profile.PEAK_GROWTH_RATIO = -1.0  # the "peak" is attributed after each of them
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
        "peak_bytes": profile._allocator.read().get("peak_allocated_bytes", -1),
        "freed_bytes": before.allocated_bytes - after.allocated_bytes,
        "activations_bytes": sums(before).get("activations", 0) - sums(after).get("activations", 0),
    }


def describe(point):
    return {
        "name": point.name,
        "during": point.during,
        "categories": sums(point),
        "allocated_bytes": point.allocated_bytes,
        "residual_bytes": point.residual_bytes,
    }


def sums(point):
    return point.categories_bytes


def run_cases(folder, cases_of, device="cpu"):
    """Processes of their own: what an earlier case leaves to be freed later would count here."""

    def on_rank(rank, world_size):
        for case in cases_of(rank):
            path = folder / f"{case}.rank{rank}.json"
            path.write_text(json.dumps(measure(case, device)), encoding="utf-8")

    assert run_ranks(on_rank, WORLD_SIZE) == [0] * WORLD_SIZE


def run_nccl_case(folder):
    def on_rank(rank, world_size):
        dist.destroy_process_group()
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=0, world_size=1)
        result = measure(NCCL_CASE, "cuda")
        (folder / f"{NCCL_CASE}.rank0.json").write_text(json.dumps(result), encoding="utf-8")

    assert run_ranks(on_rank, 1) == [0]


def main(folder, device):
    for case in TOGETHER if device == "cpu" else TOGETHER_ON_CUDA:
        run_cases(folder, lambda rank, case=case: [case], device)
    if device == "cuda":
        run_nccl_case(folder)
        return
    for place in range(max(map(len, ALONE))):
        run_cases(folder, lambda rank, place=place: ALONE[rank][place : place + 1])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), "cuda" if "--cuda" in sys.argv[2:] else "cpu")
