"""What does one operation of a device's group cost the host, by each way it is seen?

    python benchmarks/operation_cost.py [--rounds N]

One process with torch's fake group, which moves nothing, taken for a group of a device: CPU time
of the calling thread per call, without a recorder, recorded, and in a step that is not recorded
(`capture/operations/operation_stride.py`), each seen in Python and by the dispatcher's kernels.
Blocks of 300 calls in turns, round after round; lower quartiles, in µs. Tensors are on the host,
so marks on streams, which have a limit of their own, are not in it.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshscope.capture.operations import process_groups
from meshscope.capture.recorder import Recorder, RecorderConfig

BLOCK = 300
TENSOR = torch.ones(1024)


def call_operation() -> None:
    """What DTensor's redistribution comes down to."""
    operations = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    operations.wait_tensor(operations.all_reduce(TENSOR, "sum", name))


CALLS: dict[str, Callable[[], Any]] = {
    "dist.all_reduce": lambda: dist.all_reduce(TENSOR),
    "dist.all_reduce, handle": lambda: dist.all_reduce(TENSOR, async_op=True).wait(),
    "functional op + wait": call_operation,
    "funcol.all_reduce + wait": lambda: functional.wait_tensor(
        functional.all_reduce(TENSOR, "sum", dist.group.WORLD)
    ),
}


def measure(found: dict[tuple[str, str], list[float]], variant: str) -> None:
    for name, call in CALLS.items():
        for _ in range(30):
            call()
        start_ns = time.thread_time_ns()
        for _ in range(BLOCK):
            call()
        elapsed_us = (time.thread_time_ns() - start_ns) / BLOCK / 1e3
        found.setdefault((variant, name), []).append(elapsed_us)


def run_round(found: dict[tuple[str, str], list[float]], folder: Path) -> None:
    measure(found, "no recorder")
    recorder = Recorder(folder, config=RecorderConfig(provenance=False))
    recorder.watch_communication()
    log, tap = recorder.session.operations, recorder.watching.collectives
    measure(found, "recorded")
    log.rest(1)
    measure(found, "not recorded")
    log.go_on()
    tap.see_all()
    measure(found, "recorded, by kernels")
    log.rest(1)
    measure(found, "not recorded, by kernels")
    recorder.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    process_groups._HOST_BACKENDS = frozenset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(rounds):
            run_round(found, Path(folder) / str(index))
    width = max(map(len, CALLS))
    for variant in dict.fromkeys(variant for variant, _ in found):
        print(variant)
        for name in CALLS:
            values = found[variant, name]
            print(f"  {name:{width}}  {statistics.quantiles(values, n=4)[0]:6.1f} µs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
