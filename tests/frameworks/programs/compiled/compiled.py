"""torch.compile in the ways people use it: model, in place, function, optimizer."""

import argparse

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

parser = argparse.ArgumentParser()
parser.add_argument("--way", required=True)
parser.add_argument("--backend", default="aot_eager")
options = parser.parse_args()
way = options.way

torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if way == "model":
    model = torch.compile(model, backend=options.backend)
elif way == "in_place":
    model.compile(backend=options.backend)


def find_loss(tokens: torch.Tensor) -> torch.Tensor:
    return compute_loss(model(tokens), tokens)


def train_on(tokens: torch.Tensor) -> torch.Tensor:
    loss = compute_loss(model(tokens), tokens)
    loss.backward()
    return loss


def train_whole(tokens: torch.Tensor) -> torch.Tensor:
    loss = train_on(tokens)
    optimizer.step()
    return loss


if way == "loss":
    find_loss = torch.compile(find_loss, backend=options.backend)
elif way == "backward":
    train_on = torch.compile(train_on, backend=options.backend)
elif way == "step":
    train_whole = torch.compile(train_whole, backend=options.backend)
update = optimizer.step
if way == "optimizer":
    update = torch.compile(update, backend=options.backend)

for step in range(40):
    tokens = draw_tokens()
    if way == "backward":
        with hand("forward and backward"):
            loss = train_on(tokens)
    elif way == "step":
        with hand("forward and backward and optimizer"):
            loss = train_whole(tokens)
    elif way == "loss":
        with hand("forward"):
            loss = find_loss(tokens)
        with hand("backward"):
            loss.backward()
    else:
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens)
        with hand("backward"):
            loss.backward()
    if way != "step":
        with hand("optimizer"):
            update()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"step {step}: loss {loss.item():.5f}")
hand.write()
