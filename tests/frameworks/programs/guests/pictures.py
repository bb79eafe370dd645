"""Images as in the references of torchvision: workers, mixup, averaged weights, warm-up."""

import math
import sys
import time
from collections import defaultdict, deque

import torch
from hand import hand
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate


class Images(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 24, 24, generator=generator)
        if index % 2:
            image = image.flip(-1)
        return (image - 0.5) / 0.5, index % 10


class RandomMixup:
    def __call__(self, batch):
        image, target = default_collate(batch)
        target = nn.functional.one_hot(target, 10).float()
        ratio = 0.7
        return ratio * image + (1 - ratio) * image.roll(1, 0), ratio * target + (
            1 - ratio
        ) * target.roll(1, 0)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class SmoothedValue:
    def __init__(self) -> None:
        self.values = deque(maxlen=20)

    def update(self, value: float) -> None:
        self.values.append(value)


class MetricLogger:
    def __init__(self) -> None:
        self.meters = defaultdict(SmoothedValue)

    def log_every(self, iterable, every: int, header: str):
        for number, one in enumerate(iterable):
            yield one
            if number % every == 0:
                print(header, number, file=sys.stderr)


def train_one_epoch(model, criterion, optimizer, loader, averaged, scheduler, epoch):
    model.train()
    meters = MetricLogger()
    for image, target in meters.log_every(loader, 4, f"Epoch: [{epoch}]"):
        with hand("forward"):
            output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        averaged.update_parameters(model)
        scheduler.step()
        meters.meters["loss"].update(loss.item())
        hand.step(loss=loss.item(), samples=len(image))


def evaluate(model, criterion, loader):
    model.eval()
    right = 0
    with torch.inference_mode():
        for image, target in loader:
            output = model(image)
            criterion(output, target)
            right += int((output.argmax(1) == target).sum())
    print("accuracy", right)


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        *(Residual(16) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ],
        milestones=[4],
    )
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    train = DataLoader(
        Images(), 32, shuffle=True, num_workers=2, collate_fn=RandomMixup(), persistent_workers=True
    )
    test = DataLoader(Images(), 64, num_workers=2)
    started = time.time()
    for epoch in range(3):
        train_one_epoch(model, criterion, optimizer, Timed(train), averaged, scheduler, epoch)
        evaluate(model, criterion, test)
        evaluate(averaged, criterion, test)
    assert math.isfinite(time.time() - started)
    hand.write()


class Timed:
    """The loader, its fetches timed."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self):
        with hand("data"):
            iterator = iter(self.loader)
        while True:
            with hand("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch


if __name__ == "__main__":
    main()
