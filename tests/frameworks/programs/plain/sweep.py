"""A sweep: models of three rates one after the other, each deleted before the next is made."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

for rate in (1e-2, 1e-3, 1e-4):
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(12):
        tokens = draw_tokens()
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens)
        optimizer.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    print(f"rate {rate}: loss {loss.item():.6f}")
    del model, optimizer
hand.write()
