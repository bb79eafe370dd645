"""What commands cost on runs of ten thousand ranks, and that it grows with ranks × steps only.

    python benchmarks/rank_scale.py                        # three sizes of 10 million rank-steps
    python benchmarks/rank_scale.py --sizes 10240x10000    # 33 GB, made in pieces and deleted

Runs are those of `synthetic_run.py`: five records a rank-step, two of them operations, one slow
rank that the report has to name. The sizes have about the same number of rank-steps, so that what
depends on the number of ranks alone shows. Each command runs in a fresh process: CPU seconds (user
and system, imports included), peak resident memory and the most files it had open at once. What
was measured of a size is not measured again (`--again`). Other commands than `report` are asked
what an operator would ask: all ranks (`ls`, `watch`, `hang`), one edit (`simulate`), one rank
(`sql`), 20 steps of 8 ranks (`export`).
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from synthetic_run import Fault, Job, describe_machine, write_run

RESULTS = Path(__file__).parent / "results" / "rank_scale.json"
GOAL_CPU_S, GOAL_RSS_BYTES = 300.0, 4_000_000_000
COMMANDS = ("report", "ls", "watch", "simulate", "hang", "sql", "export")
MAIN = "from meshscope.cli import main; main()"


def count_files(pid: int, stop: threading.Event, counted: list[int]) -> None:
    while not stop.wait(0.05):
        with contextlib.suppress(OSError):
            counted[0] = max(counted[0], len(os.listdir(f"/proc/{pid}/fd")))


def run_command(*words: str) -> tuple[dict[str, object], str]:
    """What a command took, and what it wrote."""
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=output)
        stop, counted = threading.Event(), [0]
        counter = threading.Thread(target=count_files, args=(process.pid, stop, counted))
        counter.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stop.set()
        counter.join()
        output.seek(0)
        text = output.read().decode()
    taken: dict[str, object] = {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(time.monotonic() - begun, 2),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "most_open_files": counted[0],
    }
    if process.returncode:
        taken["exit_code"] = process.returncode
    return taken, text


def make_run(run: Path, num_ranks: int, num_steps: int) -> dict[str, object]:
    """Makes the run, or takes the one that is there (`--folder` with `--keep`)."""
    begun, found = time.process_time(), dict[str, object]()
    if not (run / "made").exists():
        job = Job(num_ranks=num_ranks, faults=(Fault(rank=slow_rank(num_ranks)),))
        chunk = max(16, min(1024, 8_000_000 // num_ranks))
        write_run(run, job, num_steps, chunk_steps=chunk)
        (run / "made").touch()
        found["made_cpu_s"] = round(time.process_time() - begun, 1)
    files = [path for path in run.rglob("*") if path.is_file()]
    found["num_files"] = len(files)
    found["stored_bytes"] = sum(path.stat().st_size for path in files)
    return found


def slow_rank(num_ranks: int) -> int:
    return num_ranks * 3 // 4 + 1


def measure_report(run: Path, folder: Path, slow: int) -> dict[str, object]:
    report = folder / "report.json"
    found: dict[str, object] = {}
    found["report"], _ = run_command("report", str(run), "--json", "-o", str(report))
    findings = json.loads(report.read_bytes())["diagnosis"]["findings"]
    urgent = [one for one in findings if one["severity"] != "low"]
    found["findings"] = [f"{one['severity']} {one['code']} {one['title']}" for one in urgent[:4]]
    found["is_slow_rank_named"] = bool(urgent) and urgent[0]["ranks"] == [
        {"first": slow, "last": slow}
    ]
    return found


def ask_commands(run: Path, folder: Path, slow: int, last_step: int) -> dict[str, list[str]]:
    """Every other command, each on what an operator would ask for."""
    steps, ranks = f"{last_step - 19}-{last_step}", f"{slow - 1}-{slow + 6}"
    trace = ["--perfetto", str(folder / "out.pftrace"), "--steps", steps, "--ranks", ranks]
    query = f"select count(*), max(step) from steps where rank = {slow}"
    return {
        "ls": ["ls", str(run)],
        "watch": ["watch", str(run), "--headless", "--once", "--json"],
        "simulate": ["simulate", str(run), "--edit", "compute=0.5x"],
        "hang": ["hang", str(run)],
        "sql": ["sql", str(run), query, "--csv"],
        "export": ["export", str(run), *trace, "--no-diagnosis"],
    }


def save(sizes: dict[str, object]) -> None:
    document = {
        "goal_cpu_s": GOAL_CPU_S,
        "goal_rss_bytes": GOAL_RSS_BYTES,
        "machine": describe_machine(),
        "sizes": sizes,
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sizes = ["1024x10000", "4096x2500", "10240x1000"]
    parser.add_argument("--sizes", nargs="+", default=sizes)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the run in --folder")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, help="these only")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text("utf-8"))["sizes"] if RESULTS.exists() else {}
    for size in options.sizes:
        num_ranks, num_steps = map(int, size.split("x"))
        folder = Path(options.folder or tempfile.mkdtemp(prefix="rank_scale_"))
        run, slow = folder / size, slow_rank(num_ranks)
        found = {} if options.again else known.get(size, {})
        known[size] = found
        commands = ask_commands(run, folder, slow, num_steps - 1)
        asked = [name for name in options.commands or COMMANDS if name not in found]
        try:
            if asked:
                found |= {"num_ranks": num_ranks, "num_steps": num_steps}
                found |= make_run(run, num_ranks, num_steps)
            for name in asked:
                if name == "report":
                    found |= measure_report(run, folder, slow)
                else:
                    found[name], text = run_command(*commands[name])
                if name == "watch":
                    events = map(json.loads, text.splitlines())
                    found["watch_told"] = [f"{one['event']} {one['title']}" for one in events]
                print(size, name, json.dumps(found[name]), flush=True)
                save(known)
        finally:
            if not options.keep:
                shutil.rmtree(run, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
