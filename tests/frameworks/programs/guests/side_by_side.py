"""Two models trained at the same time by two threads of a process."""

import threading

import torch
from small_models import LanguageModel, compute_loss, draw_tokens

results = {}


def train(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = models[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(30):
        tokens = torch.randint(0, 100, (8, 64), generator=generator)
        loss = compute_loss(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results[name] = loss.item()


torch.manual_seed(0)
models = {name: LanguageModel(64) for name in ("a", "b")}
threads = [threading.Thread(target=train, args=(name, i)) for i, name in enumerate(models)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print({name: round(results[name], 4) for name in sorted(results)}, len(draw_tokens()))
