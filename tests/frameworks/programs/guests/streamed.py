"""An endless stream of packed tokens, read by a worker; weights in bfloat16."""

import itertools

import torch
from hand import hand
from small_models import LanguageModel, compute_loss
from torch.utils.data import DataLoader, IterableDataset


class Packed(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randint(0, 100, (64,), generator=generator)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LanguageModel(128).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Packed(), 8, num_workers=1)
    iterator = iter(loader)
    for step in itertools.count():
        if step == 30:
            break
        with hand("data"):
            tokens = next(iterator)
        with hand("forward"):
            logits = model(tokens)
        loss = compute_loss(logits.float(), tokens)
        with hand("backward"):
            loss.backward()
        with hand("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
    print(f"{loss.item():.5f}")
    hand.write()
