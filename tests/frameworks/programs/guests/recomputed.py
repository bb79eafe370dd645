"""Blocks that are checkpointed in the reentrant way, two microbatches an update."""

import torch
from hand import hand
from small_models import compute_loss, draw_tokens
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 128)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(128, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    total = 0.0
    for _ in range(2):
        tokens = draw_tokens(4, 32)
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens) / 2
        with hand("backward"):
            loss.backward()
        total += loss.item()
    with hand("clip"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=total, samples=8, tokens=8 * 32)
    if step % 5 == 4:
        print(f"{step} {total:.6f}")
hand.write()
