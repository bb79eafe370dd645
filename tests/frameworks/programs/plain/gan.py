"""A generator against a discriminator: two models, two optimizers, two losses."""

from itertools import pairwise

import torch
from hand import hand
from torch import nn
from torch.nn import functional as F


def build(sizes: list[int]) -> nn.Sequential:
    pairs = pairwise(sizes)
    return nn.Sequential(*[part for pair in pairs for part in (nn.Linear(*pair), nn.LeakyReLU())])


def score(wanted: float, logits: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))


torch.manual_seed(1)
generator, discriminator = build([64, 512, 512, 256]), build([256, 512, 512, 1])
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-4, betas=(0.5, 0.999))
for step in range(30):
    real = torch.randn(128, 256) + 1
    with hand("forward"):
        fake = generator(torch.randn(128, 64))
    with hand("forward"):
        said_of_real = discriminator(real)
    with hand("forward"):
        said_of_fake = discriminator(fake.detach())
    loss_d = score(1.0, said_of_real) + score(0.0, said_of_fake)
    optimizer_d.zero_grad()
    with hand("backward"):
        loss_d.backward()
    with hand("optimizer"):
        optimizer_d.step()
    with hand("forward"):
        said = discriminator(fake)
    loss_g = score(1.0, said)
    optimizer_g.zero_grad()
    with hand("backward"):
        loss_g.backward()
    with hand("optimizer"):
        optimizer_g.step()
    hand.step(loss_d=loss_d.item(), loss_g=loss_g.item(), samples=128)
    if step % 10 == 9:
        print(f"step {step}: D {loss_d.item():.6f} G {loss_g.item():.6f}")
hand.write()
