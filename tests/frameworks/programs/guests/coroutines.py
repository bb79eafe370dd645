"""A loop in a coroutine: batches come over a queue from another one."""

import asyncio

import torch
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens


async def produce(queue: asyncio.Queue) -> None:
    for _ in range(30):
        await queue.put(draw_tokens())
        await asyncio.sleep(0.001)
    await queue.put(None)


async def train() -> None:
    queue: asyncio.Queue = asyncio.Queue(4)
    producer = asyncio.create_task(produce(queue))
    model = LanguageModel(128)
    optimizer = torch.optim.AdamW(model.parameters())
    while (tokens := await queue.get()) is not None:
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits, tokens)
        optimizer.zero_grad()
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    await producer
    print(f"{loss.item():.5f}")


torch.manual_seed(0)
asyncio.run(train())
hand.write()
