"""Runs a program bare and under `meshscope run`, and keeps what it said and what it timed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hand import PLACE
from kinds import Kind

_HERE = Path(__file__).parent
_PROGRAMS = _HERE / "programs"
_LIMIT_S = 150
_VARYING = re.compile(r"(runtime|_per_second|epoch time)\W+[\d.e+-]+")
"""What a package says of its own speed differs from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run of a program left behind."""

    return_code: int
    output: str
    errors: str
    by_hand: dict[int, dict[str, Any]]
    """What each rank timed."""


def run_both(kind: Kind, folder: Path) -> tuple[Outcome, Outcome, Path]:
    """The program bare, and recorded into the folder returned; one rank leaves room for both."""
    folder.mkdir()
    bare, recorded, run = folder / "bare", folder / "recorded", folder / "run"
    launch = [sys.executable, "-m", "meshscope", "run", "-o", str(run)]
    with ThreadPoolExecutor(2 if kind.world_size == 1 else 1) as pool:
        first = pool.submit(_run, kind, [], bare)
        second = pool.submit(_run, kind, launch, recorded)
        return first.result(), second.result(), run


def _run(kind: Kind, launch: Sequence[str], folder: Path) -> Outcome:
    folder.mkdir()
    command = [*launch, sys.executable]
    if kind.num_processes:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(kind.num_processes)]
    command += [*_name_program(kind), *kind.arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            (str(_HERE), str(_PROGRAMS), os.environ.get("PYTHONPATH", ""))
        ),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        PLACE: str(folder / "times"),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
    )
    by_hand = {
        int(path.suffix[1:]): json.loads(path.read_text("utf-8")) for path in folder.glob("times.*")
    }
    return Outcome(
        return_code=done.returncode,
        output=_VARYING.sub(r"\1", done.stdout),
        errors=done.stderr,
        by_hand=by_hand,
    )


def _name_program(kind: Kind) -> list[str]:
    path = _PROGRAMS / kind.program
    if kind.style == "-c":
        return ["-c", path.read_text("utf-8")]
    if kind.style == "-m":
        return ["-m", kind.program.removesuffix(".py").replace("/", ".")]
    return [str(path)]
