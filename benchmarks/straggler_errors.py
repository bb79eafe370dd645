"""How often is a healthy run called slow, and how often is a slow rank found?

    python benchmarks/straggler_errors.py [--state FILE] [--output FILE] [--draws 299]
    python benchmarks/straggler_errors.py --state FILE --seconds 120   # some cells, the rest later

Work of N peers over S steps is drawn from noise that has no slow rank in it, and from noise with
faults of known kinds. The draws go to the statistics behind each rule that states a chance:
ST001/ST002 (persistent), ST003 (onset), ST005 (fewer than 10 steps), TI001 and TI002 (on the time
of the slowest peer, for which all wait). An alarm is a finding that may be above LOW. TI001 is not
counted in the noise in which all ranks drift: there it is right. ST004 and PA002 describe how noisy
work is and test nothing.

A cell whose N·S is at most 10^5 has `--draws` draws: 299 without an alarm put the 95 % upper limit
(Clopper and Pearson) of its rate at 1 %. A rule with an alarm is asked again about ten times as
many draws from other seeds, and only its second count is kept, so that the limit says more
(`draws_of`). Larger cells have few draws and are pooled per kind of noise. Each finished cell is a
line of the state file; a run that is started again goes on after the last, and cells that were not
reached are listed. `--ranks` measures cells of some N only. The published rule of pytscope has the
first draws.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np

from late_runs import make_noise, make_peer_work
from meshscope.analyze.stragglers.few_steps_lead import measure_lead
from meshscope.analyze.stragglers.step_pattern import (
    MIN_STEPS as MIN_PATTERN_STEPS,
)
from meshscope.analyze.stragglers.step_pattern import (
    find_recurrences,
    find_slow_steps,
    measure_drift,
)
from meshscope.analyze.stragglers.stragglers import Stragglers, find_stragglers
from meshscope.core.layout import Layout
from meshscope.diagnose.rules.few_steps import MAX_CHANCE, MIN_EXCESS_RATIO
from meshscope.diagnose.rules.step_time import PeriodicSlowSteps, StepTimeDrift
from meshscope.numerics.chance import MIN_STEPS, SIGNIFICANCE_RATIO, binomial_tail

RANKS = (2, 4, 8, 64, 256, 1024)
STEPS = (5, 10, 20, 50, 200, 1000, 10_000)
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
RULES = ("ST001", "ST003", "ST005", "TI001", "TI002")
MAX_FULL_VALUES = 100_000
"""N·S of a cell up to which it has all draws."""
POOLED_DRAWS = {
    (64, 10_000): 45,
    (256, 1000): 120,
    (256, 10_000): 8,
    (1024, 200): 120,
    (1024, 1000): 20,
    (1024, 10_000): 2,
}
REDRAW_FACTOR = 10
MANY_SLOW, MANY_SLOW_SHARE = 256, 15
"""A draw with so many slow ranks takes seconds, as each has its interval: it has fewer draws."""
BATCH_VALUES = 400_000
"""Values drawn at a time."""
GOAL_ALARMS = 0.01
GOAL_POWER = 0.95
WORK_NS = 20e6
PER_NODE = 8


def bound_rate(count: int, draws: int, *, upper: bool = True) -> float:
    """The 95 % upper or lower limit of a rate (Clopper and Pearson), by bisection."""
    if not upper:
        return 1.0 - bound_rate(draws - count, draws)
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


def find_slow(work: np.ndarray, *, per_node: int = 0) -> Stragglers:
    """What this project says of one group of peers, `per_node` of them on a host."""
    layout = Layout(dp=work.shape[1])
    hosts = {rank: f"node{rank // per_node}" for rank in range(work.shape[1])} if per_node else {}
    half = work * WORK_NS / 2
    return find_stragglers(make_peer_work(half, half, layout), layout, hosts)


def list_alarms(work: np.ndarray, kind: str, rules: Collection[str] = RULES) -> set[str]:
    """Those of the rules that would have something to say."""
    found: set[str] = set()
    if {*rules} & {"ST001", "ST003", "ST005"}:
        found |= list_slow(work)
    if {*rules} & {"TI001", "TI002"}:
        found |= list_patterns(work, kind)
    return found & {*rules}


def list_slow(work: np.ndarray) -> set[str]:
    num_steps = len(work)
    found = set()
    if num_steps >= MIN_STEPS:
        stragglers = find_slow(work)
        found |= {"ST001"} if stragglers.slow_sets else set()
        found |= {"ST003"} if stragglers.fail_slow_sets else set()
    else:
        lead = measure_lead(work * WORK_NS)
        is_clear = lead.least_ratio >= MIN_EXCESS_RATIO.default and lead.chance < MAX_CHANCE.default
        found |= {"ST005"} if is_clear and lead.lasting_chance < SIGNIFICANCE_RATIO else set()
    return found


def list_patterns(work: np.ndarray, kind: str) -> set[str]:
    num_steps = len(work)
    found = set()
    if num_steps >= MIN_PATTERN_STEPS:
        periods = find_slow_steps(np.arange(num_steps), work.max(axis=1) * WORK_NS)
        drift = measure_drift(periods)
        least_change, most_chance = (one.default for one in StepTimeDrift.thresholds[:2])
        is_drift = drift.change_ratio >= least_change and drift.p_value <= most_chance
        found |= {"TI001"} if is_drift and kind != "drift" else set()
        least_share = PeriodicSlowSteps.thresholds[0].default
        recurs = (periods.share_of(one.rows) >= least_share for one in find_recurrences(periods))
        found |= {"TI002"} if any(recurs) else set()
    return found


def names_one_as_pytscope(work: np.ndarray) -> bool:
    """Whether the published rule of pytscope 0.2.1 names a rank."""
    num_steps, num_ranks = work.shape
    count = np.bincount(work.argmax(axis=1), minlength=num_ranks)
    expected = num_steps / num_ranks
    z = (count - expected) / math.sqrt(expected * (1 - 1 / num_ranks))
    relative = np.median(work / np.median(work, axis=1, keepdims=True), axis=0) - 1
    return int(np.count_nonzero((z >= 3) & (relative >= 0.05))) == 1


def name_noise(noise: tuple[str, float, float]) -> str:
    return f"{noise[0]} {noise[1]:g}" + (f" rho {noise[2]:g}" if noise[0] == "ar" else "")


def draw(
    noise: tuple[str, float, float], num_steps: int, num_ranks: int, draws: int, seed: int
) -> Iterator[np.ndarray]:
    """Work [step, rank], draw by draw; many are drawn together, as columns are independent."""
    kind, sigma, rho = noise
    name = [ord(letter) for letter in name_noise(noise)]
    random = np.random.default_rng([seed, num_ranks, num_steps, *name])
    at_once = max(1, BATCH_VALUES // (num_steps * num_ranks))
    for first in range(0, draws, at_once):
        count = min(at_once, draws - first)
        batch = make_noise(kind, random, (num_steps, num_ranks * count), sigma=sigma, rho=rho)
        for index in range(count):
            yield np.ascontiguousarray(batch[:, index * num_ranks : (index + 1) * num_ranks])


def count_alarms(
    noise: tuple[str, float, float], num_ranks: int, num_steps: int, draws: int
) -> dict[str, object]:
    alarms = dict.fromkeys(RULES, 0)
    theirs = 0
    for work in draw(noise, num_steps, num_ranks, draws, seed=1):
        theirs += names_one_as_pytscope(work)
        for rule in list_alarms(work, noise[0]):
            alarms[rule] += 1
    return {"draws": draws, "alarms": alarms, "pytscope_alarms": theirs}


def count_again(
    noise: tuple[str, float, float], num_ranks: int, num_steps: int, draws: int, rules: list[str]
) -> dict[str, int]:
    """The alarms of some rules in other draws."""
    alarms = dict.fromkeys(rules, 0)
    for work in draw(noise, num_steps, num_ranks, draws, seed=2):
        for rule in list_alarms(work, noise[0], rules):
            alarms[rule] += 1
    return alarms


def measure_cell(
    noise: tuple[str, float, float], num_ranks: int, num_steps: int, draws: int
) -> dict[str, object]:
    is_full = num_ranks * num_steps <= MAX_FULL_VALUES
    draws = draws if is_full else max(1, POOLED_DRAWS[num_ranks, num_steps] * draws // 299)
    first = count_alarms(noise, num_ranks, num_steps, draws)
    row: dict[str, object] = {"noise": name_noise(noise), "num_ranks": num_ranks}
    row |= {"num_steps": num_steps, "is_pooled": not is_full}
    alarms: dict[str, int] = first["alarms"]  # type: ignore[assignment]
    found = {rule: count for rule, count in alarms.items() if count}
    if is_full and found:
        row["first_alarms"] = found
        row["draws_of"] = dict.fromkeys(found, REDRAW_FACTOR * draws)
        alarms |= count_again(noise, num_ranks, num_steps, REDRAW_FACTOR * draws, list(found))
    return row | first


def count_draws(row: dict[str, object], rule: str) -> int:
    """Draws behind a rule's alarms in a cell."""
    return int(row.get("draws_of", {}).get(rule, row["draws"]))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a known kind, and who must be named."""

    name: str
    num_ranks: int
    num_steps: int
    noise: tuple[str, float, float]
    shape: Callable[[np.ndarray], np.ndarray]
    """Steps as 0 to 1 to the factor of the slow ranks' work."""
    num_slow: int = 1
    """0: the fault is no slow rank, and nobody may be named."""
    is_node: bool = False

    @property
    def label(self) -> str:
        noise = name_noise(self.noise)
        return f"{self.name}, N {self.num_ranks}, S {self.num_steps}, {noise}"


def shift(by: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda time: np.full_like(time, 1 + by)


def grow(by: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda time: 1 + by * time


def begin_at(onset: float, by: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda time: np.where(time >= onset, 1 + by, 1.0)


def oscillate(by: float, cycles: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda time: 1 + by * (1 + np.sin(2 * np.pi * cycles * time)) / 2


def burst(by: float, cycles: int, share: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda time: np.where((time * cycles) % 1 < share, 1 + by, 1.0)


def list_faults() -> list[Fault]:
    normal, pauses, pareto = ("normal", 0.03, 0.0), ("pauses", 0.03, 0.0), ("pareto", 0.05, 0.0)
    faults = []

    def add(
        name: str, size: int, steps: int, noise: tuple[str, float, float], **more: object
    ) -> None:
        fault = Fault(name=name, num_ranks=size, num_steps=steps, noise=noise, **more)  # type: ignore[arg-type]
        faults.append(fault)

    for noise in (normal, pauses, pareto):
        for size in (2, 4, 8, 64, 256, 1024):
            add("10 % in every step", size, 60, noise, shape=shift(0.10))
    for size in (2, 8, 64, 1024):
        for steps in (20, 30, 200):
            add("10 % in every step", size, steps, normal, shape=shift(0.10))
    for by in (0.3, 0.6, 1.0):
        for size in (2, 4, 64, 1024):
            for noise in (normal, pauses):
                add(f"drift 0 to {by:.0%}", size, 60, noise, shape=grow(by))
    for size in (2, 8, 64, 1024):
        add("onset at 2/3 of the run, 30 %", size, 60, normal, shape=begin_at(2 / 3, 0.3))
        add("onset at 2/3 of the run, 30 %", size, 200, pauses, shape=begin_at(2 / 3, 0.3))
        add("oscillates 0 to 30 %, 6 cycles", size, 60, normal, shape=oscillate(0.3, 6))
        add("bursts of 40 %, 6 of 10 steps", size, 60, normal, shape=burst(0.4, 6, 0.6))
    for size, steps in ((4, 60), (8, 60), (8, 200), (64, 60), (64, 200), (1024, 60)):
        more = {"shape": shift(0.10), "num_slow": size // 2}
        add("half of the group, 10 %", size, steps, normal, **more)
    for size in (64, 256, 1024):
        for noise in (normal, pauses):
            node = {"shape": shift(0.10), "num_slow": PER_NODE, "is_node": True}
            add("a node of 8, 10 %", size, 60, noise, **node)
    for size in (4, 8, 64, 1024):
        for by in (-0.10, -0.30):
            add(f"one rank {by:.0%}", size, 60, normal, shape=shift(by), num_slow=0)
    return faults


def measure_fault(fault: Fault, draws: int) -> dict[str, object]:
    draws = max(1, draws // MANY_SLOW_SHARE) if fault.num_slow >= MANY_SLOW else draws
    random = np.random.default_rng([fault.num_ranks, fault.num_steps, fault.num_slow])
    right = wrong = 0
    time = np.linspace(0, 1, fault.num_steps)
    for work in draw(fault.noise, fault.num_steps, fault.num_ranks, draws, seed=3):
        count = max(1, fault.num_slow)
        slow = random.permutation(fault.num_ranks)[:count].tolist()
        if fault.is_node:
            node = int(random.integers(fault.num_ranks // PER_NODE))
            slow = list(range(node * PER_NODE, (node + 1) * PER_NODE))
        work[:, slow] *= fault.shape(time)[:, None]
        found = find_slow(work, per_node=PER_NODE if fault.is_node else 0)
        expected = set(slow) if fault.num_slow else set()
        right += expected == found.ranks
        wrong += bool(found.ranks - expected)
    return {
        "fault": fault.label,
        "draws": draws,
        "right_ratio": round(right / draws, 4),
        "right_lower_ratio": round(bound_rate(right, draws, upper=False), 4),
        "others_named": wrong,
    }


def sum_up(rows: list[dict[str, object]]) -> dict[str, object]:
    """All cells of one noise: each rule's rate over the draws in which it can say something."""
    summary: dict[str, object] = {}
    for rule in RULES:
        counted = [row for row in rows if can_speak(rule, row)]
        draws = sum(count_draws(row, rule) for row in counted)
        if not draws:
            continue
        alarms = sum(row["alarms"][rule] for row in counted)  # type: ignore[index]
        pooled = [row for row in counted if row["is_pooled"]]
        cells = [row for row in counted if not row["is_pooled"]]
        if not cells:
            continue
        worst = max(cells, key=lambda row: row["alarms"][rule] / count_draws(row, rule))  # type: ignore[index]
        worst_alarms, worst_draws = worst["alarms"][rule], count_draws(worst, rule)  # type: ignore[index]
        summary[rule] = {
            "draws": draws,
            "alarms": alarms,
            "upper_ratio": round(bound_rate(alarms, draws), 5),
            "worst_cell": [worst["num_ranks"], worst["num_steps"]],
            "worst_ratio": round(worst_alarms / worst_draws, 5),
            "worst_upper_ratio": round(bound_rate(worst_alarms, worst_draws), 5),
            "pooled_draws": sum(row["draws"] for row in pooled),  # type: ignore[misc]
            "pooled_alarms": sum(row["alarms"][rule] for row in pooled),  # type: ignore[index]
        }
    return summary


def can_speak(rule: str, row: dict[str, object]) -> bool:
    steps = int(str(row["num_steps"]))
    if rule == "ST005":
        return steps < MIN_STEPS
    if rule == "TI001" and str(row["noise"]).startswith("drift"):
        return False
    return steps >= {"ST001": MIN_STEPS, "ST003": 20}.get(rule, MIN_PATTERN_STEPS)


class State:
    """Finished cells, one line each."""

    def __init__(self, path: Path | None, seconds: float = math.inf) -> None:
        self.path = path
        self.deadline_s = time.monotonic() + seconds
        self.rows: dict[str, dict[str, object]] = {}
        self.missing: list[str] = []
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.rows[row["key"]] = row

    def get(self, key: str, measure: Callable[[], dict[str, object]]) -> list[dict[str, object]]:
        """Its row, or none: nothing is begun after the deadline."""
        if key not in self.rows and time.monotonic() > self.deadline_s:
            self.missing.append(key)
            return []
        if key not in self.rows:
            begin = time.process_time()
            row = {"key": key, **measure()}
            row["cpu_s"] = round(time.process_time() - begin, 2)
            self.rows[key] = row
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        return [self.rows[key]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--state", type=Path, help="finished cells, to go on from")
    parser.add_argument("--draws", type=int, default=299)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell later")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="cells of these N")
    arguments = parser.parse_args()
    draws, state = arguments.draws, State(arguments.state, arguments.seconds)
    cells: dict[str, list[dict[str, object]]] = {name_noise(noise): [] for noise in NOISES}
    sizes = sorted(
        ((n, s) for n in arguments.ranks for s in STEPS), key=lambda size: size[0] * size[1]
    )
    for num_ranks, num_steps in sizes:
        for noise in NOISES:
            key = f"{draws} {name_noise(noise)}, N {num_ranks}, S {num_steps}"
            cell = (noise, num_ranks, num_steps, draws)
            cells[name_noise(noise)] += state.get(key, lambda cell=cell: measure_cell(*cell))
    power = [
        row
        for fault in list_faults()
        if fault.num_ranks in arguments.ranks
        for row in state.get(
            f"{draws} {fault.label}", lambda fault=fault: measure_fault(fault, draws)
        )
    ]
    rows = [row for part in cells.values() for row in part]
    result = {
        "machine": {"cores": os.cpu_count(), "kernel": platform.release().split("-")[0]},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "goal_alarm_ratio": GOAL_ALARMS,
        "goal_power_ratio": GOAL_POWER,
        "cpu_s": round(sum(float(str(row["cpu_s"])) for row in [*rows, *power]), 1),
        "not_measured": state.missing,
        "false_alarms": {name: sum_up(part) for name, part in cells.items()},
        "cells": rows,
        "power": power,
    }
    for name, summary in result["false_alarms"].items():  # type: ignore[attr-defined]
        print(name, json.dumps(summary))
    print(f"{len(state.missing)} cells not measured")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
