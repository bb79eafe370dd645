"""One trunk, two heads: two tasks with losses and batches of their own take turns."""

import torch
from hand import hand
from torch import nn

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
classify, regress = nn.Linear(512, 10), nn.Linear(512, 1)
parts = nn.ModuleList([trunk, classify, regress])
optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3)
for step in range(30):
    size = 32 if step % 2 else 64
    x = torch.randn(size, 64)
    with hand("forward"):
        hidden = trunk(x)
    if step % 2:
        with hand("forward"):
            out = regress(hidden)
        loss = 0.1 * (out[:, 0] - x.sum(1)).square().mean()
    else:
        with hand("forward"):
            out = classify(hidden)
        loss = nn.functional.cross_entropy(out, torch.randint(0, 10, (size,)))
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=size)
    if step % 10 == 9:
        print(f"{step} {loss.item():.6f}")
hand.write()
