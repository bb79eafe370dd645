"""Steps that asyncio hands to an executor: whichever of its threads is free has the next one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

NUM_STEPS = 30

torch.manual_seed(1)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters())


def train(step: int) -> None:
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
    if step % 10 == 9:
        print(f"step {step}: loss {loss.item():.6f}")


async def run() -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for step in range(NUM_STEPS):
            await loop.run_in_executor(second if step % 3 == 2 else first, train, step)


asyncio.run(run())
hand.write()
