"""The planner's step times against vTrain's measured ones (A100, Megatron-LM; MIT licence).

    python benchmarks/planner_vtrain.py --data FOLDER              # as shipped
    python benchmarks/planner_vtrain.py --data FOLDER --fit 300    # fits the constants again
    python benchmarks/planner_vtrain.py --data OTHER --all         # other rows: none calibrated on

FOLDER has vtrain-single-node.csv and vtrain-multi-node.csv. Calibration rows are every fourth of
the single-node rows and every second of the multi-node rows, in the files' order; all errors are of
the other rows. Two ways: the nine constants alone, and as shipped (`calibration.MEGATRON_A100`),
with measured layers on top: one factor for each hidden size, sequence length, microbatch and tp
that at least two single-node calibration rows have. Of the multi-node rows too few share a layer.

vTrain's own error, published for all of its rows: 8.37 % single node, 14.73 % multi-node.
"""

import argparse
import csv
import json
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from meshscope.plan.candidate import Candidate
from meshscope.plan.cluster import make_cluster
from meshscope.plan.model.known_models import make_gpt
from meshscope.plan.recipe import make_recipe
from meshscope.plan.timing.calibration import FITTED_NAMES, MEGATRON_A100, Constants
from meshscope.plan.timing.fitting import fit_constants, fit_layers
from meshscope.plan.timing.pricing import Job, price_candidates

VTRAIN_MAPE = {"single-node": 8.37, "multi-node": 14.73}
EVERY = {"single-node": 4, "multi-node": 2}
RECIPE = make_recipe("megatron-2021", "bf16-grads")
MIN_GROUP = 6
GOAL_SPEARMAN = 0.9 - 1e-9
KINDS = {
    "tp": lambda row: row.tp,
    "dp, tp and pp": lambda row: (row.dp, row.tp, row.pp),
    "tp and microbatch": lambda row: (row.tp, row.microbatch),
}
MIN_ROWS = 2
"""Of a layer that counts as measured."""


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
        return (self.hidden, self.length, self.microbatch, self.tp)

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
    orders, regrets, ceilings = [], [], []
    for indices in groups.values():
        if len(indices) < MIN_GROUP:
            continue
        own, other = truth[indices], predicted[indices]
        orders.append(find_spearman(own, other))
        if orders[-1] < GOAL_SPEARMAN:
            ceilings.append(find_ceilings([rows[index] for index in indices], own, other))
        regrets.append(float(own[other.argmin()] / own.min() - 1))
    return {
        "rows": len(rows),
        "mape_percent": round(100 * float(error.mean()), 2),
        "median_error_percent": round(100 * float(np.median(error)), 2),
        "p90_error_percent": round(100 * float(np.quantile(error, 0.9)), 2),
        "groups": len(orders),
        "groups_spearman_at_least_0.9": sum(one >= GOAL_SPEARMAN for one in orders),
        "spearman_min": round(min(orders, default=float("nan")), 3),
        "spearman_median": round(float(np.median(orders)), 3) if orders else None,
        "groups_regret_at_most_3_percent": sum(one <= 0.03 for one in regrets),
        "regret_max_percent": round(100 * max(regrets, default=0), 1),
        "groups_below_and_what_free_factors_would_give": ceilings,
    }


def find_spearman(one, other):
    return float(np.corrcoef(rank_of(one), rank_of(other))[0, 1])


def find_ceilings(rows, truth, predicted):
    """Order of one group if each kind of row had a factor of its own, fitted on these very rows:
    what a term that depends on no more than this could bring at best. Nothing of it is used."""
    found = {"rows": len(rows), "spearman": round(find_spearman(truth, predicted), 3)}
    for name, key in KINDS.items():
        keys = [key(row) for row in rows]
        scaled = predicted.copy()
        for kind in set(keys):
            chosen = [index for index, one in enumerate(keys) if one == kind]
            ratios = np.log(truth[chosen] / predicted[chosen])
            scaled[chosen] *= np.exp(ratios.mean())
        found[f"a factor for each {name} ({len(set(keys))})"] = round(
            find_spearman(truth, scaled), 3
        )
    whole = [index for index, row in enumerate(rows) if row.tp == max(row.tp for row in rows)]
    if len(whole) >= MIN_GROUP:
        found[f"only the largest tp ({len(whole)} rows)"] = round(
            find_spearman(truth[whole], predicted[whole]), 3
        )
    return found


def split(rows, every):
    is_calibration = [index % every == 0 for index in range(len(rows))]
    return (
        [row for row, chosen in zip(rows, is_calibration, strict=True) if chosen],
        [row for row, chosen in zip(rows, is_calibration, strict=True) if not chosen],
    )


def fit(folder, rounds):
    """Constants on all calibration rows, then layers on those of one node."""
    single, multi = (split(read_rows(folder / f"vtrain-{kind}.csv"), every)[0]
                     for kind, every in EVERY.items())  # fmt: skip
    rows = single + 3 * multi  # a third as many, but what they tell is not in the others
    constants = fit_constants(
        lambda constants: predict(rows, constants),
        measured(rows),
        replace(MEGATRON_A100, layer_ratios={}),
        FITTED_NAMES,
        num_rounds=rounds,
    )
    return fit_measured_layers(single, constants)


def fit_measured_layers(rows, constants):
    keys = [row.layer_key for row in rows]
    found = fit_layers(
        lambda own: predict(rows, own),
        measured(rows),
        replace(constants, layer_ratios={}),
        keys,
        MEGATRON_A100.find_source("layer_ratios"),
    )
    kept = {
        key: round(ratio, 3)
        for key, ratio in sorted(found.layer_ratios.items())
        if keys.count(key) >= MIN_ROWS
    }
    return replace(found, layer_ratios=kept)


def run(folder, constants, *, judges_all=False):
    results = {}
    for kind, every in EVERY.items():
        path = folder / f"vtrain-{kind}.csv"
        if not path.is_file():
            continue
        rows = read_rows(path)
        calibration, others = ([], rows) if judges_all else split(rows, every)
        results[kind] = {
            "calibration_rows": len(calibration),
            "vtrain_mape_percent": VTRAIN_MAPE[kind],
            "constants_only": judge(others, predict(others, replace(constants, layer_ratios={}))),
            "with_measured_layers": judge(others, predict(others, constants)),
        }
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with vtrain-*.csv")
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="fit the constants")
    parser.add_argument("--all", action="store_true", help="judge every row: others than ours")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    constants = fit(given.data, given.fit) if given.fit else MEGATRON_A100
    shown = {k: v for k, v in asdict(constants).items() if isinstance(v, (int, float, str))}
    shown["layer_ratios"] = [[*key, ratio] for key, ratio in constants.layer_ratios.items()]
    found = {
        "calibration": "every 4th single-node and every 2nd multi-node row",
        "constants": shown,
        "results": run(given.data, constants, judges_all=given.all),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
