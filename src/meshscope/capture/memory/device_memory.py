"""Readings of the process's and the accelerator's memory, and how often they are worth their cost.

Never starts an accelerator and never resets a peak: both are the program's.
"""

from typing import Any, NamedTuple

from meshscope.capture.memory.host_memory import resident_bytes
from meshscope.store.schema import MISSING

_COST_PER_WALL = 1000
"""A reading may cost a thousandth of the time until the next one."""
_LONGEST_PAUSE_NS = 1_000_000_000
"""However dear a reading is, there is one a second, as long as that costs less than a hundredth."""
_SHORTEST_PAUSE_PER_COST = 100


class MemorySample(NamedTuple):
    """Rows of `memory` and, with an accelerator, of `allocator`, without step and time."""

    memory: tuple[int, int, int, int, int]
    """Resident, allocated, reserved, peak allocated, peak reserved bytes; -1 where not known."""
    allocator: tuple[int, int, int, int, int] | None
    """Active, inactive split, device free and total bytes; retries and failures in one word."""


def sample_memory(torch: Any | None) -> MemorySample:
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        missing = (MISSING, MISSING, MISSING, MISSING)
        return MemorySample((resident_bytes(), *missing), None)
    stats = cuda.memory_stats()
    memory = (
        resident_bytes(),
        stats.get("allocated_bytes.all.current", MISSING),
        stats.get("reserved_bytes.all.current", MISSING),
        stats.get("allocated_bytes.all.peak", MISSING),
        stats.get("reserved_bytes.all.peak", MISSING),
    )
    free_bytes, total_bytes = _read_device(cuda)
    allocator = (
        stats.get("active_bytes.all.current", MISSING),
        stats.get("inactive_split_bytes.all.current", MISSING),
        free_bytes,
        total_bytes,
        pack_counts(stats.get("num_alloc_retries", MISSING), stats.get("num_ooms", MISSING)),
    )
    return MemorySample(memory, allocator)


def _read_device(cuda: Any) -> tuple[int, int]:
    """Free and total bytes of the device, of all processes on it; not while a graph is captured,
    which a call to the driver could break."""
    if cuda.is_current_stream_capturing():
        return MISSING, MISSING
    free_bytes, total_bytes = cuda.mem_get_info()
    return int(free_bytes), int(total_bytes)


def pack_counts(num_retries: int, num_failures: int) -> int:
    """Two counts as they stand in one word: each plus one, so that 0 is missing."""
    return min(num_retries + 1, 0xFFFFFFFF) | min(num_failures + 1, 0x7FFFFFFF) << 32


def pause_after(cost_ns: int) -> int:
    """How long after a reading of this cost the next one may come."""
    wanted_ns = _COST_PER_WALL * cost_ns
    if wanted_ns <= _LONGEST_PAUSE_NS:
        return wanted_ns
    return max(_LONGEST_PAUSE_NS, _SHORTEST_PAUSE_PER_COST * cost_ns)
