"""Fetches the next batch after backward, before the update."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = LanguageModel(128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
hand.around_fetches(model)
iterator = iter(DataLoader(TensorDataset(torch.randint(0, 100, (240, 64))), 8))
batch = next(iterator)
while batch is not None:
    (tokens,) = batch
    with hand("forward"):
        out = model(tokens)
    loss = compute_loss(out, tokens)
    with hand("backward"):
        loss.backward()
    batch = next(iterator, None)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
print(f"{loss.item():.6f}")
hand.write()
