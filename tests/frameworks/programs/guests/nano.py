"""A small GPT as many people train it: accumulation, cosine schedule, evaluation, checkpoints."""

import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from hand import hand
from torch import nn
from torch.nn import functional as F

BLOCK, BATCH, WIDTH, LAYERS, HEADS, VOCABULARY = 64, 8, 64, 2, 4, 128
ACCUMULATE, ITERATIONS, WARMUP, INTERVAL = 4, 24, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (one.view(b, t, HEADS, -1).transpose(1, 2) for one in self.qkv(x).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


data = Path(tempfile.mkdtemp()) / "train.bin"
np.random.default_rng(1).integers(0, VOCABULARY, 50_000).astype(np.uint16).tofile(data)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = np.memmap(data, dtype=np.uint16, mode="r")
    ix = torch.randint(len(tokens) - BLOCK - 1, (BATCH,))
    x, y = (
        torch.stack([torch.from_numpy(tokens[i + d : i + d + BLOCK].astype(np.int64)) for i in ix])
        for d in (0, 1)
    )
    return x, y


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = []
    for _ in range(4):
        x, y = get_batch()
        with hand("eval"), context:
            _, loss = model(x, y)
        losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


def get_lr(it: int) -> float:
    if it < WARMUP:
        return 1e-3 * (it + 1) / WARMUP
    ratio = (it - WARMUP) / (ITERATIONS - WARMUP)
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * ratio)) * 9e-4


torch.manual_seed(1337)
context = torch.autocast("cpu", dtype=torch.bfloat16)
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
)
best = 1e9
X, Y = get_batch()
for iter_num in range(ITERATIONS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % INTERVAL == 0 and iter_num:
        found = estimate_loss()
        print(f"step {iter_num}: val loss {found:.4f}")
        if found < best:
            best = found
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with hand("checkpoint"):
                torch.save(state, data.with_suffix(".pt"))
    total = 0.0
    for _ in range(ACCUMULATE):
        with context:
            with hand("forward"):
                logits, loss = model(X, Y)
            total += loss.item() / ACCUMULATE
            loss = loss / ACCUMULATE
        X, Y = get_batch()
        with hand("backward"):
            loss.backward()
    with hand("clip"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    hand.step(loss=total, samples=ACCUMULATE * BATCH, tokens=ACCUMULATE * BATCH * BLOCK)
    print(f"iter {iter_num}: loss {total:.4f}")
hand.write()
