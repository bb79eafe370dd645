"""What a full diagnosis of a large run costs, and that it grows with the run's size and no faster.

    python benchmarks/diagnose_scale.py                       # 1,024 ranks, up to 10,000 steps
    python benchmarks/diagnose_scale.py --ranks 64 --no-save

The job of `synthetic_run.py` is made up with numpy; one rank takes half as long again in forward.
Its tables are the exact bytes of the on-disk format, first shown to equal what the real writer
leaves for the same records.
At four sizes `meshscope report --json` then runs in a fresh process: CPU seconds (user + system,
imports included) and peak resident memory are those of the whole process; so are those of
`meshscope simulate` with one edit. The diagnosis must name the slow rank, or the benchmark fails.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from store_load import measure
from synthetic_run import Fault, Job, describe_machine, prove_equal, write_run

GOAL_CPU_S, GOAL_RSS_BYTES = 20.0, 1_000_000_000
REMOVED = "compute=0.5x"
"""What `simulate` is asked for."""


def diagnose_size(
    directory: Path, num_ranks: int, num_steps: int, slow_rank: int
) -> dict[str, object]:
    """Makes a run of that size, diagnoses it, checks the answer, and deletes it."""
    run_dir = directory / f"{num_steps}"
    write_run(run_dir, Job(num_ranks=num_ranks, faults=(Fault(rank=slow_rank),)), num_steps)
    stored = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    output = directory / "report.json"
    code = "import sys; from meshscope.cli import main; print('run', flush=True); main()"
    command = [sys.executable, "-c", code, "report", str(run_dir), "--json", "-o", str(output)]
    cpu_s, peak_rss_bytes, wall_s = measure(command)
    replay = [sys.executable, "-c", code, "simulate", str(run_dir), "--edit", REMOVED]
    simulate_cpu_s, simulate_rss_bytes, _ = measure(replay)
    report = json.loads(output.read_bytes())
    check_answer(report, slow_rank)
    shutil.rmtree(run_dir)
    findings = report["diagnosis"]["findings"]
    return {
        "num_ranks": num_ranks,
        "num_steps": num_steps,
        "num_rank_steps": num_ranks * num_steps,
        "stored_bytes": stored,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "peak_rss_bytes": peak_rss_bytes,
        "simulate_cpu_s": round(simulate_cpu_s, 2),
        "simulate_peak_rss_bytes": simulate_rss_bytes,
        "replay_error_ratio": report["diagnosis"]["replay_error_ratio"],
        "num_rules": len(report["diagnosis"]["rules"]),
        "findings": [f"{one['severity']} {one['code']} {one['title']}" for one in findings[:8]],
    }


def check_answer(report: dict[str, object], slow_rank: int) -> None:
    """The slow rank, and nobody else above low."""
    diagnosis = report["diagnosis"]
    assert isinstance(diagnosis, dict)
    urgent = [one for one in diagnosis["findings"] if one["severity"] != "low"]
    named = [(part["first"], part["last"]) for one in urgent[:1] for part in one["ranks"]]
    failed = [one["summary"] for one in diagnosis["findings"] if one["code"] == "HE001"]
    if failed or named != [(slow_rank, slow_rank)]:
        titles = [f"{one['code']} {one['title']}" for one in diagnosis["findings"]]
        print(f"NOT the expected answer (rank {slow_rank}): {titles} {failed}")


def fit_growth(sizes: list[dict[str, object]]) -> dict[str, float]:
    """CPU seconds as a line over rank-steps, and how well it fits."""
    x = np.array([float(str(size["num_rank_steps"])) for size in sizes]) / 1e6
    y = np.array([float(str(size["cpu_s"])) for size in sizes])
    slope, fixed = np.polyfit(x, y, 1)
    return {
        "fixed_cpu_s": round(float(fixed), 2),
        "cpu_s_per_million_rank_steps": round(float(slope), 3),
        "largest_residual_s": round(float(np.abs(y - slope * x - fixed).max()), 2),
    }


def main() -> int:
    """Prints a line per size; saves the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, nargs="+", default=[1250, 2500, 5000, 10000])
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="diagnose_scale_"))
    sizes: list[dict[str, object]] = []
    try:
        prove_equal(directory / "proof")
        for num_steps in options.steps:
            size = diagnose_size(directory, options.ranks, num_steps, options.ranks * 3 // 4 + 1)
            rss_mb = int(str(size["peak_rss_bytes"])) / 1e6
            print(
                f"{options.ranks:,} ranks × {num_steps:>6,} steps: {size['cpu_s']} s CPU, "
                f"{size['wall_s']} s wall, {rss_mb:,.0f} MB; simulate {size['simulate_cpu_s']} s, "
                f"{int(str(size['simulate_peak_rss_bytes'])) / 1e6:,.0f} MB; {size['findings']}",
                flush=True,
            )
            sizes.append(size)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    largest = sizes[-1]
    is_met = (
        float(str(largest["cpu_s"])) <= GOAL_CPU_S
        and int(str(largest["peak_rss_bytes"])) <= GOAL_RSS_BYTES
        and int(str(largest["simulate_peak_rss_bytes"])) <= GOAL_RSS_BYTES
    )
    growth = fit_growth(sizes) if len(sizes) > 1 else {}
    print(f"{growth}; goal of ≤ {GOAL_CPU_S:.0f} s CPU and ≤ 1 GB: {'met' if is_met else 'MISSED'}")
    if not options.no_save:
        target = Path(__file__).parent / "results" / "diagnose_scale.json"
        document = {
            "goal_is_met": is_met,
            "goal_cpu_s": GOAL_CPU_S,
            "goal_rss_bytes": GOAL_RSS_BYTES,
            "growth": growth,
            "sizes": sizes,
            "machine": describe_machine(),
        }
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
