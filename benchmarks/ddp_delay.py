"""A rank that is 20 ms late in backward under DistributedDataParallel: is it found, and only it?

    python benchmarks/ddp_delay.py [--output FILE]

Three gloo ranks train one model twice in turns: as it is, and with a sleep of 20 ms in the backward
pass of one rank (a tensor hook on an early layer's output, so gradients of later layers are
already being reduced). From the recording alone: who arrived last, how long the others waited for
it, and whether the share of the step spent in transfer stayed what it was. pytscope, whose
straggler finder compares durations of phases, gives z = -0.1 for such a rank: under DDP everybody's
backward takes equally long.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

from fork_ranks import run_ranks

NUM_RANKS = 3
NUM_STEPS = 60
SLOW_RANK = 1
DELAY_S = 0.020


def make_job(run_dir: Path, delayed_rank: int | None):
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
        if rank == delayed_rank:
            layers[6].register_full_backward_hook(lambda *_: time.sleep(DELAY_S))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(NUM_STEPS):
            batch = torch.randn(32, 256, generator=generator)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.close()

    return job


def analyse(run_dir: Path) -> dict[str, object]:
    """What the recording says."""
    from meshscope.analyze.communication import analyze_communication
    from meshscope.store.reader import open_run

    attempt = open_run(run_dir).last_attempt
    found = analyze_communication(attempt, first_step=5)
    steps = [
        int(end - start)
        for recording in attempt
        for columns in [recording.read("steps")]
        for start, end in zip(
            columns["start_host_mono_ns"][5:], columns["end_host_mono_ns"][5:], strict=True
        )
    ]
    wall_ns = sum(steps)
    dp = next(axis for axis in found.by_axis if axis.axis in ("dp", "world"))
    return {
        "median_step_ms": round(statistics.median(steps) / 1e6, 2),
        "wait_share": round(dp.total.wait_ns / wall_ns, 4),
        "transfer_share": round(dp.total.transfer_ns / wall_ns, 4),
        "exposed_wait_share": round(dp.total.exposed_wait_ns / wall_ns, 4),
        "exposed_transfer_share": round(dp.total.exposed_transfer_ns / wall_ns, 4),
        "waits_ms_per_step_by_rank": {
            entry.rank: round(entry.total.wait_ns / 1e6 / (NUM_STEPS - 5), 2)
            for entry in found.by_rank
        },
        "beyond_chance": [
            {
                "axis": entry.axis,
                "rank": entry.rank,
                "num_last": entry.num_last,
                "num_operations": entry.num_operations,
                "expected_last": round(entry.expected_last, 1),
                "cost_ms_per_step": round(entry.cost_ns / 1e6 / (NUM_STEPS - 5), 2),
                "phase": str(entry.phase),
            }
            for entry in found.last_arrivers
            if entry.is_beyond_chance
        ],
        "num_matched": found.health.num_matched,
        "num_unmatched": found.health.num_unmatched,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, object] = {"delay_ms": DELAY_S * 1e3, "slow_rank": SLOW_RANK}
    with tempfile.TemporaryDirectory() as folder:
        for name, delayed in (("healthy", None), ("delayed", SLOW_RANK)):
            codes = run_ranks(make_job(Path(folder) / name, delayed), NUM_RANKS)
            assert not any(codes), codes
            result[name] = analyse(Path(folder) / name)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
