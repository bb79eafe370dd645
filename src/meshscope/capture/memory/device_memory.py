"""Readings of the process's and the accelerator's memory, and how often they are worth their cost.

Never starts an accelerator and never resets a peak: both are the program's.
"""

import sys
from typing import Any, NamedTuple

from meshscope.capture.memory.host_memory import resident_bytes
from meshscope.capture.steps.device_events import find_backend
from meshscope.store.schema import MISSING

COST_PER_WALL = 1000
"""A reading may cost a thousandth of the time until the next one."""
_LONGEST_PAUSE_NS = 1_000_000_000
"""However dear a reading is, there is one a second, as long as that costs less than a hundredth."""
_SHORTEST_PAUSE_PER_COST = 100
_EARLY_READINGS, _EARLY_PAUSE_NS = 16, 100_000_000
"""So many come as often as this, however dear: 60 steps of 25 ms are to show a leak."""
_COUNTERS = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")


class MemorySample(NamedTuple):
    """Rows of `memory` and, with an accelerator, of `allocator`, without step and time."""

    memory: tuple[int, int, int, int, int]
    """Resident, allocated, reserved, peak allocated, peak reserved bytes; -1 where not known."""
    allocator: tuple[int, int, int, int, int] | None
    """Active, inactive split, device free and total bytes; retries and failures in one word."""


class DeviceCapacity(NamedTuple):
    """What the driver says of the device; -1 where not known."""

    free_bytes: int = MISSING
    """Whoever uses the rest."""
    total_bytes: int = MISSING
    limit_bytes: int = MISSING
    """Of this process, where the program set a share of the device."""


def sample_memory(torch: Any | None, capacity: DeviceCapacity) -> MemorySample:
    """What the process and its allocator hold; `capacity` as it was just read, if it was."""
    cuda = _find_cuda(torch)
    if cuda is None:
        return MemorySample((resident_bytes(), *_sample_other(torch)), None)
    # Nested as it comes from C++: `memory_stats` flattens and sorts it, which takes several times
    # as long.
    stats = cuda.memory_stats_as_nested_dict()
    allocated, reserved = _count_all(stats, "allocated_bytes"), _count_all(stats, "reserved_bytes")
    memory = (
        resident_bytes(),
        allocated.get("current", MISSING),
        reserved.get("current", MISSING),
        allocated.get("peak", MISSING),
        reserved.get("peak", MISSING),
    )
    allocator = (
        _count_all(stats, "active_bytes").get("current", MISSING),
        _count_all(stats, "inactive_split_bytes").get("current", MISSING),
        capacity.free_bytes,
        capacity.total_bytes,
        pack_counts(stats.get("num_alloc_retries", MISSING), stats.get("num_ooms", MISSING)),
    )
    return MemorySample(memory, allocator)


def _sample_other(torch: Any) -> tuple[int, int, int, int]:
    """Allocated, reserved and both peaks of an accelerator that is not CUDA's."""
    missing = (MISSING, MISSING, MISSING, MISSING)
    find_any = getattr(getattr(torch, "_C", None), "_accelerator_getAccelerator", None)
    if find_any is None or find_any() is None:
        return missing
    mps = getattr(torch, "mps", None) if sys.platform == "darwin" else None
    if mps is not None and torch.backends.mps.is_available():
        allocated = int(mps.current_allocated_memory())
        return (
            (allocated, int(mps.driver_allocated_memory()), *missing[2:]) if allocated else missing
        )
    found = find_backend(torch)
    if found is None:
        return missing
    backend = getattr(torch, found[0])
    allocated, reserved, most, most_reserved = (
        int(getattr(backend, name, lambda: MISSING)()) for name in _COUNTERS
    )
    return allocated, reserved, most, most_reserved


def _find_cuda(torch: Any | None) -> Any | None:
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _count_all(stats: Any, name: str) -> dict[str, int]:
    """Blocks of all sizes; empty where an allocator does not count this."""
    found: dict[str, int] = stats.get(name, {}).get("all", {})
    return found


def read_capacity(torch: Any | None) -> DeviceCapacity:
    """Asks the driver, which takes far longer than asking the allocator; not while a graph is
    captured, which a call to the driver could break."""
    cuda = _find_cuda(torch)
    if cuda is None or cuda.is_current_stream_capturing():
        return DeviceCapacity()
    free_bytes, total_bytes = cuda.mem_get_info()
    read_share = getattr(cuda, "get_per_process_memory_fraction", None)
    share = 1.0 if read_share is None else float(read_share())
    limit_bytes = int(share * total_bytes) if share < 1 else MISSING
    return DeviceCapacity(int(free_bytes), int(total_bytes), limit_bytes)


def pack_counts(num_retries: int, num_failures: int) -> int:
    """Two counts as they stand in one word: each plus one, so that 0 is missing."""
    return min(num_retries + 1, 0xFFFFFFFF) | min(num_failures + 1, 0x7FFFFFFF) << 32


def pause_after(cost_ns: int, num_readings: int) -> int:
    """How long after the last of so many readings, which cost this, the next one may come."""
    wanted_ns = COST_PER_WALL * cost_ns
    least_ns = _SHORTEST_PAUSE_PER_COST * cost_ns
    if num_readings < _EARLY_READINGS:
        return max(min(wanted_ns, _EARLY_PAUSE_NS), least_ns)
    if wanted_ns <= _LONGEST_PAUSE_NS:
        return wanted_ns
    return max(_LONGEST_PAUSE_NS, least_ns)
