"""No optimizer: weights are changed by the loop."""

import torch
from hand import hand
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))
for _ in range(30):
    x, y = torch.randn(128, 128), torch.randint(0, 10, (128,))
    with hand("forward"):
        output = model(x)
    loss = nn.functional.cross_entropy(output, y)
    with hand("backward"):
        loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad
            p.grad = None
    hand.step(loss=loss.item(), samples=128)
print(f"{loss.item():.5f}")
hand.write()
