"""Does the budget say what the device did? Held against the union of kernels in the same program.

    python benchmarks/nccl_truth.py --parcel OUT.tar [--only ddp pp4]     # records; needs CUDA
    python benchmarks/nccl_truth.py --judge OUT.tar [--output FILE]       # anywhere
    python benchmarks/nccl_truth.py --device cpu --steps 8 --parcel OUT.tar  # only whether it runs

Each program is recorded for some steps; then, in the same processes and without the recorder, timed
and traced. The truth are unions of kernels on each rank: compute, exposed communication, copies
alone, idle. A window of torch.profiler slows hosts down, so the truth is a range: shares of the
window's own wall clock, and shares of the steps timed without it, in which idle time is shorter by
what the window added. Checkpoints, evaluations and compilations cost what steps take longer with
them; kernels are traced in steps without them. A disk or a compiler is not as fast later as it was
in the recording: together these cost what the recorded steps took longer than plain ones.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_bench import FAILED_KEY, Place, add_options, choose, is_rank, run_jobs, serve_rank
from nccl_catalog import PROGRAMS
from nccl_kernels import trace_steps
from nccl_parcel import pack, unpack
from nccl_programs import Program, Training

NUM_TRACED_STEPS = 6
MAX_DIFFERENCE = 0.03
"""Of the wall clock."""
TRUTH_FILE = "truth.json"

PART_OF_SHARE = {
    "useful compute": "compute",
    "kernel inefficiency": "compute",
    "compute": "compute",
    "exposed transfer": "exposed",
    "exposed wait": "exposed",
    "exposed communication": "exposed",
    "exposed, nothing queued": "exposed",
    "pipeline bubble": "exposed",
    "exposed copies": "copies_alone",
    "copies": "copies_alone",
    "host/launch gap": "idle",
    "input stall": "idle",
    "logging": "idle",
    "other": "idle",
    "idle": "idle",
    "checkpoint": "checkpoint",
    "eval": "eval",
    "compile": "compile",
    "compilation": "compile",
    "recompilation": "compile",
}
"""The part of the truth that a line of the budget is about, by the beginning of its name. A rank
that waits in a kernel of NCCL communicates, also where the budget calls it a bubble."""

PARTS = ("compute", "exposed", "copies_alone", "idle")


# --- recording -------------------------------------------------------------------------------


def record(place: Place, name: str, options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    program = PROGRAMS[name]
    training = program.build(place)
    # What comes every so many steps has been there once: the first time costs more than later.
    for _ in range(max(options.warmup_steps, program.period)):
        training.step()
    place.meet()
    folder = place.folder / name
    caught, recorded_ms = record_steps(training, folder / "run", options.steps)
    truth = measure_truth(place, program, training, options)
    training.close()
    truth |= {
        "num_ranks": place.num_ranks,
        "caught": place.gather(caught),
        "recorded_ms": place.gather(recorded_ms),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    place.meet()
    if place.rank == 0:
        (folder / TRUTH_FILE).write_text(json.dumps(truth), encoding="utf-8")
        pack(folder, options.parcel)
    return truth


def record_steps(training: Training, folder: Path, num_steps: int) -> tuple[dict[str, int], float]:
    """What the recorder caught; how long a step took, from the end of the first to that of the
    last. Collective."""
    training.place.meet()
    recorder = training.start_recording(folder)
    ends = []
    for _ in range(num_steps):
        training.step()
        ends.append(time.perf_counter())
    training.place.synchronize()
    recorded_ms = 1e3 * (ends[-1] - ends[0]) / max(len(ends) - 1, 1)
    return training.stop_recording(recorder), recorded_ms


def time_steps(training: Training, num_steps: int) -> float:
    """Milliseconds a step, from an empty device to an empty one. Collective."""
    training.place.meet()
    begin = time.perf_counter()
    for _ in range(num_steps):
        training.step()
    training.place.synchronize()
    return 1e3 * (time.perf_counter() - begin) / num_steps


def measure_truth(
    place: Place, program: Program, training: Training, options: argparse.Namespace
) -> dict[str, Any]:
    num_steps = max(1, options.timed_steps // program.period) * program.period
    wall_ms = place.gather(time_steps(training, num_steps))
    program.limit(training, [])
    plain_ms = place.gather(time_steps(training, num_steps)) if program.phases else wall_ms
    phases = {}
    for phase in program.phases:
        program.limit(training, [phase])
        spent = place.gather(time_steps(training, num_steps))
        phases[phase] = [max(0.0, a - b) for a, b in zip(spent, plain_ms, strict=True)]
    program.limit(training, [])
    kernels = place.gather(trace_steps(place, training.step, NUM_TRACED_STEPS))
    return {
        "wall_ms": wall_ms,
        "plain_ms": plain_ms,
        "phases_ms": phases,
        "kernels_ms": kernels,
    }


def show_truth(name: str, result: dict[str, Any]) -> None:
    if FAILED_KEY in result:
        return
    wall = statistics.fmean(result["wall_ms"])
    text = f"{name:15} wall {wall:.2f} ms"
    if rows := [row for row in result["kernels_ms"] if row is not None]:
        means = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        text += "; traced " + "  ".join(f"{key} {ms:.2f}" for key, ms in means.items())
    for phase, ms in result["phases_ms"].items():
        text += f"  {phase} {statistics.fmean(ms):.2f}"
    caught = f"  CAUGHT {result['caught']}" if any(result["caught"]) else ""
    print(f"{text}  ({result['seconds']} s){caught}", flush=True)


# --- judging ---------------------------------------------------------------------------------


def judge(folder: Path) -> dict[str, Any]:
    """One program: each part of the truth, what the budget says, and how far it is off."""
    truth = json.loads((folder / TRUTH_FILE).read_text(encoding="utf-8"))
    truth.setdefault("recorded_ms", read_recorded_ms(folder / "run"))
    ranges = [find_ranges(truth, rank) for rank in range(truth["num_ranks"])]
    said = read_budget(folder / "run")
    if isinstance(said, str):
        return {"failed": said}
    if not any(ranges):
        return {"failed": "no kernels were traced", "said": said}
    rows = {}
    for part in dict.fromkeys([*PARTS, *truth["phases_ms"], *said]):
        if part == "lines":
            continue
        low = statistics.fmean(one.get(part, (0.0, 0.0))[0] for one in ranges)
        high = statistics.fmean(one.get(part, (0.0, 0.0))[1] for one in ranges)
        share = statistics.fmean(said.get(part, [0.0] * len(ranges)))
        worst = max(
            find_distance(own, *one.get(part, (0.0, 0.0)))
            for own, one in zip(said.get(part, [0.0] * len(ranges)), ranges, strict=True)
        )
        rows[part] = {
            "truth": [round(low, 4), round(high, 4)],
            "budget": round(share, 4),
            "difference": round(find_distance(share, low, high), 4),
            "worst_rank": round(worst, 4),
        }
    is_right = all(row["difference"] <= MAX_DIFFERENCE for row in rows.values())
    wall_ms = round(statistics.fmean(truth["wall_ms"]), 3)
    return {"is_right": is_right, "wall_ms": wall_ms, "parts": rows, "lines": said["lines"]}


def find_distance(value: float, low: float, high: float) -> float:
    return max(low - value, value - high, 0.0)


def find_ranges(truth: Mapping[str, Any], rank: int) -> dict[str, tuple[float, float]]:
    """Shares of a rank's wall clock, by the window's own wall and by that of undisturbed steps."""
    kernels = truth["kernels_ms"][rank]
    if kernels is None:
        return {}
    phases = {phase: ms[rank] for phase, ms in truth["phases_ms"].items()}
    longer_ms = max(truth["recorded_ms"][rank] - truth["plain_ms"][rank], 0.0)
    scale = longer_ms / max(sum(phases.values()), 1e-9)
    phases = {phase: scale * ms for phase, ms in phases.items()}
    found = []
    for step_ms in (kernels["wall"], min(kernels["wall"], truth["plain_ms"][rank])):
        busy = {part: kernels[part] for part in PARTS if part != "idle"}
        idle = max(step_ms - sum(busy.values()), 0.0)
        wall = sum(busy.values()) + idle + sum(phases.values())
        found.append({k: ms / wall for k, ms in {**busy, "idle": idle, **phases}.items()})
    return {
        part: (min(one[part] for one in found), max(one[part] for one in found))
        for part in found[0]
    }


def read_recorded_ms(path: Path) -> list[float]:
    """For parcels that do not say it: by the ends of the recorded steps."""
    import meshscope

    found = []
    for recording in meshscope.study(path).study.attempt:
        ends = recording.read("steps")["end_host_mono_ns"]
        found.append(1e-6 * float(ends[-1] - ends[0]) / max(len(ends) - 1, 1))
    return found


def read_budget(path: Path) -> dict[str, Any] | str:
    """Shares of the wall clock by part, one for each rank; and all lines. Or why there is none."""
    import meshscope
    from meshscope.core.unavailable import Unavailable

    budget = meshscope.study(path).study.budget
    if isinstance(budget, Unavailable):
        return budget.reason
    shares = budget.of_ranks_ns() / budget.run.wall_ns[:, None]
    said: dict[str, Any] = {}
    for index, line in enumerate(budget.lines):
        part = find_part(line.name)
        own = shares[:, index].tolist()
        said[part] = [a + b for a, b in zip(said.get(part, [0.0] * len(own)), own, strict=True)]
    said["lines"] = {
        line.name: round(float(shares[:, index].mean()), 4)
        for index, line in enumerate(budget.lines)
    }
    return said


def find_part(line_name: str) -> str:
    """By the longest name of a share that it begins with; its own name where none does."""
    fitting = [name for name in PART_OF_SHARE if line_name.startswith(name)]
    return PART_OF_SHARE[max(fitting, key=len)] if fitting else line_name


def judge_all(parcels: Sequence[Path], output: Path | None) -> bool:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in unpack(list(parcels), Path(folder)):
            results[path.name] = judge(path)
            show_verdict(path.name, results[path.name])
    num_right = sum(one.get("is_right", False) for one in results.values())
    print(f"{num_right} of {len(results)} programs within {MAX_DIFFERENCE:.0%} of the wall clock")
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return num_right == len(results)


def show_verdict(name: str, result: Mapping[str, Any]) -> None:
    if "parts" not in result:
        print(f"{name:15} not judged: {result['failed']}")
        return
    print(f"{name:15} {'right' if result['is_right'] else 'WRONG'}, {result['wall_ms']:.1f} ms")
    for part, row in result["parts"].items():
        low, high = row["truth"]
        mark = "" if row["difference"] <= MAX_DIFFERENCE else "  <<<"
        print(
            f"    {part:14} budget {row['budget']:6.1%}  kernels {low:6.1%} to {high:6.1%}  "
            f"off {100 * row['difference']:4.1f} points, worst rank "
            f"{100 * row['worst_rank']:4.1f}{mark}"
        )
    shown = [f"{line} {share:.1%}" for line, share in result["lines"].items() if share >= 0.0005]
    print(f"    lines: {', '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--parcel", type=Path, default=Path("nccl_truth.tar"))
    parser.add_argument("--judge", type=Path, nargs="+", help="parcels; nothing is recorded")
    parser.add_argument("--steps", type=int, default=70, help="recorded")
    parser.add_argument("--timed-steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=5)
    options = parser.parse_args()
    if options.judge:
        sys.exit(0 if judge_all(options.judge, options.output) else 1)
    options.parcel = options.parcel.absolute()
    if is_rank():
        serve_rank(options.device, lambda place, name: record(place, name, options))
        return
    names = choose(list(PROGRAMS), options.only)
    run_jobs([PROGRAMS[name].task for name in names], options, show_truth)


if __name__ == "__main__":
    main()
