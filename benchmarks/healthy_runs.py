"""How often does a recording of a healthy program get a finding above low?

    python benchmarks/healthy_runs.py                      # 100 recordings, about 20 minutes
    python benchmarks/healthy_runs.py --load 4             # beside 4 busy processes
    python benchmarks/healthy_runs.py --limit 10           # the next 10; what is done is kept
    python benchmarks/healthy_runs.py --again              # first those that others disturbed, anew
    python benchmarks/healthy_runs.py --judge              # judges what was recorded again

Every recording is a whole program of real processes (`healthy_programs.py`, and the engine in small
layouts) under `meshscope run` or `train`, with a seed of its own. Recordings are kept in `--folder`
and nothing is recorded twice, so that it can be stopped and go on. With each goes how many cores
other programs used meanwhile (all CPU time of the machine less the recording's own): recordings in
which they used more than a tenth of one are not of a quiet machine, and are counted apart.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from healthy_programs import PROGRAMS

import meshscope
from meshscope.core.verdict.severity import Severity

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "healthy_runs.json"
NUM_SEEDS = 5
MAX_OTHER_CORES = 0.1
TIMEOUT_S = 300
BUSY = "import math\nwhile True: math.factorial(300)"
ENGINE = """
name = "{name}"
seed = {seed}
num_steps = 60
device = "cpu"
[model]
preset = "llama-tiny"
[parallel]
{degrees}
[batch]
microbatch_size = 4
num_microbatches = {microbatches}
[optimizer]
kind = "adamw"
learning_rate = 3e-3
"""
LAYOUTS = {"engine_dp": "dp = 2", "engine_pp": 'pp = 2\nschedule = "1f1b"'}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One recording, judged."""

    program: str
    seed: int
    findings: tuple[str, ...]
    """Above low and not explained by another."""
    other_cores: float
    """Cores that other programs used meanwhile, the busy processes of `--load` included."""

    @property
    def is_quiet(self) -> bool:
        return self.other_cores <= MAX_OTHER_CORES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside")
    parser.add_argument("--folder", type=Path, help="where recordings and verdicts are kept")
    parser.add_argument("--limit", type=int, help="record at most so many now")
    parser.add_argument("--only", nargs="*", default=[], help="words in names of programs")
    parser.add_argument("--again", action="store_true", help="record disturbed ones anew")
    parser.add_argument("--judge", action="store_true", help="judge again, record nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.gettempdir()) / "meshscope_healthy_runs"
    folder = folder / f"load{options.load}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [
        (name, seed)
        for seed in range(NUM_SEEDS)
        for name in (*PROGRAMS, *LAYOUTS)
        if not options.only or any(word in name for word in options.only)
    ]
    if options.again and not options.judge:
        forget_disturbed(wanted, folder)
    if not options.judge:
        record_missing(wanted, folder, options.load, options.limit)
    done = [judge(folder, name, seed) for name, seed in wanted if is_done(folder, name, seed)]
    show(done, options.load)
    if done and not options.only:
        save(done, options.load, options.output)
    return 0


# --- recording -----------------------------------------------------------------------------------


def is_done(folder: Path, name: str, seed: int) -> bool:
    """Whether there is a recording and what was noted of it, in the form of this script."""
    try:
        read_others(folder, name, seed)
    except (OSError, ValueError, TypeError):  # absent, cut short, or of an earlier form
        return False
    return (folder / f"{name}-{seed}").is_dir()


def forget_disturbed(wanted: list[tuple[str, int]], folder: Path) -> None:
    for name, seed in wanted:
        if is_done(folder, name, seed) and read_others(folder, name, seed) > MAX_OTHER_CORES:
            (folder / f"{name}-{seed}.json").unlink()


def read_others(folder: Path, name: str, seed: int) -> float:
    return float(json.loads((folder / f"{name}-{seed}.json").read_text(encoding="utf-8")))


def read_busy_s() -> tuple[float, float]:
    """CPU seconds of the whole machine since its start, and of the children of this process."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, stolen = map(int, fields)
    busy = user + nice + system + irq + softirq + stolen
    machine = busy / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return machine, own.ru_utime + own.ru_stime


def record_missing(
    wanted: list[tuple[str, int]], folder: Path, load: int, limit: int | None
) -> None:
    missing = [pair for pair in wanted if not is_done(folder, *pair)][:limit]
    with run_busy(load):
        for name, seed in missing:
            run_dir = folder / f"{name}-{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)
            before, start_s = read_busy_s(), time.monotonic()
            try:
                result = record(name, seed, run_dir)
            except subprocess.TimeoutExpired:
                print(f"{name}-{seed} took more than {TIMEOUT_S} s", flush=True)
                continue
            after, length_s = read_busy_s(), time.monotonic() - start_s
            if result.returncode:
                print(f"{name}-{seed} ended with {result.returncode}: {result.stderr[-500:]}")
                continue
            others_s = (after[0] - before[0]) - (after[1] - before[1])
            others = round(max(others_s, 0.0) / length_s, 2)
            (folder / f"{name}-{seed}.json").write_text(json.dumps(others), encoding="utf-8")
            found = judge(folder, name, seed).findings
            text = "; ".join(found) or "nothing above low"
            print(f"{name}-{seed}: {text} ({length_s:.0f} s)", flush=True)


def record(name: str, seed: int, run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "meshscope"]
    if name in LAYOUTS:
        config = run_dir.with_suffix(".toml")
        text = ENGINE.format(
            name=name, seed=seed, degrees=LAYOUTS[name], microbatches=8 if "pp" in name else 2
        )
        config.write_text(text, encoding="utf-8")
        command += ["train", str(config), "-o", str(run_dir)]
    else:
        command += ["run", "-o", str(run_dir), "--", sys.executable]
        if name.startswith("distributed"):
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(HERE / "healthy_programs.py"), name, "--seed", str(seed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@contextlib.contextmanager
def run_busy(count: int) -> Iterator[None]:
    """So many processes that only compute, while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- judging -------------------------------------------------------------------------------------


def judge(folder: Path, name: str, seed: int) -> Recorded:
    others = read_others(folder, name, seed)
    findings = meshscope.study(folder / f"{name}-{seed}").findings
    above = tuple(
        f"{one.severity.word} {one.label}"
        for one in findings
        if one.severity > Severity.LOW and one.explained_by is None
    )
    return Recorded(program=name, seed=seed, findings=above, other_cores=others)


def show(done: list[Recorded], load: int) -> None:
    alarmed = [one for one in done if one.findings]
    beside = f" beside {load} busy processes" if load else ""
    print(f"{len(alarmed)} of {len(done)} healthy recordings{beside} with a finding above low")
    quiet = [one for one in done if one.is_quiet]
    if not load:
        num_alarmed = sum(bool(one.findings) for one in quiet)
        print(f"{num_alarmed} of the {len(quiet)} in which nobody else used the machine")
    for one in alarmed:
        print(f"  {one.program}-{one.seed}, others used {one.other_cores} cores: {one.findings}")


def save(done: list[Recorded], load: int, output: Path) -> None:
    """One entry per load; the others are kept."""
    document: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        document = json.loads(output.read_text(encoding="utf-8"))
    alarmed = [one for one in done if one.findings]
    codes = Counter(text.split()[1] for one in alarmed for text in one.findings)
    document[f"beside {load} busy processes" if load else "quiet"] = {
        "num_recordings": len(done),
        "num_with_a_finding_above_low": len(alarmed),
        "codes": dict(codes.most_common()),
        "findings": [asdict(one) for one in alarmed],
        "num_undisturbed": sum(one.is_quiet for one in done),
        "num_undisturbed_with_a_finding": sum(one.is_quiet and bool(one.findings) for one in done),
        "median_other_cores": sorted(one.other_cores for one in done)[len(done) // 2],
        "machine": {"cores": os.cpu_count(), "kernel": platform.release().split("-")[0]},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
