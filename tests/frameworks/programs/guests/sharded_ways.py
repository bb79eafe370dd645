"""Sharded parameters: `--way` fsdp1, hsdp (a mesh of two dimensions), tp (DTensor)."""

import argparse
import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from hand import hand
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

parser = argparse.ArgumentParser()
parser.add_argument("--way", required=True)
way = parser.parse_args().way


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 96)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = Model()
replica = rank
if way == "fsdp1":
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
    )
elif way == "hsdp":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
else:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    replica = 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=way != "tp")
torch.manual_seed(replica)
for step in range(20):
    tokens = torch.randint(0, 96, (8, 32))
    with hand("forward"):
        logits = model(tokens)
    with loss_parallel() if way == "tp" else nullcontext():
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        with hand("backward"):
            loss.backward()
    if way == "fsdp1":
        model.clip_grad_norm_(1.0)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    hand.step(loss=value.item(), samples=8, tokens=tokens.numel())
    if step % 5 == 4 and rank == 0:
        print(f"step {step}: loss {value.item():.4f}", flush=True)
hand.write()
dist.barrier()
dist.destroy_process_group()
