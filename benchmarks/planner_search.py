"""How long the planner's search takes, and whether bounds lose anything.

    python benchmarks/planner_search.py [-o benchmarks/results/planner_search.json]

CPU time of this process for three requests of 10⁴ to 6·10⁵ combinations, caches cold; the same
request twice must give the same; and on a request with at least 500 layouts that fit, the best ten
by bounds against replaying all of them.
"""

import argparse
import json
import os
import time
from pathlib import Path

from meshscope.plan import candidate
from meshscope.plan.cluster import make_cluster
from meshscope.plan.model.known_models import find_model
from meshscope.plan.recipe import make_recipe
from meshscope.plan.search import bounds
from meshscope.plan.search.request import make_request
from meshscope.plan.search.search import search
from meshscope.plan.timing import pricing
from meshscope.plan.timing.batch_replay import compile_schedule
from meshscope.plan.timing.calibration import find_constants
from meshscope.plan.timing.pricing import Job

ALL = ("1f1b", "interleaved_1f1b", "gpipe", "looped_bfs", "round_robin", "zb_h1", "zb_h2", "zb_v")


def make_job(model, device, number):
    return Job(
        model=find_model(model),
        recipe=make_recipe("megatron"),
        cluster=make_cluster(device, number),
        constants=find_constants("megatron"),
    )


def clear_caches():
    for cached in (
        compile_schedule, candidate.build_cached, candidate.list_held, candidate.list_tails,
        pricing._count_cached, bounds._measure_key,
    ):  # fmt: skip
        cached.cache_clear()


def name_best(found):
    return [(one.candidate.describe(), round(one.price.step_s, 9)) for one in found.best]


def measure(model, number, batch, **given):
    job = make_job(model, "H100-80GB", number)
    request = make_request(job, batch, **given)
    clear_caches()
    start = time.process_time()
    found = search(job, request)
    cpu_s = time.process_time() - start
    return {
        "model": model,
        "devices": number,
        "combinations": found.num_combinations,
        "bounded": found.num_bounded,
        "replayed": found.num_replayed,
        "cpu_s": round(cpu_s, 2),
        "is_same_again": name_best(found) == name_best(search(job, request)),
    }


def compare():
    job = make_job("llama-3-8b", "H100-80GB", 32)
    request = make_request(job, 64, schedules=ALL, zero_stages=(0, 1, 3))
    by_bounds = search(job, request)
    everything = search(job, request, is_exhaustive=True)
    return {
        "fitting": everything.num_replayed,
        "replayed_by_bounds": by_bounds.num_replayed,
        "is_same_best_ten": name_best(by_bounds) == name_best(everything),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    results = {
        "machine": {"cores": os.cpu_count()},
        "requests": [
            measure("llama-3-70b", 512, 1024),
            measure(
                "llama-3-70b", 512, 1024, schedules=ALL, zero_stages=(0, 1, 3), chunks=(1, 2, 4, 5)
            ),
            measure(
                "llama-3.1-405b", 1024, 2048, schedules=ALL, zero_stages=(0, 1, 2, 3),
                recomputes=("none", "selective", "full", "every-2"), chunks=(1, 2, 3, 6),
                cp=(1, 2, 4, 8),
            ),
        ],
        "bounds_against_everything": compare(),
    }  # fmt: skip
    print(json.dumps(results, indent=1))
    if given.output:
        given.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
