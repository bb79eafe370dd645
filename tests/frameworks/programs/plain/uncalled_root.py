"""The loss comes from a method of the model: `--call loss`, or `--call forward`."""

import argparse

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

parser = argparse.ArgumentParser()
parser.add_argument("--call", choices=("loss", "forward"), required=True)
call = parser.parse_args().call

torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    tokens = draw_tokens()
    if call == "loss":
        with hand("forward"):
            loss = model.loss(tokens)
    else:
        with hand("forward"):
            logits = model.forward(tokens)
        loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"step {step}: loss {loss.item():.6f}")
hand.write()
