"""Trains, saves, and goes on in new objects from what was saved."""

import os
import tempfile

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens


def build() -> tuple[LanguageModel, torch.optim.Optimizer]:
    model = LanguageModel()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: LanguageModel, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        tokens = draw_tokens()
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens)
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    print(f"loss {loss.item():.6f}")


torch.manual_seed(1)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    model, optimizer = build()
    train(model, optimizer, 15)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with hand("checkpoint"):
        torch.save(state, path)
    model, optimizer = build()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 15)
hand.write()
