"""What `make demo` runs: a real 8-process training with one slow rank, recorded and reported.

    python examples/demo.py --run-dir runs/demo

Eight gloo processes train a small GPT data-parallel on this machine's CPUs. Rank 5 is made slower
in its forward pass; the report that follows has not been told so and must show it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

TRAINING_SCRIPT = Path(__file__).with_name("train_gpt.py")


def main() -> int:
    """Runs the demo; the exit code of the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="parent folder")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--slow-rank", type=int, default=5)
    parser.add_argument("--slow-ms", type=float, default=120.0)
    options = parser.parse_args()

    run_dir = options.run_dir / time.strftime("%Y%m%d-%H%M%S")
    injected = (
        f"rank {options.slow_rank} was made {options.slow_ms:g} ms slower per step, in its forward"
    )
    print(f"Training a small GPT with {options.ranks} processes; {injected}.", flush=True)
    begin = time.monotonic()
    launcher = [sys.executable, "-m", "meshscope", "run", "--report"]
    launcher += ["--run-dir", str(run_dir), "--total-steps", str(options.steps)]
    training = ["torchrun", "--standalone", "--nproc-per-node", str(options.ranks)]
    training += [str(TRAINING_SCRIPT), "--steps", str(options.steps), "--log-every", "0"]
    training += ["--device", "cpu"]
    training += ["--slow-rank", str(options.slow_rank), "--slow-ms", str(options.slow_ms)]
    # Eight processes share the cores: one thread each, or they fight for them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    exit_code = subprocess.call([*launcher, "--", *training], env=environment)
    if exit_code == 0:
        print(f"\nTo check the report against: {injected}.")
        print(f"The run is in {run_dir}; the demo took {time.monotonic() - begin:.0f} s.")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
