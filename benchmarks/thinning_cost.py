"""What thinning costs a training that goes on beside it.

    python benchmarks/thinning_cost.py             # about four minutes, on a core of its own

A loop of small steps on one core, each with many recorded spans, so that a size of some megabytes
is full every few seconds: far more often than in any real run. It is recorded with and without
`max_disk_bytes`, in turn, each time in a new process. Told are CPU seconds of the thinning thread
as a share of the time (from /proc), and the median and 99th percentile of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from kill_storm import describe_machine

THREAD = "meshscope-thin"
MAX_BYTES = 8 << 20
SPANS_PER_STEP = 100
WORK_S = 0.004


def train(run_dir: Path, max_bytes: int | None, seconds: float) -> dict[str, float]:
    """Records a loop for some seconds; what its steps and the thread took."""
    from meshscope.capture.config import RecorderConfig
    from meshscope.capture.recorder import Recorder

    recorder = Recorder(run_dir, config=RecorderConfig(max_disk_bytes=max_bytes))
    times, cpu_s, begin = [], 0.0, time.monotonic()
    while time.monotonic() - begin < seconds:
        before = time.perf_counter()
        with recorder.step():
            for _ in range(SPANS_PER_STEP):
                with recorder.span("part"):
                    end = time.perf_counter() + WORK_S / SPANS_PER_STEP
                    while time.perf_counter() < end:
                        pass
        times.append(time.perf_counter() - before)
        if len(times) % 100 == 0:
            cpu_s = max(cpu_s, read_thread_cpu_s())
    wall_s = time.monotonic() - begin
    recorder.close()
    folder = run_dir / "rank00000" / "attempt000"
    times.sort()
    return {
        "num_steps": len(times),
        "median_step_us": round(1e6 * statistics.median(times), 1),
        "p99_step_us": round(1e6 * times[int(0.99 * len(times))], 1),
        "thread_cpu_share": round(cpu_s / wall_s, 5),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "num_files": len(list(folder.iterdir())),
    }


def read_thread_cpu_s() -> float:
    """CPU seconds of the thread that thins; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == THREAD and thread.native_id is not None:
            text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8")
            fields = text.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.one is not None:
            limit = MAX_BYTES if options.one == "thinned" else None
            print(json.dumps(train(Path(name) / "run", limit, options.seconds)))
            return 0
        machine = describe_machine(Path(name))
    found: dict[str, list[dict[str, float]]] = {"whole": [], "thinned": []}
    for _ in range(options.pairs):
        for kind, runs in found.items():
            words = [sys.executable, __file__, "--one", kind, "--seconds", str(options.seconds)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            runs.append(json.loads(done.stdout))
            print(kind, runs[-1], flush=True)
    ratios = [
        thinned["median_step_us"] / whole["median_step_us"]
        for whole, thinned in zip(found["whole"], found["thinned"], strict=True)
    ]
    result = {
        "median_step_ratio": round(statistics.median(ratios), 5),
        "step_ratios": [round(ratio, 5) for ratio in ratios],
        "thread_cpu_share": max(run["thread_cpu_share"] for run in found["thinned"]),
    }
    print(json.dumps(result))
    if not options.no_save:
        target = Path(__file__).parent / "results" / "thinning_cost.json"
        document = {
            "max_bytes": MAX_BYTES, "spans_per_step": SPANS_PER_STEP, "machine": machine,
            "result": result, "runs": found,
        }  # fmt: skip
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
