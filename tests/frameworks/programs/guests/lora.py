"""Adapters of low rank on a frozen transformer, by hand; its blocks are checkpointed."""

import torch
from hand import hand
from torch import nn
from torch.utils.checkpoint import checkpoint


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.a.T) @ self.b.T


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Base(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 100)

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        x.requires_grad_(True)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
model = Base()
model.requires_grad_(False)
for block in model.blocks:
    block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)
trainable = [p for p in model.parameters() if p.requires_grad]
print(
    f"trainable {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())}"
)
optimizer = torch.optim.AdamW(trainable, lr=1e-3)
for step in range(24):
    ids = torch.randint(0, 100, (8, 48))
    with hand("forward"):
        out = model(input_ids=ids, labels=ids)
    with hand("backward"):
        out["loss"].backward()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=out["loss"].item(), samples=8, tokens=ids.numel())
    if step % 8 == 7:
        print(f"{step}: {out['loss'].item():.5f}")
hand.write()
