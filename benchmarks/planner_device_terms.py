"""What a host takes to issue layers, and NCCL ranks that share a GPU for one collective or message.

    PYTHONPATH=src python benchmarks/planner_device_terms.py --output OUT.json    # needs CUDA
    python benchmarks/planner_device_terms.py --device cpu --output OUT.json    # whether it runs

The terms that `meshscope.plan` has of small models on a device and of ranks that talk over TCP,
each by itself. `host`: the engine's forward, backward (also as I and W), recompute and update, on
models so narrow that the device waits, with two numbers of layers; milliseconds until the calls
return, and until the device has ended. `links`: collectives by size and group, all groups at it and
one; messages of the pipeline; products, all ranks at once and one. Wall clock and CPU of a
process, means over ranks, many in a row with one wait for the device at the end.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from nccl_bench import Place, Task, add_options, is_rank, run_jobs, serve_rank

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import (
    BatchConfig,
    MemoryConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

NUM_RANKS = 4
SIZES_KIB = (4, 256, 1024, 2048, 8192, 32768)
NUM_LAYERS = (4, 16)
NUM_STEPS = 14
GPT = {"norm": "layernorm", "position": "learned", "activation": "gelu", "bias": True}
KINDS: dict[str, dict[str, Any]] = {"gated": {}, "plain": GPT}
WAYS: dict[str, dict[str, str]] = {
    "whole backward": {},
    "I and W": {"schedule": "zb_h1"},
    "recompute": {"memory": "standard"},
}
PRODUCTS = ((1024, 512, 1408), (2048, 512, 1408), (2048, 512, 512), (2048, 512, 8192))


# --- the host ------------------------------------------------------------------------------------


def measure_host(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, model in KINDS.items():
        for way, given in WAYS.items():
            for num_layers in NUM_LAYERS:
                config = make_config(place, num_layers, model, **given)
                found[f"{kind}, {way}, {num_layers} layers"] = measure_parts(place, config)
    return found


def make_config(
    place: Place, num_layers: int, model: dict[str, Any], *, schedule: str = "1f1b",
    memory: str = "basic",
) -> TrainConfig:  # fmt: skip
    return TrainConfig(
        model=ModelConfig(
            hidden_size=128, num_layers=num_layers, num_heads=4, num_kv_heads=4,
            ffn_hidden_size=256, sequence_length=64, vocab_size=512, **model,
        ),
        device=place.device.type,
        parallel=ParallelConfig(schedule=schedule),  # type: ignore[arg-type]
        precision=PrecisionConfig(compute="bf16" if place.is_cuda else "fp32"),
        batch=BatchConfig(microbatch_size=1, num_microbatches=2),
        memory=MemoryConfig(strategy=memory),  # type: ignore[arg-type]
    )  # fmt: skip


def measure_parts(place: Place, config: TrainConfig) -> dict[str, list[float]]:
    """Median and least milliseconds of a microbatch's parts and of the update, to issue and to
    end."""
    from meshscope.core.schedule import Action, ActionKind
    from meshscope.engine import Engine

    engine = Engine(config, device=place.device)
    shape = (config.num_microbatches, 1, config.model.sequence_length + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape)
    spent: dict[str, list[tuple[float, float]]] = {}

    def note(part: str, run: Callable[[], Any]) -> None:
        place.synchronize()
        start = time.perf_counter()
        run()
        issued = time.perf_counter()
        place.synchronize()
        ended = time.perf_counter()
        spent.setdefault(part, []).append((1e3 * (issued - start), 1e3 * (ended - start)))

    kinds = {"backward": ActionKind.BACKWARD}
    if config.parallel.schedule == "zb_h1":
        kinds = {"I": ActionKind.INPUT_GRAD, "W": ActionKind.WEIGHT_GRAD}
    for _ in range(NUM_STEPS):
        engine.begin_step()
        for index, microbatch in enumerate(tokens):
            inputs, targets = microbatch[:, :-1], microbatch[:, 1:]
            note("forward", partial(engine.forward, index, inputs, targets))
            by_hand: Any = engine._by_hand
            for part, kind in kinds.items():
                note(part, partial(by_hand.step.run, Action(kind, 0, index)))
        note("update", engine.finish_step)
    engine.close()
    found = {}
    for part, rows in spent.items():
        kept = rows[len(rows) // 4 :]
        both = (
            pick([row[which] for row in kept])
            for which in range(2)
            for pick in (statistics.median, min)
        )
        found[part] = [round(one, 3) for one in both]
    return found


# --- links ---------------------------------------------------------------------------------------


def measure(place: Place, run: Callable[[], Any], number: int) -> tuple[float, float]:
    """Milliseconds of wall clock and CPU of one, after two that do not count."""
    run()
    run()
    place.synchronize()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(number):
        run()
    place.synchronize()
    wall, cpu = time.perf_counter() - start_s, time.process_time() - cpu_s
    return 1e3 * wall / number, 1e3 * cpu / number


def measure_links(place: Place) -> dict[str, Any]:
    found: dict[str, list[float]] = {}

    def note(name: str, run: Callable[[], Any], number: int, first: int = NUM_RANKS) -> None:
        """With the ranks below `first` at it, while others wait."""
        place.meet()
        own = measure(place, run, number) if place.rank < first else None
        rows = [row for row in place.gather(own) if row is not None]
        means = (statistics.fmean(column) for column in zip(*rows, strict=True))
        found[name] = [round(one, 4) for one in means]

    for n in (2, NUM_RANKS):
        groups = [dist.new_group(list(range(i, i + n))) for i in range(0, NUM_RANKS, n)]
        group = groups[place.rank // n]
        for kib in SIZES_KIB:
            x = torch.zeros(kib * 512, device=place.device, dtype=torch.bfloat16)
            number = max(4, min(30, 40000 // (kib + 60)))
            reduce = partial(dist.all_reduce, x, group=group)
            note(f"all_reduce {n} ranks {kib} KiB all", reduce, number)
            if n < NUM_RANKS:
                note(f"all_reduce {n} ranks {kib} KiB one", reduce, number, first=n)
        for kib in (2048, 16384):
            whole = torch.zeros(kib * 512, device=place.device, dtype=torch.bfloat16)
            part = torch.zeros(kib * 512 // n, device=place.device, dtype=torch.bfloat16)
            gather = partial(dist.all_gather_into_tensor, whole, part, group=group)
            scatter = partial(dist.reduce_scatter_tensor, part, whole, group=group)
            note(f"all_gather {n} ranks {kib} KiB all", gather, 8)
            note(f"reduce_scatter {n} ranks {kib} KiB all", scatter, 8)
    measure_messages(place, note)
    for m, k, n in PRODUCTS:
        left, right = torch.randn(m, k, device=place.device), torch.randn(k, n, device=place.device)
        if place.is_cuda:
            left, right = left.bfloat16(), right.bfloat16()
        multiply = partial(torch.matmul, left, right)
        note(f"product {m} {k} {n} all", multiply, 200 if place.is_cuda else 2)
        note(f"product {m} {k} {n} one", multiply, 200 if place.is_cuda else 2, first=1)
    return found


def measure_messages(place: Place, note: Callable[..., None]) -> None:
    """There and back between neighbours, all pairs and one; and around all ranks, as a pipeline's
    messages go: each waits for the one before it."""
    other = place.rank ^ 1
    before, after = (place.rank - 1) % NUM_RANKS, (place.rank + 1) % NUM_RANKS
    for kib in (4, 1024, 2048):
        x, y = (torch.zeros(kib * 256, device=place.device) for _ in range(2))

        def exchange(x: Any = x, y: Any = y) -> None:
            for turn in (0, 1):
                if place.rank % 2 == turn:
                    dist.send(x, other)
                else:
                    dist.recv(y, other)

        def pass_on(x: Any = x, y: Any = y) -> None:
            if place.rank == 0:
                dist.send(x, after)
                dist.recv(y, before)
            else:
                dist.recv(y, before)
                dist.send(x, after)

        note(f"there and back {kib} KiB all", exchange, 12)
        note(f"there and back {kib} KiB one", exchange, 12, first=2)
        note(f"around {kib} KiB", pass_on, 12)


MEASURES = {"host": measure_host, "links": measure_links}


def serve(place: Place, name: str) -> dict[str, Any]:
    begin = time.perf_counter()
    return {**MEASURES[name](place), "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(limit_s=110.0, task_limit_s=60.0)
    options = parser.parse_args()
    if is_rank():
        serve_rank(options.device, serve)
        return
    tasks = [Task(name="host", num_ranks=1), Task(name="links", num_ranks=NUM_RANKS)]
    names = options.only or [task.name for task in tasks]
    run_jobs(
        [task for task in tasks if task.name in names],
        options,
        lambda name, result: print(name, result.get("seconds"), flush=True),
    )


if __name__ == "__main__":
    main()
