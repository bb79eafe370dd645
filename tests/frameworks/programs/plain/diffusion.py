"""A denoiser with a moving average of its weights, which draws samples after every epoch."""

import copy

import torch
from hand import hand
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_TIMES, BATCH = 1000, 16


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(NUM_TIMES, 32)
        self.into = nn.Conv2d(3, 32, 3, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.out = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.into(image) + self.time(time)[:, :, None, None])
        return self.out(F.silu(self.middle(hidden)))


torch.manual_seed(1)
model = Denoiser()
average = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
kept = torch.linspace(0.999, 0.01, NUM_TIMES)
loader = DataLoader(TensorDataset(torch.randn(16 * BATCH, 3, 32, 32)), BATCH, shuffle=True)
hand.around_fetches(model)
for epoch in range(2):
    for (image,) in loader:
        time, noise = torch.randint(0, NUM_TIMES, (BATCH,)), torch.randn_like(image)
        share = kept[time][:, None, None, None]
        noisy = share.sqrt() * image + (1 - share).sqrt() * noise
        with hand("forward"):
            found = model(noisy, time)
        loss = F.mse_loss(found, noise)
        optimizer.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with hand("optimizer"):
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        hand.step(loss=loss.item(), samples=BATCH)
    sample = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        for time in range(900, 895, -1):
            sample -= 0.1 * average(sample, torch.full((4,), time))
    print(f"epoch {epoch}: loss {loss.item():.6f}, sample {sample.mean().item():.6f}")
hand.write()
