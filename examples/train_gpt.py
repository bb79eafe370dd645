"""Trains a small GPT on synthetic tokens: plain PyTorch, one process or DistributedDataParallel.

    python examples/train_gpt.py
    torchrun --standalone --nproc-per-node 8 examples/train_gpt.py --slow-rank 5 --slow-ms 40
    meshscope run -- torchrun --standalone --nproc-per-node 8 examples/train_gpt.py

It knows nothing of meshscope: the last line records it all the same. It uses gloo on CPUs and nccl
when there is a GPU per process. Shapes: B batch, T sequence, C channels, V vocabulary.
"""

import argparse
import contextlib
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """One layer."""
        B, T, C = x_BTC.shape
        qkv = self.qkv(self.norm1(x_BTC)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.project(mixed.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.feed_forward(self.norm2(x_BTC))


class GPT(nn.Module):
    """A decoder-only transformer with tied embeddings."""

    def __init__(self, options: argparse.Namespace, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.is_checkpointed = options.checkpointing
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads) for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at every position."""
        if self.delay_s:
            # The slow rank sleeps instead of computing more: where ranks share cores, more
            # computing would slow its neighbours down as well and hide who is slow.
            time.sleep(self.delay_s)
        places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTC = self.tokens(ids_BT) + self.positions(places_T)
        for block in self.blocks:
            if self.is_checkpointed and self.training:
                x_BTC = checkpoint(block, x_BTC, use_reentrant=False)
            else:
                x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


class SyntheticTokens(Dataset):
    """Sequences that count up by a step of their own: easy to learn, different on every rank.

    Item i of rank r is the same in every run.
    """

    def __init__(self, options: argparse.Namespace, rank: int, num_items: int) -> None:
        self.options = options
        self.rank = rank
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        """T + 1 tokens: the model sees all but the last and predicts all but the first."""
        seed = (self.options.seed * 1_000_003 + self.rank) * 1_000_003 + index
        generator = torch.Generator().manual_seed(seed)
        start, stride = torch.randint(1, 8, (2,), generator=generator).tolist()
        places = torch.arange(self.options.sequence + 1)
        return (start + stride * places) % self.options.vocabulary


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a small GPT on synthetic tokens.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="channels")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and microbatch")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="limit of the gradient's norm")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--log-every", type=int, default=50, help="steps between printed lines")
    parser.add_argument("--slow-rank", type=int, default=-1, help="rank to slow down")
    parser.add_argument("--slow-ms", type=float, default=40.0, help="by this much per forward")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def choose_device(choice: str) -> torch.device:
    """A GPU if every process of this node can have its own."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if choice == "cuda" or (choice == "auto" and torch.cuda.device_count() >= num_local):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Rises over the first tenth, then falls along a cosine to a tenth."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def compute_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Mean loss over a loader, in eval mode."""
    model.eval()
    losses = [compute_loss(model, batch.to(device)).item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


def train(options: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    """The model, the data and the loop."""
    delay_s = options.slow_ms / 1000 if rank == options.slow_rank else 0.0
    model: nn.Module = GPT(options, delay_s).to(device)
    if world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids)
    num_items = options.steps * options.accumulate * options.batch
    loader = DataLoader(
        SyntheticTokens(options, rank, num_items), options.batch, num_workers=options.workers
    )
    eval_loader = DataLoader(SyntheticTokens(options, rank + world_size, 4 * options.batch), 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )

    batches = iter(loader)
    for step in range(options.steps):
        for microbatch in range(options.accumulate):
            is_last = microbatch == options.accumulate - 1
            tokens = next(batches).to(device)
            # Gradients are averaged over ranks once per step, with the last microbatch.
            quiet = contextlib.nullcontext() if is_last or world_size == 1 else model.no_sync()
            with quiet:
                loss = compute_loss(model, tokens)
                (loss / options.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if options.eval_every and (step + 1) % options.eval_every == 0:
            eval_loss = evaluate(model, eval_loader, device)
            if rank == 0:
                print(f"step {step}: evaluation loss {eval_loss:.3f}", flush=True)
        if rank == 0 and options.log_every and (step + 1) % options.log_every == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    """One process of the job."""
    options = parse_options()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(options.seed)
    device = choose_device(options.device)
    if world_size == 1:
        train(options, device, rank, world_size)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device, rank, world_size)
    dist.barrier()
    # A gloo thread of torch 2.13 may still be letting go of an object of the last backward, and
    # aborts the process if the interpreter ends meanwhile. Nothing can be waited for, so it is
    # given a moment: of 40 runs of 5 steps 9 were aborted without this.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
