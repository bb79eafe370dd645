"""What recording costs real NCCL ranks and single GPUs, by paired blocks inside one job.

    python benchmarks/nccl_overhead.py [--only ddp fsdp2] [--output FILE] [--resume FILE]
    python benchmarks/nccl_overhead.py --only ddp --connections 1        # as Megatron-LM's jobs
    python benchmarks/nccl_overhead.py --only pp4 --ways no-marks least  # where the cost is
    python benchmarks/nccl_overhead.py --device cpu --rounds 2 --steps 2 # only whether it runs

Blocks of steps take turns without and with the recorder, in random order, the same on all ranks; in
some rounds with pytscope, if it is installed. torch.profiler (wait 1, warm-up 1, active 3 of the
block's steps) has rounds of its own behind all others: it leaves CUPTI in the process, and calls of
CUDA are slower from then on; after a program it is taken out. All ranks begin a block together with
empty devices, and it lasts until the last rank's device is empty. A recording lasts for one block,
which begins at its 2nd or at its 10th step, in turns: together they show steps 2 to 19, one of
which has its operations recorded where others have not. Bare blocks begin after as many steps.
The first 64 steps of a recording cost more than others, for a short run is to have enough marks:
`--settle 64 --blocks 6` shows those that follow, six blocks a recording, until the third kernel
sample at step 132. Kernel samples and the count of FLOPs come seldom (`--long-rounds` has them).
The cost is the median of the ratios of the two blocks, with a bootstrap interval. What each step of
a recording takes the host longer is shown by its number. Kernels of a few steps are traced each
way: how much communication ran beside compute.

See `nccl_bench.py` for how ranks share a GPU.
"""

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from nccl_bench import FAILED_KEY, Place, add_options, choose, is_rank, run_jobs, serve_rank
from nccl_catalog import PROGRAMS
from nccl_kernels import trace_steps
from nccl_programs import Training
from torch.profiler import ProfilerActivity, profile, schedule

from meshscope.capture.profiling.kernel_window import detach

DEFAULT = ("ddp", "fsdp2", "tp_fsdp2", "pp4", "engine_222_light", "single_25ms", "single_100ms")
NUM_TRACED_STEPS = 4
SETTLE_STEPS = (2, 10)
"""Before a block, in turns. The same for all blocks of a round: where only recordings had ten, both
they and pytscope were 2 to 4 % slower in those rounds, and not in the others."""
LONG_STEPS = 60
"""Kernels are sampled at about the 20th and 40th step of a recording."""
NUM_RESAMPLES = 2000
MAX_MEDIAN_RATIO, MAX_UPPER_RATIO = 0.01, 0.02
MAX_SINGLE_RATIO = 0.002
MAX_OVERLAP_CHANGE_RATIO = 0.05

Step = Callable[[], None]


# --- ways ------------------------------------------------------------------------------------


@contextmanager
def run_bare(training: Training, folder: Path) -> Iterator[Step]:
    yield training.step


@contextmanager
def run_recorded(training: Training, folder: Path, **settings: Any) -> Iterator[Step]:
    recorder = training.start_recording(folder, **settings)
    try:
        yield training.step
    finally:
        caught = training.stop_recording(recorder)
        if caught:
            print(f"the recorder caught {caught} {recorder.guard.first_messages}", flush=True)


@contextmanager
def run_torch_profiler(training: Training, folder: Path) -> Iterator[Step]:
    """The usual schedule; nothing is exported."""
    activities = [ProfilerActivity.CPU]
    if training.place.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities, schedule=schedule(wait=1, warmup=1, active=3, repeat=1)
    ) as profiled:

        def step() -> None:
            training.step()
            profiled.step()

        yield step


@contextmanager
def run_pytscope(training: Training, folder: Path) -> Iterator[Step]:
    from pytscope import AutoProfiler

    path = f"{folder}-{training.place.rank}"
    profiler = AutoProfiler(path, training.model, training.optimizer)
    profiler.start()
    try:
        yield training.step
    finally:
        profiler.finish()


LEAST = {
    "communication": False,
    "device_events": False,
    "flop_counts": False,
    "gc_pauses": False,
    "hardware": False,
    "kernel_samples": False,
    "memory": False,
    "signals": False,
    "stack_dumps": False,
    "stack_samples": False,
}
"""Settings that leave the host's phases alone."""
WAYS = {
    "bare": run_bare,
    "recorded": run_recorded,
    "unsampled": partial(run_recorded, kernel_samples=False),
    "no-operations": partial(run_recorded, communication=False),
    "no-marks": partial(run_recorded, device_events=False),
    "no-flops": partial(run_recorded, flop_counts=False),
    "least": partial(run_recorded, **LEAST),
    "torch.profiler": run_torch_profiler,
    "pytscope": run_pytscope,
}


def list_ways(turn: int, others: Sequence[str], period: int) -> list[str]:
    """What is for comparison in some rounds only."""
    ways = ["bare", "recorded"]
    if turn % period == period - 1:
        ways += others
    if turn % 6 == 1 and importlib.util.find_spec("pytscope") is not None:
        ways.append("pytscope")
    return ways


# --- on every rank ---------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Block:
    """Steps in a row on this rank."""

    turn: int
    way: str
    index: int
    """Among those of its recording."""
    first_step: int
    """Of the recording."""
    ms: float = 0.0
    """A step, until the device is empty."""
    step_ms: list[float] = field(default_factory=list)
    """What the host took for each of them."""
    seconds: float = 0.0
    """With what came before and after its steps."""
    main_ms: float = 0.0
    """CPU time of the thread that runs the steps, a step."""
    process_ms: float = 0.0
    """CPU time of all threads, a step; those that wait for a device or for NCCL may spin."""


def measure(place: Place, name: str, options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    training = PROGRAMS[name].build(place)
    for _ in range(options.warmup_steps):
        training.step()
    place.meet()
    shuffle = random.Random(1)
    blocks: list[Block] = []

    def run_round(turn: int, order: list[str]) -> None:
        shuffle.shuffle(order)
        for way in order:
            folder = place.folder / name / f"{turn}-{way}"
            num_settled = options.settle[turn % len(options.settle)]
            blocks.extend(
                run_blocks(training, turn, way, folder, num_settled, options.steps, options.blocks)
            )

    turn = 0
    # Rank 0's clock counts.
    while turn < options.rounds and place.gather(time.perf_counter() - begin)[0] < options.seconds:
        run_round(turn, list_ways(turn, options.ways, options.ways_period))
        turn += 1
    for number in range(options.profiled_rounds):
        run_round(turn + number, ["bare", "torch.profiler"])
    long_blocks = run_long_blocks(training, place.folder / name, options)
    kernels: dict[str, list[list[dict | None]]] = {}
    for turn in range(options.traces):
        for way in ("bare", "recorded"):
            folder = place.folder / name / f"trace{turn}-{way}"
            with WAYS[way](training, folder) as step:
                for _ in range(SETTLE_STEPS[0]):
                    step()
                traced = trace_steps(place, step, NUM_TRACED_STEPS)
            kernels.setdefault(way, []).append(place.gather(traced))
    training.close()
    if place.is_cuda and "graphs" not in name:
        detach(())
    return {
        "num_ranks": place.num_ranks,
        "blocks": gather_blocks(place, blocks),
        "long_blocks": gather_blocks(place, long_blocks),
        "kernels_ms": kernels,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def run_long_blocks(training: Training, folder: Path, options: argparse.Namespace) -> list[Block]:
    """Recordings that last until kernels were sampled twice."""
    blocks = []
    for turn in range(options.long_rounds):
        ways = ["bare", "recorded", "unsampled"]
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            path = folder / f"long{turn}-{way}"
            blocks += run_blocks(training, turn, way, path, SETTLE_STEPS[0], LONG_STEPS, 1)
    return blocks


def run_blocks(
    training: Training,
    turn: int,
    way: str,
    folder: Path,
    num_settled: int,
    num_steps: int,
    num_blocks: int,
) -> list[Block]:
    """Blocks in a row, of one recording."""
    entered = time.perf_counter()
    is_traced = way == "torch.profiler"
    blocks = []
    with nullcontext(training.step) if is_traced else WAYS[way](training, folder) as step:
        for _ in range(num_settled):
            step()
        for index in range(num_blocks):
            first_step = num_settled + index * num_steps
            block = Block(turn=turn, way=way, index=index, first_step=first_step)
            with WAYS[way](training, folder) if is_traced else nullcontext(step) as timed_step:
                time_block(block, training, timed_step, num_steps)
            blocks.append(block)
    for block in blocks:
        block.seconds = round((time.perf_counter() - entered) / num_blocks, 3)
    return blocks


def time_block(block: Block, training: Training, step: Step, num_steps: int) -> None:
    training.place.meet()
    main, process = time.thread_time(), time.process_time()
    moments = [time.perf_counter()]
    for _ in range(num_steps):
        step()
        moments.append(time.perf_counter())
    main, process = time.thread_time() - main, time.process_time() - process
    training.place.synchronize()
    seconds = time.perf_counter() - moments[0]
    block.ms = round(1e3 * seconds / num_steps, 4)
    block.step_ms = [round(1e3 * (b - a), 2) for a, b in pairwise(moments)]
    block.main_ms = round(1e3 * main / num_steps, 3)
    block.process_ms = round(1e3 * process / num_steps, 3)


def gather_blocks(place: Place, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    by_rank = place.gather([(block.ms, block.main_ms, block.process_ms) for block in blocks])
    return [
        {
            "round": block.turn,
            "index": block.index,
            "way": block.way,
            "rank_ms": [one[index][0] for one in by_rank],
            "main_ms": [one[index][1] for one in by_rank],
            "process_ms": [one[index][2] for one in by_rank],
            "first_step": block.first_step,
            "step_ms": block.step_ms,
            "seconds": block.seconds,
        }
        for index, block in enumerate(blocks)
    ]


# --- what it says ----------------------------------------------------------------------------


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Costs by way, and what the kernels say."""
    return {
        "ways": summarize_blocks(result["blocks"]),
        "long": summarize_blocks(result["long_blocks"]),
        "by_step_ms": summarize_steps(result["blocks"]),
        "main_cpu_ms": summarize_cpu(result["blocks"], "main_ms"),
        "process_cpu_ms": summarize_cpu(result["blocks"], "process_ms"),
        "kernels": summarize_kernels(result["kernels_ms"]),
    }


def summarize_blocks(blocks: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    by_round: dict[int, dict[tuple[str, int], float]] = {}
    for block in blocks:
        in_round = by_round.setdefault(block["round"], {})
        in_round[block["way"], block.get("index", 0)] = max(block["rank_ms"])
    return {
        way: compare(
            [
                [(one["bare", index], ms) for (its, index), ms in one.items() if its == way]
                for one in by_round.values()
                if (way, 0) in one
            ]
        )
        for way in dict.fromkeys(block["way"] for block in blocks)
    }


def summarize_steps(blocks: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By way and number of a recording's step: the median of what rank 0's host takes longer than
    in the bare step at the same place, for the first steps of a block run ahead of the device."""
    steps: dict[str, dict[int, list[float]]] = {}
    for block in blocks:
        of_way = steps.setdefault(block["way"], {})
        for number, ms in enumerate(block["step_ms"], block["first_step"]):
            of_way.setdefault(number, []).append(ms)
    bare = {number: statistics.median(values) for number, values in steps.pop("bare").items()}
    return {
        way: {
            str(number): round(statistics.median(values) - bare[number], 3)
            for number, values in sorted(of_way.items())
            if number in bare
        }
        for way, of_way in steps.items()
        if way != "torch.profiler"
    }


def summarize_cpu(blocks: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """By way: the median of the CPU time of a rank's step, less that of bare steps; milliseconds.
    Empty for measurements from before it was kept."""
    found: dict[str, list[float]] = {}
    for block in blocks:
        found.setdefault(block["way"], []).extend(block.get(key, ()))
    medians = {way: statistics.median(values) for way, values in found.items() if values}
    bare = medians.get("bare", 0.0)
    return {way: round(ms if way == "bare" else ms - bare, 3) for way, ms in medians.items()}


def compare(rounds: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Cost as a ratio of the bare block at the same place of the same round, and how blocks spread.
    Rounds are drawn again, not blocks: those of one recording may have something in common."""
    ratios = [[other / bare - 1 for bare, other in pairs] for pairs in rounds]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(chain.from_iterable(draw.choices(ratios, k=len(ratios))))
        for _ in range(NUM_RESAMPLES)
    )
    values = [other for pairs in rounds for _, other in pairs]
    middle = statistics.median(values)
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [middle] * 3
    return {
        "num_blocks": len(values),
        "ms": round(middle, 4),
        "spread_ratio": round((quartiles[2] - quartiles[0]) / middle, 5),
        "median_ratio": round(statistics.median(chain.from_iterable(ratios)), 6),
        "low_ratio": round(medians[int(0.025 * NUM_RESAMPLES)], 6),
        "high_ratio": round(medians[int(0.975 * NUM_RESAMPLES) - 1], 6),
    }


def summarize_kernels(kernels: dict[str, list[list[dict | None]]]) -> dict[str, dict[str, float]]:
    """Means over ranks and windows, milliseconds a step."""
    found = {}
    for way, windows in kernels.items():
        rows = [row for window in windows for row in window if row is not None]
        if rows:
            found[way] = {
                name: round(statistics.fmean(r[name] for r in rows), 3) for name in rows[0]
            }
    return found


def find_misses(result: dict[str, Any]) -> list[str]:
    """The goals that are not met."""
    summary = result["summary"]
    cost, kernels = summary["ways"]["recorded"], summary["kernels"]
    misses = []
    if result["num_ranks"] == 1:
        if cost["median_ratio"] > MAX_SINGLE_RATIO:
            misses.append(f"median above {MAX_SINGLE_RATIO:.1%}")
    else:
        if cost["median_ratio"] > MAX_MEDIAN_RATIO:
            misses.append(f"median above {MAX_MEDIAN_RATIO:.0%}")
        if cost["high_ratio"] > MAX_UPPER_RATIO:
            misses.append(f"upper end above {MAX_UPPER_RATIO:.0%}")
        if kernels and kernels["bare"]["overlapped"] > 0.1:
            change = kernels["recorded"]["overlapped"] / kernels["bare"]["overlapped"] - 1
            if abs(change) > MAX_OVERLAP_CHANGE_RATIO:
                misses.append(f"overlap changed by {change:+.1%}")
    return misses


def show(name: str, result: dict[str, Any]) -> None:
    if FAILED_KEY in result:
        return
    result["summary"] = summarize(result)
    result["misses"] = find_misses(result)
    long = {f"{way}, long": cost for way, cost in result["summary"]["long"].items()}
    for way, cost in (result["summary"]["ways"] | long).items():
        print(
            f"{name:13} {way:16} {cost['ms']:8.2f} ms ± {cost['spread_ratio'] / 2:.1%}  "
            f"{cost['median_ratio']:+.2%} of bare, 95 % interval "
            f"{cost['low_ratio']:+.2%} to {cost['high_ratio']:+.2%}, {cost['num_blocks']} blocks"
        )
    for way, by_step in result["summary"]["by_step_ms"].items():
        shown = " ".join(f"{number}:{ms:+.2f}" for number, ms in by_step.items())
        print(f"{name:13} {way:16} host, ms more by step: {shown}")
    for key in ("main_cpu_ms", "process_cpu_ms"):
        shown = "  ".join(f"{way} {ms:.2f}" for way, ms in result["summary"][key].items())
        print(f"{name:13} {key}, others than bare: more than bare: {shown}")
    for way, found in result["summary"]["kernels"].items():
        shown = "  ".join(f"{key} {found[key]:.1f}" for key in SHOWN_KERNELS)
        print(f"{name:13} {way:16} kernels, ms a step: {shown}")
    blocks = ", ".join(
        f"{way} {statistics.median(b['seconds'] for b in result['blocks'] if b['way'] == way):.2f}"
        for way in result["summary"]["ways"]
    )
    print(
        f"{name:13} {'; '.join(result['misses']) or 'goals met'}, {result['seconds']} s; "
        f"s a block: {blocks}",
        flush=True,
    )


SHOWN_KERNELS = ("compute", "communication", "overlapped", "exposed", "copies", "idle", "wall")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="of a program after which no round begins"
    )
    parser.add_argument("--profiled-rounds", type=int, default=5, help="of torch.profiler")
    parser.add_argument(
        "--ways", nargs="+", default=(), choices=list(WAYS), help="more ways, in some rounds"
    )
    parser.add_argument("--ways-period", type=int, default=3, help="rounds to the next with them")
    parser.add_argument("--steps", type=int, default=10, help="in a block")
    parser.add_argument("--blocks", type=int, default=1, help="in a row, of one recording")
    parser.add_argument(
        "--settle",
        type=int,
        nargs="+",
        default=SETTLE_STEPS,
        help="steps before a block, in turns; more of them measure a recording that is older",
    )
    parser.add_argument("--traces", type=int, default=2, help="windows of kernels each way")
    parser.add_argument("--warmup-steps", type=int, default=8, help="before the first block")
    parser.add_argument(
        "--long-rounds", type=int, default=0, help="of blocks long enough for kernel samples"
    )
    options = parser.parse_args()
    if is_rank():
        serve_rank(options.device, lambda place, name: measure(place, name, options))
        return
    names = choose(list(PROGRAMS), options.only) if options.only else list(DEFAULT)
    run_jobs([PROGRAMS[name].task for name in names], options, show)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
