"""DistributedDataParallel, and averaging by hand, in the ways that people use: `--way`."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--way", required=True)
way = parser.parse_args().way

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = LanguageModel(128)
plain = model
if way not in ("manual", "buckets", "local"):
    model = DistributedDataParallel(
        model, static_graph=way == "static", gradient_as_bucket_view=way == "static"
    )
if way == "powersgd":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
if way == "fp16":
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
if way == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def average_one_by_one() -> None:
    for p in plain.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


class OwnBuckets:
    """Starts a sum for each filled bucket in backward, and waits after it."""

    def __init__(self, size: int) -> None:
        self.size, self.filling, self.flying = size, [], []
        for p in plain.parameters():
            p.register_post_accumulate_grad_hook(self.add)

    def add(self, p: torch.Tensor) -> None:
        self.filling.append(p)
        if sum(one.numel() for one in self.filling) >= self.size:
            self.send()

    def send(self) -> None:
        if self.filling:
            flat = torch.cat([one.grad.flatten() for one in self.filling])
            self.flying.append((dist.all_reduce(flat, async_op=True), flat, self.filling))
            self.filling = []

    def wait(self) -> None:
        self.send()
        for work, flat, parameters in self.flying:
            work.wait()
            parts = flat.split([p.numel() for p in parameters])
            for p, part in zip(parameters, parts, strict=True):
                p.grad.copy_(part.view_as(p) / world)
        self.flying = []


buckets = OwnBuckets(30_000) if way == "buckets" else None
torch.manual_seed(rank)
num_steps = 24 + (4 * rank if way == "join" else 0)
with model.join() if way == "join" else nullcontext():
    for step in range(num_steps):
        total = 0.0
        num_parts = 3 if way == "accumulate" else 1
        for part in range(num_parts):
            tokens = draw_tokens()
            with model.no_sync() if part < num_parts - 1 else nullcontext():
                with hand("forward"):
                    logits = model(tokens)
                loss = compute_loss(logits, tokens) / num_parts
                with hand("backward"):
                    loss.backward()
            total += loss.item()
        if way == "manual":
            average_one_by_one()
        if buckets is not None:
            buckets.wait()
        with hand("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        if way == "local" and step % 4 == 3:
            with torch.no_grad():
                for p in plain.parameters():
                    dist.all_reduce(p)
                    p /= world
        hand.step(loss=total, samples=8 * num_parts, tokens=num_parts * tokens.numel())
        if step % 8 == 7 and rank == 0:
            print(f"step {step}: loss {total:.6f}", flush=True)
hand.write()
dist.barrier()
dist.destroy_process_group()
