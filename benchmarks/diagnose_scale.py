"""What a full diagnosis of a large run costs, and that it grows with the run's size and no faster.

    python benchmarks/diagnose_scale.py                       # 1,024 ranks, up to 10,000 steps
    python benchmarks/diagnose_scale.py --ranks 64 --no-save

A job of dp × tp8 is made up with numpy: every step, tensor-parallel groups meet in forward and
data-parallel groups at the end of backward, each transfer begins when the last rank has come, and
one rank takes half as long again in forward. The tables are the exact bytes of the on-disk format,
first shown to equal what the real writer leaves for the same records; journals and manifest come
from the real writer.
At four sizes `meshscope report --json` then runs in a fresh process: CPU seconds (user + system,
imports included) and peak resident memory are those of the whole process. The diagnosis must name
the slow rank, or the benchmark fails.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from store_load import START_MONO_NS, measure, rank_header, write_table

from meshscope.core.layout import Layout
from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.run import open_run
from meshscope.store.schema import BUILTIN_NAMES
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.table_file import HEADER_BYTES
from meshscope.store.write.writer import RankWriter

TP = 8
RANKS_PER_HOST = 8
SLOW_RATIO = 1.5
DATA_NS, FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 2_000_000, 30_000_000, 60_000_000, 5_000_000
TP_TRANSFER_NS, DP_TRANSFER_NS, TAIL_NS, GAP_NS = 500_000, 4_000_000, 500_000, 1_000_000
GOAL_CPU_S, GOAL_RSS_BYTES = 30.0, 2_000_000_000
Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of all ranks: [rank, step], ns from the start of the job."""

    begin: Times
    data_end: Times
    tp_arrival: Times
    tp_end: Times
    forward_end: Times
    dp_arrival: Times
    dp_end: Times
    end: Times


def make_moments(num_ranks: int, num_steps: int, slow_rank: int) -> Moments:
    """Every moment follows from drawn durations and from who waits for whom."""
    rng = np.random.default_rng(0)
    empty = {name: np.empty((num_ranks, num_steps), dtype=np.int64) for name in Moments.__slots__}
    slow = np.where(np.arange(num_ranks) == slow_rank, SLOW_RATIO, 1.0)
    now = np.zeros(num_ranks, dtype=np.int64)
    for step in range(num_steps):
        noise = rng.lognormal(0.0, 0.03, (4, num_ranks))
        at = {"begin": now}
        at["data_end"] = now + (DATA_NS * noise[0]).astype(np.int64)
        at["tp_arrival"] = at["data_end"] + (FORWARD_NS / 2 * noise[1] * slow).astype(np.int64)
        last_tp = at["tp_arrival"].reshape(-1, TP).max(axis=1)
        at["tp_end"] = np.repeat(last_tp + TP_TRANSFER_NS, TP)
        at["forward_end"] = at["tp_end"] + (FORWARD_NS / 2 * noise[2] * slow).astype(np.int64)
        at["dp_arrival"] = at["forward_end"] + (BACKWARD_NS * noise[3]).astype(np.int64)
        last_dp = at["dp_arrival"].reshape(-1, TP).max(axis=0)
        at["dp_end"] = np.tile(last_dp + DP_TRANSFER_NS, num_ranks // TP)
        at["end"] = at["dp_end"] + OPTIMIZER_NS + TAIL_NS
        for name, values in at.items():
            empty[name][:, step] = values
        now = at["end"] + GAP_NS
    return Moments(**empty)


def table_words(moments: Moments, rank: int) -> dict[str, Int64s]:
    """Seven payload words per record, per table."""
    at = {name: getattr(moments, name)[rank] + START_MONO_NS for name in Moments.__slots__}
    count = len(at["begin"])
    number = np.arange(count)
    steps = np.zeros((count, 7), dtype=np.int64)
    steps[:, 0], steps[:, 1], steps[:, 2], steps[:, 3] = number, at["begin"], at["end"], 1
    steps[:, 4] = np.where(number % 16 == 0, 9_000, -1)
    steps[:, 5] = 4096
    phases = np.stack(
        [
            at["begin"],
            at["data_end"],
            at["data_end"],
            at["forward_end"],
            at["forward_end"],
            at["dp_end"],
            np.full(count, OPTIMIZER_NS),
        ],
        axis=1,
    )
    scalars = np.zeros((count, 7), dtype=np.int64)
    scalars[:, 0], scalars[:, 1], scalars[:, 2], scalars[:, 4] = 64, number, at["end"] - 500, -1
    scalars[:, 3] = (3.0 + np.random.default_rng(rank).normal(0, 0.1, count)).view(np.int64)
    operations = np.stack(
        [
            operation_words(number, 0, "forward", at["tp_arrival"], at["tp_end"], 1 << 20),
            operation_words(number, 1, "backward", at["dp_arrival"], at["dp_end"], 1 << 26),
        ],
        axis=1,
    )
    return {
        "steps": steps,
        "phases": phases.astype(np.int64),
        "scalars": scalars,
        "collectives": operations.reshape(-1, 7),
    }


def operation_words(
    number: Times, group: int, phase: str, arrival: Times, end: Times, size_bytes: int
) -> Int64s:
    """One all-reduce per step that held its caller up."""
    head = Kind.ALL_REDUCE | Outcome.OK << 8 | EndSource.WAIT << 16 | group << 32
    words = np.zeros((len(number), 7), dtype=np.int64)
    words[:, 0] = head | BUILTIN_NAMES[phase] << 48
    words[:, 1] = number
    words[:, 2] = words[:, 3] = arrival
    words[:, 4], words[:, 5] = end, size_bytes
    words[:, 6] = number + 1 | 1 << 32 | DTYPES.index("float32") << 48
    return words


def write_rank(
    run_dir: Path, rank: int, num_ranks: int, moments: Moments, *, with_writer: bool
) -> None:
    """One rank's files. Journal and manifest always come from the real writer."""
    layout = Layout(dp=num_ranks // TP, tp=TP)
    header = {**rank_header(rank, num_ranks), "layout": layout.to_dict()}
    writer = RankWriter(run_dir, rank, header=header, mapped=True)
    writer.name_id("loss")
    tp_ranks = range(rank - rank % TP, rank - rank % TP + TP)
    groups = (("tp", tp_ranks), ("dp", range(rank % TP, num_ranks, TP)))
    for number, (name, ranks) in enumerate(groups):
        writer.journal.write(
            GROUP_KIND,
            id=number,
            name=f"{name}{ranks[0]}",
            description=f"mesh_{name}",
            backend="nccl",
            ranks=pack_ranks(tuple(ranks)),
        )
    tables = table_words(moments, rank)
    for name, words in tables.items():
        table = writer.table(name)
        if with_writer:
            for record in words.tolist():
                table.put(*record)
    writer.close(
        end_host_mono_ns=int(moments.end[rank, -1]) + START_MONO_NS, num_errors=0, errors={}
    )
    if not with_writer:
        for name, words in tables.items():
            write_table(writer.directory / f"{name}.tbl", name, words, rank)


def prove_equal(directory: Path) -> None:
    """The fast way and the real writer leave the same bytes (time stamps in the header aside)."""
    moments = make_moments(2 * TP, 40, 3)
    for with_writer in (True, False):
        write_rank(directory / str(with_writer), 3, 2 * TP, moments, with_writer=with_writer)
    for name in table_words(moments, 3):
        real, fast = (
            next((directory / str(kind)).rglob(f"{name}.tbl")).read_bytes()
            for kind in (True, False)
        )
        if real[:3968] != fast[:3968] or real[HEADER_BYTES:] != fast[HEADER_BYTES:]:
            raise SystemExit(f"{name}: the generated bytes are not what the writer leaves")
    recording = open_run(directory / "False").last_attempt.ranks[3]
    for name in table_words(moments, 3):
        recording.read(name)
    if recording.problems:
        raise SystemExit(f"generated run has problems: {recording.problems}")


def diagnose_size(
    directory: Path, num_ranks: int, num_steps: int, slow_rank: int
) -> dict[str, object]:
    """Makes a run of that size, diagnoses it, checks the answer, and deletes it."""
    run_dir = directory / f"{num_steps}"
    moments = make_moments(num_ranks, num_steps, slow_rank)
    for rank in range(num_ranks):
        write_rank(run_dir, rank, num_ranks, moments, with_writer=False)
    del moments
    stored = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    output = directory / "report.json"
    code = "import sys; from meshscope.cli import main; print('run', flush=True); main()"
    command = [sys.executable, "-c", code, "report", str(run_dir), "--json", "-o", str(output)]
    cpu_s, peak_rss_bytes, wall_s = measure(command)
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


def describe_machine() -> dict[str, object]:
    """What the numbers depend on; nothing that names the machine."""
    return {
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "meshscope")},
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
                f"{size['wall_s']} s wall, {rss_mb:,.0f} MB; {size['findings']}",
                flush=True,
            )
            sizes.append(size)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    largest = sizes[-1]
    is_met = (
        float(str(largest["cpu_s"])) <= GOAL_CPU_S
        and int(str(largest["peak_rss_bytes"])) <= GOAL_RSS_BYTES
    )
    growth = fit_growth(sizes) if len(sizes) > 1 else {}
    print(f"{growth}; goal of ≤ {GOAL_CPU_S:.0f} s CPU and ≤ 2 GB: {'met' if is_met else 'MISSED'}")
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
