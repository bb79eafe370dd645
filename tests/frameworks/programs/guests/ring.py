"""Keys and values sent around a ring by batch_isend_irecv; each rank has a part of a sequence."""

import torch
import torch.distributed as dist
from hand import hand
from torch import nn


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift):
        ctx.shift = shift
        return exchange(x, shift)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, -ctx.shift), None


def exchange(x, shift):
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % world),
        dist.P2POp(dist.irecv, received, (rank - shift) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class Model(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        top, bottom = 0.0, 0.0
        for hop in range(dist.get_world_size()):
            score = (q @ k.transpose(-1, -2) / 10).exp()
            top, bottom = top + score @ v, bottom + score.sum(-1, keepdim=True)
            if hop + 1 < dist.get_world_size():
                kv = Rotate.apply(torch.stack((k, v)), 1)
                k, v = kv[0], kv[1]
        return self.head(x + top / bottom)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(2)
for step in range(24):
    tokens = torch.randint(0, 100, (4, 64 * world)).chunk(world, 1)[rank]
    with hand("forward"):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    with hand("backward"):
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item())
    if rank == 0 and step % 8 == 7:
        print(f"{step} {loss.item():.4f}", flush=True)
hand.write()
dist.barrier()
dist.destroy_process_group()
