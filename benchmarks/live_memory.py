"""Whether following a run needs more memory the longer the run is.

    python benchmarks/live_memory.py                 # 64 ranks, an hour of a step a second
    python benchmarks/live_memory.py --no-save

A child writes the steps of `synthetic_run.py`; this process does what the dashboard's analysing
process does: it polls, measures the new columns of the heat map, makes a whole report and its page,
keeps the last of each, and gives memory back. After each twentieth of the hour its resident memory
and the CPU time of the report are noted. The hour is not waited for: only what is recorded counts.
Growth is the last value against that of the middle, where the report reads as many steps as it
ever will.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from diagnose_scale import describe_machine
from synthetic_run import Fault, Job, LiveRun

from meshscope.serve.following import free_memory

RESULT = Path(__file__).parent / "results" / "live_memory.json"
PARTS = 20
GOAL_GROWTH_RATIO = 0.05


def write_steps(folder: Path, num_ranks: int, pipe: Connection) -> None:
    run = LiveRun(folder, Job(num_ranks=num_ranks, faults=(Fault(rank=num_ranks * 3 // 4),)))
    while num_steps := pipe.recv():
        for _ in range(num_steps):
            run.write_step()
        pipe.send(run.step)


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def follow(folder: Path, pipe: Connection, num_steps: int) -> dict[str, object]:
    from meshscope.serve.analyst import Analyst

    analyst = Analyst()
    samples = []
    for _ in range(PARTS):
        pipe.send(num_steps // PARTS)
        step = pipe.recv()
        follower = analyst.follow(str(folder))
        begun = time.process_time()
        follower.poll()
        polled = time.process_time()
        follower.excess()
        measured = time.process_time()
        # A new follower's first report is due at once; those after it when they are asked for.
        follower._report_pace.note(0.0, 0.0)
        analysis = analyst.analyse_followed(str(folder))
        assert analysis is not None
        assert analysis.report.study.steps.num_steps >= step - 1
        answer = analyst.page(str(folder))
        reported = time.process_time()
        free_memory(analysis)
        samples.append(
            {
                "steps": step,
                "rss_bytes": rss_bytes(),
                "poll_cpu_s": round(polled - begun, 3),
                "excess_cpu_s": round(measured - polled, 3),
                "report_cpu_s": round(reported - measured, 2),
                "page_bytes": len(answer.body),
            }
        )
        print(json.dumps(samples[-1]), flush=True)
    found = [int(str(one["rss_bytes"])) for one in samples]
    growth = found[-1] / found[PARTS // 2 - 1] - 1
    return {"samples": samples, "growth_ratio_second_half": round(growth, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="live_memory"))
    ours, theirs = multiprocessing.Pipe()
    writer = multiprocessing.get_context("spawn").Process(
        target=write_steps, args=(folder / "live", options.ranks, theirs), daemon=True
    )
    writer.start()
    theirs.close()  # a writer that fails is then heard of
    try:
        found = follow(folder / "live", ours, options.steps)
        ours.send(0)
    finally:
        writer.terminate()
        writer.join()
        shutil.rmtree(folder, ignore_errors=True)
    growth = float(str(found["growth_ratio_second_half"]))
    is_met = growth <= GOAL_GROWTH_RATIO
    print(f"growth in the second half {growth:.1%}; the goal is {GOAL_GROWTH_RATIO:.0%}")
    if not options.no_save:
        document = {
            "goal_is_met": is_met,
            "num_ranks": options.ranks,
            "num_steps": options.steps,
            **found,
            "load_average": round(os.getloadavg()[0], 1),
            "machine": describe_machine(),
        }
        RESULT.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
