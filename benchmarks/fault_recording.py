"""Records the cases of the fault matrix, and again those whose ranks waited for their cores.

The rule of `--again` looks at the recording only, never at what is said of it. The kernel counts
how long each training thread was ready and had no core; a recording whose ranks waited for more
than `MAX_QUEUED_RATIO` of the time each, times the number of ranks, was held up by other programs.
It is recorded up to `MAX_ATTEMPTS` times, and the one that waited least is kept. Programs that have
too many threads on purpose are left as they are; of runs too short for two readings nothing is
known.
"""

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.fault_cases import HEALTHY
from tests.distributed.fault_matrix import (
    Case,
    Recipe,
    find_twin,
    group_by_clean,
    record,
    record_cases,
    take_precedence,
)
from tests.distributed.fork_ranks import freeze_imports, import_everything

from meshscope.analyze.device.core_queue import read_core_queue
from meshscope.core.unavailable import known
from meshscope.store.read.run import open_run

MACHINE_FILE = "machine.json"
ROUND = "round {}"
"""A folder in the folder: everything recorded once more, to see how far twins repeat each other."""
QUEUED_FILE = "queued.json"
"""In a folder: what the ranks of each attempt waited, of those recorded again."""
MAX_QUEUED_RATIO = 0.01
"""For each rank of a run: 8 ranks on 2 cores wait for each other, too."""
MAX_ATTEMPTS = 3


def record_all(
    cases: Sequence[Case],
    folder: Path,
    seconds: float,
    *,
    is_real_time: bool = True,
    is_again: bool = False,
    num_rounds: int = 1,
) -> None:
    """What is missing, with `is_again` also what was disturbed; and how the machine was.

    Beside load ranks have no precedence: others hold them up. With `num_rounds` all is recorded as
    often, one whole round after the other.
    """
    import torch

    deadline_s = time.monotonic() + seconds
    import_everything()
    freeze_imports()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MACHINE_FILE
    machine = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    machine |= {
        "cores": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "is_real_time": is_real_time and take_precedence(),
    }
    before = round(os.getloadavg()[0], 1)
    record_cases(cases, folder, deadline_s=deadline_s)
    for number in range(2, num_rounds + 1):
        timed = [case for case in cases if case.clean is not None and case.is_timed]
        record_cases(timed, folder / ROUND.format(number), deadline_s=deadline_s)
    if is_again:
        record_disturbed(cases, folder, deadline_s)
    took_s = round(time.monotonic() - deadline_s + seconds) if math.isfinite(seconds) else None
    batch = {"load_before": before, "load_after": round(os.getloadavg()[0], 1), "seconds": took_s}
    machine["batches"] = [*machine.get("batches", []), batch]
    path.write_text(json.dumps(machine), encoding="utf-8")


def list_clean(cases: Sequence[Case]) -> list[Case]:
    """Every clean run once, as a case of its own."""
    found: dict[str, Recipe] = {}
    for clean, members in group_by_clean(cases):
        if clean is not None:
            found[f"{members[0].name}, clean"] = clean
    return [Case(name=name, truth=HEALTHY, faulty=one, clean=None) for name, one in found.items()]


@contextmanager
def keep_busy(count: int) -> Iterator[None]:
    """So many processes beside this one that never rest, at the same priority."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


# --- what was disturbed --------------------------------------------------------------------------


def measure_queued(run_dir: Path) -> float | None:
    """The share of the time in which its training threads had no core, mean over ranks."""
    found = [known(read_core_queue(one)) for one in open_run(run_dir).last_attempt.ranks.values()]
    ratios = [one.queued_ratio for one in found if one is not None]
    return statistics.mean(ratios) if ratios else None


def record_disturbed(cases: Sequence[Case], folder: Path, deadline_s: float) -> None:
    """Once more what waited too long, if it was not recorded often enough already."""
    path = folder / QUEUED_FILE
    attempts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for recipe, run_dir in list_recordings(cases, folder):
        if time.monotonic() > deadline_s:
            return
        queued = None if recipe.is_fair or not run_dir.exists() else measure_queued(run_dir)
        key = str(run_dir.relative_to(folder))
        done = attempts.get(key, [] if queued is None else [round(queued, 4)])
        is_disturbed = queued is not None and queued > MAX_QUEUED_RATIO * recipe.num_ranks
        if queued is None or not is_disturbed or len(done) >= MAX_ATTEMPTS:
            continue
        again = run_dir.with_name(f"{run_dir.name}_again")
        record(recipe, again)
        anew = measure_queued(again) if again.exists() else None
        attempts[key] = [*done, None if anew is None else round(anew, 4)]
        path.write_text(json.dumps(attempts), encoding="utf-8")
        if anew is not None and anew < queued:
            shutil.rmtree(run_dir)
            again.rename(run_dir)
        shutil.rmtree(again, ignore_errors=True)


def list_recordings(cases: Sequence[Case], folder: Path) -> list[tuple[Recipe, Path]]:
    """Every run once, twins among the faults they belong to."""
    found: list[tuple[Recipe, Path]] = []
    for clean, members in group_by_clean(cases):
        found += [(case.faulty, folder / case.name / "faulty") for case in members]
        if clean is not None:
            found.append((clean, find_twin(clean, members, folder)))
    return found
