"""Is the automatic schedule as good as the published one, and does the engine run it rightly?

    python benchmarks/automatic_schedule.py [--output benchmarks/results/automatic_schedule.json]

The inputs of the Zero Bubble paper (arXiv 2401.10241, tables 3 and 9) with twice 1F1B's memory: the
bubble by replay of the schedule found, beside the paper's ZB-2p (table 5) and the built-in ones.
Those of 8 ranks are then trained by the engine on 8 gloo processes, five steps, against one
process: the largest differences of losses, gradients, weights and norms. Needs about a minute.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from recorder_overhead import describe_machine
from tests.distributed import engine_equality
from tests.unit.core.test_schedule_search import PAPER, same_stages

from meshscope.plan.schedule_choice import ScheduleChoice, choose_schedule

GOAL = 0.002
"""At most this much above the published rate."""


def choose(row: tuple) -> ScheduleChoice:
    p, m, forward, inputs, weights, transfer, hidden, heads, _ = row
    return choose_schedule(
        same_stages(p, forward, inputs, weights, 2 * p),
        m,
        source="table 9",
        communication_ns=transfer,
        kept_ratio=32 * hidden / (34 * hidden + 5 * heads * 1024),
    )


def rate(row: tuple) -> dict:
    start_s = time.process_time()
    choice = choose(row)
    cpu_s = time.process_time() - start_s
    result = {
        "ranks": row[0],
        "microbatches": row[1],
        "published": row[-1],
        "found": round(choice.found.bubble_ratio, 5),
        "most held, microbatches": round(choice.found.max_held, 2),
        "is within goal": choice.found.bubble_ratio <= row[-1] + GOAL,
        "built in": {one.name: round(one.bubble_ratio, 5) for one in choice.built_in},
        "search and replays, CPU s": round(cpu_s, 2),
    }
    print(result, flush=True)
    return result


def train(rows: list[tuple]) -> list[dict]:
    num_ranks, num_microbatches = 8, 24
    # Forked ranks have what is set here.
    engine_equality.NUM_MICROBATCHES = {1: num_microbatches}
    engine_equality.GLOBAL_BATCH_SIZE = num_microbatches
    results = []
    for row in rows:
        case = engine_equality.Case(pp=num_ranks, schedule=choose(row).text)
        with tempfile.TemporaryDirectory() as folder:
            (result,) = engine_equality.main(Path(folder), [case])
        kept = {name: result[name] for name in ("differences", "error") if name in result}
        results.append({"published": row[-1], "case": case.name, **kept})
        print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rates = [rate(row) for row in PAPER]
    trained = train([row for row in PAPER if row[0] == 8])
    result = {"machine": describe_machine("cpu"), "bubbles": rates, "trained": trained}
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
