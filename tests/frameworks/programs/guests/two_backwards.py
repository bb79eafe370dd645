"""Two losses of one forward, each with its backward; one update."""

import torch
from hand import hand
from torch import nn


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
        self.decoder = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 256))

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


torch.manual_seed(0)
vae = VAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
for step in range(30):
    x = torch.randn(128, 256)
    with hand("forward"):
        output, mean, log_var = vae(x)
    reconstruction = (output - x).square().mean()
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).mean()
    optimizer.zero_grad()
    with hand("backward"):
        reconstruction.backward(retain_graph=True)
    with hand("backward"):
        (0.1 * divergence).backward()
    with hand("optimizer"):
        optimizer.step()
    loss = reconstruction.item() + 0.1 * divergence.item()
    hand.step(loss=loss, samples=128)
    if step % 10 == 9:
        print(f"{step} {reconstruction.item():.5f} {divergence.item():.5f}")
hand.write()
