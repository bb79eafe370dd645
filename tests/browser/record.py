"""Records the small real runs that the tests of the page look at, and writes their pages.

    .venv/bin/python tests/browser/record.py FOLDER

    slow      dp2 × tp2 × pp2, eight processes, profiled; rank 5 is slower in forward from step 15
    even      the same job without a fault: what `slow` is compared with
    dp        four data-parallel ranks; rank 2 waits for data
    diverged  two ranks; the loss is NaN from step 8 on, by rank 1
    oom       two ranks with 3 GiB of address space each; rank 1 keeps 60 MB more in every step, and
              ends in a MemoryError
    stuck     dp1 × tp2 × pp2; rank 3 does not enter an operation; asked while the job waits
    traces    what torch.profiler wrote of four data-parallel ranks; rank 2 is slow

Needs torch, and takes about a minute of two cores.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

CONFIG = """
name = "train"
num_steps = 30
device = "cpu"
[model]
preset = "llama-tiny"
[parallel]
dp = 2
tp = 2
pp = 2
schedule = "1f1b"
[batch]
microbatch_size = 1
num_microbatches = 4
[optimizer]
kind = "adamw"
learning_rate = 3e-3
num_warmup_steps = 2
"""
FLAT = ("--dp", "4", "--tp", "1", "--pp", "1")
RUNS: dict[str, tuple[str, ...]] = {
    "slow": ("--profiling", "--fault", "slow rank=5 phase=forward ms=60 steps=15-"),
    "even": (),
    "dp": (*FLAT, "--steps", "20", "--fault", "stalled_loader rank=2 ms=80 steps=6-"),
    "diverged": (*FLAT, "--dp", "2", "--steps", "14", "--fault", "nan rank=1 steps=8-"),
}
STUCK = ("--dp", "1", "--fault", "hang rank=3 steps=4 phase=collective axis=tp")
OOM = (*FLAT, "--dp", "2", "--profiling", "--fault", "leak rank=1 mb=60 steps=4-")
OOM_STEPS, OOM_LIMIT_BYTES = 60, 3 << 30
STUCK_AFTER_S = 3.0
START_TIMEOUT_S = 60.0


def record_all(folder: Path) -> None:
    """Records what is not there yet, and writes all pages."""
    config = folder / "train.toml"
    config.write_text(CONFIG, encoding="utf-8")
    for name, flags in RUNS.items():
        if not (folder / name).exists():
            meshscope("train", config, "-o", folder / name, *flags)
        meshscope("report", folder / name, "-o", folder / f"{name}.html")
    if not (folder / "oom").exists():
        record_oom(folder, config)
    meshscope("report", folder / "oom", "-o", folder / "oom.html")
    if not (folder / "stuck.html").exists():
        record_stuck(folder, config)
    if not (folder / "traces").exists():
        program = Path(__file__).with_name("trace_program.py")
        run([sys.executable, str(program), str(folder / "traces")])
    meshscope("report", folder / "traces", "-o", folder / "traces.html")
    meshscope("compare", folder / "even", folder / "slow", "--html", folder / "compare.html")


def record_oom(folder: Path, config: Path) -> None:
    """A rank gets no more memory from the system."""
    limit = (OOM_LIMIT_BYTES, OOM_LIMIT_BYTES)
    flags = (*OOM, "--steps", OOM_STEPS)
    done = subprocess.run(
        command("train", config, "-o", folder / "oom", *flags),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    if done.returncode == 0:
        raise SystemExit(f"the job did not run out of memory: {done.stdout}{done.stderr}")


def record_stuck(folder: Path, config: Path) -> None:
    """Asks while the job is stuck, then ends it."""
    job = subprocess.Popen(
        command("train", config, "-o", folder / "stuck", *STUCK),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while ask_why(folder) != 5 and time.monotonic() < deadline:
            time.sleep(1)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def ask_why(folder: Path) -> int:
    """Writes the page of a job that hangs; 5 if it does."""
    ask = command(
        "hang", folder / "stuck", "--after", STUCK_AFTER_S, "--html", folder / "stuck.html"
    )
    return subprocess.run(ask, capture_output=True, check=False).returncode


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "meshscope", *map(str, arguments)]


def meshscope(*arguments: object) -> None:
    run(command(*arguments))


def run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    record_all(Path(sys.argv[1]))
