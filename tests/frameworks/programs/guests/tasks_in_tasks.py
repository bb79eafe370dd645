"""Meta-learning: inner updates by functional_call and autograd.grad, an outer one."""

import torch
from hand import hand
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
)
meta = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(24):
    outer = torch.zeros(())
    for _ in range(4):
        phase, scale = torch.rand(2)
        x = torch.rand(64, 1) * 6
        y = scale * torch.sin(x + phase)
        weights = dict(model.named_parameters())
        with hand("forward"):
            predicted = functional_call(model, weights, x[:32])
        inner = (predicted - y[:32]).square().mean()
        with hand("backward"):
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.01 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        with hand("forward"):
            predicted = functional_call(model, fast, x[32:])
        outer = outer + (predicted - y[32:]).square().mean() / 4
    meta.zero_grad()
    with hand("backward"):
        outer.backward()
    with hand("optimizer"):
        meta.step()
    hand.step(loss=outer.item(), samples=4 * 64)
    if step % 8 == 7:
        print(f"{step} {outer.item():.5f}")
hand.write()
