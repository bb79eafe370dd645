"""Experts over ranks: tokens go by all_to_all_single, the rest is averaged by hand."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from hand import hand
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))

    def forward(self, x):
        flat = x.flatten(0, 1)
        score, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=dist.get_world_size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        received = dist_nn.all_to_all_single(
            torch.empty(int(theirs.sum()), flat.shape[1]),
            flat[order],
            theirs.tolist(),
            counts.tolist(),
        )
        done = self.expert(received)
        back = dist_nn.all_to_all_single(
            torch.empty_like(flat), done, counts.tolist(), theirs.tolist()
        )
        out = torch.empty_like(back)
        out[order] = back
        return x + (out * score[:, None]).view_as(x)


class Model(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.layers = nn.ModuleList([Experts(width) for _ in range(2)])
        self.head = nn.Linear(width, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = Model()
shared = [p for n, p in model.named_parameters() if ".expert." not in n]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(24):
    tokens = torch.randint(0, 100, (8, 32))
    with hand("forward"):
        logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    with hand("backward"):
        loss.backward()
    flat = torch.cat([p.grad.flatten() for p in shared])
    dist.all_reduce(flat)
    for p, grad in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
        p.grad.copy_(grad.view_as(p) / world)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if rank == 0 and step % 8 == 7:
        print(f"{step} {loss.item():.4f}", flush=True)
hand.write()
dist.barrier()
dist.destroy_process_group()
