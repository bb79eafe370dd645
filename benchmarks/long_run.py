"""A month of recording in minutes: a run with a size limit tells the same as the whole recording.

    python benchmarks/long_run.py                                    # 20,000 steps, 0.1 GB a rank
    python benchmarks/long_run.py --steps 200000 --rank-bytes 1GB    # needs 5 GB of disk, and time

Two ranks of a data-parallel job communicate `--operations` times in a step. Both recordings are
written by the recorder's own writer, record by record, with the same drawn times; the clock alone
is made up (five seconds a step: 200,000 steps are 11 days). Thinning does its rounds as soon as
they are due. Then both are reported, and budget and findings are compared with each other and
with what was drawn: waits and transfers of every step are known.

A fault makes rank 1 slow in forward from the middle of the run on (or as `--slow` says), and single
steps are slow on both ranks, so that there is something to find.
"""

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from kill_storm import describe_machine

from meshscope.analyze.study import Study
from meshscope.core.byte_text import parse_bytes
from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.context import Context
from meshscope.diagnose.runner import Diagnosis, diagnose
from meshscope.store.read.run import open_run
from meshscope.store.schema import BUILTIN_NAMES, StepFlag
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.writer import RankWriter

NUM_RANKS = 2
STEP_NS = 5_000_000_000
TRANSFER_SHARE = 0.2
"""Of a step, in transfers."""
SLOW_RATIO = 1.25
PAUSE_RATIO = 3.0
PAUSE_EVERY = 5003
START_NS = 1_000_000_000
MAX_BUDGET_POINTS = 0.5
FAIL_SLOW = "ST003"
BY_PARTS = "HE008"
"""Says that a diagnosis is based on a part of the steps: true of the thinned run."""


class LongJob:
    """Draws both ranks' steps; all drawn numbers follow from the seed."""

    def __init__(
        self, num_steps: int, num_operations: int, seed: int, slow: tuple[float, float]
    ) -> None:
        self._num_operations = num_operations
        self.slow_steps = range(int(num_steps * slow[0]), int(num_steps * slow[1]))
        self._random = random.Random(seed)
        self._now = [START_NS] * NUM_RANKS
        self._wait_ns = self._transfer_ns = 0

    def tell_truth(self) -> dict[str, float]:
        """Per cent of all ranks' wall clock."""
        wall_ns = sum(now - START_NS for now in self._now)
        wait, transfer = 100 * self._wait_ns / wall_ns, 100 * self._transfer_ns / wall_ns
        return {
            "COMPUTE": round(100 - wait - transfer, 3),
            "TRANSFER dp": round(transfer, 3),
            "WAIT dp": round(wait, 3),
        }

    def write(self, writers: list[RankWriter], step: int) -> None:
        """One step of all ranks, with operations spread over forward and backward."""
        work_ns = STEP_NS * (1 - TRANSFER_SHARE) / self._num_operations
        transfer_ns = STEP_NS * TRANSFER_SHARE / self._num_operations
        begin = list(self._now)
        pause = PAUSE_RATIO if step % PAUSE_EVERY == PAUSE_EVERY - 1 else 1.0
        middle, marks = self._num_operations // 2, []
        for index in range(self._num_operations):
            arrivals = []
            for rank in range(NUM_RANKS):
                is_slow = rank == 1 and index < middle and step in self.slow_steps
                ratio = (SLOW_RATIO if is_slow else 1.0) * self._random.uniform(0.97, 1.03)
                self._now[rank] += int(work_ns * ratio * (pause if index == middle else 1.0))
                arrivals.append(self._now[rank])
            end = max(arrivals) + int(transfer_ns)
            self._wait_ns += sum(max(arrivals) - one for one in arrivals)
            self._transfer_ns += NUM_RANKS * int(transfer_ns)
            for rank, writer in enumerate(writers):
                phase = "forward" if index < middle else "backward"
                self._put_operation(writer, step, index, phase, arrivals[rank], end)
                self._now[rank] = end + 1000
            if index == middle - 1:
                marks = list(self._now)
        for rank, writer in enumerate(writers):
            end = self._now[rank]
            optimizer_ns = STEP_NS // 100
            data_end = begin[rank] + 1000
            writer.table("phases").put(
                begin[rank], data_end, data_end, marks[rank], marks[rank], end, optimizer_ns
            )
            end += optimizer_ns
            writer.table("steps").put(step, begin[rank], end, 1, -1, 4096, 8)
            self._now[rank] = end + 2000

    @staticmethod
    def _put_operation(
        writer: RankWriter, step: int, index: int, phase: str, arrival: int, end: int
    ) -> None:
        head = Kind.ALL_REDUCE | Outcome.OK << 8 | EndSource.WAIT << 16
        writer.table("collectives").put(
            head | BUILTIN_NAMES[phase] << 48,
            (step * 100_000 + index) & 0xFFFFFFFF,
            arrival,
            arrival,
            end,
            1 << 20,
            step + 1 | 1 << 32 | DTYPES.index("float32") << 48,
        )


def write_run(
    path: Path, job: LongJob, num_steps: int, rank_bytes: int | None
) -> dict[str, object]:
    """Records a run; what it took."""
    begin_s, thinning_s, peak_bytes, num_rounds, most_files = time.process_time(), 0.0, 0, 0, 0
    writers = [_open_writer(path, rank, rank_bytes) for rank in range(NUM_RANKS)]
    for step in range(num_steps):
        job.write(writers, step)
        if step % 100 or rank_bytes is None:
            continue
        before = time.process_time()
        for writer in writers:
            if writer.thinner is not None and writer.thinner.is_due():
                num_rounds += 1
                for index, _ in enumerate(writer.thinner.work()):
                    if index % 64 == 0:
                        sizes = [one.stat().st_size for one in writer.directory.iterdir()]
                        peak_bytes, most_files = (
                            max(peak_bytes, sum(sizes)),
                            max(most_files, len(sizes)),
                        )
        thinning_s += time.process_time() - before
    for writer in writers:
        writer.close(end_host_mono_ns=START_NS + (num_steps + 1) * STEP_NS * 2)
    files = [one for one in (path / "rank00000" / "attempt000").iterdir() if one.is_file()]
    return {
        "writing_cpu_s": round(time.process_time() - begin_s - thinning_s, 1),
        "thinning_cpu_s": round(thinning_s, 1),
        "num_rounds": num_rounds,
        "peak_rank_bytes": peak_bytes,
        "final_rank_bytes": sum(one.stat().st_size for one in files),
        "num_files_of_a_rank": len(files),
        "most_files_of_a_rank": max(most_files, len(files)),
    }


def _open_writer(path: Path, rank: int, rank_bytes: int | None) -> RankWriter:
    header: dict[str, object] = {
        "rank": rank, "world_size": NUM_RANKS, "launch_id": "long", "restart_count": 0,
        "host": "node0", "clock_id": "one clock", "start_host_mono_ns": START_NS,
        "start_unix_ns": 1_700_000_000_000_000_000, "communication": True,
        "layout": {"dp": NUM_RANKS}, "layout_source": "declared",
    }  # fmt: skip
    writer = RankWriter(path, rank, header=header, max_bytes=rank_bytes, grace_seconds=0.0)
    writer.journal.write(
        GROUP_KIND, id=0, name="default_pg", description="", backend="gloo",
        ranks=pack_ranks(tuple(range(NUM_RANKS))),
    )  # fmt: skip
    return writer


def report(path: Path) -> dict[str, object]:
    """Budget in per cent by line, and findings as their code and culprit."""
    begin_s = time.process_time()
    attempt = open_run(path).last_attempt
    study = Study(attempt)
    budget = study.budget
    if isinstance(budget, Unavailable):
        raise SystemExit(f"no budget: {budget.reason}")
    wall = budget.total_wall_ns
    shares = {
        f"{line.share.name}{' ' + line.axis if line.axis else ''}": round(100 * int(ns) / wall, 3)
        for line, ns in zip(budget.lines, budget.total_ns(), strict=True)
    }
    steps = attempt.ranks[0].read("steps")
    is_thinned = (steps["flags"].astype(int) & StepFlag.THINNED) != 0
    diagnosis = diagnose(Context(study))
    return {
        "num_steps": len(is_thinned),
        "num_thinned_steps": int(is_thinned.sum()),
        "num_budget_steps": len(budget.steps),
        "budget_percent": shares,
        "findings": sorted(
            f"{one.code} {list(one.ranks)}: {one.title}" for one in diagnosis.findings
        ),
        "onset": _find_onset(diagnosis),
        "cpu_s": round(time.process_time() - begin_s, 1),
    }


def _find_onset(diagnosis: Diagnosis) -> dict[str, object] | None:
    for one in diagnosis.findings:
        if one.code == FAIL_SLOW:
            said = {fact.name: fact.value for fact in one.evidence}
            names = ("first slow step, earliest", "first slow step, latest")
            bounds = [said.get(name, one.first_step) for name in names]
            return {"step": one.first_step, "last_step": one.last_step, "bounds": bounds}
    return None


def compare(full: dict[str, object], thinned: dict[str, object]) -> dict[str, object]:
    ours, theirs = thinned["budget_percent"], full["budget_percent"]
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    points = max(abs(ours.get(key, 0) - theirs.get(key, 0)) for key in ours.keys() | theirs.keys())
    codes = []
    for run in (full, thinned):
        findings = run["findings"]
        assert isinstance(findings, list)
        codes.append({one.split(":")[0] for one in findings if not one.startswith(BY_PARTS)})
    return {"most_budget_points": round(points, 3), "are_findings_equal": codes[0] == codes[1]}


def judge(run: dict[str, object], job: LongJob) -> dict[str, object]:
    """How far a report is from what was drawn."""
    found, truth, onset = run["budget_percent"], job.tell_truth(), run["onset"]
    assert isinstance(found, dict)
    points = max(abs(found.get(key, 0) - share) for key, share in truth.items())
    result: dict[str, object] = {"most_points_from_truth": round(points, 3)}
    if isinstance(onset, dict):
        low, high = onset["bounds"]
        result["onset_error_steps"] = int(onset["step"]) - job.slow_steps[0]
        result["is_onset_in_bounds"] = low <= job.slow_steps[0] <= high
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--operations", type=int, default=100)
    parser.add_argument("--rank-bytes", default="0.1GB")
    parser.add_argument(
        "--slow", default="0.5,1", help="begin and end of the fault, as shares of the run"
    )
    parser.add_argument("--seed", type=int, default=20261118)
    parser.add_argument("--folder", type=Path, help="where the runs are written, and deleted")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    rank_bytes = parse_bytes(options.rank_bytes, "--rank-bytes")
    begin, end = map(float, options.slow.split(","))
    slow = begin, end
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    runs: dict[str, dict[str, object]] = {}
    try:
        for name, limit in (("thinned", rank_bytes), ("full", None)):
            job = LongJob(options.steps, options.operations, options.seed, slow)
            written = write_run(folder / name, job, options.steps, limit)
            runs[name] = written | report(folder / name)
            runs[name] |= judge(runs[name], job)
            print(name, json.dumps(runs[name], indent=2), flush=True)
            shutil.rmtree(folder / name)
        machine = describe_machine(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = compare(runs["full"], runs["thinned"])
    peak = runs["thinned"]["peak_rank_bytes"]
    result["is_within_size"] = isinstance(peak, int) and peak <= rank_bytes
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result, indent=2))
    if not options.no_save:
        target = Path(__file__).parent / "results" / f"long_run_{options.steps}.json"
        document = {
            "steps": options.steps, "operations": options.operations, "rank_bytes": rank_bytes,
            "seed": options.seed, "slow": slow, "truth": job.tell_truth(), "machine": machine,
            "result": result, "runs": runs,
        }  # fmt: skip
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    is_close = float(str(result["most_budget_points"])) <= MAX_BUDGET_POINTS
    is_close &= all(
        float(str(one["most_points_from_truth"])) <= MAX_BUDGET_POINTS for one in runs.values()
    )
    return int(not (is_close and result["are_findings_equal"] and result["is_within_size"]))


if __name__ == "__main__":
    sys.exit(main())
