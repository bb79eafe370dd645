"""How long straggler traces and replays of recorded size take, and that answers are the published.

    python benchmarks/straggler_trace.py ../shared/data/straggler
    python benchmarks/straggler_trace.py FOLDER… --no-save

For every `trace-NAME.parquet` with `result-NAME.json`, `ms-NAME.json` and `mw-NAME.json` beside it:
CPU seconds of reading, of S with its whole attribution, and of the command in a fresh process, and
the largest difference to the published numbers.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from meshscope.ingest.straggler.straggler_trace import load_straggler_trace
from meshscope.simulate.straggler.slowdown import Slowdown
from meshscope.simulate.straggler.straggler_replay import StragglerReplay, measure_slowdown

RESULT = Path(__file__).parent / "results" / "straggler_trace.json"


def measure_trace(path: Path) -> dict[str, object]:
    """Times and differences of one trace."""
    began = time.process_time()
    replay = StragglerReplay.make(load_straggler_trace(path))
    read_s = time.process_time() - began
    began = time.process_time()
    found = measure_slowdown(replay)
    attributed_s = time.process_time() - began
    if not isinstance(found, Slowdown):
        raise SystemExit(f"{path.name}: {found.reason}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "meshscope", "simulate", str(path), "--json"]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "trace": path.name,
        "num_operations": int(replay.measured_s.size),
        "read_cpu_s": round(read_s, 3),
        "attribute_cpu_s": round(attributed_s, 3),
        "command_cpu_s": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3
        ),
        "slowdown": found.slowdown,
        "fidelity_error_ratio": found.fidelity.error_ratio,
        "largest_difference": compare(path, found),
    }


def compare(path: Path, found: Slowdown) -> float | None:
    """The largest difference to what the authors give; None where nothing is beside the trace."""
    name = path.stem.removeprefix("trace-")
    files = [path.with_name(f"{kind}-{name}.json") for kind in ("result", "ms", "mw")]
    if not all(file.is_file() for file in files):
        return None
    result, last, worst = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    pairs = [
        (found.slowdown, result["blocking_slowdown"]),
        (found.step_ns / 1e9, last["tori"]),
        (found.ideal_ns / 1e9, last["tideal"]),
        (getattr(found.last_stage_share, "removed", np.nan), last["Ms"]),
        (getattr(found.worst_share, "removed", np.nan), worst["Mw"]),
    ]
    for ours, key in ((found.by_axis["pp"], "stage"), (found.by_axis["dp"], "dp_rank")):
        theirs = result[f"blocking_decompose_by_{key}"]
        pairs += [(value, theirs[str(at)]) for at, value in ours.items()]
    types = result["blocking_decompose_by_optype"]
    pairs += [(value, types[name]) for name, value in found.by_type.items()]
    return float(max(abs(ours - theirs) for ours, theirs in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--no-save", action="store_true")
    arguments = parser.parse_args()
    traces = [
        path for folder in arguments.folders for path in sorted(folder.glob("trace-*.parquet"))
    ]
    measured = [measure_trace(path) for path in traces]
    for one in measured:
        print(json.dumps(one))
    if not arguments.no_save:
        machine = {"cores": os.cpu_count(), "python": platform.python_version()}
        document = {"machine": {**machine, "numpy": np.__version__}, "traces": measured}
        RESULT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
