"""Gradient synchronisation: which all-reduce is fastest when, and what overlap is worth.

    python benchmarks/gradient_sync.py [--rounds N] [--output FILE]

Four gloo ranks on one machine, in one run:

1. Strategies × sizes: the slowest rank's time, best of the repeats, two "nodes" of two ranks.
2. Steps of one model under DistributedDataParallel, under our reducer, and under our reducer with
   everything sent after backward. Blocks of steps under each variant, in turn, round after round;
   a block counts with its slowest rank, and the result is the median over rounds of the ratio to
   DDP's block of the same round. Twice: with layers that compute, where ranks and gloo's threads
   share the cores so that nothing can be hidden, and with layers whose backward only sleeps, as
   a host does while an accelerator computes.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

import fork_ranks

NUM_RANKS = 4
RANKS_PER_NODE = 2
SIZES_BYTES = (1 << 10, 1 << 13, 1 << 17, 1 << 20, 1 << 24)
NUM_LAYERS = 8
WIDTH = 512
BUCKET_BYTES = 1 << 20
"""One layer's gradient."""
SLEEP_S = 0.004
"""Backward of one layer, where layers sleep."""
STEPS_PER_BLOCK = 4


def make_model(sleep_s: float):
    """Layers of a mebibyte each; with a pause in the backward of each, if asked for."""
    import torch
    from torch import nn

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            time.sleep(sleep_s)
            return grad

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            x = torch.tanh(self.linear(x))
            return Pause.apply(x) if sleep_s else x

    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))


def make_variants(sleep_s: float) -> dict[str, Any]:
    """By name: a function that takes one step."""
    import torch
    import torch.distributed as dist

    from meshscope.engine.data_parallel.data_parallel import GradientReducer

    x = torch.randn(4 if sleep_s else 64, WIDTH)

    def with_ddp():
        model = torch.nn.parallel.DistributedDataParallel(
            make_model(sleep_s), bucket_cap_mb=BUCKET_BYTES / 2**20
        )

        def step() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        return step

    def with_reducer(*, overlap: bool = True, **options: Any):
        model = make_model(sleep_s)
        reducer = GradientReducer(
            model.parameters(), dist.group.WORLD, bucket_bytes=BUCKET_BYTES, **options
        )

        def step() -> None:
            model.zero_grad()
            if not overlap:
                reducer.start_accumulating()
            model(x).square().mean().backward()
            reducer.finish()

        return step

    return {
        "ddp": with_ddp(),
        "ddp again": with_ddp(),
        "reducer": with_reducer(),
        "reducer, no overlap": with_reducer(overlap=False),
        "reducer, ring": with_reducer(strategy="ring"),
        "reducer, tree": with_reducer(strategy="tree"),
        "reducer, hierarchical": with_reducer(
            strategy="hierarchical", local_world_size=RANKS_PER_NODE
        ),
        "reducer, fp16": with_reducer(compression="fp16"),
        "reducer, int8": with_reducer(compression="int8"),
    }


def time_variants(sleep_s: float, num_rounds: int) -> dict[str, Any]:
    """Milliseconds for each step, and ratios to DDP in the same round."""
    import torch
    import torch.distributed as dist

    variants = make_variants(sleep_s)
    spent: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        for _ in range(2):  # DDP rebuilds its buckets after the first
            step()
    for round_index in range(num_rounds):
        names = list(variants)
        for name in names[round_index % len(names) :] + names[: round_index % len(names)]:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                variants[name]()
            block = torch.tensor((time.perf_counter() - began) / STEPS_PER_BLOCK)
            dist.all_reduce(block, dist.ReduceOp.MAX)
            spent[name].append(block.item())
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(times), 2),
            "ratio_to_ddp": round(
                statistics.median(a / b for a, b in zip(times, spent["ddp"], strict=True)), 3
            ),
        }
        for name, times in spent.items()
    }


def make_job(target: Path, num_rounds: int):
    """What every rank does; rank 0 writes."""

    def job(rank: int, world_size: int) -> None:
        import torch.distributed as dist

        from meshscope.engine.data_parallel.allreduce import (
            make_candidates,
            make_node_groups,
            measure_strategies,
        )

        nodes = make_node_groups(dist.group.WORLD, RANKS_PER_NODE)
        table = measure_strategies(
            dist.group.WORLD, SIZES_BYTES, candidates=make_candidates(nodes), num_repeats=num_rounds
        )
        found = {
            "strategies": table.to_document(),
            "fastest": {row.size_bytes: table.choose(row.size_bytes) for row in table.rows},
            "layers that compute": time_variants(0.0, num_rounds),
            "layers that sleep": time_variants(SLEEP_S, num_rounds),
        }
        if rank == 0:
            target.write_text(json.dumps(found), encoding="utf-8")

    return job


def print_result(found: dict[str, Any]) -> None:
    """Both tables, as text."""
    names = list(found["strategies"]["rows"][0]["duration_ns"])
    print(f"{'bytes':>10}  " + "  ".join(f"{name:>12}" for name in names) + "   ms")
    for row in found["strategies"]["rows"]:
        times = "  ".join(f"{row['duration_ns'][name] / 1e6:12.2f}" for name in names)
        print(f"{row['size_bytes']:10}  {times}")
    for title in ("layers that compute", "layers that sleep"):
        print(f"\n{title:24}  {'ms':>8}  of DDP")
        for name, times in found[title].items():
            print(f"{name:24}  {times['median_ms']:8.2f}  {times['ratio_to_ddp']:6.3f}")


def main() -> None:
    """Runs both parts and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        fork_ranks.RANK_TIMEOUT_SECONDS = 900
        codes = fork_ranks.run_ranks(make_job(target, arguments.rounds), NUM_RANKS)
        assert not any(codes), codes
        found = json.loads(target.read_text(encoding="utf-8"))
    print_result(found)
    if arguments.output is not None:
        import torch

        found["machine"] = {
            "cores": os.cpu_count(),
            "load": [round(load, 1) for load in os.getloadavg()],
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        found["settings"] = {
            "num_ranks": NUM_RANKS,
            "ranks_per_node": RANKS_PER_NODE,
            "num_layers": NUM_LAYERS,
            "bucket_bytes": BUCKET_BYTES,
            "sleep_s": SLEEP_S,
            "num_rounds": arguments.rounds,
        }
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
