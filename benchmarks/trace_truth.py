"""Holds `meshscope trace` and `meshscope report` against an oracle that shares no code with them.

    python benchmarks/trace_truth.py FOLDER… [--output benchmarks/results/trace_truth.json]

For every trace below the folders: the busiest device's compute, communication, exposed
communication, copies, idle time and number of kernels; steps and their lengths; the host's phases;
exposed communication in steps, each as `tests/trace_oracle.py` computes it from the raw JSON.
Equal means equal to the nanosecond, for means of the report to the nearest one. Also what share of
device time the roofline covers. Prints a row for each trace and what differs. Traces that the
output has already are not read again, or with `--again` those that are at hand: the rows of others
stay, marked as of older code.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import meshscope
import trace_oracle
from meshscope.analyze.device.trace_summary import TraceSummary, summarize_trace
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_files import find_traces

FOUND = ("range", "kernels")
"""Ways to find steps that the oracle does not have."""


def main() -> int:
    """Exit code 1 where anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--again", action="store_true", help="read what --output has, too")
    options = parser.parse_args()
    kept: dict[str, dict[str, Any]] = {}
    if options.output and options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["traces"]
        kept = {row["trace"]: row for row in rows}
    if options.again:
        kept = {name: {**row, "is_of_older_code": True} for name, row in kept.items()}
    for folder in options.folders:
        for path in find_traces([folder]):
            name = f"{folder.name}/{path.relative_to(folder) if folder.is_dir() else path.name}"
            if name in kept and not kept[name].get("is_of_older_code"):
                continue
            row = compare(path)
            kept[name] = {"trace": name, **row}
            print(f"{name}: {row.get('refused') or row['differences'] or 'equal'}")
    rows = list(kept.values())
    looked_at = [row for row in rows if "refused" not in row]
    with_steps = [row for row in looked_at if row["num_steps"]]
    of_this_code = [row for row in looked_at if not row.get("is_of_older_code")]
    result = {
        "num_files": len(rows),
        "num_refused": len(rows) - len(looked_at),
        "num_with_device": sum(row["has_device"] for row in looked_at),
        "num_with_steps": len(with_steps),
        "num_equal": sum(not row["differences"] for row in looked_at),
        "num_numbers_compared": sum(row["num_compared"] for row in looked_at),
        "num_of_this_code": len(of_this_code),
        "num_equal_of_this_code": sum(not row["differences"] for row in of_this_code),
        "num_numbers_of_this_code": sum(row["num_compared"] for row in of_this_code),
        "traces": rows,
    }
    print({key: value for key, value in result.items() if key != "traces"})
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(result["num_equal"] < len(looked_at))


def compare(path: Path) -> dict[str, Any]:
    """What the product and the oracle say of one trace."""
    try:
        summary = summarize_trace(read_trace(path))
    except MeshscopeError as error:
        return {"refused": str(error).removeprefix(f"{path}: ")[:120]}
    said = trace_oracle.answer(path)
    found = Comparison()
    if said["device"] is not None:
        _compare_device(found, summary, said["device"])
    elif summary.devices:
        # Devices of other makers, which have no category: the oracle does not know them.
        said["num_steps"] = 0
    source = str(summary.step_source)
    if source not in FOUND and (said["num_steps"] or said["device"] is not None):
        found.hold("step source", said["step_source"], source)
    if said["num_steps"]:
        _compare_report(found, path, said)
    device = max(summary.devices, key=lambda one: one.breakdown.time.busy_ns, default=None)
    return {
        "has_device": bool(summary.devices),
        "step_source": source,
        "num_steps": said["num_steps"],
        "num_compared": found.num_compared,
        "differences": found.differences,
        "roofline_coverage_ratio": None if device is None else _round(device.coverage.ratio),
        "roofline_coverage_of_launched_ratio": None
        if device is None
        else _round(device.coverage.launched_ratio),
        "not_counted": []
        if device is None
        else [
            [one.name, round(one.device_ns / max(device.coverage.device_ns, 1), 3), one.reason]
            for one in device.coverage.uncounted[:3]
            if one.device_ns * 50 > device.coverage.device_ns
        ],
    }


class Comparison:
    """Numbers held against each other."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.differences: dict[str, list[Any]] = {}

    def hold(self, name: str, expected: Any, got: Any, *, within: float = 0) -> None:
        self.num_compared += 1
        is_equal = (
            expected == got if isinstance(expected, str | list) else abs(expected - got) <= within
        )
        if not is_equal:
            self.differences[name] = [expected, got]


def _compare_device(found: Comparison, summary: TraceSummary, said: dict[str, int]) -> None:
    if not summary.devices:
        found.hold("devices", 1, 0)
        return
    device = max(summary.devices, key=lambda one: len(one.kernels))
    device = max(
        summary.devices, key=lambda one: sum(row.count for row in one.kernels), default=device
    )
    time = device.breakdown.time
    for name, got in (
        ("compute", time.compute_ns),
        ("communication", time.communication_ns),
        ("exposed", time.exposed_ns),
        ("copies", time.exposed_copy_ns),
        ("idle", time.idle_ns),
        ("total", time.total_ns),
        ("kernels", time.num_kernels),
    ):
        found.hold(name, said[name], got)


def _compare_report(found: Comparison, path: Path, said: dict[str, Any]) -> None:
    report = json.loads(meshscope.study(path).report().to_json())
    num_steps = report["steps"]["num_steps"]
    found.hold("report: steps", said["num_steps"], num_steps)
    if num_steps != said["num_steps"] or report["steps"]["num_warmup"]:
        return
    phases = {one["phase"]: one["mean_ns"] for one in report["phases"]}
    earlier = phases.pop("earlier", 0)
    for phase, ns in said["phases"].items():
        found.hold(f"report: {phase}", ns / num_steps, phases.get(phase, 0), within=1)
    mean = report["steps"]["time"]["mean_ns"]
    found.hold("report: step", sum(said["steps_ns"]) / num_steps, mean - earlier, within=1)
    budget = report["budget"]
    if "exposed_in_steps" in said and budget and "unavailable" not in budget:
        exposed = sum(
            line["mean_ns"]
            for line in budget["lines"]
            if line["name"].startswith("exposed") and "copies" not in line["name"]
        )
        found.hold("report: exposed", said["exposed_in_steps"] / num_steps, exposed, within=1)


def _round(value: float | Unavailable) -> float | None:
    return None if isinstance(value, Unavailable) else round(value, 4)


if __name__ == "__main__":
    sys.exit(main())
