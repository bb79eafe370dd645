"""An optimizer for each parameter, which steps in backward and frees the gradient."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

torch.manual_seed(0)
model = LanguageModel(128)
optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}


def update(parameter: torch.Tensor) -> None:
    with hand("optimizer"):
        optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(30):
    tokens = draw_tokens()
    with hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")
hand.write()
