"""Ranks that the program starts by itself: `--start spawn`, `fork` or `forkserver`."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(1)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(24):
        tokens = draw_tokens()
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens)
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
        if step % 8 == 7 and rank == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    hand.write(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", choices=("spawn", "fork", "forkserver"), required=True)
    method = parser.parse_args().start
    arguments = (2, os.path.abspath("store"))
    mp.start_processes(train, args=arguments, nprocs=2, start_method=method)
