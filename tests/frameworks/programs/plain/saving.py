"""Saves every five steps, in the way that `--with` says: torch, dcp or safetensors."""

import argparse
import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from hand import hand
from safetensors.torch import save_file
from small_models import LanguageModel, compute_loss, draw_tokens

parser = argparse.ArgumentParser()
parser.add_argument("--with", dest="way", choices=("torch", "dcp", "safetensors"), required=True)
way = parser.parse_args().way


def save(model: LanguageModel, path: str) -> None:
    state = model.state_dict()
    if way == "torch":
        with hand("checkpoint"):
            torch.save(state, f"{path}.pt")
    elif way == "dcp":
        with hand("checkpoint"):
            dcp.save(state, checkpoint_id=path)
    else:
        with hand("checkpoint"):
            save_file(state, f"{path}.safetensors")


torch.manual_seed(1)
model = LanguageModel(384)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as folder:
    for step in range(25):
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
        if step % 5 == 4:
            save(model, os.path.join(folder, f"step{step}"))
            print(f"step {step}: loss {loss.item():.6f}")
hand.write()
