"""Are clocks of different hosts brought together within the error that is stated?

    python benchmarks/clock_alignment.py [--output FILE] [--trials N]

A real gloo job of a few seconds is recorded. Its ranks are then declared to be hosts of their own
and their times are rewritten as if read from clocks that are off by -3 s … +3 s and run fast or
slow by up to 50 ppm. The alignment is computed from the rewritten run alone and compared with what
was injected, over the whole run. Ranks share one machine, so without the injection the true offset
is zero.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from fork_ranks import run_ranks

from meshscope.analyze.communication.communication import analyze_communication
from meshscope.analyze.job.job import load_job
from meshscope.store.read.columns import Columns
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.schema import TABLES, Table
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.writer import RankWriter

GOAL_NS = 200_000
RUN_SECONDS = 6.0


def record(run_dir: Path, world_size: int) -> None:
    """A job that computes a little and communicates, as training does."""

    def job(rank: int, world_size: int) -> None:
        import torch
        import torch.distributed as dist

        import meshscope

        recorder = meshscope.start(run_dir)
        tensor = torch.ones(1 << 12)
        work = torch.randn(128, 128)
        flag = torch.zeros(1)
        begin = time.monotonic()
        while flag.item() == 0:
            work = torch.tanh(work @ work)
            dist.all_reduce(tensor)
            dist.barrier()
            flag.fill_(float(rank == 0 and time.monotonic() - begin > RUN_SECONDS))
            dist.broadcast(flag, 0)
        recorder.close()

    codes = run_ranks(job, world_size)
    assert not any(codes), codes


def rewrite(
    source: Path, target: Path, offsets_ns: list[int], drifts_ppm: list[float], origin_ns: int
) -> None:
    """The same run with the clock of each rank off by its offset at `origin`, and drifting."""
    for recording in open_run(source).last_attempt:
        rank = recording.rank
        scale, offset_ns = 1 + drifts_ppm[rank] * 1e-6, offsets_ns[rank]

        def shift(times, scale=scale, offset_ns=offset_ns):
            return origin_ns + offset_ns + np.rint((times - origin_ns) * scale).astype(np.int64)

        write_shifted(recording, target, shift)


def write_shifted(recording: Recording, target: Path, shift) -> None:
    header = dict(recording.header)
    for name in ("kind", "schema_version", "attempt", "sink"):
        header.pop(name, None)
    header["host"] = f"host{recording.rank}"
    header["clock_id"] = f"boot{recording.rank}"
    header["start_host_mono_ns"] = int(shift(np.int64(header["start_host_mono_ns"])))
    writer = RankWriter(target, recording.rank, header=header)
    for group in recording.groups.values():
        writer.journal.write(
            GROUP_KIND,
            id=group.group_id,
            name=group.name,
            description=group.description,
            backend=group.backend,
            ranks=pack_ranks(group.ranks),
        )
    for name in ("collectives", "waits", "clocks"):
        table = TABLES[name]
        for words in shifted_words(table, recording.read(name), shift):
            writer.table(name).put(*words)
    writer.close(end_host_mono_ns=0)


def shifted_words(table: Table, columns: Columns, shift) -> list[list[int]]:
    size = len(next(iter(columns.values())))
    words = np.zeros((size, 8), dtype=np.int64)
    for column in table.columns:
        values = columns[column.name].astype(np.int64)
        if column.name.endswith("_host_mono_ns"):
            values = np.where(values >= 0, shift(values), values)
        if column.is_stored_plus_one:
            values = values + 1
        words[:, column.word] |= values << column.shift
    return [row.tolist()[1:] for row in words]


def compare(
    run_dir: Path, source: Path, offsets_ns, drifts_ppm, origin_ns: int
) -> dict[str, object]:
    """Error of the alignment against what was injected, at the run's begin, middle and end."""
    found = analyze_communication(load_job(open_run(run_dir).last_attempt), first_step=-1)
    original = open_run(source).last_attempt
    times = np.concatenate([r.read("collectives")["enqueue_host_mono_ns"] for r in original])
    moments = np.linspace(times.min(), times.max(), 9).astype(np.int64)
    worst, ratio, uncertainty = 0.0, 0.0, 0.0
    zero_rank = found.clocks.reference_rank
    for clock in found.clocks.clocks:
        [rank] = clock.ranks
        if rank == zero_rank:
            continue
        own = (
            origin_ns
            + offsets_ns[rank]
            + np.rint((moments - origin_ns) * (1 + drifts_ppm[rank] * 1e-6))
        )
        reference = (
            origin_ns
            + offsets_ns[zero_rank]
            + np.rint((moments - origin_ns) * (1 + drifts_ppm[zero_rank] * 1e-6))
        )
        aligned = found.clocks.to_reference(rank, own.astype(np.int64))
        error = float(np.abs(aligned - reference).max())
        stated = float(clock.uncertainty_ns)
        worst, uncertainty = max(worst, error), max(uncertainty, stated)
        ratio = max(ratio, error / stated)
    return {
        "worst_error_us": round(worst / 1e3, 1),
        "largest_uncertainty_us": round(uncertainty / 1e3, 1),
        "worst_error_over_uncertainty": round(ratio, 3),
        "num_operations": found.health.num_matched,
        "problems": list(found.clocks.problems),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    arguments = parser.parse_args()
    result: dict[str, object] = {"goal_us": GOAL_NS / 1e3}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for world_size in (2, 4):
            source = folder / f"run{world_size}"
            record(source, world_size)
            first = open_run(source).last_attempt.ranks[0].read("collectives")
            origin_ns = int(first["enqueue_host_mono_ns"].min())
            trials = []
            for trial in range(arguments.trials):
                chance = random.Random(trial)
                offsets = [round(chance.uniform(-3e9, 3e9)) for _ in range(world_size)]
                drifts = [chance.uniform(-50, 50) for _ in range(world_size)]
                target = folder / f"shifted{world_size}-{trial}"
                rewrite(source, target, offsets, drifts, origin_ns)
                trials.append(compare(target, source, offsets, drifts, origin_ns))
            result[f"{world_size} hosts"] = {
                "trials": len(trials),
                "operations": trials[0]["num_operations"],
                "worst_error_us": max(t["worst_error_us"] for t in trials),
                "largest_uncertainty_us": max(t["largest_uncertainty_us"] for t in trials),
                "worst_error_over_uncertainty": max(
                    t["worst_error_over_uncertainty"] for t in trials
                ),
                "trials_within_uncertainty": sum(
                    t["worst_error_over_uncertainty"] <= 1 for t in trials
                ),
                "problems": sorted({p for t in trials for p in t["problems"]})[:5],
            }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
