"""Other people's traces: what each says of its devices, beside what HTA and TraceLens say.

    python benchmarks/trace_zoo.py FOLDER [--peers PYTHON] [--tracelens CHECKOUT] [--output FILE.md]

Prints a row for every trace below FOLDER: hardware, events, compute, communication, exposed and
idle time in µs summed over its devices, and whether the peers agree to 1 µs in each. HTA cuts
begins and ends to whole µs, so that 2 µs for each device event are allowed there where the trace
has decimals; it counts fills of memory as busy but not as compute, and leaves out device work whose
launch is not in the trace: where it disagrees, ours is measured so too. PYTHON is an interpreter
that can import the peers, by default this one; CHECKOUT is a copy of TraceLens's source. A peer
that cannot be imported is left out. `{owner}+{name}` as the first folder below FOLDER is the
repository a trace came from.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshscope.analyze.device.trace_summary import TraceSummary, summarize_trace
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_columns import Category, Trace
from meshscope.ingest.kineto.trace_files import find_traces
from meshscope.ingest.traces.trace_kernels import classify_kernels
from meshscope.ingest.traces.trace_steps import find_launches
from meshscope.ingest.traces.trace_time import DeviceTime, find_devices, measure
from meshscope.store.read.arrays import Bools

PARTS = ("compute", "communication", "exposed", "idle")
TOLERANCE_US = 1.0

TRACELENS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from TraceLens.util import DataLoader
from TraceLens.TreePerf.gpu_event_analyser import GPUEventAnalyser

def answer(path):
    events = DataLoader.load_data(path)["traceEvents"]
    for place, event in enumerate(events):
        event["UID"] = place
        if "dur" in event and "ts" in event:
            event["t_end"] = event["ts"] + event["dur"]
    found = GPUEventAnalyser(events).compute_metrics()
    return [found[key] for key in
            ("computation_time", "total_comm_time", "exposed_comm_time", "idle_time")]
"""

HTA = """
import json, logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis

def answer(path):
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="", include_last_profiler_step=True)
    found = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    kinds, _ = analysis.get_gpu_kernel_breakdown(visualize=False, include_memory_kernels=True)
    sums = dict(zip(kinds["kernel_type"], kinds["sum"]))
    total = sum(value for kind, value in sums.items() if "COMMUNICATION" in kind)
    hidden = sum(value for kind, value in sums.items()
                 if "COMMUNICATION" in kind and "COMPUTATION" in kind)
    return [float(found["compute_time(us)"]), float(total), float(total - hidden),
            float(found["idle_time(us)"])]
"""

LOOP = """
for line in sys.stdin:
    try:
        found = answer(line.strip())
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"[:80]
    print("RESULT " + json.dumps([line.strip(), found]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trace."""

    path: Path
    summary: TraceSummary | None
    error: str = ""
    parts_us: list[float] = field(default_factory=list)
    without_fills_us: list[float] = field(default_factory=list)
    """The same as HTA counts: fills of memory are busy time, but no compute."""
    launched_us: list[float] = field(default_factory=list)
    """As HTA counts, of the device work whose launch is in the trace."""
    has_decimals: bool = False
    peers: dict[str, list[float] | str] = field(default_factory=dict)


def sum_parts(times: list[DeviceTime]) -> list[float]:
    names = ("compute_ns", "communication_ns", "exposed_ns", "idle_ns")
    return [sum(getattr(time, name) for time in times) / 1e3 for name in names]


def measure_without_fills(trace: Trace, is_wanted: Bools) -> list[float]:
    """The parts over the wanted events, where fills are busy time but no compute."""
    classes = classify_kernels(trace)
    device = find_devices(trace, classes.work)
    is_fill = trace.events.category == Category.MEMSET
    sums = np.zeros(len(PARTS))
    for number in np.unique(device[device >= 0]):
        rows = np.flatnonzero((device == number) & is_wanted)
        compute, _, exposed, _ = sum_parts([measure(trace, classes, rows[~is_fill[rows]])])
        _, communication, _, idle = sum_parts([measure(trace, classes, rows)])
        sums += [compute, communication, exposed, idle]
    return sums.tolist()


def ask_peer(
    python: str, script: str, argument: str, paths: list[Path]
) -> dict[str, list[float] | str]:
    """The peer's answer or error by path, all from one process; empty where it cannot start."""
    result = subprocess.run(
        [python, "-c", script + LOOP, argument],
        input="\n".join(map(str, paths)),
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"left out: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return dict(json.loads(line.removeprefix("RESULT ")) for line in lines)


def read_row(path: Path) -> Row:
    """Ours."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        return Row(path=path, summary=None, error=str(error).removeprefix(f"{path}: "))
    summary = summarize_trace(trace)
    return Row(
        path=path,
        summary=summary,
        parts_us=sum_parts([device.breakdown.time for device in summary.devices]),
        without_fills_us=measure_without_fills(trace, np.ones(len(trace.events), dtype=np.bool_)),
        launched_us=measure_without_fills(trace, find_launches(trace) >= 0),
        has_decimals=bool(np.any(trace.events.begin_ns % 1000)),
    )


def differ(ours: list[float], theirs: list[float], slack_us: float) -> list[str]:
    """The parts in which they do, with the peer's number."""
    return [
        f"{name} {value:,.1f}"
        for name, own, value in zip(PARTS, ours, theirs, strict=True)
        if not abs(own - value) <= slack_us
    ]


def judge(row: Row) -> str:
    """What agrees and what does not, in words."""
    if row.summary is None:
        return f"refused: {row.error}"
    if not row.summary.devices:
        return "no device work in it"
    verdicts = []
    for peer, found in row.peers.items():
        if isinstance(found, str):
            verdicts.append(f"{peer} cannot: {found}")
            continue
        slack_us = TOLERANCE_US
        if peer == "HTA" and row.has_decimals:
            slack_us += 2 * row.summary.recognition.num_device_events
        off = differ(row.parts_us, found, slack_us)
        if not off:
            verdicts.append(f"{peer} agrees")
        elif peer == "HTA" and not differ(row.without_fills_us, found, slack_us):
            verdicts.append(f"{peer} agrees but for fills")
        elif peer == "HTA" and not differ(row.launched_us, found, slack_us):
            verdicts.append(f"{peer} agrees over what has its launch in the trace")
        else:
            verdicts.append(f"{peer} says {', '.join(off)}")
    return "; ".join(verdicts) or "read"


def describe_hardware(summary: TraceSummary) -> str:
    names = dict.fromkeys(device.breakdown.name for device in summary.devices)
    return ", ".join(name for name in names if name) or ("not said" if names else "none")


def format_row(row: Row, folder: Path) -> str:
    place = row.path.relative_to(folder)
    owner, *rest = place.parts
    source = f"{owner.replace('+', '/', 1)} `{'/'.join(rest)}`" if rest else f"`{place}`"
    if row.summary is None or not row.summary.devices:
        events = f"{row.summary.counts.num_events:,}" if row.summary else ""
        cells = ["none" if row.summary else "", events, "", "", *[""] * len(PARTS)]
    else:
        found = row.summary.recognition
        cells = [
            describe_hardware(row.summary),
            f"{row.summary.counts.num_events:,}",
            f"{found.num_kernels:,}",
            f"{found.num_collectives:,}",
            *(f"{value:,.1f}" for value in row.parts_us),
        ]
    return "| " + " | ".join([source, *cells, judge(row).replace("|", "\\|")]) + " |"


def make_table(rows: list[Row], folder: Path) -> str:
    titles = ["trace", "hardware", "events", "kernels", "collectives"]
    titles += [f"{name} µs" for name in PARTS] + ["peers"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(format_row(row, folder) for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--tracelens", default="")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    paths = find_traces([options.folder])
    rows = [read_row(path) for path in paths]
    asked = [row.path for row in rows if row.summary is not None and row.summary.devices]
    for name, script in (("TraceLens", TRACELENS), ("HTA", HTA)):
        for path, found in ask_peer(options.peers, script, options.tracelens, asked).items():
            next(row for row in rows if str(row.path) == path).peers[name] = found
    table = make_table(rows, options.folder)
    print(table)
    if options.output:
        options.output.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
