"""Sharpness-aware minimization: two forwards and backwards for an update."""

import torch
from hand import hand
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                e = p.grad * group["rho"] / (norm + 1e-12)
                self.state[p]["e"] = e
                p.add_(e)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["e"])
        with hand("optimizer"):
            self.base_optimizer.step()
        self.zero_grad()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
for step in range(30):
    x, y = torch.randn(128, 128), torch.randint(0, 10, (128,))
    with hand("forward"):
        output = model(x)
    loss = nn.functional.cross_entropy(output, y)
    with hand("backward"):
        loss.backward()
    optimizer.first_step()
    with hand("forward"):
        output = model(x)
    again = nn.functional.cross_entropy(output, y)
    with hand("backward"):
        again.backward()
    optimizer.second_step()
    # Each of 128 samples is trained on twice.
    hand.step(loss=0.5 * (loss.item() + again.item()), samples=256)
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")
hand.write()
