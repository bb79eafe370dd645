"""DDP over microbatches with `no_sync`; the last group of an epoch has half of them."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from hand import hand
from small_models import VOCABULARY, LanguageModel, compute_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, GROUP, NUM_BATCHES = 8, 4, 18

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(LanguageModel())
optimizer = torch.optim.AdamW(model.parameters())
num_sequences = dist.get_world_size() * NUM_BATCHES * BATCH
data = TensorDataset(torch.randint(0, VOCABULARY, (num_sequences, 64)))
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH, sampler=sampler)
hand.around_fetches(model)
for epoch in range(3):
    sampler.set_epoch(epoch)
    losses: list[float] = []
    for index, (tokens,) in enumerate(loader):
        is_last = index % GROUP == GROUP - 1 or index == NUM_BATCHES - 1
        num_together = min(GROUP, NUM_BATCHES - index // GROUP * GROUP)
        with nullcontext() if is_last else model.no_sync():
            with hand("forward"):
                logits = model(tokens)
            loss = compute_loss(logits, tokens)
            with hand("backward"):
                (loss / num_together).backward()
        losses.append(loss.item())
        if is_last:
            with hand("clip"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with hand("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            num_samples = BATCH * len(losses)
            mean = sum(losses) / len(losses)
            hand.step(loss=mean, samples=num_samples, tokens=64 * num_samples)
            losses.clear()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
hand.write()
