"""A run of many ranks that is being recorded, written by the store's own writer at a steady pace.

    python benchmarks/live_run.py RUN --ranks 64 --steps-per-s 4 --seconds 60

The job is that of `synthetic_run.py`; one rank is half as slow again in forward.
"""

import argparse
import time
from pathlib import Path

from synthetic_run import Fault, Job, LiveRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--slow-rank", type=int, default=37)
    parser.add_argument("--steps-per-s", type=float, default=4.0)
    parser.add_argument("--first-steps", type=int, default=50, help="written at once")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    job = Job(num_ranks=arguments.ranks, faults=(Fault(rank=arguments.slow_rank),))
    run = LiveRun(arguments.run, job)
    for _ in range(arguments.first_steps):
        run.write_step()
    print("recording", flush=True)
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < arguments.seconds:
        behind = int(passed * arguments.steps_per_s) - (run.step - arguments.first_steps)
        for _ in range(max(behind, 0)):
            run.write_step()
        time.sleep(0.5 / arguments.steps_per_s)
    run.close()
    cpu_s = time.process_time()
    print(f"wrote {run.step} steps of {arguments.ranks} ranks, {cpu_s:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
