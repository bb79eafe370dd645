"""A rank that is 20 ms late in backward under DistributedDataParallel: is it found, and only it?

    python benchmarks/ddp_delay.py [--output FILE]

Three gloo ranks train one model: first as it is, then with a sleep of 20 ms in the backward pass of
one rank (a hook on a middle layer, so gradients of later layers are already being reduced), in
every other block of ten steps, so that steps with and without the delay come from the same minute.
From the recordings alone: who arrived last, how long the others waited for it, and whether the time
of a step that goes into transfer stayed what it was. pytscope, whose
straggler finder compares durations of phases, gives z = -0.1 for such a rank: under DDP everybody's
backward takes equally long.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

import numpy as np
from fork_ranks import run_ranks

NUM_RANKS = 3
NUM_STEPS = 200
BLOCK = 10
FIRST_STEP = 10
SLOW_RANK = 1
DELAY_MS = 20.0


def is_delayed(step: int) -> bool:
    """Whether the slow rank is slow in this step."""
    return step // BLOCK % 2 == 1


def make_job(run_dir: Path, delayed_rank: int | None, num_steps: int, delay_s: float):
    """The training program, recorded."""

    def job(rank: int, world_size: int) -> None:
        import torch

        import meshscope

        torch.manual_seed(0)
        layers = [torch.nn.Linear(256, 256) for _ in range(12)]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers), bucket_cap_mb=0.6
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        recorder = meshscope.start(run_dir)
        recorder.attach(model, optimizer)
        is_late = False
        if rank == delayed_rank:
            layers[6].register_full_backward_hook(
                lambda *_: time.sleep(delay_s) if is_late else None
            )
        generator = torch.Generator().manual_seed(rank)
        for step in range(num_steps):
            is_late = is_delayed(step)
            batch = torch.randn(32, 256, generator=generator)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.close()

    return job


def analyse(run_dir: Path) -> dict[str, object]:
    """What the recording says, for steps with and without the delay (medians over steps)."""
    from meshscope.analyze.communication.communication import analyze_communication
    from meshscope.analyze.job.job import load_job
    from meshscope.store.read.run import open_run

    attempt = open_run(run_dir).last_attempt
    found = analyze_communication(load_job(attempt), first_step=FIRST_STEP)
    walls = []
    for recording in attempt:
        columns = recording.read("steps")
        walls.append(columns["end_host_mono_ns"] - columns["start_host_mono_ns"])
    wall_ms = np.mean(walls, axis=0) / 1e6
    by_step = found.by_step
    others = [index for index, rank in enumerate(by_step.ranks) if rank != SLOW_RANK]
    result: dict[str, object] = {}
    for name, wanted in (("without", False), ("with", True)):
        picked = [i for i, step in enumerate(by_step.step) if is_delayed(int(step)) is wanted]

        def per_step(table, ranks=slice(None), picked=picked) -> float:
            return round(float(np.median(table[ranks][:, picked].mean(axis=0))) / 1e6, 2)

        result[name] = {
            "step_ms": round(float(np.median(wall_ms[by_step.step[picked]])), 2),
            "exposed_transfer_ms": per_step(by_step.exposed_transfer_ns),
            "exposed_wait_of_others_ms": per_step(by_step.exposed_wait_ns, others),
            "exposed_wait_of_slow_rank_ms": per_step(
                by_step.exposed_wait_ns, [by_step.ranks.index(SLOW_RANK)]
            ),
        }
    result["beyond_chance"] = [
        {
            "axis": entry.axis,
            "rank": entry.rank,
            "num_last": entry.num_last,
            "num_operations": entry.num_operations,
            "cost_ms": round(entry.cost_ns / 1e6, 1),
            "phase": str(entry.phase),
        }
        for entry in found.last_arrivers
        if entry.is_beyond_chance
    ]
    result["num_matched"] = found.health.num_matched
    result["num_unmatched"] = found.health.num_unmatched
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS)
    arguments = parser.parse_args()
    num_steps = arguments.steps
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, object] = {"delay_ms": arguments.delay_ms, "slow_rank": SLOW_RANK}
    with tempfile.TemporaryDirectory() as folder:
        for name, delayed in (("healthy", None), ("delayed", SLOW_RANK)):
            job = make_job(Path(folder) / name, delayed, num_steps, arguments.delay_ms / 1e3)
            codes = run_ranks(job, NUM_RANKS)
            assert not any(codes), codes
            result[name] = analyse(Path(folder) / name)
    late, usual = result["delayed"]["with"], result["delayed"]["without"]
    num_delayed = sum(is_delayed(step) for step in range(FIRST_STEP, num_steps))
    result["injected_ms"] = round(num_delayed * arguments.delay_ms, 1)
    result["transfer_change_of_step"] = round(
        (late["exposed_transfer_ms"] - usual["exposed_transfer_ms"]) / late["step_ms"], 4
    )
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
