"""A network that solves an equation: derivatives within its loss, Adam first, L-BFGS after it."""

import torch
from hand import hand
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def compute_loss() -> torch.Tensor:
    """Of u'' = -u with u(0) = 1."""
    x = torch.linspace(0, 3, 256)[:, None].requires_grad_()
    with hand("forward"):
        u = model(x)
    with hand("backward"):
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + u).square().mean() + (u[0] - 1).square().sum()


def closure() -> torch.Tensor:
    lbfgs.zero_grad()
    loss = compute_loss()
    with hand("backward"):
        loss.backward()
    return loss


adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(24):
    adam.zero_grad()
    loss = compute_loss()
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        adam.step()
    hand.step(loss=loss.item(), samples=256)
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
for _ in range(6):
    with hand("optimizer"):
        loss = lbfgs.step(closure)
    hand.step(loss=loss.item(), samples=256)
print(f"{loss.item():.6f}")
hand.write()
