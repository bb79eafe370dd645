"""Weights in bfloat16, of which the optimizer steps copies in float32."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens
from torch import nn

torch.manual_seed(0)
model = LanguageModel(128).bfloat16()
weights = list(model.parameters())
masters = [p.detach().clone().float() for p in weights]
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for step in range(30):
    tokens = draw_tokens()
    with torch.autocast("cpu", torch.bfloat16), hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits.float(), tokens)
    with hand("backward"):
        loss.backward()
    for master, p in zip(masters, weights, strict=True):
        master.grad, p.grad = p.grad.float(), None
    with hand("clip"):
        nn.utils.clip_grad_norm_(masters, 1.0)
    with hand("optimizer"):
        optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, weights, strict=True):
            p.copy_(master)
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"{step} {loss.item():.6f}")
hand.write()
