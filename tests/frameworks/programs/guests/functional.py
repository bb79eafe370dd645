"""Gradients by torch.func of a functional call, put on the parameters; a cosine schedule."""

import torch
from hand import hand
from torch import nn
from torch.func import functional_call, grad_and_value

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def compute_loss(weights, x, y):
    return nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)


for step in range(30):
    x, y = torch.randn(128, 128), torch.randint(0, 10, (128,))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with hand("backward and forward"):
        grads, loss = grad_and_value(compute_loss)(weights, x, y)
    for name, p in model.named_parameters():
        p.grad = grads[name]
    with hand("optimizer"):
        optimizer.step()
    schedule.step()
    hand.step(loss=loss.item(), samples=128)
    if step % 10 == 9:
        print(f"{step} {loss.item():.6f}")
hand.write()
