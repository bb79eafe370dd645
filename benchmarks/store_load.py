"""How long a large run takes to open and summarise, beside pytscope 0.2.1 on the same data.

    python benchmarks/store_load.py                      # 1,024 ranks × 1,000 steps
    python benchmarks/store_load.py --ranks 64 --no-save

Both layouts are made from the same numbers: five phases a step, two scalars a step. Ours is built
in the exact bytes of the on-disk format with numpy, which is first shown to equal what the real
writer leaves for the same records; pytscope's is written as its own RunStore writes it. Then each
tool runs in a fresh process, three times, in turn: CPU seconds (user + system, imports included)
and peak resident memory are those of the whole process.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import numpy as np

from meshscope.store.read.arrays import Int64s
from meshscope.store.read.files import read_file
from meshscope.store.read.run import open_run
from meshscope.store.schema import BUILTIN_NAMES, TABLES
from meshscope.store.write.pack import PACK_NAME, PackDraft
from meshscope.store.write.table_file import CHECK_SALT, HEADER_BYTES
from meshscope.store.write.writer import RankWriter, file_system_type

PHASES = ("data", "forward", "backward", "comm", "optimizer")
MEAN_MS = (2.0, 30.0, 60.0, 8.0, 5.0)
SCALARS = ("loss", "grad_norm")
START_MONO_NS = 5_000_000_000_000
START_UNIX_NS = 1_763_200_000_000_000_000
GOAL_CPU_S = 2.0
GOAL_RSS_BYTES = 500_000_000


class RankData:
    """The numbers of one rank, the same for both layouts."""

    def __init__(self, rank: int, num_steps: int) -> None:
        rng = np.random.default_rng(rank)
        slow = 1.3 if rank == 3 else 1.0
        noise = rng.lognormal(0.0, 0.05, (num_steps, len(PHASES)))
        self.phase_ns: Int64s = (np.array(MEAN_MS) * 1e6 * noise * slow).astype(np.int64)
        self.loss = 3.0 + rng.normal(0, 0.1, num_steps)
        self.grad_norm = rng.lognormal(0, 0.2, num_steps)
        durations = self.phase_ns.sum(axis=1) + 1_000_000
        ends = START_MONO_NS + np.cumsum(durations)
        self.start_ns: Int64s = ends - durations
        self.end_ns: Int64s = ends
        self.num_steps = num_steps

    def table_words(self) -> dict[str, Int64s]:
        """Seven payload words per record, per table."""
        count = self.num_steps
        steps = np.zeros((count, 7), dtype=np.int64)
        steps[:, 0] = np.arange(count)
        steps[:, 1], steps[:, 2] = self.start_ns, self.end_ns
        steps[:, 3] = 1
        steps[:, 4] = np.where(np.arange(count) % 16 == 0, 9_000, -1)
        steps[:, 5] = 4096
        spans = np.zeros((count, len(PHASES), 7), dtype=np.int64)
        spans[:, :, 0] = [BUILTIN_NAMES[name] for name in PHASES]
        offsets = np.cumsum(self.phase_ns, axis=1) - self.phase_ns
        spans[:, :, 1] = self.start_ns[:, None] + offsets
        spans[:, :, 2] = spans[:, :, 3] = self.phase_ns
        spans[:, :, 4] = -1
        scalars = np.zeros((count, 2, 7), dtype=np.int64)
        scalars[:, :, 0] = (64, 65)
        scalars[:, :, 1] = np.arange(count)[:, None]
        scalars[:, :, 2] = self.end_ns[:, None] - 500
        scalars[:, 0, 3] = self.loss.view(np.int64)
        scalars[:, 1, 3] = self.grad_norm.view(np.int64)
        scalars[:, :, 4] = -1
        clocks = np.array([[START_MONO_NS, START_UNIX_NS, 120, 0, 0, 0, 0]], dtype=np.int64)
        return {
            "clocks": clocks,
            "steps": steps,
            "spans": spans.reshape(-1, 7),
            "scalars": scalars.reshape(-1, 7),
        }


def rank_header(rank: int, num_ranks: int) -> dict[str, object]:
    """What a recorder writes at the start, without provenance."""
    return {
        "rank": rank,
        "world_size": num_ranks,
        "local_rank": rank % 8,
        "local_world_size": 8,
        "node_rank": rank // 8,
        "launch_id": "benchmark",
        "restart_count": 0,
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "start_host_mono_ns": START_MONO_NS,
        "start_unix_ns": START_UNIX_NS,
        "layout": {"dp": num_ranks},
        "layout_source": "declared",
    }


def write_rank(
    run_dir: Path, rank: int, num_ranks: int, data: RankData, *, with_writer: bool
) -> None:
    """One rank's files. Journal and manifest always come from the real writer."""
    writer = RankWriter(run_dir, rank, header=rank_header(rank, num_ranks), mapped=True)
    for name in SCALARS:
        writer.name_id(name)
    tables = data.table_words()
    if with_writer:
        for name, words in tables.items():
            table = writer.table(name)
            for record in words.tolist():
                table.put(*record)
    writer.close(
        end_host_mono_ns=int(data.end_ns[-1]), last_step=data.num_steps - 1, num_errors=0, errors={}
    )
    if not with_writer:
        write_tables(writer.directory / PACK_NAME, tables, rank)


def write_tables(path: Path, tables: dict[str, Int64s], rank: int) -> None:
    """Closed tables, byte for byte as the writer leaves them but for two time stamps, each of them
    in one extent."""
    with PackDraft(path, {"rank": rank, "attempt": 0, "sink": "append"}) as pack:
        for name, payload in tables.items():
            count = len(payload)
            records = np.empty((count, 8), dtype=np.uint64)
            records[:, 1:] = payload.view(np.uint64)
            slots = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(CHECK_SALT)
            records[:, 0] = records[:, 1:].sum(axis=1, dtype=np.uint64) + slots
            pack.begin(TABLES[name], {"rank": rank, "attempt": 0, "sink": "mapped"})
            pack.append(array("q", records.astype("<u8").tobytes()), 0)
            pack.end(0)
        pack.complete()


def prove_equal(directory: Path) -> None:
    """The fast way and the real writer leave the same bytes (time stamps in the header aside)."""
    data = RankData(3, 40)
    for with_writer in (True, False):
        write_rank(directory / str(with_writer), 3, 8, data, with_writer=with_writer)
    for name in data.table_words():
        real, fast = (
            read_file(next((directory / str(kind)).rglob(PACK_NAME)) / f"{name}.tbl")
            for kind in (True, False)
        )
        records = real[HEADER_BYTES : len(fast)]
        if real[:3968] != fast[:3968] or records != fast[HEADER_BYTES:] or any(real[len(fast) :]):
            raise SystemExit(f"{name}: the generated bytes are not what the writer leaves")
    for kind in (True, False):
        recording = open_run(directory / str(kind)).last_attempt.ranks[3]
        for name in data.table_words():
            recording.read(name)
        if recording.problems:
            raise SystemExit(f"generated run has problems: {recording.problems}")


def write_pytscope_rank(run_dir: Path, rank: int, data: RankData) -> None:
    """As pytscope's RunStore writes it: one compact JSON object per step, and run.json."""
    from pytscope.core.events import StepRecord
    from pytscope.core.store import RunStore

    store = RunStore(
        run_dir / f"rank{rank}", {"name": "benchmark", "rank": rank, "env": {"python": "3.11"}}
    ).open()
    seconds = (data.phase_ns / 1e9).tolist()
    for step in range(data.num_steps):
        store.append(
            StepRecord(
                step=step,
                phases=dict(zip(PHASES, seconds[step], strict=True)),
                scalars={"loss": float(data.loss[step]), "grad_norm": float(data.grad_norm[step])},
                timestamp=(START_UNIX_NS + int(data.end_ns[step]) - START_MONO_NS) / 1e9,
            )
        )
    store.close()
    store.write_meta()


PYTSCOPE = """
import sys
from pytscope.analyzers.distributed import analyze_distributed, load_multirank
summary = analyze_distributed(load_multirank(sys.argv[1]))
print(summary.num_ranks if hasattr(summary, "num_ranks") else summary is not None)
"""


def check_report(command: list[str], num_ranks: int, num_steps: int) -> None:
    """What is timed must have read everything: all ranks, all steps, no problem, rank 3 slow."""
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    steps = {rank["num_steps"] for rank in report["ranks"]}
    mean_ns = {rank["rank"]: rank["step_time"]["mean_ns"] for rank in report["ranks"]}
    is_whole = report["health"]["is_complete"] and not report["health"]["problems"]
    if len(mean_ns) != num_ranks or steps != {num_steps} or not is_whole:
        raise SystemExit(f"the report is not of the whole run: {len(mean_ns)} ranks, {steps} steps")
    if max(mean_ns, key=lambda rank: mean_ns[rank]) != 3:
        raise SystemExit("the report does not find the slow rank")


def measure(command: list[str]) -> tuple[float, int, float]:
    """CPU seconds, peak resident bytes and wall seconds of a fresh process."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    output = process.stdout.read()
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not output:
        raise SystemExit(f"{command[:3]} failed ({process.returncode}): {errors.decode()[-800:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return cpu_s, usage.ru_maxrss * 1024, time.monotonic() - begin


def summarise(samples: list[tuple[float, int, float]]) -> dict[str, object]:
    """Medians, and every sample."""
    return {
        "cpu_s": round(statistics.median(s[0] for s in samples), 3),
        "peak_rss_bytes": int(statistics.median(s[1] for s in samples)),
        "wall_s": round(statistics.median(s[2] for s in samples), 3),
        "samples_cpu_s": [round(s[0], 3) for s in samples],
        "samples_peak_rss_bytes": [s[1] for s in samples],
    }


def run_benchmark(
    directory: Path, num_ranks: int, num_steps: int, repeats: int
) -> dict[str, dict[str, object]]:
    """Makes the data, measures both tools in turn."""
    prove_equal(directory / "proof")
    ours, theirs = directory / "ours", directory / "theirs"
    for rank in range(num_ranks):
        data = RankData(rank, num_steps)
        write_rank(ours, rank, num_ranks, data, with_writer=False)
        write_pytscope_rank(theirs, rank, data)
    open_code = (
        "import sys; from meshscope.store.read.run import open_run; "
        "print(len(open_run(sys.argv[1]).attempts))"
    )
    commands = {
        "meshscope report --json --no-diagnosis": [
            sys.executable, "-c", "from meshscope.cli import main; main()",
            "report", str(ours), "--json", "--no-diagnosis",
        ],
        "meshscope open_run only": [sys.executable, "-c", open_code, str(ours)],
        "pytscope load + analyze_distributed": [sys.executable, "-c", PYTSCOPE, str(theirs)],
    }  # fmt: skip
    check_report(commands["meshscope report --json --no-diagnosis"], num_ranks, num_steps)
    samples: dict[str, list[tuple[float, int, float]]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            samples[name].append(measure(command))
    return {name: summarise(taken) for name, taken in samples.items()}


def describe_machine(directory: Path) -> dict[str, object]:
    """What the numbers depend on; nothing that names the machine."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("numpy", "duckdb", "pytscope", "meshscope")
    }
    return {
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system_type(directory),
        "python": platform.python_version(),
        **versions,
    }


def main() -> int:
    """Prints a table and the ratio; saves the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="store_load_"))
    try:
        machine = describe_machine(directory)
        results = run_benchmark(directory, options.ranks, options.steps, options.repeats)
        sizes = {
            name: sum(
                path.stat().st_size for path in (directory / name).rglob("*") if path.is_file()
            )
            for name in ("ours", "theirs")
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{options.ranks:,} ranks × {options.steps:,} steps, median of {options.repeats}")
    for name, result in results.items():
        rss_mb = int(str(result["peak_rss_bytes"])) / 1e6
        print(
            f"{name:38} {result['cpu_s']:>7} s CPU  {rss_mb:>7.0f} MB  {result['wall_s']:>7} s wall"
        )
    ours, theirs = (
        results["meshscope report --json --no-diagnosis"],
        results["pytscope load + analyze_distributed"],
    )
    ratios = {
        key: round(float(str(theirs[key])) / float(str(ours[key])), 1)
        for key in ("cpu_s", "peak_rss_bytes")
    }
    is_met = (
        float(str(ours["cpu_s"])) < GOAL_CPU_S and int(str(ours["peak_rss_bytes"])) < GOAL_RSS_BYTES
    )
    line = (
        f"pytscope takes {ratios['cpu_s']}× our CPU and {ratios['peak_rss_bytes']}× our memory; "
        f"goal of < {GOAL_CPU_S} s CPU and < {GOAL_RSS_BYTES / 1e6:.0f} MB: "
        f"{'met' if is_met else 'MISSED'}"
    )
    print(line)
    if not options.no_save:
        target = Path(__file__).parent / "results" / "store_load.json"
        target.parent.mkdir(exist_ok=True)
        document = {
            "summary": line,
            "num_ranks": options.ranks,
            "num_steps": options.steps,
            "stored_bytes": sizes,
            "machine": machine,
            "results": results,
            "ratios": ratios,
        }
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
