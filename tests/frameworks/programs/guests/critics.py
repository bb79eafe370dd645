"""A Wasserstein GAN with a penalty: five updates of the critic for one of the generator."""

import torch
from hand import hand
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
critic = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))


def penalty(real, fake):
    mixed = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_(True)
    with hand("forward"):
        score = critic(mixed)
    with hand("backward"):
        (slope,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
    return 10 * (slope.norm(dim=1) - 1).square().mean()


for iteration in range(12):
    for _ in range(5):
        real = torch.randn(64, 64)
        with torch.no_grad():
            fake = generator(torch.randn(64, 32))
        with hand("forward"):
            on_real = critic(real)
        with hand("forward"):
            on_fake = critic(fake)
        loss = on_fake.mean() - on_real.mean() + penalty(real, fake)
        of_critic.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            of_critic.step()
    with hand("forward"):
        fake = generator(torch.randn(64, 32))
    with hand("forward"):
        score = critic(fake)
    of_generator.zero_grad()
    loss_of_generator = -score.mean()
    with hand("backward"):
        loss_of_generator.backward()
    with hand("optimizer"):
        of_generator.step()
    print(f"{iteration} {loss.item():.5f} {loss_of_generator.item():.5f}")
hand.write()
