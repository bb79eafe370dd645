"""How often is a healthy run called slow, and how often is a slow rank found?

    python benchmarks/straggler_errors.py [--output FILE] [--effort 0.1]

Work of N peers over S steps is drawn from noise that has no slow rank in it, and from noise with
one rank (or two, or half of them) made slower. The same draws go to `find_stragglers`, persistent
and onset tests together, and to pytscope's published rule: a rank is a straggler when it alone is
slowest with z >= 3 (normal approximation) and its median over the step's median is up by 5 %.

Cells of many values have few draws (one at 1,024 ranks x 10,000 steps), and noises of one kind and
deviation share their random numbers. `upper_ratio` is the 95 % upper limit of the rate: 3/n where
none of n draws gave an alarm. Summaries leave out cells below the least number of steps, where
nobody is ever named.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np

from late_runs import make_noise, make_peer_work
from meshscope.analyze.stragglers.stragglers import find_stragglers
from meshscope.core.layout import Layout
from meshscope.numerics.chance import MIN_STEPS, binomial_tail

RANKS = (2, 4, 8, 64, 256, 1024)
STEPS = (1, 5, 10, 20, 50, 200, 1000, 10_000)
NOISES = (
    ("normal", 0.03, 0.0),
    ("normal", 0.10, 0.0),
    ("lognormal", 0.30, 0.0),
    ("ar", 0.10, 0.50),
    ("ar", 0.10, 0.80),
    ("ar", 0.03, 0.95),
    ("ar", 0.10, 0.95),
    ("drift", 0.03, 0.0),
    ("pauses", 0.03, 0.0),
    ("pareto", 0.05, 0.0),
)
"""Kind, deviation, correlation of a step with the next."""
VALUES_PER_CELL = 300_000
MAX_DRAWS = 100
GOAL_ALARMS = 0.01
GOAL_POWER = 0.95
WORK_NS = 20e6


def name_slow(work: np.ndarray) -> list[int]:
    """What this project says of one group of peers."""
    layout = Layout(dp=work.shape[1])
    half = work * WORK_NS / 2
    found = find_stragglers(make_peer_work(half, half, layout), layout, {})
    return sorted(found.ranks)


def name_slow_as_pytscope(work: np.ndarray) -> list[int]:
    """What the published rule of pytscope 0.2.1 says."""
    num_steps, num_ranks = work.shape
    count = np.bincount(work.argmax(axis=1), minlength=num_ranks)
    expected = num_steps / num_ranks
    z = (count - expected) / math.sqrt(expected * (1 - 1 / num_ranks))
    relative = np.median(work / np.median(work, axis=1, keepdims=True), axis=0) - 1
    found = np.flatnonzero((z >= 3) & (relative >= 0.05))
    return found.tolist() if len(found) == 1 else []


def upper_limit(count: int, draws: int) -> float:
    """The 95 % upper limit of a rate (Clopper and Pearson), by bisection."""
    low, high = count / draws, 1.0
    if count == draws:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 - binomial_tail(count + 1, draws, middle) > 0.05:
            low = middle
        else:
            high = middle
    return high


def count_draws(num_steps: int, num_ranks: int, effort: float) -> int:
    most = VALUES_PER_CELL / (num_steps * num_ranks)
    return max(1, int(effort * min(MAX_DRAWS, most)))


def measure_alarms(noise: tuple[str, float, float], effort: float) -> list[dict[str, object]]:
    kind, sigma, rho = noise
    rows = []
    for num_ranks in RANKS:
        for num_steps in STEPS:
            draws = count_draws(num_steps, num_ranks, effort)
            random = np.random.default_rng(
                [num_ranks, num_steps, len(kind), int(1e3 * sigma + rho)]
            )
            ours = theirs = 0
            for _ in range(draws):
                work = make_noise(kind, random, (num_steps, num_ranks), sigma=sigma, rho=rho)
                ours += bool(name_slow(work))
                theirs += bool(name_slow_as_pytscope(work))
            rows.append(
                {
                    "num_ranks": num_ranks,
                    "num_steps": num_steps,
                    "draws": draws,
                    "alarms": ours,
                    "upper_ratio": round(upper_limit(ours, draws), 4),
                    "pytscope_alarms": theirs,
                }
            )
    return rows


def measure_power(effort: float) -> list[dict[str, object]]:
    rows = []
    cases = [(n, s, 1, "normal") for n in (2, 8, 64, 1024) for s in (20, 30, 50, 200)]
    cases += [(8, 50, 2, "normal"), (8, 50, 4, "normal"), (64, 50, 8, "normal")]
    cases += [(8, 200, 4, "normal")]
    cases += [(n, 60, 1, kind) for n in (4, 64, 256, 1024) for kind in ("pauses", "pareto")]
    for num_ranks, num_steps, num_slow, kind in cases:
        draws = max(10, int(effort * min(100, 4 * VALUES_PER_CELL / (num_steps * num_ranks))))
        random = np.random.default_rng([7, num_ranks, num_steps, num_slow])
        ours = theirs = 0
        for _ in range(draws):
            work = make_noise(kind, random, (num_steps, num_ranks), sigma=0.03)
            slow = sorted(random.permutation(num_ranks)[:num_slow].tolist())
            work[:, slow] *= 1.10
            ours += name_slow(work) == slow
            theirs += name_slow_as_pytscope(work) == slow
        rows.append(
            {
                "num_ranks": num_ranks,
                "num_steps": num_steps,
                "num_slow": num_slow,
                "noise": kind,
                "draws": draws,
                "found_ratio": round(ours / draws, 3),
                "pytscope_found_ratio": round(theirs / draws, 3),
            }
        )
    return rows


def sum_up(rows: list[dict[str, object]]) -> dict[str, object]:
    """All cells of one noise in which a rank can be named at all: fewer steps are silent."""
    rows = [row for row in rows if int(str(row["num_steps"])) >= MIN_STEPS]
    draws = sum(int(str(row["draws"])) for row in rows)
    alarms = sum(int(str(row["alarms"])) for row in rows)
    theirs = sum(int(str(row["pytscope_alarms"])) for row in rows)
    worst = max(rows, key=lambda row: int(str(row["alarms"])) / int(str(row["draws"])))
    return {
        "draws": draws,
        "alarms": alarms,
        "alarm_ratio": round(alarms / draws, 5),
        "upper_ratio": round(upper_limit(alarms, draws), 5),
        "pytscope_alarm_ratio": round(theirs / draws, 4),
        "worst_cell": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--effort", type=float, default=1.0, help="share of the draws")
    arguments = parser.parse_args()
    begin = time.process_time()
    alarms = {}
    for noise in NOISES:
        name = f"{noise[0]} {noise[1]}" + (f" rho {noise[2]}" if noise[0] == "ar" else "")
        rows = measure_alarms(noise, arguments.effort)
        alarms[name] = {"summary": sum_up(rows), "cells": rows}
        print(name, json.dumps(alarms[name]["summary"]), flush=True)
    power = measure_power(arguments.effort)
    for row in power:
        print(json.dumps(row))
    result = {
        "machine": {"cores": os.cpu_count(), "kernel": platform.release().split("-")[0]},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "goal_alarm_ratio": GOAL_ALARMS,
        "goal_power_ratio": GOAL_POWER,
        "cpu_s": round(time.process_time() - begin, 1),
        "false_alarms": alarms,
        "power_10_percent_slow": power,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
