"""Whether nine of ten steps lie in the intervals that the planner states.

    python benchmarks/planner_intervals.py [-o benchmarks/results/planner_intervals.json]

Presets: the published runs of `planner_published.py` and `planner_literature.py`, by stack and by
the kind of device; a stack's interval was set before most of these rows were written down. Fitted
constants: the layouts of results/planner_engine.json, planner_gpu.json and
planner_gpu_held_out.json that were not calibrated on. What those miss beyond the spread of the
recorded steps (`MODEL_ERROR`, in `plan.timing.from_run`) is set on every second of them, so that
nine of ten lie within, and the coverage of the others is what counts.
"""

import argparse
import json
from collections import defaultdict
from math import ceil, hypot, log
from pathlib import Path

import planner_literature
import planner_published

from meshscope.plan.timing.calibration import find_constants
from meshscope.plan.timing.from_run import MODEL_ERROR

RESULTS = Path(__file__).parent / "results"
LEAST = 0.02
SHARE = 0.9
GENERATIONS = {"A100": "Ampere", "H100": "Hopper", "H200": "Hopper"}


def list_presets():
    """Group, |ln(predicted/published)|, and the interval that is stated."""
    for row in [*planner_published.list_rows(), *planner_literature.list_all()]:
        constants = find_constants(row.stack, row.device)
        ratio = planner_published.predict(row) / row.step_s
        device = next((g for word, g in GENERATIONS.items() if word in row.device), "Blackwell")
        yield f"{row.stack} on {device}", abs(log(ratio)), constants.interval_ratio


def list_fitted():
    """|ln(predicted/measured)| of layouts that were not calibrated on, and the interval that the
    runs which were would give by themselves."""
    engine = json.loads((RESULTS / "planner_engine.json").read_text(encoding="utf-8"))["time"]
    groups = [engine]
    for name in ("planner_gpu", "planner_gpu_held_out"):
        device = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["time"]
        groups += device.values()
    for group in groups:
        layouts = group["layouts"].values()
        fitted = [row for row in layouts if row["is_calibration"]]
        own = max(
            *(row["spread_ms"] / row["measured_ms"] for row in fitted),
            *(abs(row["error_percent"]) / 100 for row in fitted),
            LEAST,
        )
        for row in layouts:
            if not row["is_calibration"]:
                yield abs(log(row["predicted_ms"] / row["measured_ms"])), own


def count(rows, error):
    """How many of (error, own interval) lie within, with this much more."""
    return sum(miss <= log(1 + hypot(own, error)) for miss, own in rows)


def judge_fitted():
    rows = list(list_fitted())
    chosen, others = rows[::2], rows[1::2]
    wanted = ceil(SHARE * len(chosen))
    least = next(p for p in range(1000) if count(chosen, p / 100) >= wanted) / 100
    return {
        "model_error_by_every_second": least,
        "model_error_stated": MODEL_ERROR,
        "chosen_within": [count(chosen, MODEL_ERROR), len(chosen)],
        "others_within": [count(others, MODEL_ERROR), len(others)],
        "all_within_without_it": [count(rows, 0.0), len(rows)],
    }


def judge_presets():
    groups = defaultdict(list)
    for name, error, width in list_presets():
        groups[name].append(error <= log(1 + width))
        groups["all"].append(error <= log(1 + width))
    return {name: [sum(one), len(one)] for name, one in sorted(groups.items())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    found = {"presets_within": judge_presets(), "fitted": judge_fitted()}
    text = json.dumps(found, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
