"""Two stages of torch.distributed.pipelining, GPipe over four microbatches."""

import torch
import torch.distributed as dist
from hand import hand
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

WIDTH, BATCH, LENGTH, CHUNKS = 256, 16, 64, 4


class Stage(nn.Module):
    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH) if index == 0 else nn.Identity()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 100) if index == num_stages - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)))


def compute_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
module = Stage(rank, world)
stage = PipelineStage(module, rank, world, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=CHUNKS, loss_fn=compute_loss)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
hand.around(stage, "forward_one_chunk", "forward")
hand.around(stage, "backward_one_chunk", "backward")
torch.manual_seed(2)
for step in range(20):
    tokens = torch.randint(0, 100, (BATCH, LENGTH))
    losses = []
    if rank == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=tokens, losses=losses)
    with hand("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    numbers = {"samples": BATCH, "tokens": tokens.numel()}
    if losses:
        numbers["loss"] = torch.stack(losses).mean().item()
    hand.step(**numbers)
    if losses and step % 5 == 4:
        print(f"step {step}: loss {numbers['loss']:.4f}", flush=True)
hand.write()
dist.destroy_process_group()
