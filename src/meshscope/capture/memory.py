"""One cheap reading of the process's and the accelerator's memory."""

import os
from typing import Any

from meshscope.store.schema import MISSING

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def sample_memory(torch: Any | None) -> tuple[int, int, int, int, int]:
    """Resident, allocated, reserved, peak allocated, peak reserved bytes; -1 where not known.

    Never starts an accelerator and never resets a peak: both are the program's.
    """
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return (resident_bytes(), MISSING, MISSING, MISSING, MISSING)
    stats = cuda.memory_stats()
    return (
        resident_bytes(),
        stats.get("allocated_bytes.all.current", MISSING),
        stats.get("reserved_bytes.all.current", MISSING),
        stats.get("allocated_bytes.all.peak", MISSING),
        stats.get("reserved_bytes.all.peak", MISSING),
    )


def resident_bytes() -> int:
    """Resident set size of this process; -1 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return MISSING
