"""The loop of every tutorial: language model, AdamW, no loader."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    tokens = draw_tokens()
    with hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"step {step}: loss {loss.item():.6f}")
hand.write()
