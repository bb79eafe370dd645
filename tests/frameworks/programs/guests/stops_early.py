"""Stops early by its validation loss, then goes on from its best checkpoint at a lower rate."""

import tempfile
from pathlib import Path

import torch
from hand import hand
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
truth = torch.randn(64, 10)


def make_data(size: int) -> TensorDataset:
    x = torch.randn(size, 64)
    return TensorDataset(x, (x @ truth).argmax(1))


def train(optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for x, y in training:
        with hand("forward"):
            out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        hand.step(loss=loss.item(), samples=64)


def evaluate() -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in validation:
            with hand("eval"):
                out = model(x)
            total += nn.functional.cross_entropy(out, y).item()
    return total


model = nn.Sequential(
    nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
training = DataLoader(make_data(512), 64, shuffle=True)
validation = DataLoader(make_data(128), 64)
place = Path(tempfile.mkdtemp()) / "best.pt"
hand.around_fetches(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
best = float("inf")
for epoch in range(6):
    train(optimizer)
    value = evaluate() + 10 * (epoch > 3)
    if value > best:
        break
    best = value
    with hand("checkpoint"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place)
print(f"stopped in epoch {epoch}, best {best:.5f}")
state = torch.load(place)
model.load_state_dict(state["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
optimizer.load_state_dict(state["optimizer"])
optimizer.param_groups[0]["lr"] = 3e-4
for _ in range(2):
    train(optimizer)
print(f"{evaluate():.5f}")
hand.write()
