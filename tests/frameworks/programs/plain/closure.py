"""L-BFGS: the optimizer calls the model, as often as it likes."""

import torch
from hand import hand
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
x = torch.randn(512, 64)
y = x @ torch.randn(64, 8) + 0.1 * torch.randn(512, 8)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
losses = []


def evaluate() -> torch.Tensor:
    optimizer.zero_grad()
    with hand("forward"):
        output = model(x)
    loss = F.mse_loss(output, y)
    with hand("backward"):
        loss.backward()
    losses.append(loss.item())
    return loss


for step in range(20):
    losses.clear()
    with hand("optimizer"):
        optimizer.step(evaluate)
    hand.step(loss=losses[0], samples=512)
    if step % 5 == 4:
        print(f"step {step}: loss {losses[0]:.6f}")
hand.write()
