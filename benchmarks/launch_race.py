"""Two launchers into one folder at the same moment, again and again, as on two nodes of a job.

    python benchmarks/launch_race.py                  # 100 pairs, writes benchmarks/results/
    python benchmarks/launch_race.py --launches 6 --no-save

Each pair is two whole `python -m meshscope.capture -o SAME` whose commands write a rank each
through the real writer, without torch. A pair is good when both exit with 0 and the folder is a run
with both ranks, each with its end; every tenth pair records nothing, and must exit with 0 and leave
no folder or a run.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from meshscope.store.read.run import open_run

RESULTS = Path(__file__).parent / "results" / "launch_race.json"
NUM_LAUNCHERS = 2
NOTHING_EVERY = 10

PROGRAM = """
import os, sys
from pathlib import Path
from meshscope.store.write.writer import RankWriter
run_dir, rank = Path(os.environ["MESHSCOPE_RUN_DIR"]), int(sys.argv[1])
RankWriter(run_dir, rank, header={"world_size": 2}).close()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.launches):
            failure = try_pair(Path(folder) / f"{index}", records=bool((index + 1) % NOTHING_EVERY))
            failures += [failure] if failure else []
    num_good = options.launches - len(failures)
    print(f"{num_good} of {options.launches} pairs of launchers good", *failures, sep="\n")
    if not options.no_save:
        result = {
            "num_pairs": options.launches,
            "num_good": num_good,
            "failures": failures,
            "machine": {"cores": os.cpu_count(), "kernel": platform.release().split("-")[0]},
            "python": platform.python_version(),
        }
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


def try_pair(run_dir: Path, *, records: bool) -> str | None:
    """What went wrong with one pair; None when nothing did."""
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "meshscope.capture", "-o", str(run_dir), "--"]
            + ([sys.executable, "-c", PROGRAM, str(rank)] if records else ["true"]),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_LAUNCHERS)
    ]
    said = [launcher.communicate()[1] for launcher in launchers]
    codes = [launcher.returncode for launcher in launchers]
    if any(codes):
        return f"exit codes {codes}: {' | '.join(said)}"
    if not records:
        left = os.listdir(run_dir) if run_dir.exists() else []
        return f"left {left}" if set(left) - {"run.json"} else None
    attempt = open_run(run_dir).last_attempt
    ends = {rank.rank for rank in attempt if rank.closing is not None}
    return None if ends == set(range(NUM_LAUNCHERS)) else f"ranks with an end: {sorted(ends)}"


if __name__ == "__main__":
    sys.exit(main())
