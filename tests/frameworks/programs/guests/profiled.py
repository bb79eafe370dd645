"""Profilers of its own: torch by a schedule, cProfile around all, tracemalloc."""

import cProfile
import pstats
import tracemalloc

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

tracemalloc.start(5)
torch.manual_seed(0)
model = LanguageModel(128)
optimizer = torch.optim.AdamW(model.parameters())
seen = []
profiler = torch.profiler.profile(
    schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=2),
    on_trace_ready=lambda p: seen.append(len(p.events())),
    record_shapes=True,
)
watch = cProfile.Profile()
watch.enable()
with profiler:
    for _ in range(30):
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
        profiler.step()
watch.disable()
assert pstats.Stats(watch).total_calls > 1000
assert tracemalloc.get_traced_memory()[1] > 0
tracemalloc.stop()
print(len(seen), f"{loss.item():.5f}")
hand.write()
