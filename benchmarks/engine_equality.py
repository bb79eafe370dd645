"""Does the engine learn what one process learns, whatever the layout? The full cross.

    python benchmarks/engine_equality.py [--output FILE] [--jobs N]

Every schedule × layout × {reducer, FSDP2} × {no checkpointing, per layer} × sequence parallel on,
off: five SGD steps with momentum at a learning rate of 0.5, against the single-process model: the
largest difference of loss, gradient, weight and norm over all steps, ranks and elements. The suite
runs a covering selection of these (`tests/distributed/engine_equality.py`, which has the cases).
`--jobs` programs share the cases, for machines with many cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from recorder_overhead import describe_machine
from tests.distributed.engine_equality import TOLERANCE, main, make_full_cross

ROOT = Path(__file__).parent.parent
WHAT = ("loss", "gradient", "weight", "norm")


def run_jobs(num_jobs: int) -> list[dict]:
    """Every n-th case to the n-th program; ranks of one program take turns over its cases."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            subprocess.Popen(
                [sys.executable, __file__, "--part", f"{index}/{num_jobs}", "--folder", folder],
                cwd=ROOT,
            )
            for index in range(num_jobs)
        ]
        codes = [job.wait() for job in jobs]
        assert not any(codes), codes
        found = []
        for index in range(num_jobs):
            lines = (Path(folder) / str(index) / "results.jsonl").read_text(encoding="utf-8")
            found += [json.loads(line) for line in lines.splitlines()]
    return found


def run_part(part: str, folder: Path) -> None:
    index, num_jobs = map(int, part.split("/"))
    main(folder / str(index), make_full_cross()[index::num_jobs])


def summarize(found: list[dict]) -> dict:
    failed = [
        line["case"]
        for line in found
        if "error" in line or any(line["differences"][what] > TOLERANCE for what in WHAT)
    ]
    by_layout: dict[str, dict] = defaultdict(lambda: {"cases": 0} | dict.fromkeys(WHAT, 0.0))
    for line in found:
        layout = f"{line['dp']}×{line['tp']}×{line['pp']}"
        row = by_layout[layout + (" uneven" if line["is_uneven"] else "")]
        row["cases"] += 1
        for what in WHAT if "error" not in line else ():
            row[what] = max(row[what], line["differences"][what])
    return {
        "num_cases": len(found),
        "num_failed": len(failed),
        "failed": failed,
        "tolerance": TOLERANCE,
        "largest_by_layout": {key: by_layout[key] for key in by_layout},
        "cases": {
            line["case"]: line.get("error")
            or {what: float(f"{line['differences'][what]:.2g}") for what in WHAT}
            for line in found
        },
    }


def print_table(summary: dict) -> None:
    print(f"{'layout':16}{'cases':>6}" + "".join(f"{what:>11}" for what in WHAT))
    for layout, row in summary["largest_by_layout"].items():
        print(f"{layout:16}{row['cases']:6}" + "".join(f"{row[what]:11.1e}" for what in WHAT))
    print(f"{summary['num_cases']} cases, {summary['num_failed']} beyond {TOLERANCE:g}")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part, arguments.folder)
        return
    began = time.monotonic()
    found = run_jobs(arguments.jobs)
    order = {case.name: place for place, case in enumerate(make_full_cross())}
    summary = summarize(sorted(found, key=lambda line: order[line["case"]]))
    assert summary["num_cases"] == len(order), "some cases left no result"
    summary["seconds"] = round(time.monotonic() - began)
    summary["machine"] = describe_machine("cpu")
    print_table(summary)
    if arguments.output is not None:
        text = json.dumps(summary, indent=1, ensure_ascii=False)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run()
