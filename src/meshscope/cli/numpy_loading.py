"""Loads numpy as commands need it."""

import os
import sys

_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Without threads for products of matrices, which are not used here: they spin when they begin,
    for 0.05 s of CPU time and more. What this process starts finds its environment as it was."""
    if "numpy" in sys.modules:
        return
    is_asked = _THREADS in os.environ
    os.environ.setdefault(_THREADS, "1")
    try:
        import numpy  # noqa: F401
    finally:
        if not is_asked:
            del os.environ[_THREADS]
