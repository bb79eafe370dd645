"""What 8 processes on a host's cores take for one collective, message or matrix product.

    python benchmarks/planner_host_terms.py [-o benchmarks/results/planner_host_terms.json]

The terms that `meshscope.plan` has of processes that share cores, each by itself: gloo's all-reduce
by size and group, with all groups at it and with one; its gather and reduce-scatter; a message
there and back; products of a small layer by tp, with all processes and with one. `cut`: steps of
the engine on two processes, each with a core of its own, by ZeRO stage and microbatches; what FSDP2
itself does is what such steps take more than those without it, less their collectives. Milliseconds
of wall clock and of a process's CPU, means over ranks. Best on a quiet machine.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZE = 8
HIDDEN, FFN = 192, 512
SIZES_KIB = (4, 48, 196, 393, 1024, 4096)


def measure(call, number):
    """Milliseconds of wall clock and CPU of one, after two that do not count."""
    call()
    call()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(number):
        call()
    wall, cpu = time.perf_counter() - start_s, time.process_time() - cpu_s
    return 1e3 * wall / number, 1e3 * cpu / number


def alone(rank, first, call, number):
    """The same while the other ranks wait in a barrier; None on those."""
    dist.barrier()
    found = measure(call, number) if rank < first else None
    dist.barrier()
    return found


def measure_collectives(rank):
    found = {}
    for n in (2, 4, 8):
        groups = [dist.new_group(list(range(i, i + n))) for i in range(0, WORLD_SIZE, n)]
        group = groups[rank // n]
        for kib in SIZES_KIB:
            x, number = torch.zeros(kib * 256), max(4, min(40, 8000 // (kib + 60)))

            def reduce(x=x, group=group):
                dist.all_reduce(x, group=group)

            found[f"all_reduce {n} ranks {kib} KiB all"] = alone(rank, WORLD_SIZE, reduce, number)
            found[f"all_reduce {n} ranks {kib} KiB one"] = alone(rank, n, reduce, number)
        for kib in (196, 1780):
            whole = torch.zeros(kib * 256 // n * n)
            part = torch.zeros(whole.numel() // n)

            def gather(whole=whole, part=part, group=group):
                dist.all_gather_into_tensor(whole, part, group=group)

            def scatter(whole=whole, part=part, group=group):
                dist.reduce_scatter_tensor(part, whole, group=group)

            number = 8 if kib > 1000 else 20
            found[f"all_gather {n} ranks {kib} KiB all"] = alone(rank, WORLD_SIZE, gather, number)
            found[f"reduce_scatter {n} ranks {kib} KiB all"] = alone(
                rank, WORLD_SIZE, scatter, number
            )
    return found


def measure_messages(rank):
    """One way of a message to the neighbour and back."""
    found, other = {}, rank ^ 1
    for kib in (96, 196, 393):
        x, y = torch.zeros(kib * 256), torch.zeros(kib * 256)

        def exchange(x=x, y=y):
            for turn in (0, 1):
                if rank % 2 == turn:
                    dist.send(x, other)
                else:
                    dist.recv(y, other)

        wall, cpu = alone(rank, WORLD_SIZE, exchange, 20)
        found[f"message {kib} KiB all"] = (wall / 2, cpu / 2)
    return found


def measure_products(rank):
    found = {}
    for tokens in (128, 256, 512):
        for tp in (1, 2, 4, 8):
            shapes = [
                (3 * HIDDEN // tp, HIDDEN), (HIDDEN, HIDDEN // tp), (2 * FFN // tp, HIDDEN),
                (HIDDEN, FFN // tp),
            ]  # fmt: skip
            pairs = [(torch.randn(n, k), torch.randn(tokens, k)) for n, k in shapes]

            def multiply(pairs=pairs):
                for weight, x in pairs:
                    torch.nn.functional.linear(x, weight)

            gigaflops = sum(2 * tokens * n * k for n, k in shapes) / 1e9
            for first, name in ((WORLD_SIZE, "all"), (1, "one")):
                times = alone(rank, first, multiply, 20)
                if times is not None:
                    key = f"products {tokens} tokens tp {tp} {name}"
                    found[key] = (*times, 1e3 * gigaflops / times[1])
    return found


CUT_RANKS, CUT_LAYERS = 2, 8
CUT_STEPS = 16


def measure_cut(rank, folder):
    """CPU and wall milliseconds of a step, the least of many."""
    from meshscope.core.config.model_config import ModelConfig
    from meshscope.core.config.train_config import BatchConfig, ParallelConfig, TrainConfig
    from meshscope.engine import Engine
    from meshscope.engine.mesh import Mesh

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/cut", rank=rank, world_size=CUT_RANKS
    )
    found = {}
    for stage in (0, 1, 3):
        for number in (1, 4):
            cut = {"data_parallel": "fsdp", "zero_stage": stage} if stage else {}
            config = TrainConfig(
                model=ModelConfig(
                    vocab_size=1024, num_layers=CUT_LAYERS, hidden_size=HIDDEN, num_heads=8,
                    num_kv_heads=8, ffn_hidden_size=FFN, sequence_length=128,
                ),
                device="cpu",
                parallel=ParallelConfig(dp=CUT_RANKS, **cut),
                batch=BatchConfig(microbatch_size=1, num_microbatches=number),
            )  # fmt: skip
            device = torch.device("cpu")
            engine = Engine(config, mesh=Mesh(config.layout, device), device=device)
            tokens = torch.randint(0, 1024, (number, 1, 129))
            rows = []
            for _ in range(CUT_STEPS):
                dist.barrier()
                start_s, cpu_s = time.perf_counter(), time.process_time()
                engine.train_step(tokens)
                rows.append((time.perf_counter() - start_s, time.process_time() - cpu_s))
            engine.close()
            found[f"step zero{stage} {number} microbatches"] = tuple(
                1e3 * min(column) for column in zip(*rows[3:], strict=True)
            )
    Path(folder, f"cut-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def run_rank(rank, folder):
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE
    )
    found = {**measure_collectives(rank), **measure_messages(rank), **measure_products(rank)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only-cut", action="store_true", help="only steps of the engine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not given.only_cut:
            mp.spawn(run_rank, args=(folder,), nprocs=WORLD_SIZE)
        mp.spawn(measure_cut, args=(folder,), nprocs=CUT_RANKS)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    names = ("wall_ms", "cpu_ms", "gigaflops_per_cpu_second")
    keys = dict.fromkeys(key for one in ranks for key in one)
    means = {key: np.mean([one[key] for one in ranks if one.get(key)], axis=0) for key in keys}
    results = {
        "machine": {"cores": os.cpu_count(), "processes": WORLD_SIZE},
        "terms": {
            key: {name: round(float(value), 3) for name, value in zip(names, values, strict=False)}
            for key, values in means.items()
        },
    }
    print(json.dumps(results, indent=1))
    if given.output:
        given.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
