"""numpy as commands load it: no further thread, and the environment as it was."""

import os
import sys

import pytest

from ended_process import run_process

PROGRAM = """
import os, sys
from pathlib import Path
from meshscope.cli.numpy_loading import load_numpy
before = dict(os.environ)
load_numpy()
load_numpy()
assert dict(os.environ) == before, "the environment is another"
print("numpy" in sys.modules, len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="/proc is Linux's")
@pytest.mark.parametrize("asked", [None, "1"])
def test_numpy_is_loaded_without_threads(asked) -> None:
    env = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    if asked is not None:
        env["OPENBLAS_NUM_THREADS"] = asked
    said = run_process([sys.executable, "-c", PROGRAM], env=env, check=True)
    assert said.stdout.split() == ["True", "1"]
