"""Does the diagnosis name what is wrong with a program on devices, and price it rightly?

    python benchmarks/nccl_faults.py --parcel OUT.tar [--set first] [--only ddp one_leak]
                                                                # records; needs CUDA
    python benchmarks/nccl_faults.py --judge OUT.tar [--output FILE]          # anywhere
    python benchmarks/nccl_faults.py --device cpu --steps 8 --parcel OUT.tar  # only whether it runs

The cases are in `nccl_cases.py`, on which rules were tuned (`--set first`), and in
`nccl_cases_more.py`, written by somebody who had not read the rules (`--set more`). Twins run in
the same processes: each is recorded, and then both are timed in turns without the recorder: the
median difference of paired blocks is what the fault costs. A fault that begins within the recording
is timed at work, and costs that in its part of the recorded steps. Cases with the same clean
program share its recording. A case is right when

- a finding names it above low: an accepted code, the culprits and no other rank; of several faults
  each is named, and their prices are added;
- its price is what the fault costs, within 15 %, or within three times the scatter of the blocks;
  neither is asked of a fault that costs less than 3 % of the step, from where a loss is medium;
- nothing else is above low, but for what is true of the clean program too: exposed communication,
  if the kernels of the twin show at least 5 % of it, and copies with nothing beside them, if they
  show at least 3 %;
- nothing but that is above low in the clean twin.

Of a healthy variant only the last but one is asked.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_bench import FAILED_KEY, Place, Task, add_options, choose, is_rank, run_jobs, serve_rank
from nccl_cases import CASES as FIRST_CASES
from nccl_cases import OWN, OWN_COPIES, Case, Expected, make_faulty
from nccl_cases_more import CASES as MORE_CASES
from nccl_kernels import trace_steps
from nccl_parcel import pack, unpack
from nccl_programs import Program, Training
from nccl_truth import record_steps, time_steps

CASES: dict[str, Case] = FIRST_CASES | MORE_CASES
SETS = tuple(dict.fromkeys(case.set_name for case in CASES.values()))
TIMES_FILE = "times.json"
NUM_TRACED_STEPS = 4
PRICE_TOLERANCE_RATIO = 0.15
NUM_SCATTERS = 3.0
MEDIUM_RATIO = 0.03
OWN_RATIO = 0.05


# --- recording -------------------------------------------------------------------------------


@dataclass(slots=True)
class Kept:
    """The clean program of the last case: the next one may have the same."""

    program: Program | None = None
    training: Training | None = None


KEPT = Kept()


def record(place: Place, name: str, options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    case = CASES[name]
    clean = take_clean(place, case, options)
    faulty = clean
    if case.other is not None:
        faulty = case.other.build(place)
        for _ in range(options.warmup_steps):
            faulty.step()
    if place.is_cuda:
        import torch

        torch.cuda.empty_cache()  # what an earlier fault left would hide what this one needs
    folder = place.folder / name
    faulty.set_faults(make_faulty(case).faults)
    faulty.num_steps = case.since
    for _ in range(2):
        faulty.step()  # what a fault does when it is first reached
    faulty.num_steps = 0
    caught = place.gather(record_steps(faulty, folder / "run", options.steps)[0])
    times = time_twins(case, clean, faulty, options) if case.is_timed else []
    if case.other is not None:
        faulty.close()
    clean.set_faults(())
    result = {
        "clean": case.clean.name,
        "times_ms": place.gather(times),
        "share": max(0.0, 1 - case.since / options.steps),
        "caught": caught,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    finish(place, folder, result, options)
    return result


def take_clean(place: Place, case: Case, options: argparse.Namespace) -> Training:
    """Built, recorded and traced once for all its cases."""
    if KEPT.program is case.clean and KEPT.training is not None:
        return KEPT.training
    if KEPT.training is not None:
        KEPT.training.close()
        KEPT.program = KEPT.training = None
        place.clean_up()
    training = case.clean.build(place)
    for _ in range(options.warmup_steps):
        training.step()
    folder = place.folder / case.clean.name
    caught = place.gather(record_steps(training, folder / "run", options.steps)[0])
    kernels = place.gather(trace_steps(place, training.step, NUM_TRACED_STEPS))
    finish(place, folder, {"kernels_ms": kernels, "caught": caught}, options)
    KEPT.program, KEPT.training = case.clean, training
    return training


def finish(place: Place, folder: Path, result: dict[str, Any], options: argparse.Namespace) -> None:
    place.meet()
    if place.rank == 0:
        (folder / TIMES_FILE).write_text(json.dumps(result), encoding="utf-8")
        pack(folder, options.parcel)


def time_twins(
    case: Case, clean: Training, faulty: Training, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Milliseconds a step in blocks without and with the fault, in turns."""
    num_steps = max(1, options.timed_steps // case.period) * case.period
    times = []
    for turn in range(options.blocks):
        pair = {}
        for which in ("clean", "faulty") if turn % 2 else ("faulty", "clean"):
            training = faulty if which == "faulty" else clean
            if clean is faulty:
                training.set_faults(case.faults if which == "faulty" else ())
            training.num_steps = case.since
            training.step()
            training.num_steps = case.since
            pair[which] = time_steps(training, num_steps)
        times.append((pair["clean"], pair["faulty"]))
    return times


def show_record(name: str, result: dict[str, Any]) -> None:
    if FAILED_KEY in result:
        return
    cost = measure_cost(result["times_ms"], result["share"])
    text = "not timed" if cost is None else str(cost)
    caught = f"  CAUGHT {result['caught']}" if any(result["caught"]) else ""
    print(f"{name:30} {text}  ({result['seconds']} s){caught}", flush=True)


# --- judging ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a fault costs, by its twin."""

    clean_ms: float
    faulty_ms: float
    lost_ms: float
    scatter_ms: float
    """Standard error of it."""

    @property
    def ratio(self) -> float:
        """Of the faulty step, as findings state it."""
        return self.lost_ms / self.faulty_ms

    def __str__(self) -> str:
        return (
            f"{self.faulty_ms:.2f} − {self.clean_ms:.2f} ms: costs {self.lost_ms:.2f} "
            f"± {self.scatter_ms:.2f} ms, {self.ratio:.1%}"
        )


def measure_cost(
    times_ms: Sequence[Sequence[Sequence[float]]],
    share: float = 1.0,
) -> Cost | None:
    """From [rank][block][clean, faulty]; a block lasts as long as on its slowest rank. The fault
    is at work in `share` of the recorded steps."""
    if not times_ms or not times_ms[0]:
        return None
    slowest = [
        [max(rank[index][which] for rank in times_ms) for which in (0, 1)]
        for index in range(len(times_ms[0]))
    ]
    blocks = [(clean, clean + share * (faulty - clean)) for clean, faulty in slowest]
    lost = [faulty - clean for clean, faulty in blocks]
    scatter = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else 0.0
    return Cost(
        clean_ms=statistics.median(clean for clean, _ in blocks),
        faulty_ms=statistics.median(faulty for _, faulty in blocks),
        lost_ms=statistics.median(lost),
        scatter_ms=scatter,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a diagnosis compares with what was done."""

    is_named: bool
    price_ms: float | None
    is_price_right: bool
    false: tuple[str, ...]
    """Findings above low about nothing that was done."""
    own: tuple[str, ...]
    """Findings above low that are true of the clean program."""
    found: tuple[str, ...]
    is_cheap: bool
    """The fault costs too little to be named."""

    @property
    def is_right(self) -> bool:
        return (self.is_cheap or (self.is_named and self.is_price_right)) and not self.false


def judge_case(case: Case, folder: Path, cost: Cost | None, own: Sequence[str]) -> Verdict:
    from meshscope.core.verdict.severity import Severity

    findings = read_findings(folder / "run")
    is_cheap = cost is not None and cost.ratio < MEDIUM_RATIO
    heard = [one for one in findings if is_cheap or one.severity > Severity.LOW]
    wanted = () if case.is_healthy else (case.expected, *case.also)
    culprits = {rank for one in wanted for rank in one.ranks}
    answers = [[one for one in heard if is_about(one, each, culprits)] for each in wanted]
    named = [one for answer in answers for one in answer]
    price_ms = add_prices(answers)
    loud = [one for one in findings if one.severity > Severity.LOW and one not in named]
    return Verdict(
        is_named=all(map(has_culprits, answers, wanted)),
        price_ms=price_ms,
        is_price_right=cost is None or not case.has_price or is_price_right(price_ms, cost),
        false=tuple(one.label for one in loud if one.code not in own),
        own=tuple(one.label for one in loud if one.code in own),
        found=tuple(map(describe, findings)),
        is_cheap=is_cheap,
    )


def is_about(finding: Any, expected: Expected, culprits: Set[int]) -> bool:
    """Whether it names this fault, and of the ranks culprits only."""
    text = f"{finding.title} {finding.summary}"
    has_ranks = not expected.ranks or (
        set(finding.ranks) & set(expected.ranks) and set(finding.ranks) <= culprits
    )
    has_words = not expected.words or any(word in text for word in expected.words)
    return finding.code in expected.codes and bool(has_ranks) and has_words


def has_culprits(answer: Sequence[Any], expected: Expected) -> bool:
    ranks = {rank for finding in answer for rank in finding.ranks}
    return bool(answer) and ranks >= set(expected.ranks)


def add_prices(answers: Sequence[Sequence[Any]]) -> float | None:
    """The dearest finding about each fault; one that is about several counts once."""
    dearest: list[Any] = []
    for answer in filter(None, answers):
        one = max(answer, key=lambda finding: finding.saved_ns)
        if one not in dearest:
            dearest.append(one)
    return sum(one.saved_ns for one in dearest) / 1e6 if dearest else None


def is_price_right(price_ms: float | None, cost: Cost) -> bool:
    if price_ms is None:
        return False
    limit = max(PRICE_TOLERANCE_RATIO * abs(cost.lost_ms), NUM_SCATTERS * cost.scatter_ms)
    return abs(price_ms - cost.lost_ms) <= limit


def read_findings(path: Path) -> tuple[Any, ...]:
    import meshscope

    return meshscope.study(path).findings


def describe(finding: Any) -> str:
    gain = finding.gain
    stated = f"{gain.saved_ns / 1e6:.2f} ms" if hasattr(gain, "saved_ns") else gain.reason
    return f"{finding.label} ({finding.severity.word}, {stated})"


def find_own(twin: Path) -> tuple[str, ...]:
    """The codes that are true of the clean program."""
    rows = [row for row in read_times(twin).get("kernels_ms", []) if row is not None]
    if not rows:
        return ()
    shares = {
        key: statistics.fmean(row[key] / row["wall"] for row in rows)
        for key in ("exposed", "copies_alone")
    }
    own = OWN if shares["exposed"] >= OWN_RATIO else ()
    return own + (OWN_COPIES if shares["copies_alone"] >= MEDIUM_RATIO else ())


def read_times(folder: Path) -> dict[str, Any]:
    return json.loads((folder / TIMES_FILE).read_text(encoding="utf-8"))


def judge_all(parcels: Sequence[Path], output: Path | None) -> bool:
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {path.name: path for path in unpack(list(parcels), Path(name))}
        twins = {CASES[one].clean.name: CASES[one].set_name for one in folders if one in CASES}
        for twin, set_name in twins.items():
            rows[twin] = {"set": set_name, **judge_twin(twin, folders)}
            show_twin(twin, rows[twin])
        for one, folder in folders.items():
            if one not in CASES:
                continue
            case = CASES[one]
            times = read_times(folder)
            cost = measure_cost(times["times_ms"], times.get("share", 1.0))
            own = find_own(folders[case.clean.name]) if case.clean.name in folders else ()
            verdict = judge_case(case, folder, cost, own)
            known = {"set": case.set_name, "is_healthy": case.is_healthy}
            rows[one] = known | to_document(verdict, cost)
            show_verdict(one, verdict, cost)
    show_counts(rows)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return all(row["is_right"] for row in rows.values())


def show_counts(rows: dict[str, dict[str, Any]]) -> None:
    for set_name in SETS:
        those = [row for row in rows.values() if row["set"] == set_name]
        quiet = [row for row in those if row["is_twin"] or row["is_healthy"]]
        if those:
            num_right = sum(row["is_right"] for row in those)
            print(f"{set_name}: {num_right} of {len(those)} right; {len(quiet)} of all are healthy")


def judge_twin(name: str, folders: dict[str, Path]) -> dict[str, Any]:
    """A clean program says nothing above low, but for what its kernels show."""
    from meshscope.core.verdict.severity import Severity

    if name not in folders:
        return {"is_twin": True, "is_right": False, "false": ["not recorded"], "found": []}
    own = find_own(folders[name])
    findings = read_findings(folders[name] / "run")
    loud = [one for one in findings if one.severity > Severity.LOW]
    false = [one.label for one in loud if one.code not in own]
    return {
        "is_twin": True,
        "is_right": not false,
        "false": false,
        "own": [one.label for one in loud if one.code in own],
        "found": list(map(describe, findings)),
    }


def to_document(verdict: Verdict, cost: Cost | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "is_twin": False,
        "is_right": verdict.is_right,
        "is_named": verdict.is_named,
        "is_cheap": verdict.is_cheap,
        "is_price_right": verdict.is_price_right,
        "false": list(verdict.false),
        "own": list(verdict.own),
        "found": list(verdict.found),
        "price_ms": verdict.price_ms and round(verdict.price_ms, 3),
    }
    if cost is not None:
        document |= {
            "cost_ms": round(cost.lost_ms, 3),
            "cost_scatter_ms": round(cost.scatter_ms, 3),
            "clean_ms": round(cost.clean_ms, 3),
            "faulty_ms": round(cost.faulty_ms, 3),
            "price_error_ratio": None
            if verdict.price_ms is None
            else round(verdict.price_ms / cost.lost_ms - 1, 4),
        }
    return document


def show_twin(name: str, row: dict[str, Any]) -> None:
    mark = "right" if row["is_right"] else "WRONG"
    print(f"{mark}  {name:30} clean: {', '.join(row['false']) or 'silent'}")
    print_found(row["found"])


def show_verdict(name: str, verdict: Verdict, cost: Cost | None) -> None:
    price = "no price" if verdict.price_ms is None else f"price {verdict.price_ms:.2f} ms"
    if cost is not None and verdict.price_ms is not None:
        price += f" ({verdict.price_ms / cost.lost_ms - 1:+.0%})"
    has_said = "named" if verdict.is_named else "not named" if verdict.is_cheap else "NOT NAMED"
    parts = [
        "healthy" if CASES[name].is_healthy else has_said,
        price if verdict.is_price_right or verdict.is_cheap else f"{price} WRONG",
        *(["cheap"] if verdict.is_cheap else []),
        *([f"FALSE {', '.join(verdict.false)}"] if verdict.false else []),
        *([f"own {', '.join(verdict.own)}"] if verdict.own else []),
    ]
    mark = "right" if verdict.is_right else "WRONG"
    print(f"{mark}  {name:30} {'; '.join(parts)}; {cost or 'not timed'}")
    print_found(verdict.found)


def print_found(found: Sequence[str]) -> None:
    for one in found:
        print(f"           {one}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--parcel", type=Path, default=Path("nccl_faults.tar"))
    parser.add_argument("--set", choices=SETS, help="one set of cases; otherwise all")
    parser.add_argument("--judge", type=Path, nargs="+", help="parcels; nothing is recorded")
    parser.add_argument("--steps", type=int, default=65, help="recorded")
    parser.add_argument("--timed-steps", type=int, default=10, help="in a block")
    parser.add_argument("--blocks", type=int, default=4, help="pairs of blocks")
    parser.add_argument("--warmup-steps", type=int, default=5)
    options = parser.parse_args()
    if options.judge:
        sys.exit(0 if judge_all(options.judge, options.output) else 1)
    options.parcel = options.parcel.absolute()
    if is_rank():
        serve_rank(options.device, lambda place, name: record(place, name, options))
        return
    known = [one for one, case in CASES.items() if options.set in (None, case.set_name)]
    names = choose(known, options.only)
    tasks = [Task(name=name, num_ranks=CASES[name].num_ranks) for name in names]
    run_jobs(tasks, options, show_record)


if __name__ == "__main__":
    main()
