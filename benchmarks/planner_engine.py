"""The planner against the engine on 8 CPU processes: peak memory and step time of many layouts.

    python benchmarks/planner_engine.py --work FOLDER --measure --seconds 240    # resumes
    python benchmarks/planner_engine.py --work FOLDER -o benchmarks/results/planner_engine.json

Layouts are measured twice, one after the other round; a measurement in which others used more than
a tenth of a core is taken again, and of two the less disturbed one counts.

Every layout trains the same model on the same global batch with all ranks on the machine's cores,
recorded, with a memory profile of one step. Measured memory is what `meshscope memory` counts:
tensor bytes at a rank's peak. Constants of time are fitted on `CALIBRATION` alone, by the function
that `train --predict-from` uses; all other layouts are judged. A second process notes how much of
the cores others used while steps ran. Times are judged twice: as if all cores were free, and with
the cores that others left as the processors that ranks share, which is a fact of the placement and
not fitted. Order is judged for pairs whose measured steps differ by more than the two spreads (half
of the middle nine tenths) together. `HELD_OUT` were chosen and committed before any of them had
run, and are summed up by themselves.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

WORLD_SIZE = 8
GLOBAL_BATCH = 16
NUM_STEPS, NUM_WARMUP = 11, 2
ROUNDS = (1, 2)
"""Every layout is measured so often, a whole round of all layouts after the other."""
MODEL = {
    "vocab_size": 1024, "num_layers": 8, "hidden_size": 192, "num_heads": 8, "num_kv_heads": 8,
    "ffn_hidden_size": 512, "sequence_length": 128,
}  # fmt: skip
CALIBRATION = ("dp2 tp2 pp2 1f1b", "dp8 b2")
LAYOUTS = {
    "dp2 tp2 pp2 1f1b": {"parallel": {"dp": 2, "tp": 2, "pp": 2}, "b": 2},
    "dp8 b1": {"parallel": {"dp": 8}, "b": 1},
    "dp8 b2": {"parallel": {"dp": 8}, "b": 2},
    "dp8 zero3": {"parallel": {"dp": 8, "data_parallel": "fsdp"}, "b": 1},
    "dp4 tp2": {"parallel": {"dp": 4, "tp": 2}, "b": 2},
    "dp4 tp2 sp recompute": {
        "parallel": {"dp": 4, "tp": 2, "sequence_parallel": True}, "b": 2, "memory": "standard",
    },
    "dp2 tp4": {"parallel": {"dp": 2, "tp": 4}, "b": 4},
    "tp8": {"parallel": {"tp": 8}, "b": 4},
    "dp4 pp2 1f1b": {"parallel": {"dp": 4, "pp": 2}, "b": 1},
    "dp4 pp2 gpipe zero1": {
        "parallel": {
            "dp": 4, "pp": 2, "schedule": "gpipe", "data_parallel": "fsdp", "zero_stage": 1,
        },
        "b": 1,
    },
    "dp2 pp4 interleaved": {
        "parallel": {"dp": 2, "pp": 4, "schedule": "interleaved_1f1b", "chunks_per_rank": 2},
        "b": 1,
    },
    "dp2 pp4 recompute": {"parallel": {"dp": 2, "pp": 4}, "b": 2, "memory": "standard"},
    "tp2 pp4 zb_v": {"parallel": {"tp": 2, "pp": 4, "schedule": "zb_v"}, "b": 2},
    "pp8 1f1b": {"parallel": {"pp": 8}, "b": 1},
    "pp8 zb_h1": {"parallel": {"pp": 8, "schedule": "zb_h1"}, "b": 2},
    "dp2 tp2 pp2 recompute": {
        "parallel": {"dp": 2, "tp": 2, "pp": 2}, "b": 4, "memory": "standard",
    },
}  # fmt: skip
HELD_OUT = {
    "dp2 tp2 pp2 gpipe": {"parallel": {"dp": 2, "tp": 2, "pp": 2, "schedule": "gpipe"}, "b": 2},
    "dp2 tp2 pp2 zb_h1": {"parallel": {"dp": 2, "tp": 2, "pp": 2, "schedule": "zb_h1"}, "b": 2},
    "dp2 tp4 sp": {"parallel": {"dp": 2, "tp": 4, "sequence_parallel": True}, "b": 4},
    "tp4 pp2 1f1b": {"parallel": {"tp": 4, "pp": 2}, "b": 4},
    "dp4 tp2 zero1": {
        "parallel": {"dp": 4, "tp": 2, "data_parallel": "fsdp", "zero_stage": 1}, "b": 2,
    },
    "dp2 pp4 zero1": {
        "parallel": {"dp": 2, "pp": 4, "data_parallel": "fsdp", "zero_stage": 1}, "b": 2,
    },
    "dp8 zero1": {"parallel": {"dp": 8, "data_parallel": "fsdp", "zero_stage": 1}, "b": 2},
    "dp4 pp2 gpipe": {"parallel": {"dp": 4, "pp": 2, "schedule": "gpipe"}, "b": 1},
}  # fmt: skip
"""Chosen on 2026-11-19, before any of them had run."""
ALL_LAYOUTS = {**LAYOUTS, **HELD_OUT}
MOST_OTHERS = 0.1
"""Cores; a measurement in which others used more is taken again."""
GOAL_MEMORY = 0.05
GOAL_TIME = 0.15


def make_config(name, run_dir):
    from meshscope.core.config.model_config import ModelConfig
    from meshscope.core.config.train_config import (
        BatchConfig,
        MemoryConfig,
        ParallelConfig,
        RecordingConfig,
        TrainConfig,
    )

    given = ALL_LAYOUTS[name]
    dp = given["parallel"].get("dp", 1)
    return TrainConfig(
        model=ModelConfig(**MODEL),
        num_steps=NUM_STEPS,
        name="planner",
        device="cpu",
        log_every=1000,
        parallel=ParallelConfig(**given["parallel"]),
        batch=BatchConfig(
            microbatch_size=given["b"], num_microbatches=GLOBAL_BATCH // (dp * given["b"])
        ),
        memory=MemoryConfig(strategy=given.get("memory", "basic")),
        # No trace window is reached: the memory of one step is all that is profiled.
        recording=RecordingConfig(run_dir=run_dir, profiling="skip=1000,active=1,ranks=0"),
    )


# --- measuring -----------------------------------------------------------------------------------


def watch_cores(path):
    """Until killed: nanoseconds of the clock, and ticks of all processes and of this session."""
    session = os.getsid(0)
    with path.open("w", encoding="utf-8") as file:
        while True:
            words = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
            ticks = list(map(int, words))
            busy = sum(ticks) - ticks[3] - ticks[4]
            file.write(f"{time.monotonic_ns()} {busy} {count_ticks(session)}\n")
            file.flush()
            time.sleep(0.2)


def count_ticks(session):
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total


def find_folder(work, name, number):
    return work / str(number) / name.replace(" ", "_")


def is_measured(folder):
    """Whether it was, and others left the cores alone; one that was disturbed is deleted."""
    if not (folder / "cores.txt").is_file():
        return False
    if read_others(folder, range(NUM_WARMUP, NUM_STEPS)) <= MOST_OTHERS:
        return True
    shutil.rmtree(folder)
    return False


def read_others(folder, steps):
    """Cores that others used in these steps."""
    from meshscope.store.read.run import open_run

    table = open_run(folder).last_attempt.ranks[0].read("steps")
    chosen = np.isin(table["step"], steps)
    clock, busy, own = np.loadtxt(folder / "cores.txt").T
    inside = clock >= table["start_host_mono_ns"][chosen].min()
    inside &= clock <= table["end_host_mono_ns"][chosen].max()
    clock, busy, own = clock[inside], busy[inside], own[inside]
    ticks = np.diff((busy - own)[[0, -1]])[0]
    seconds = np.diff(clock[[0, -1]])[0] / 1e9
    return max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds)


def measure(name, number, work):
    from meshscope.cli.jobs.train import train_rank
    from meshscope.engine.launch.local_ranks import LocalLaunch, run_local_ranks

    folder = find_folder(work, name, number)
    folder.parent.mkdir(exist_ok=True)
    config = make_config(name, folder)
    watch = subprocess.Popen([sys.executable, __file__, "--watch", str(work / "cores.txt")])
    start_s = time.monotonic()
    try:
        outcome = run_local_ranks(
            partial(train_rank, config),
            LocalLaunch(
                world_size=WORLD_SIZE, run_dir=folder, run_id=folder.name,
                label=config.layout.label, say=print,
            ),
        )  # fmt: skip
    finally:
        watch.terminate()
        watch.wait()
    print(f"{name}: {outcome.message or 'trained'} in {time.monotonic() - start_s:.1f} s")
    if outcome.exit_code == 0:
        (work / "cores.txt").rename(folder / "cores.txt")


def measure_missing(work, seconds):
    wanted = [(name, number) for number in ROUNDS for name in ALL_LAYOUTS]
    missing = [one for one in wanted if not is_measured(find_folder(work, *one))]
    end_s = time.monotonic() + seconds
    while missing and time.monotonic() < end_s:
        measure(*missing.pop(0), work)
    print(f"{len(missing)} measurements are left")


# --- judging -------------------------------------------------------------------------------------


def open_study(folder):
    from meshscope.analyze.study import Study
    from meshscope.store.read.run import open_run

    return Study(open_run(folder).last_attempt)


def read_run(folder):
    """The study, milliseconds of its steady steps, and the cores that others had in them."""
    study = open_study(folder)
    cores = read_others(folder, study.budget.steps)
    walls_ms = np.median(study.budget.wall_ns, axis=0) / 1e6
    return study, walls_ms, cores


def compare_memory(name, folder):
    """Tensor bytes of each stage's fullest rank at its peak, measured and predicted."""
    from meshscope.analyze.memory.memory_attribution import summarize_memory
    from meshscope.core.config.memory_model import estimate_memory
    from meshscope.store.read.memory_points import read_memory

    stages = summarize_memory(read_memory(folder)).stages
    estimate = estimate_memory(make_config(name, folder), device_type="cpu")
    predicted = [rank.total_bytes for rank in estimate.ranks]
    measured = [stage.largest_bytes for stage in sorted(stages, key=lambda one: one.stage)]
    worst = max(predicted) / max(measured) - 1
    return {
        "measured_mib": [round(one / 2**20, 2) for one in measured],
        "predicted_mib": [round(one / 2**20, 2) for one in predicted],
        "peak_error_percent": round(100 * worst, 2),
        "worst_stage_error_percent": round(
            100 * max((p / m - 1 for p, m in zip(predicted, measured, strict=True)), key=abs), 2
        ),
    }


def price(job, name, num_processors):
    from meshscope.plan.memory.engine_layout import make_candidate
    from meshscope.plan.timing.pricing import price_candidates

    cluster = replace(job.cluster, num_processors=num_processors)
    candidate = make_candidate(make_config(name, None))
    return price_candidates(replace(job, cluster=cluster), [candidate])[0]


def judge_times(runs, *, knows_load):
    """Step times of all layouts; with `knows_load`, on the cores that others left."""
    from meshscope.plan.predict import make_host_job
    from meshscope.plan.timing.from_run import fit_host_runs

    num_cores = len(os.sched_getaffinity(0))
    left = {
        name: max(0.25, num_cores - others) if knows_load else num_cores
        for name, (_, _, others) in runs.items()
    }
    job = make_host_job(make_config(CALIBRATION[0], None), num_cores=num_cores, memory_bytes=0)
    job, fitted = fit_host_runs(
        job, [runs[name][0] for name in CALIBRATION], [left[name] for name in CALIBRATION]
    )
    rows = {}
    for name, (study, walls_ms, _) in runs.items():
        low, high = np.quantile(walls_ms, (0.05, 0.95))
        # What is fitted, and what a report compares with a prediction.
        middle = study.step_ns / 1e6
        found = price(job, name, left[name])
        rows[name] = {
            "measured_ms": round(float(middle), 1),
            "spread_ms": round(float(high - low) / 2, 1),
            "predicted_ms": round(1e3 * found.step_s, 1),
            "error_percent": round(100 * (1e3 * found.step_s / float(middle) - 1), 1),
            "is_calibration": name in CALIBRATION,
        }
    known, held_out = (
        [row for name, row in rows.items() if name in names and not row["is_calibration"]]
        for names in (LAYOUTS, HELD_OUT)
    )
    return {
        "fitted": list(fitted),
        "layouts": rows,
        **sum_up(known),
        "held_out": sum_up(held_out) if held_out else None,
    }


def sum_up(judged):
    # Not the rounded ones: 15.04 % is not within 15.
    errors = [100 * abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in judged]
    right, total = count_ordered(judged)
    return {
        "judged": len(judged),
        f"within_{100 * GOAL_TIME:.0f}_percent": sum(e <= 100 * GOAL_TIME for e in errors),
        "mean_error_percent": round(float(np.mean(errors)), 1),
        "worst_error_percent": round(max(errors), 1),
        "pairs_in_order": [right, total],
    }


def count_ordered(rows):
    """Of pairs that differ by more than both spreads, how many are predicted in their order."""
    right = total = 0
    for index, one in enumerate(rows):
        for other in rows[:index]:
            difference = one["measured_ms"] - other["measured_ms"]
            if abs(difference) > one["spread_ms"] + other["spread_ms"]:
                total += 1
                right += bool(difference * (one["predicted_ms"] - other["predicted_ms"]) > 0)
    return right, total


def judge(work):
    found = {
        name: [
            (read_run(folder), folder)
            for number in ROUNDS
            if ((folder := find_folder(work, name, number)) / "cores.txt").is_file()
        ]
        for name in ALL_LAYOUTS
    }
    # Of two measurements the one that others disturbed less.
    best = {name: min(rows, key=lambda row: row[0][2]) for name, rows in found.items() if rows}
    runs = {name: run for name, (run, _) in best.items()}
    memory = {name: compare_memory(name, folder) for name, (_, folder) in best.items()}
    errors = [abs(one["peak_error_percent"]) for one in memory.values()]
    return {
        "calibration": list(CALIBRATION),
        "cores": len(os.sched_getaffinity(0)),
        "measurements": {
            name: [
                {"step_ms": round(study.step_ns / 1e6, 1), "cores_of_others": round(others, 2)}
                for (study, _, others), _ in rows
            ]
            for name, rows in found.items()
        },
        "memory": {
            "layouts": memory,
            f"within_{100 * GOAL_MEMORY:.0f}_percent": sum(e <= 100 * GOAL_MEMORY for e in errors),
            "of": len(errors),
            "worst_percent": max(errors),
        },
        "time": judge_times(runs, knows_load=False),
        "time_on_the_cores_left_by_others": judge_times(runs, knows_load=True),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, help="folder of the runs; what is there is kept")
    parser.add_argument("--measure", action="store_true", help="run layouts that are missing")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no layout after these")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.watch:
        watch_cores(given.watch)
    elif given.measure:
        given.work.mkdir(parents=True, exist_ok=True)
        measure_missing(given.work, given.seconds)
    else:
        found = judge(given.work)
        print(json.dumps(found, indent=1))
        if given.output:
            given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
