"""DistributedDataParallel over gloo, as torchrun starts it.

`--optimizer first` makes the optimizer before the model is wrapped.
"""

import argparse

import torch
import torch.distributed as dist
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", choices=("first", "last"), default="last")
order = parser.parse_args().optimizer

dist.init_process_group("gloo")
torch.manual_seed(1)
plain = LanguageModel()
if order == "first":
    optimizer = torch.optim.AdamW(plain.parameters())
model = DistributedDataParallel(plain)
if order == "last":
    optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for step in range(30):
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
    if step % 10 == 9 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
hand.write()
