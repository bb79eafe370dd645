"""Mixed precision: autocast, and a gradient scaler that skips its first updates."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(24):
    tokens = draw_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens)
    scaled = scaler.scale(loss)
    with hand("backward"):
        scaled.backward()
    scaler.unscale_(optimizer)
    with hand("clip"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with hand("optimizer"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 8 == 7:
        print(f"step {step}: loss {loss.item():.5f}, scale {scaler.get_scale():.0f}")
hand.write()
