"""One model, two optimizers in each step: one of its own for matrices, AdamW for the rest."""

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                kept = state.setdefault("momentum", torch.zeros_like(p))
                kept.mul_(group["momentum"]).add_(p.grad)
                x = kept / (kept.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * (x @ x.T @ x if x.shape[0] <= x.shape[1] else x @ (x.T @ x))
                p.add_(x, alpha=-group["lr"])


torch.manual_seed(0)
model = LanguageModel(128)
matrices = [p for p in model.body.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
optimizers = [torch.optim.AdamW(rest, lr=1e-3, fused=False), Muon(matrices)]
schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / 40) for o in optimizers]
for step in range(30):
    tokens = draw_tokens()
    with hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    for optimizer in optimizers:
        with hand("optimizer"):
            optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    model.zero_grad(set_to_none=True)
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    if step % 10 == 9:
        print(f"{step} {loss.item():.5f}")
hand.write()
