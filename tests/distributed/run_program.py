"""Runs a program of forked ranks beside pytest, whose own process must not fork torch."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MAX_CHARACTERS = 8000


@functools.cache
def start_forking() -> "subprocess.Popen[str]":
    """The process that forks programs, one for all tests here; it ends when its input does."""
    forking = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.distributed.fork_programs"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(forking.communicate)  # closes its input, and waits for it
    return forking


def run_program(
    name: str, folder: Path, *, timeout_s: float, is_strict: bool = True, is_checked: bool = True
) -> str:
    """What `python -m tests.distributed.<name> FOLDER` writes to stdout and stderr.

    With `is_strict` warnings are errors; with `is_checked` its failure is ours.
    """
    forking = start_forking()
    assert forking.stdin is not None
    assert forking.stdout is not None
    output = folder.with_name(f"{folder.name}.output.txt")
    request = {
        "module": f"tests.distributed.{name}",
        "arguments": [str(folder)],
        "environment": {**os.environ, "OMP_NUM_THREADS": "1"},
        "output": str(output),
        "timeout_s": timeout_s,
        "is_strict": is_strict,
    }
    forking.stdin.write(json.dumps(request) + "\n")
    forking.stdin.flush()
    answer = forking.stdout.readline()
    said = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    assert answer, "the process that forks programs has ended"
    code = json.loads(answer)
    assert code is not None, f"{name} took more than {timeout_s} s: {said[-MAX_CHARACTERS:]}"
    assert not is_checked or code == 0, said[-MAX_CHARACTERS:]
    return said
