"""Does the diagnosis name what was done to a run, say nothing else, and price it rightly?

    python benchmarks/fault_matrix.py --folder FOLDER --output benchmarks/results/fault_matrix.json
    python benchmarks/fault_matrix.py --folder FOLDER --record-only --again --seconds 300
    python benchmarks/fault_matrix.py --folder FOLDER --judge-only --part 'held out' --output …
    python benchmarks/fault_matrix.py --only link pause --folder FOLDER
    python benchmarks/fault_matrix.py --folder OTHER --load 8     # clean runs, beside busy cores

The matrix of the test suite (`tests/distributed/fault_cases.py`) on many more layouts, schedules,
programs, places, changes over time and pairs of faults. Nothing is recorded again because it was
judged wrong; with `--again` what waited for its cores is (`fault_recording`). With `--rounds`
everything is recorded several times: what a fault cost is then the mean of the differences, and how
far they are apart is its error. The first recording is the one that is judged. A folder that has
some of the recordings gets the others. Each faulty run has a clean twin, recorded close to it; the
difference of their periods is what the fault really cost, and the stated gain must be within 10 %
of it, 15 % where ranks outnumber cores. Twins, and runs without any fault, must be called healthy:
nothing above low.

About half of the older cases are held out, by their names; those written later ("fresh", "newest",
"unseen", "clients", "last", "later", "blind") are parts of their own: without `--part` they are
recorded, and nothing is said of them; `--only blind` records that part alone. Results of all parts
are merged into one file.

Ranks run under SCHED_RR where that is allowed, so that sleepers are woken promptly on a machine
that others use. What it does not show: real compute that fights for memory or links; ranks of real
models are as many as this machine has cores.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.fault_cases_blind import list_blind
from benchmarks.fault_cases_clients import list_clients
from benchmarks.fault_cases_engine import list_engine_trials
from benchmarks.fault_cases_fresh import list_fresh
from benchmarks.fault_cases_last import list_last
from benchmarks.fault_cases_later import list_later
from benchmarks.fault_cases_newest import list_newest
from benchmarks.fault_cases_steady import list_steady
from benchmarks.fault_cases_trials import list_trials
from benchmarks.fault_cases_unseen import list_unseen
from benchmarks.fault_recording import (
    MACHINE_FILE,
    QUEUED_FILE,
    ROUND,
    keep_busy,
    list_clean,
    measure_queued,
    record_all,
)
from benchmarks.fault_score import (
    LedgerSum,
    Row,
    sum_ledger,
    summarize,
    write_failures,
    write_summary,
)
from tests.distributed.fault_cases import HEALTHY, list_cases
from tests.distributed.fault_matrix import Case, group_by_clean
from tests.distributed.fault_verdict import (
    GAIN_TOLERANCE_RATIO,
    Effect,
    Truth,
    judge_findings,
    measure_effect,
    open_context,
)

from meshscope.diagnose.runner import diagnose

CROWDED_TOLERANCE_RATIO = 0.15
"""Where ranks outnumber cores."""
MAX_ROUNDS = 9
LATER_PARTS = ("fresh", "newest", "unseen", "clients", "last", "later", "blind")
DEVELOPMENT, HELD_OUT = "development", "held out"
PARTS = (DEVELOPMENT, HELD_OUT, *LATER_PARTS)


def list_matrix() -> list[Case]:
    """Those of the suite come first."""
    older = [*list_cases().values(), *list_steady(), *list_trials(), *list_engine_trials()]
    newer = [*list_fresh(), *list_newest(), *list_unseen(), *list_clients(), *list_last()]
    return [*older, *newer, *list_later(), *list_blind()]


def find_part(case: Case) -> str:
    """The suite's cases are looked at with every change: none of them is held out."""
    for part in LATER_PARTS:
        if case.name.startswith(part):
            return part
    return HELD_OUT if case.is_held_out and case.name not in list_cases() else DEVELOPMENT


# --- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One recording to be judged."""

    name: str
    part: str
    is_twin: bool
    truths: tuple[Truth, ...]
    run_dir: Path
    twin_dir: Path | None
    """Where what it cost is measured."""
    tolerance_ratio: float
    more: tuple[tuple[Path, Path], ...] = ()
    """Further recordings of it and its twin."""


def list_jobs(cases: Sequence[Case], folder: Path, part: str) -> tuple[list[Job], list[str]]:
    """What the folder has of a part, and the names of what it lacks; twins go with their first."""
    cores = json.loads((folder / MACHINE_FILE).read_text(encoding="utf-8"))["cores"]
    jobs: list[Job] = []
    missing: list[str] = []
    for clean, members in group_by_clean(cases):
        for case in members:
            faulty, twin = folder / case.name / "faulty", folder / case.name / "clean"
            if find_part(case) != part:
                continue
            if not faulty.exists() or (clean is not None and not twin.exists()):
                missing.append(case.name)
                continue
            is_crowded = case.faulty.num_ranks > cores
            jobs.append(
                Job(
                    name=case.name,
                    part=part,
                    is_twin=False,
                    truths=case.truths,
                    run_dir=faulty,
                    twin_dir=twin if clean is not None and case.is_timed else None,
                    tolerance_ratio=CROWDED_TOLERANCE_RATIO if is_crowded else GAIN_TOLERANCE_RATIO,
                    more=list_more(case, folder),
                )
            )
        twin = folder / members[0].name / "clean"
        if clean is not None and twin.exists() and find_part(members[0]) == part:
            name = f"{members[0].name}, clean"
            jobs.append(make_healthy_job(name, part, twin, is_twin=True))
    return jobs, missing


def list_more(case: Case, folder: Path) -> tuple[tuple[Path, Path], ...]:
    """The case and its twin in further rounds."""
    found = []
    for number in range(2, MAX_ROUNDS + 1):
        place = folder / ROUND.format(number) / case.name
        if (place / "faulty").exists() and (place / "clean").exists():
            found.append((place / "faulty", place / "clean"))
    return tuple(found)


def make_healthy_job(name: str, part: str, run_dir: Path, *, is_twin: bool) -> Job:
    return Job(
        name=name, part=part, is_twin=is_twin, truths=(HEALTHY,), run_dir=run_dir, twin_dir=None,
        tolerance_ratio=GAIN_TOLERANCE_RATIO,
    )  # fmt: skip


def judge_job(job: Job) -> Row:
    context = open_context(job.run_dir)
    findings = diagnose(context).findings
    effect = measure(job)
    verdict = judge_findings(findings, job.truths, effect, tolerance_ratio=job.tolerance_ratio)
    return Row(
        name=job.name,
        part=job.part,
        is_twin=job.is_twin,
        truths=job.truths,
        verdict=verdict,
        effect=effect,
        tolerance_ratio=job.tolerance_ratio,
        ledger=sum_ledger(context),
        best_of_twin_ns=find_best(job.twin_dir),
        queued_ratio=measure_queued(job.run_dir),
        num_rounds=1 + len(job.more),
    )


def measure(job: Job) -> Effect | None:
    if job.twin_dir is None:
        return None
    pairs = [(job.run_dir, job.twin_dir), *job.more]
    return average_effects([measure_effect(*pair, job.truths[0]) for pair in pairs])


def average_effects(effects: Sequence[Effect]) -> Effect:
    """Of several rounds: the mean, and the larger error of steps' scatter and rounds' spread."""
    if len(effects) == 1:
        return effects[0]
    count, saved_ns = len(effects), [one.saved_ns for one in effects]
    within_ns = math.sqrt(sum(one.error_ns**2 for one in effects)) / count
    return Effect(
        saved_ns=statistics.mean(saved_ns),
        error_ns=max(within_ns, statistics.stdev(saved_ns) / math.sqrt(count)),
        faulty_ns=statistics.mean(one.faulty_ns for one in effects),
        clean_ns=statistics.mean(one.clean_ns for one in effects),
    )


def find_best(twin_dir: Path | None) -> float | None:
    found = None if twin_dir is None else sum_ledger(open_context(twin_dir))
    return found.best_ns if isinstance(found, LedgerSum) else None


def judge_all(jobs: Sequence[Job], num_processes: int) -> list[Row]:
    if num_processes < 2:
        return [judge_job(job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        return list(pool.map(judge_job, jobs, chunksize=4))


# --- the program ---------------------------------------------------------------------------------


def report(jobs: Sequence[Job], missing: Sequence[str], options: argparse.Namespace) -> None:
    rows = judge_all(jobs, options.jobs)
    for row in rows:
        mark = "right" if row.is_right else "WRONG"
        print(f"{mark}  {row.name}: {row.verdict} {row.effect or ''}")
    summary = summarize(rows)
    print("\n".join(write_summary(summary, missing)))
    if options.failures is not None:
        options.failures.write_text(write_failures(rows, summary, missing), encoding="utf-8")
    if options.output is not None:
        merge(options.output, options.folder, rows, summary, missing)


def merge(
    output: Path, folder: Path, rows: Sequence[Row], summary: dict[str, Any], missing: Sequence[str]
) -> None:
    """Rows of a part replace those of the same part; other parts stay as they are."""
    parts = {row.part for row in rows}
    document = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    old = [row for row in document.get("rows", ()) if row.get("half") in set(PARTS) - parts]
    machine = json.loads((folder / MACHINE_FILE).read_text(encoding="utf-8"))
    told = {"machine": machine, "summary": summary, "not_recorded": list(missing)}
    again = {**document.get("recorded_again_waited_ratio", {}), **read_again(folder)}
    document = {
        **{name: tell_parts(document, name, parts, value) for name, value in told.items()},
        "recorded_again_waited_ratio": again,
        "rows": [*old, *(row.to_document() for row in rows)],
    }
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def tell_parts(document: dict[str, Any], name: str, parts: set[str], value: Any) -> dict[str, Any]:
    """What is known of every part of the matrix, with what is new of some."""
    found = document.get(name, {})
    old = {part: found[part] for part in PARTS if isinstance(found, dict) and part in found}
    return {**old, **dict.fromkeys(sorted(parts), value)}


def read_again(folder: Path) -> dict[str, list[float | None]]:
    """What the ranks of each attempt waited, of recordings made more than once."""
    path = folder / QUEUED_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=(), help="parts of cases' names")
    parser.add_argument("--folder", type=Path, help="where recordings stay; default: nowhere")
    parser.add_argument("--judge-only", action="store_true", help="what FOLDER has already")
    parser.add_argument("--record-only", action="store_true", help="judge nothing")
    parser.add_argument("--seconds", type=float, default=math.inf, help="record no longer")
    parser.add_argument("--again", action="store_true", help="anew what waited for its cores")
    parser.add_argument("--rounds", type=int, default=1, help="times that twins are recorded")
    parser.add_argument("--part", choices=PARTS, default=DEVELOPMENT, help="judge these cases")
    parser.add_argument(
        "--load", type=int, default=0, help="clean runs only, beside busy processes"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that judge")
    parser.add_argument("--failures", type=Path, help="a table of what was said wrongly")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = [
        case
        for case in (list_clean(list_matrix()) if options.load else list_matrix())
        if not options.only or any(part in case.name for part in options.only)
    ]
    with tempfile.TemporaryDirectory() as name:
        options.folder = options.folder or Path(name)
        if not options.judge_only:
            with keep_busy(options.load):
                record_all(
                    cases,
                    options.folder,
                    options.seconds,
                    is_real_time=not options.load,
                    is_again=options.again,
                    num_rounds=options.rounds,
                )
        if not options.record_only:
            report(*list_jobs(cases, options.folder, options.part), options)


if __name__ == "__main__":
    main()
