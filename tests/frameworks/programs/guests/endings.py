"""A loop that ends in the way that it is told: `--end`."""

import argparse
import os
import signal
import sys
import time

import torch
from small_models import LanguageModel, compute_loss, draw_tokens

parser = argparse.ArgumentParser()
parser.add_argument("--end", required=True)
end = parser.parse_args().end
torch.manual_seed(0)
model = LanguageModel(64)
optimizer = torch.optim.AdamW(model.parameters())
stopping = []
if end == "usr1":
    signal.signal(signal.SIGUSR1, lambda *_: stopping.append(1))
if end == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
for step in range(40):
    tokens = draw_tokens()
    loss = compute_loss(model(tokens), tokens)
    if step == 30 and end == "raise":
        raise ValueError("a bad batch")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if step == 30:
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "exit":
            sys.exit(3)
        if end == "os_exit":
            os._exit(4)
        if end == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if end == "usr1":
            os.kill(os.getpid(), signal.SIGUSR1)
        if end == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if end == "child":
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    if stopping:
        print("told to stop")
        break
print(f"{loss.item():.5f}")
