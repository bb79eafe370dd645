"""Blocks compiled one by one and in place; lengths change, so code is made again once."""

import torch
from hand import hand
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Model()
for block in model.blocks:
    block.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    tokens = torch.randint(0, 100, (8, 32 if step % 3 else 48))
    with hand("forward"):
        logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")
hand.write()
