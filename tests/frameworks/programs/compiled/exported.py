"""A model that is copied, pickled and scripted, traced by fx or exported, while it trains."""

import argparse
import copy
import pickle
import warnings

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is on its way out
parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=("script", "fx", "export"), required=True)
way = parser.parse_args().way


def convert(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """The same output by another way."""
    if way == "script":
        return torch.jit.script(model)(tokens)
    if way == "fx":
        return torch.fx.symbolic_trace(model)(tokens)
    return torch.export.export(model, (tokens,)).module()(tokens)


torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(24):
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
    if step % 12 == 11:
        with torch.no_grad():
            other = convert(copy.deepcopy(pickle.loads(pickle.dumps(model))), tokens)
            with hand("eval"):
                logits = model(tokens)
        print(f"step {step}: loss {loss.item():.6f}, same {torch.allclose(other, logits)}")
hand.write()
