"""torchrun restarts all ranks once: rank 1 dies after step 12, the job resumes."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from small_models import LanguageModel, compute_loss, draw_tokens
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
place = Path(tempfile.gettempdir()) / f"elastic-{os.environ['TORCHELASTIC_RUN_ID']}.pt"
torch.manual_seed(1)
model = DistributedDataParallel(LanguageModel(64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if place.exists():
    state = torch.load(place)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
for step in range(first, 24):
    tokens = draw_tokens()
    loss = compute_loss(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 12 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(13)
    if step % 5 == 4:
        if rank == 0:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                },
                place,
            )
        dist.barrier()
if rank == 0:
    place.unlink()
    print(f"from {first}", flush=True)
dist.destroy_process_group()
