"""Runs a program of forked ranks beside pytest, whose own process must not fork torch."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_program(name: str, folder: Path, *, timeout_s: float) -> None:
    """`python -m tests.distributed.<name> FOLDER`, warnings as errors; its errors are ours."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.distributed.{name}", folder],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
