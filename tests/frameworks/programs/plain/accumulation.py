"""Gradient accumulation over four microbatches, gradients set to None, clipped by norm."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

ACCUMULATE = 4

torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for step in range(20):
    total = 0.0
    for _ in range(ACCUMULATE):
        tokens = draw_tokens(4)
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens) / ACCUMULATE
        with hand("backward"):
            loss.backward()
        total += loss.item()
    with hand("clip"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with hand("optimizer"):
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    hand.step(loss=total, samples=4 * ACCUMULATE, tokens=ACCUMULATE * tokens.numel())
    print(f"step {step}: loss {total:.6f}")
hand.write()
