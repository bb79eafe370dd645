"""What does recording an operation cost, and what does it add to a step of a 2x2x2 mesh?

    python benchmarks/communication_overhead.py [--output FILE] [--quick]

1. One rank, gloo: CPU time of the calling thread per operation, with nothing, with a kernel that
   only passes on (the floor of any tap in Python), with the recorder, with torch.profiler, and
   with CommDebugMode, in blocks of 200 in random order, round after round; lower quartiles. CPU
   time, because waking gloo's thread makes wall time jump.
2. Two ranks, gloo: wall time of small blocking all-reduces, recorder on and off in turns.
3. Eight ranks, dp2 x tp2 x pp2 (plain tensors, 1F1B-like sends and receives): wall time of steps,
   recorder on and off in turns (paused and resumed, with the taps in place but passing on).
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from fork_ranks import run_ranks
from recorder_overhead import describe_machine

import meshscope

GOAL_US = 15.0
BLOCK = 200
"""Operations measured at a time."""


def measure_cpu_us(call, count: int) -> float:
    """CPU microseconds of this thread per call."""
    begin = time.thread_time_ns()
    for _ in range(count):
        call()
    return (time.thread_time_ns() - begin) / count / 1e3


def make_calls() -> dict[str, object]:
    import torch.distributed._functional_collectives as functional

    tensor = torch.ones(1024)
    return {
        "blocking": lambda: dist.all_reduce(tensor),
        "asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "barrier": dist.barrier,
        # Last: it brings the dispatcher's kernels into play, for all that follow.
        "functional": lambda: functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0,
        "blocking, once C++ communicates": lambda: dist.all_reduce(tensor),
    }


@contextlib.contextmanager
def nothing(folder: Path):
    yield


@contextlib.contextmanager
def bare_tap(folder: Path):
    """A kernel that only passes on."""
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library = torch.library.Library("c10d", "IMPL")
    for name in ("allreduce_", "allreduce_coalesced_", "barrier"):
        overload = getattr(torch.ops.c10d, name).default

        def kernel(keyset, *args, redispatch=overload.redispatch):
            return redispatch(keyset & after, *args)

        library.impl(overload, kernel, "BackendSelect", with_keyset=True)
    yield
    library._destroy()


@contextlib.contextmanager
def recording(folder: Path):
    """The recorder, as a program would have it."""
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        recorder = meshscope.start(run_dir, provenance=False)
        with recorder.step():
            pass  # the recorder measures itself in one step in 17, of which this is the first
        yield
        recorder.close()
        assert not recorder.guard.counts, recorder.guard.first_messages


@contextlib.contextmanager
def profiling(folder: Path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


@contextlib.contextmanager
def debugging(folder: Path):
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode():
        yield


VARIANTS = {
    "plain": nothing,
    "bare tap": bare_tap,
    "meshscope": recording,
    "torch.profiler": profiling,
    "CommDebugMode": debugging,
}


def cost_per_operation(folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Part 1, in a process of its own: blocks of each variant in turn, round after round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    calls = make_calls()
    found = {variant: {name: [] for name in calls} for variant in VARIANTS}
    for turn in range(rounds + 1):
        order = list(VARIANTS)
        random.Random(turn).shuffle(order)
        for variant in order:
            with VARIANTS[variant](folder):
                for name, call in calls.items():
                    measure_cpu_us(call, 30)
                    cost_us = measure_cpu_us(call, BLOCK)
                    if turn:
                        found[variant][name].append(cost_us)
    dist.destroy_process_group()
    return found


def wall_of_two_ranks(folder: Path, rounds: int) -> dict[str, float]:
    """Part 2: medians over blocks, on rank 0."""

    def job(rank: int, world_size: int) -> None:
        tensor = torch.ones(16)
        recorder = meshscope.start(folder / "two")
        times = {True: [], False: []}
        for turn in range(2 * rounds):
            is_on = turn % 2 == 0
            recorder.configure(communication=is_on)
            dist.barrier()
            begin = time.perf_counter_ns()
            for _ in range(100):
                dist.all_reduce(tensor)
            times[is_on].append((time.perf_counter_ns() - begin) / 100 / 1e3)
        if rank == 0:
            (folder / "two.json").write_text(
                json.dumps(
                    {
                        "taps_passing_on_us": round(statistics.median(times[False]), 2),
                        "recording_us": round(statistics.median(times[True]), 2),
                    }
                )
            )
        recorder.close()

    codes = run_ranks(job, 2)
    assert not any(codes), codes
    return json.loads((folder / "two.json").read_text())


def step_of_a_mesh(folder: Path, rounds: int) -> dict[str, object]:
    """Part 3."""

    def job(rank: int, world_size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        groups = {name: mesh.get_group(name) for name in ("pp", "dp", "tp")}
        stage = mesh.get_local_rank("pp")
        peer = dist.get_global_rank(groups["pp"], 1 - stage)
        weights = [torch.randn(256, 256) / 16 for _ in range(4)]

        def step() -> None:
            for _ in range(4):  # microbatches
                hidden = torch.randn(64, 256)
                if stage == 1:
                    dist.recv(hidden, peer)
                for weight in weights:
                    hidden = hidden @ weight
                    dist.all_reduce(hidden, group=groups["tp"])
                if stage == 0:
                    dist.send(hidden, peer)
            for weight in weights:
                dist.all_reduce(weight, group=groups["dp"])
                weight.mul_(0.5)

        recorder = None
        times = {True: [], False: []}
        for turn in range(2 * rounds):
            is_on = turn % 2 == 0
            if is_on:
                recorder = meshscope.start(folder / "mesh" / str(turn))
            for _ in range(2):
                step()
            dist.barrier()
            begin = time.perf_counter_ns()
            for _ in range(10):
                step()
            dist.barrier()
            times[is_on].append((time.perf_counter_ns() - begin) / 10 / 1e6)
            if recorder is not None:
                recorder.close()
                recorder = None
        if rank == 0:
            ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
            (folder / "mesh.json").write_text(
                json.dumps(
                    {
                        "without_ms": round(statistics.median(times[False]), 2),
                        "with_ms": round(statistics.median(times[True]), 2),
                        "ratio_median": round(statistics.median(ratios), 4),
                        "ratio_quartiles": [
                            round(value, 4) for value in statistics.quantiles(ratios, n=4)[::2]
                        ],
                        "operations_per_step": 4 * 4 + 4 + 4,
                    }
                )
            )

    codes = run_ranks(job, 8)
    assert not any(codes), codes
    return json.loads((folder / "mesh.json").read_text())


def quartile(values: list[float]) -> float:
    """The lower quartile of blocks: gloo's thread needs the interpreter now and then, which doubles
    the time of some blocks, with and without us."""
    return statistics.quantiles(values, n=4)[0]


def in_a_child(function) -> object:
    """A process group of its own, without leaving one behind here."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(write, json.dumps(function()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    text = b""
    while part := os.read(read, 1 << 16):
        text += part
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 15
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs = in_a_child(lambda: cost_per_operation(folder, rounds * 4))
        plain = {call: quartile(values) for call, values in costs["plain"].items()}
        added = {
            tool: {call: round(quartile(values) - plain[call], 1) for call, values in found.items()}
            for tool, found in costs.items()
            if tool != "plain"
        }
        ours = added["meshscope"]
        result = {
            "goal_us": GOAL_US,
            "plain_cpu_us": {call: round(value, 1) for call, value in plain.items()},
            "added_cpu_us": added,
            "ratio_to": {
                tool: {call: round(ours[call] / found[call], 2) for call in plain}
                for tool, found in added.items()
                if tool != "meshscope"
            },
            "two_ranks_wall": wall_of_two_ranks(folder, rounds),
            "mesh_2x2x2_wall": step_of_a_mesh(folder, rounds),
            "machine": describe_machine("cpu"),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
