"""What watching a large job costs, how soon it tells a fault, and that it tells nothing else.

    python benchmarks/watch_scale.py live                   # 1,024 ranks at 10 steps/s, real time
    python benchmarks/watch_scale.py healthy --minutes 10   # one part of an hour; resumable

`live`: `synthetic_run.LiveRun` records through the real writer in a process of its own, and
`meshscope watch --headless --json` watches as users start it. After a minute one rank becomes slow
(half as long again in forward). Measured of the watcher: CPU time over wall clock once the first
diagnoses are made, peak resident memory, and the seconds from the first slow step to the alarm.

`healthy`: a job without a fault is written faster than real time, and a watcher in this process
looks at it on the clock of the recording (a look every 2 s of it or more). Every event is a false
alarm. Parts are added up in the results until there are 60 minutes.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from synthetic_run import Fault, Job, LiveRun, append_steps, describe_machine

from meshscope.alarms.settings import WatchSettings
from meshscope.alarms.watcher import Watcher

RESULTS = Path(__file__).parent / "results" / "watch_scale.json"
STEPS_PER_S = 10.0
HEALTHY_STEP_NS = 114_000_000
"""Of 1,024 ranks with their noise: all wait for the slowest."""
GOALS = {"cpu_share": 0.10, "peak_rss_bytes": 300_000_000, "alarm_after_s": 30.0}
MAIN = "from meshscope.cli import main; main()"


def record(run_dir: Path, num_ranks: int, healthy_s: float, seconds: float) -> None:
    """Records in real time; says when the first slow step is written."""
    scale = 1e9 / STEPS_PER_S / HEALTHY_STEP_NS
    first_slow = int(healthy_s * STEPS_PER_S)
    fault = Fault(rank=num_ranks * 3 // 4 + 1, first_step=first_slow)
    run = LiveRun(run_dir, Job(num_ranks=num_ranks, faults=(fault,), time_scale=scale))
    run.write_step()
    print("recording", flush=True)
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        due = int(passed * STEPS_PER_S)
        while run.step < due:
            run.write_step()
            if run.step == first_slow + 1:
                print(json.dumps({"slow_unix_s": time.time()}), flush=True)
        time.sleep(0.02)
    print(json.dumps({"steps_per_s": run.step / passed, "cpu_s": time.process_time()}), flush=True)


def read_usage(pid: int) -> tuple[float, int]:
    """CPU seconds, and peak resident bytes."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    peak_kb = int(status.split("VmHWM:")[1].split()[0])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), peak_kb * 1024


def measure_live(num_ranks: int, healthy_s: float, seconds: float) -> dict[str, object]:
    # In memory where that is: a disk that writes back makes the writer wait, not the watcher work.
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="watch_scale_", dir=shared if shared.is_dir() else None))
    run = folder / "run"
    record_words = ["record", str(run), str(num_ranks), str(healthy_s), str(seconds)]
    writer = subprocess.Popen(
        [sys.executable, __file__, *record_words], stdout=subprocess.PIPE, text=True
    )
    watcher: subprocess.Popen[str] | None = None
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        watcher = subprocess.Popen(
            [sys.executable, "-c", MAIN, "watch", str(run), "--headless", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        begun = time.monotonic()
        events: list[dict[str, object]] = []
        output = watcher.stdout
        assert output is not None
        reader = threading.Thread(target=lambda: events.extend(map(json.loads, output)))
        reader.start()
        slow = json.loads(writer.stdout.readline())
        ended = json.loads(writer.stdout.readline())
        wall_s = time.monotonic() - begun
        cpu_s, peak_rss_bytes = read_usage(watcher.pid)
        watcher.send_signal(signal.SIGTERM)
        watcher.wait(30)
        reader.join()
        raised = [one for one in events if one["event"] == "raised"]
        slow_ns = slow["slow_unix_s"] * 1e9
        return {
            "num_ranks": num_ranks,
            "steps_per_s": round(ended["steps_per_s"], 2),
            "wall_s": round(wall_s, 1),
            "cpu_s": round(cpu_s, 2),
            "cpu_share": round(cpu_s / wall_s, 4),
            "peak_rss_bytes": peak_rss_bytes,
            "alarm_after_s": [
                round((int(str(one["told_unix_ns"])) - slow_ns) / 1e9, 1) for one in raised
            ],
            "told": [f"{one['event']} {one['severity']} {one['title']}" for one in events],
            "writer_cpu_s": round(ended["cpu_s"], 1),
        }
    finally:
        for process in (writer, watcher):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def replay_healthy(num_ranks: int, minutes: float, seed: int) -> dict[str, object]:
    folder = Path(tempfile.mkdtemp(prefix="watch_scale_"))
    now = [0.0]
    job = Job(num_ranks=num_ranks, seed=seed)
    watcher = Watcher(folder / "run", WatchSettings(), clock=lambda: now[0])
    num_looks, next_s, events, cpu_s = 0, 0.0, [], 0.0
    try:
        for _ in append_steps(folder / "run", job, 1 << 40, chunk_steps=40):
            now[0] = job.end_ns / 1e9
            if now[0] >= next_s:
                begun = time.process_time()
                look = watcher.look()
                cpu_s += time.process_time() - begun
                num_looks += 1
                next_s = now[0] + watcher.wait_s
                events += [f"{one.event} {one.severity.word} {one.title}" for one in look.events]
            if now[0] >= 60 * minutes:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "num_ranks": num_ranks,
        "seed": seed,
        "recorded_s": round(now[0], 1),
        "num_steps": job.step,
        "num_looks": num_looks,
        "num_diagnoses": watcher.num_diagnoses,
        "cpu_share_of_recorded_time": round(cpu_s / now[0], 4),
        "false_alarms": events,
    }


def read_parts() -> list[dict[str, object]]:
    """Those that are done; several processes may add to them."""
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found: list[dict[str, object]] = known.get("healthy", {}).get("parts", [])
    return found


def save(key: str, value: object) -> dict[str, object]:
    known = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    known |= {"goals": GOALS, "machine": describe_machine(), key: value}
    RESULTS.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return known


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=["live", "healthy", "record"])
    parser.add_argument("record_words", nargs="*")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--healthy-s", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of a healthy part; 0: the next one")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    if options.part == "record":
        folder, ranks, healthy_s, seconds = options.record_words
        record(Path(folder), int(ranks), float(healthy_s), float(seconds))
        return 0
    if options.part == "live":
        found = measure_live(options.ranks, options.healthy_s, options.seconds)
        print(json.dumps(found, indent=2))
        if not options.no_save:
            save("live", found)
        return 0
    seed = options.seed or len(read_parts()) + 1
    part = replay_healthy(options.ranks, options.minutes, seed=seed)
    parts = [*(one for one in read_parts() if one["seed"] != seed), part]
    total = {
        "recorded_s": round(sum(float(str(one["recorded_s"])) for one in parts), 1),
        "num_false_alarms": sum(len(list(one["false_alarms"])) for one in parts),
        "parts": parts,
    }
    print(json.dumps(part, indent=2), total["recorded_s"], total["num_false_alarms"])
    if not options.no_save:
        save("healthy", total)
    return 0


if __name__ == "__main__":
    sys.exit(main())
