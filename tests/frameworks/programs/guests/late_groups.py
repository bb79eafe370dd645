"""Gradients summed by hand, from step 8 on mostly in pairs: groups made in mid-training."""

import torch
import torch.distributed as dist
from hand import hand
from small_models import LanguageModel, compute_loss, draw_tokens

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = LanguageModel(64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pairs: list[dist.ProcessGroup] = []
torch.manual_seed(rank)
for step in range(24):
    if step == 8:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tokens = draw_tokens()
    with hand("forward"):
        logits = model(tokens)
    loss = compute_loss(logits, tokens)
    with hand("backward"):
        loss.backward()
    group = pairs[rank // 2] if pairs and step % 4 else None
    sums = [dist.all_reduce(p.grad, group=group, async_op=True) for p in model.parameters()]
    for one in sums:
        one.wait()
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    hand.step(loss=loss.item(), samples=8, tokens=tokens.numel())
if rank == 0:
    print("done", flush=True)
hand.write()
dist.barrier()
dist.destroy_process_group()
