"""How long `meshscope ls` takes over ten thousand runs: at first, and again from its index.

    python benchmarks/fleet_scale.py --runs 10000

Runs are copies (hard links) of one of 8 ranks × 50 steps. Each command is a fresh process with a
cache of its own: CPU seconds, wall clock and peak memory.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from store_load import measure
from synthetic_run import Job, describe_machine, write_run

MAIN = "import sys; from meshscope.cli import main; print('run', flush=True); main()"


def copy_run(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fleet_scale_"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found: dict[str, object] = {"num_runs": options.runs, "machine": describe_machine()}
    try:
        write_run(folder / "source", Job(num_ranks=8), 50)
        for number in range(options.runs):
            name = f"20260101-{number:06d}-x"
            copy_run(folder / "source", folder / "runs" / f"job{number % 50}" / name)
        for key in ("first", "second", "third"):
            command = [sys.executable, "-c", MAIN, "ls", str(folder / "runs"), "--json"]
            cpu_s, peak_rss_bytes, wall_s = measure(command)
            found[key] = {
                "cpu_s": round(cpu_s, 2),
                "wall_s": round(wall_s, 2),
                "peak_rss_bytes": peak_rss_bytes,
            }
            print(key, found[key], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    target = Path(__file__).parent / "results" / "fleet_scale.json"
    target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
