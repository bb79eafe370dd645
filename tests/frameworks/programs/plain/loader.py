"""A classifier fed by a DataLoader with two workers, a scheduler, clipping, validation and saving.

`--workers 0` loads in the training process.
"""

import argparse
import os
import tempfile

import torch
from hand import hand
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
workers = parser.parse_args().workers


class Pictures(Dataset):
    def __init__(self, num_pictures: int) -> None:
        self.pictures = torch.randn(num_pictures, 3, 32, 32)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index], index % 10


def fetch(batches, phase: str):
    """The next batch, timed."""
    try:
        with hand(phase):
            return next(batches)
    except StopIteration:
        return None


def evaluate(model, loader) -> float:
    model.eval()
    batches, correct = iter(loader), 0
    with torch.no_grad():
        while (batch := fetch(batches, "eval")) is not None:
            with hand("eval"):
                logits = model(batch[0])
            correct += int((logits.argmax(-1) == batch[1]).sum())
    model.train()
    return correct / len(loader.dataset)


torch.manual_seed(1)
# Taking a batch from a worker costs up to a millisecond, and more where an epoch begins. A step
# must be so long, on fast machines too, that this is no stall.
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU(),
    nn.Flatten(), nn.Linear(256 * 16 * 16, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
queue = {"persistent_workers": True, "prefetch_factor": 8} if workers else {}
train = DataLoader(Pictures(240), batch_size=16, num_workers=workers, **queue)
validation = DataLoader(Pictures(64), batch_size=16, num_workers=0)

with tempfile.TemporaryDirectory() as folder:
    for epoch in range(2):
        batches = iter(train)
        while (batch := fetch(batches, "data")) is not None:
            with hand("forward"):
                logits = model(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            with hand("backward"):
                loss.backward()
            with hand("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with hand("optimizer"):
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            hand.step(loss=loss.item(), samples=len(batch[0]))
        accuracy = evaluate(model, validation)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with hand("checkpoint"):
            torch.save(state, os.path.join(folder, "last.pt"))
        print(f"epoch {epoch}: loss {loss.item():.6f}, accuracy {accuracy:.3f}")
hand.write()
