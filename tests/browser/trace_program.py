"""Four data-parallel ranks that torch.profiler traces, without any recorder: rank 2 is slow.

.venv/bin/python tests/browser/trace_program.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

NUM_RANKS, NUM_STEPS = 4, 8
SLOW_RANK, SLOW_S = 2, 0.1


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 8))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = schedule(wait=0, warmup=1, active=NUM_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
        for _ in range(NUM_STEPS + 1):
            inputs = torch.randn(64, 128)
            with record_function("forward"):
                loss = model(inputs).square().mean()
                if rank == SLOW_RANK:
                    time.sleep(SLOW_S)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.pt.trace.json")
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Forked: torch is imported once.
    mp.start_processes(train, args=(str(folder),), nprocs=NUM_RANKS, start_method="fork")
    (folder / "meet").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
