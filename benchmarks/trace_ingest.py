"""How fast, and in how much memory, is a trace read, beside HTA and TraceLens?

    python benchmarks/trace_ingest.py --traces ../shared/data/traces --peers PYTHON \
        --tracelens CHECKOUT [--size-gb 1] [--output FILE]

PYTHON has HolisticTraceAnalysis (with pandas<3) and what TraceLens imports (orjson, tqdm); `--peers
make` makes such an environment for the run. CHECKOUT is a copy of the source of AMD's TraceLens:
`tracelens` on PyPI is another project. Each tool reads
the same file in a fresh process, which reports its own CPU seconds (user and system, imports
included) and its peak memory, and answers the same question: compute, communication, exposed and
idle time of the device. The large trace is the A100 trace over
and over, later times and other ids each time. The command itself, `meshscope trace`, is measured
from outside: cold, from what it kept, and its help. Then the answers on all shared traces, our peak
memory as files are added, the same files on one core and on two, and many tiny files.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NUM_TURNS = 5
"""Of one core and two."""

OURS = """
import json, resource, sys
from pathlib import Path
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_kernels import classify_kernels
from meshscope.ingest.traces.trace_steps import assign_steps, find_launches, find_steps
from meshscope.ingest.traces.trace_time import break_down_devices
use_native = None if sys.argv[1] == "native" else False
answer = []
for path in sys.argv[2:]:
    trace = read_trace(Path(path), use_native=use_native)
    steps = find_steps(trace)
    step_of = assign_steps(trace, steps, find_launches(trace))
    for device in break_down_devices(trace, classify_kernels(trace), steps, step_of):
        time = device.time
        answer.append([time.compute_ns / 1e3, time.communication_ns / 1e3, time.exposed_ns / 1e3,
                       time.idle_ns / 1e3])
    del trace, step_of
"""

TRACELENS = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from TraceLens.util import DataLoader
from TraceLens.TreePerf.gpu_event_analyser import GPUEventAnalyser
answer = []
for path in sys.argv[2:]:
    events = DataLoader.load_data(path)["traceEvents"]
    for place, event in enumerate(events):
        event["UID"] = place
        if "dur" in event and "ts" in event:
            event["t_end"] = event["ts"] + event["dur"]
    found = GPUEventAnalyser(events).compute_metrics()
    answer.append([found["computation_time"], found["total_comm_time"],
                   found["exposed_comm_time"], found["idle_time"]])
"""

HTA = """
import json, resource, sys, warnings, logging
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
answer = []
for path in sys.argv[2:]:
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="", include_last_profiler_step=True)
    found = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    percent = float(overlap["comp_comm_overlap_pctg"].iloc[0]) if len(overlap) else float("nan")
    answer.append([float(found["compute_time(us)"]), None, percent, float(found["idle_time(us)"])])
"""

END = """
used = resource.getrusage(resource.RUSAGE_SELF)
print("RESULT " + json.dumps({"answer": answer, "cpu_s": used.ru_utime + used.ru_stime,
                              "peak_bytes": used.ru_maxrss * 1024}))
"""


def run_tool(python: str, script: str, *arguments: object) -> dict:
    """What a fresh process says of itself."""
    result = subprocess.run(
        [python, "-c", script + END, *(str(argument) for argument in arguments)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": (result.stderr or result.stdout).strip()[-400:]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def write_large(source: Path, target: Path, size_bytes: int) -> None:
    """The events of `source` again and again, as json.dumps writes them."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    events = document.pop("traceEvents")
    begins = [event["ts"] for event in events if event.get("ph") == "X"]
    span_us = max(begins) - min(begins) + 1000
    repeated = [event for event in events if event.get("ph") != "M"]
    with target.open("w", encoding="utf-8") as file:
        size = file.write(json.dumps(document)[:-1] + ', "traceEvents": [\n')
        size += file.write(",\n".join(json.dumps(e) for e in events if e.get("ph") == "M"))
        turn = 0
        while size < size_bytes:
            size += sum(file.write(",\n" + json.dumps(shift(e, turn, span_us))) for e in repeated)
            turn += 1
        file.write("]}\n")


def shift(event: dict, turn: int, span_us: float) -> dict:
    """The event, `turn` spans later, with ids of its own."""
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] = round(moved["ts"] + turn * span_us, 3)
    if "args" in moved:
        moved["args"] = dict(moved["args"])
        for key in ("External id", "correlation"):
            if key in moved["args"]:
                moved["args"][key] += turn * 10_000_000
    return moved


def measure_large(options: argparse.Namespace, path: Path) -> dict:
    size = path.stat().st_size
    runs = [run_tool(sys.executable, OURS, "native", path) for _ in range(3)]
    ours = min(runs, key=lambda run: run["cpu_s"])
    result = {
        "bytes": size,
        "meshscope": ours,
        "meshscope_cpu_s": [run["cpu_s"] for run in runs],
        "meshscope_bytes_per_byte": ours["peak_bytes"] / size,
    }
    if options.with_python:
        result["meshscope_without_compiler"] = run_tool(sys.executable, OURS, "python", path)
    median = statistics.median(result["meshscope_cpu_s"])
    for name, script, first in (("tracelens", TRACELENS, options.tracelens), ("hta", HTA, "-")):
        if options.peers is None or first is None:
            continue
        result[name] = found = run_tool(options.peers, script, first, path)
        if "cpu_s" in found:
            result[f"{name}_cpu_ratio"] = found["cpu_s"] / median
            result[f"{name}_memory_ratio"] = found["peak_bytes"] / ours["peak_bytes"]
    return result


def measure_answers(options: argparse.Namespace) -> dict:
    """Ours beside the peers' on each shared trace, in µs."""
    found = {}
    for path in sorted(options.traces.glob("*.json.gz")):
        row = {"meshscope": run_tool(sys.executable, OURS, "native", path).get("answer")}
        if options.peers and options.tracelens:
            row["tracelens"] = run_tool(options.peers, TRACELENS, options.tracelens, path)
            row["tracelens"] = row["tracelens"].get("answer") or row["tracelens"]
        if options.peers:
            row["hta"] = run_tool(options.peers, HTA, "-", path)
            row["hta"] = row["hta"].get("answer") or row["hta"]
        found[path.name] = row
        print(path.name, json.dumps(row))
    return found


def run_command(*arguments: object, cores: int | None = None) -> dict:
    """`meshscope trace` with children: CPU and wall seconds, largest memory of one process."""
    command = [sys.executable, "-m", "meshscope", "trace", *(str(one) for one in arguments)]
    if cores is not None:
        command = ["taskset", "-c", f"0-{cores - 1}", *command]
    return run_whole(command)


def run_whole(command: Sequence[str], **settings: Any) -> dict:
    """A command from outside."""
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, **settings) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - begin,
        "peak_bytes": used.ru_maxrss * 1024,
    }


def measure_reports(options: argparse.Namespace, path: Path) -> dict:
    """The whole commands of both: TraceLens's report on a trace, tables as files, as its own
    documentation starts it, and ours."""
    command = [options.peers, "-m", "TraceLens.Reporting.generate_perf_report_pytorch"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--profile_json_path", str(path), "--output_csvs_dir", folder]
        environment = {**os.environ, "PYTHONPATH": options.tracelens, "OMP_NUM_THREADS": "1"}
        theirs = run_whole(command, env=environment, stderr=subprocess.DEVNULL)
        theirs["num_tables"] = len(list(Path(folder).rglob("*.csv")))
    ours = [run_command(path, "--no-cache") for _ in range(3)]
    ratio = theirs["cpu_s"] / statistics.median(run["cpu_s"] for run in ours)
    size = path.stat().st_size
    return {"bytes": size, "tracelens": theirs, "meshscope": ours, "cpu_ratio": ratio}


def measure_command(path: Path) -> dict:
    """One large trace: help, three times cold, three times from what was kept."""
    helped = [run_command("--help") for _ in range(3)]
    cold = [run_command(path, "--no-cache") for _ in range(3)]
    run_command(path)
    warm = [run_command(path) for _ in range(3)]
    help_s, warm_s = (min(run["cpu_s"] for run in runs) for runs in (helped, warm))
    return {"help": helped, "cold": cold, "warm": warm, "warm_beyond_help_s": warm_s - help_s}


def write_apart(write: Callable[..., None], *arguments: object) -> None:
    """In a process of its own: what this one ever held would count as the peak of its children."""
    process = multiprocessing.get_context("fork").Process(target=write, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{write.__name__} ended with {process.exitcode}")


def measure_many(small: Path, folder: Path, num_files: int) -> dict:
    """Files of several ranks, on one core and on two, in turns."""
    write_apart(write_ranks, small, folder, num_files)
    runs = [
        {cores: run_command(folder, "--no-cache", cores=cores) for cores in (1, 2)}
        for _ in range(NUM_TURNS)
    ]
    speedups = [run[1]["wall_s"] / run[2]["wall_s"] for run in runs]
    return {
        "num_files": num_files,
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "one_core": [run[1] for run in runs],
        "two_cores": [run[2] for run in runs],
        "speedups": speedups,
        "speedup": statistics.median(speedups),
    }


def write_ranks(small: Path, folder: Path, num_files: int) -> None:
    """The same trace as of each rank."""
    text = small.read_bytes()
    at = text.index(b'"rank": ')
    for rank in range(num_files):
        own = text[:at] + f'"rank": {rank}'.encode() + text[text.index(b",", at) :]
        (folder / f"rank{rank}.json").write_bytes(own)


def measure_tiny(folder: Path, num_files: int) -> dict:
    """Files of 20 events, 5 of them collectives."""
    group = json.dumps(list(range(0, num_files, max(num_files // 10, 1))))
    for rank in range(num_files):
        events = [make_tiny(place, group) for place in range(5)]
        document = {
            "distributedInfo": {"rank": rank, "world_size": num_files, "backend": "nccl"},
            "traceEvents": [event for four in events for event in four],
        }
        (folder / f"rank{rank:05d}.json").write_text(json.dumps(document), encoding="utf-8")
    return {"num_files": num_files, "command": run_command(folder, "--no-cache")}


def make_tiny(place: int, group: str) -> list[dict]:
    """An operator, its launch, its kernel, and an all-reduce."""
    begin, own = 1000.0 + 100 * place, {"External id": 10 + place}
    launched = {**own, "correlation": 10 + place}
    collective = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 1_000_000,
        "Out msg nelems": 1_000_000,
        "Process Group Name": "0",
        "Process Group Ranks": group,
    }
    rows = (
        ("cpu_op", "aten::mm", 1, begin - 20, 15, own),
        ("cuda_runtime", "cudaLaunchKernel", 1, begin - 15, 5, launched),
        ("kernel", "gemm", 7, begin, 40, {**launched, "device": 0, "stream": 7}),
        ("kernel", "ncclDevKernel_AllReduce", 20, begin + 50, 30, {**collective, "stream": 20}),
    )
    return [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 0,
            "tid": tid,
            "ts": ts,
            "dur": dur,
            "args": said,
        }
        for cat, name, tid, ts, dur, said in rows
    ]


def make_peers(folder: Path) -> str:
    """An environment with HTA and what TraceLens imports; gives its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet"]
    # HTA also asks for JupyterLab, which none of this needs.
    subprocess.run([*pip, "--no-deps", "HolisticTraceAnalysis"], check=True)
    packages = ("pandas<3", "plotly", "networkx", "pydot", "psutil", "pyyaml", "orjson", "tqdm")
    subprocess.run([*pip, *packages], check=True)
    return python


def measure_flatness(path: Path) -> list[dict]:
    """Peak memory over 1, 2, 4 and 8 readings of files of one size, one after another."""
    rows = []
    for num_files in (1, 2, 4, 8):
        found = run_tool(sys.executable, OURS, "native", *([path] * num_files))
        rows.append({"num_files": num_files, "peak_bytes": found["peak_bytes"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--peers", help="a Python that has them, or `make`")
    parser.add_argument("--tracelens")
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--report-gb", type=float, default=0.25, help="for TraceLens's report")
    parser.add_argument("--large", type=Path, help="the large trace, made there once")
    parser.add_argument("--num-files", type=int, default=64, help="of a tenth of the size")
    parser.add_argument("--num-tiny", type=int, default=3000)
    parser.add_argument("--with-python", action="store_true", help="also without the C scanner")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # Installed packages have their bytecode; where it may not be written, a source tree has none,
    # and every process would compile it again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    source = options.traces / "a100-ddp-rank0of2.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        if options.peers == "make":
            options.peers = make_peers(Path(folder) / "peers")
        large = options.large or Path(folder) / "large.json"
        if not large.exists():
            write_apart(write_large, source, large, int(options.size_gb * 1e9))
        result = {
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
            "load_at_begin": os.getloadavg()[0],
            "large": measure_large(options, large),
        }
        print(json.dumps(result["large"], indent=1))
        result["command"] = measure_command(large)
        print(json.dumps(result["command"], indent=1))
        if options.peers and options.tracelens:
            reported = Path(folder) / "reported.json"
            write_apart(write_large, source, reported, int(options.report_gb * 1e9))
            result["reports"] = measure_reports(options, reported)
            print(json.dumps(result["reports"], indent=1))
        small = Path(folder) / "small.json"
        write_apart(write_large, source, small, int(options.size_gb * 1e8))
        result["flatness"] = measure_flatness(small)
        for name in ("many", "tiny"):
            (Path(folder) / name).mkdir()
        result["many"] = measure_many(small, Path(folder) / "many", options.num_files)
        print(json.dumps(result["many"], indent=1))
        result["tiny"] = measure_tiny(Path(folder) / "tiny", options.num_tiny)
        print(json.dumps(result["tiny"], indent=1))
        result["load_at_end"] = os.getloadavg()[0]
        result["answers_us"] = measure_answers(options)
    print(json.dumps(result["flatness"]))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
