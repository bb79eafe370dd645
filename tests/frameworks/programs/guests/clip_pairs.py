"""Two encoders, a learned temperature and heads for tasks in one module without a forward."""

import torch
from hand import hand
from torch import nn
from torch.nn import functional as F


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 128)
        )
        self.text = nn.Sequential(nn.EmbeddingBag(100, 256), nn.Linear(256, 128))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.classes = nn.Linear(128, 10)


torch.manual_seed(0)
model = Pairs()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    images, words = torch.rand(32, 3, 32, 32), torch.randint(0, 100, (32, 12))
    with hand("forward"):
        a = model.image(images)
    with hand("forward"):
        b = model.text(words)
    with hand("forward"):
        classes = model.classes(a)
    similar = model.temperature.exp() * F.normalize(a) @ F.normalize(b).T
    target = torch.arange(32)
    losses = {
        "image": F.cross_entropy(similar, target),
        "text": F.cross_entropy(similar.T, target),
        "classes": 0.1 * F.cross_entropy(classes, target % 10),
    }
    loss = sum(losses.values())
    optimizer.zero_grad()
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    hand.step(loss=loss.item(), samples=32, tokens=words.numel())
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")
hand.write()
