"""What `make demo` runs: a real 8-process training in 3D with a slow rank, recorded and explained.

    python examples/demo.py --run-dir runs/demo

Eight gloo processes train a small transformer on this machine's CPUs, data, tensor and pipeline
parallel (2×2×2). Rank 5 is made slower in its forward pass; the report that follows has not been
told so and must show it. So must the page that is written beside the run.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

CONFIGURATION = Path(__file__).with_name("train_2x2x2.toml")
NUM_RANKS = 8
NUM_MICROBATCHES = 4
MESHSCOPE = (sys.executable, "-m", "meshscope")


def main() -> int:
    """Runs the demo; the exit code of the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="parent folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow-rank", type=int, default=5, choices=range(NUM_RANKS))
    parser.add_argument("--slow-ms", type=float, default=120.0, help="per step")
    options = parser.parse_args()

    run_dir = options.run_dir / time.strftime("%Y%m%d-%H%M%S")
    injected = (
        f"rank {options.slow_rank} was made {options.slow_ms:g} ms slower per step, in its forward"
    )
    print(
        f"Training a small transformer with {NUM_RANKS} processes (2×2×2); {injected}.", flush=True
    )
    begin = time.monotonic()
    # A pipeline rank runs one forward for each microbatch.
    fault = f"slow rank={options.slow_rank} phase=forward ms={options.slow_ms / NUM_MICROBATCHES:g}"
    train = [*MESHSCOPE, "train", str(CONFIGURATION), "--run-dir", str(run_dir)]
    train += ["--steps", str(options.steps), "--device", "cpu", "--fault", fault]
    train += ["--set", f"batch.num_microbatches={NUM_MICROBATCHES}", "--set", "log_every=20"]
    # Eight processes share the cores: one thread each, or they fight for them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    exit_code = subprocess.call(train, env=environment, stdout=subprocess.DEVNULL)
    if exit_code == 0:
        print(flush=True)
        exit_code = subprocess.call([*MESHSCOPE, "report", str(run_dir)])
    if exit_code == 0:
        page = run_dir.with_suffix(".html")
        exit_code = subprocess.call([*MESHSCOPE, "report", str(run_dir), "-o", str(page)])
        print(f"\nTo check the report against: {injected}.")
        print(f"The run is in {run_dir}; the demo took {time.monotonic() - begin:.0f} s.")
        print(f"Its page, one file that any browser opens: {page.resolve().as_uri()}")
        print(f"The dashboard: {Path(sys.executable).parent / 'meshscope'} serve {options.run_dir}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
