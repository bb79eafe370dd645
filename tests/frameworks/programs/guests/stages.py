"""Pipelines of torch: `--schedule` 1f1b, interleaved, zbv, on two ranks."""

import argparse

import torch
import torch.distributed as dist
from hand import hand
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", required=True)
name = parser.parse_args().schedule
WIDTH, BATCH, LENGTH, CHUNKS = 128, 16, 32, 4


class Part(nn.Module):
    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH) if index == 0 else nn.Identity()
        self.body = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))
        self.head = nn.Linear(WIDTH, 100) if index == count - 1 else nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


def compute_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
count = world if name == "1f1b" else 2 * world
mine = {
    "1f1b": [rank],
    "interleaved": [rank, rank + world],
    "zbv": [rank, count - 1 - rank],
}[name]
parts = [Part(i, count) for i in mine]
stages = [PipelineStage(p, i, count, torch.device("cpu")) for p, i in zip(parts, mine, strict=True)]
if name == "1f1b":
    schedule = Schedule1F1B(stages[0], CHUNKS, loss_fn=compute_loss)
elif name == "interleaved":
    schedule = ScheduleInterleaved1F1B(stages, CHUNKS, loss_fn=compute_loss)
else:
    schedule = ScheduleZBVZeroBubble(stages, CHUNKS, loss_fn=compute_loss)
optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
# After the optimizer: these take the methods that are there now, and what is put around the class
# later is not seen.
for stage in stages:
    hand.around(stage, "forward_one_chunk", "forward")
    hand.around(stage, "backward_one_chunk", "backward")
    hand.around(stage, "backward_weight_one_chunk", "backward")
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
torch.manual_seed(2)
for step in range(20):
    tokens = torch.randint(0, 100, (BATCH, LENGTH))
    losses = []
    args = (tokens,) if 0 in mine else ()
    if count - 1 in mine:
        schedule.step(*args, target=tokens, losses=losses)
    else:
        schedule.step(*args)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    warmup.step()
    numbers = {"samples": BATCH, "tokens": tokens.numel()}
    if losses:
        numbers["loss"] = torch.stack(losses).mean().item()
    hand.step(**numbers)
    if losses and step % 5 == 4:
        print(f"step {step}: loss {numbers['loss']:.4f}", flush=True)
hand.write()
dist.barrier()
dist.destroy_process_group()
