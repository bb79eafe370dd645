"""FSDP2 on a named DeviceMesh; with `--tp 2` tensor parallel inside."""

import argparse

import torch
import torch.distributed as dist
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
tp = parser.parse_args().tp

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(1)
model = LanguageModel(384)
if tp > 1:
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model.body, mesh["tp"], plan)
    shards = mesh["dp"]
else:
    shards = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
fully_shard(model.body, mesh=shards)
fully_shard(model, mesh=shards)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank() // tp)
for step in range(24):
    tokens = draw_tokens(8)
    with hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 8 == 7 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
hand.write()
dist.destroy_process_group()
