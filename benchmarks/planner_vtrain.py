"""The planner's step times against vTrain's measured ones (A100, Megatron-LM; MIT licence).

    python benchmarks/planner_vtrain.py --data FOLDER            # shipped constants, and layers
    python benchmarks/planner_vtrain.py --data FOLDER --fit      # fits the seven constants again
    python benchmarks/planner_vtrain.py --data OTHER --layers benchmarks/results/planner_vtrain.json

FOLDER has vtrain-single-node.csv and vtrain-multi-node.csv. Calibration rows are every fourth of
the single-node rows and every second of the multi-node rows, in the files' order; all errors are of
the other rows. Two ways: seven constants for all rows (`calibration.MEGATRON_A100`), and on top of
them measured layers: one factor for each hidden size, microbatch and tp that calibration rows have,
which is what a user's own recording gives. With `--layers` nothing is calibrated: the factors of
all rows of the first folder are read from its results file, and all rows of the other are judged.

vTrain's own error, published for all of its rows: 8.37 % single node, 14.73 % multi-node.
"""

import argparse
import csv
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from meshscope.plan.calibration import FITTED_NAMES, MEGATRON_A100, Constants
from meshscope.plan.candidate import Candidate
from meshscope.plan.cluster import make_cluster
from meshscope.plan.fitting import fit_constants, fit_layers
from meshscope.plan.known_models import make_gpt
from meshscope.plan.pricing import Job, price_candidates
from meshscope.plan.recipe import make_recipe

VTRAIN_MAPE = {"single-node": 8.37, "multi-node": 14.73}
EVERY = {"single-node": 4, "multi-node": 2}
RECIPE = make_recipe("megatron-2021", "bf16-grads")
MIN_GROUP = 6


@dataclass(frozen=True)
class Row:
    num_gpus: int
    global_batch: int
    microbatch: int
    hidden: int
    heads: int
    layers: int
    length: int
    tp: int
    dp: int
    pp: int
    measured_ms: float

    @property
    def model(self):
        return (self.hidden, self.heads, self.layers, self.length)

    @property
    def layer_key(self):
        return (self.hidden, self.microbatch, self.tp)

    @property
    def candidate(self):
        return Candidate(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            microbatch_size=self.microbatch,
            num_microbatches=self.global_batch // (self.dp * self.microbatch),
            recompute="full",
        )


def read_rows(path):
    """Numbers from the right, so that a first column with the parameters does not matter."""
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line in csv.reader(file):
            try:
                values = [float(cell) for cell in line][-11:]
            except ValueError:
                continue
            rows.append(Row(*(int(v) for v in values[:-1]), values[-1]))
    return rows


def make_job(row, constants):
    hidden, heads, layers, length = row.model
    return Job(
        model=make_gpt(
            "vtrain", hidden_size=hidden, num_layers=layers, num_heads=heads, sequence_length=length
        ),
        recipe=RECIPE,
        # vTrain's cluster: four HDR adapters a node.
        cluster=make_cluster("A100-SXM4-80GB", row.num_gpus, between="100GB/s"),
        constants=constants,
    )


def predict(rows, constants: Constants):
    """Milliseconds of every row."""
    jobs = defaultdict(list)
    for index, row in enumerate(rows):
        jobs[row.model, row.num_gpus].append(index)
    found = np.zeros(len(rows))
    for indices in jobs.values():
        job = make_job(rows[indices[0]], constants)
        prices = price_candidates(job, [rows[index].candidate for index in indices])
        found[indices] = [1e3 * price.step_s for price in prices]
    return found


def measured(rows):
    return np.array([row.measured_ms for row in rows])


def rank_of(values):
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    return ranks


def judge(rows, predicted):
    """Error, order and regret."""
    truth = measured(rows)
    error = np.abs(predicted / truth - 1)
    groups = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.model, row.num_gpus, row.global_batch].append(index)
    orders, regrets = [], []
    for indices in groups.values():
        if len(indices) < MIN_GROUP:
            continue
        own, other = truth[indices], predicted[indices]
        orders.append(float(np.corrcoef(rank_of(own), rank_of(other))[0, 1]))
        regrets.append(float(own[other.argmin()] / own.min() - 1))
    return {
        "rows": len(rows),
        "mape_percent": round(100 * float(error.mean()), 2),
        "median_error_percent": round(100 * float(np.median(error)), 2),
        "p90_error_percent": round(100 * float(np.quantile(error, 0.9)), 2),
        "groups": len(orders),
        "groups_spearman_at_least_0.9": sum(one >= 0.9 - 1e-9 for one in orders),
        "spearman_min": round(min(orders, default=float("nan")), 3),
        "spearman_median": round(float(np.median(orders)), 3) if orders else None,
        "groups_regret_at_most_3_percent": sum(one <= 0.03 for one in regrets),
        "regret_max_percent": round(100 * max(regrets, default=0), 1),
    }


def split(rows, every):
    is_calibration = [index % every == 0 for index in range(len(rows))]
    return (
        [row for row, chosen in zip(rows, is_calibration, strict=True) if chosen],
        [row for row, chosen in zip(rows, is_calibration, strict=True) if not chosen],
    )


def fit(folder, rounds):
    single, multi = (split(read_rows(folder / f"vtrain-{kind}.csv"), every)[0]
                     for kind, every in EVERY.items())  # fmt: skip
    rows = single + 3 * multi  # a third as many, but what they tell is not in the others
    return fit_constants(
        lambda constants: predict(rows, constants),
        measured(rows),
        MEGATRON_A100,
        FITTED_NAMES,
        num_rounds=rounds,
    )


def encode_layers(constants):
    return [{"key": list(key), "ratio": round(ratio, 4)}
            for key, ratio in sorted(constants.layer_ratios.items())]  # fmt: skip


def run(folder, constants, given_layers):
    results = {}
    for kind, every in EVERY.items():
        path = folder / f"vtrain-{kind}.csv"
        if not path.is_file():
            continue
        rows = read_rows(path)
        calibration, others = split(rows, every)
        if given_layers is not None:
            calibration, others = [], rows
            layered = constants.with_layers(given_layers[kind], "a results file")
        else:
            layered = fit_layers(
                lambda own, part=calibration: predict(part, own),
                measured(calibration),
                constants,
                [row.layer_key for row in calibration],
                "calibration rows",
            )
        results[kind] = {
            "calibration_rows": len(calibration),
            "vtrain_mape_percent": VTRAIN_MAPE[kind],
            "constants_only": judge(others, predict(others, constants)),
            "with_measured_layers": judge(others, predict(others, layered)),
            "with_measured_layers_all_rows": judge(rows, predict(rows, layered)),
            "layers": encode_layers(layered),
            "layers_of_all_rows": encode_layers(
                fit_layers(
                    lambda own, part=rows: predict(part, own),
                    measured(rows),
                    constants,
                    [row.layer_key for row in rows],
                    "all rows",
                )
            ),
        }
    return results


def read_layers(path):
    stored = json.loads(path.read_text())
    return {
        kind: {
            tuple(one["key"]): one["ratio"] for one in stored["results"][kind]["layers_of_all_rows"]
        }
        for kind in EVERY
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with vtrain-*.csv")
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="fit the constants")
    parser.add_argument("--layers", type=Path, help="factors of layers from a results file")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    constants = fit(given.data, given.fit) if given.fit else MEGATRON_A100
    results = run(given.data, constants, given.layers and read_layers(given.layers))
    shown = {name: getattr(constants, name) for name in FITTED_NAMES}
    judged = {
        kind: {key: value for key, value in one.items() if not key.startswith("layers")}
        for kind, one in results.items()
    }
    print(json.dumps({"constants": shown, **judged}, indent=1))
    if given.output:
        stored = {
            "calibration": "every 4th single-node and every 2nd multi-node row",
            "constants": {
                k: v for k, v in asdict(constants).items() if isinstance(v, (int, float, str))
            },
            "results": results,
        }
        given.output.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
