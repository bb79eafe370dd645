"""Trains below `meshscope run … torchrun` until a file is there, and gives reasons for traces.

    meshscope run … -- torchrun --nproc-per-node=2 asked_windows.py STOP_FILE

A step waits in forward for 20 ms, some for 400 ms, and from step 15 on rank 1 logs a loss that is
NaN. Once STOP_FILE is there, all ranks alike trace every other step under a cap that one trace
exceeds, and end.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshscope

FIRST_NAN_STEP = 15
SLOW_STEPS = (34, 46, 70)
CAPPED = "skip=0,wait=1,warmup=0,repeat=0,ranks=all,cap=100"
NUM_CAPPED_STEPS = 6


class Model(nn.Module):
    """A small one that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the layer's outputs."""
        time.sleep(0.4 if self.step in SLOW_STEPS else 0.02)
        self.step += 1
        return self.layer(x).mean()


def main(stop_file: Path) -> None:
    """One process of the job."""
    with contextlib.suppress(PermissionError):  # it mostly sleeps; others may load the machine
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    dist.init_process_group("gloo")
    model = Model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    num_left = None
    while num_left != 0:
        parallel(torch.ones(2, 4)).backward()
        if dist.get_rank() == 1 and model.step > FIRST_NAN_STEP:
            meshscope.recorder().log(loss=float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        if num_left is not None:
            num_left -= 1
            continue
        is_over = torch.tensor(int(stop_file.exists()))
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX)  # no rank goes on alone
        if is_over.item():
            meshscope.recorder().profile(CAPPED)
            num_left = NUM_CAPPED_STEPS
    dist.barrier()
    time.sleep(0.5)  # see examples/train_gpt.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
