"""Loads numpy as commands need it."""

import os
import sys

_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Without threads for products of matrices, which are not used here: they spin when they begin,
    which takes as much CPU time as all other modules take to load. What this process starts finds
    its environment as it was."""
    if "numpy" in sys.modules or _THREADS in os.environ:
        return
    os.environ[_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_THREADS]
