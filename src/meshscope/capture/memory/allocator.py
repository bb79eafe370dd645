"""What the allocator says is in use, to hold the attribution against.

On CUDA the caching allocator's own counters. On CPU glibc's `mallinfo2`: bytes in use in all
arenas and in mapped blocks, less what the process used already when the profile was made, and again
when a profiled step began, tensors apart; so what the program allocates otherwise from then on
(graph nodes, Python objects over 512 bytes, other threads) is part of the residual. Other
allocators are not read: their bytes are unavailable.
"""

import ctypes
from typing import Any

from meshscope.store.schema import MISSING

Counters = dict[str, int]
"""By the names of `MemoryPoint`, those that the allocator has."""


class CudaAllocator:
    """torch's caching allocator of one device."""

    name = "torch's CUDA caching allocator"
    why_missing = ""
    counts_tensors_only = True

    def __init__(self, torch: Any, device: Any) -> None:
        self.held_bytes = 0
        """In use before the step without a tensor of Python's: libraries' workspaces, graphs."""
        self._read_stats = torch._C._cuda_memoryStats
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def settle(self, attributed_bytes: int) -> None:
        """Marks what is in use now, and belongs to no Python tensor, as not the program's."""
        self.held_bytes = max(self.held_bytes + self.allocated_bytes() - attributed_bytes, 0)

    def allocated_bytes(self) -> int:
        return int(self._read_stats(self._index)["allocated_bytes"]["all"]["current"])

    def requested_bytes(self) -> int:
        """Now, without what it rounds up: changes by exactly what is asked for."""
        stats = self._read_stats(self._index)
        kind = "requested_bytes" if _counts_requests(stats) else "allocated_bytes"
        return int(stats[kind]["all"]["current"])

    def rounding_bytes(self) -> int:
        """Handed out beyond what was asked for; 0 where it is not counted."""
        stats = self._read_stats(self._index)
        if not _counts_requests(stats):
            return 0
        current = [stats[kind]["all"]["current"] for kind in ("allocated_bytes", "requested_bytes")]
        return max(int(current[0]) - int(current[1]), 0)

    def read(self) -> Counters:
        stats = self._read_stats(self._index)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        split = stats.get("inactive_split_bytes", {}).get("all", {})
        return _drop_missing(
            allocated_bytes=int(allocated["current"]),
            reserved_bytes=int(reserved["current"]),
            peak_allocated_bytes=int(allocated["peak"]),
            inactive_split_bytes=int(split.get("current", MISSING)),
            num_retries=int(stats.get("num_alloc_retries", MISSING)),
            num_ooms=int(stats.get("num_ooms", MISSING)),
        )


def _drop_missing(**counters: int) -> Counters:
    return {name: value for name, value in counters.items() if value >= 0}


def _counts_requests(stats: Any) -> bool:
    """cudaMallocAsync's statistics have none."""
    requested = stats.get("requested_bytes", {}).get("all", {}).get("current", 0)
    return bool(requested > 0)


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class HostAllocator:
    """glibc's malloc, which torch uses on CPU."""

    name = "glibc malloc (mallinfo2), less what was in use before"
    counts_tensors_only = False

    def __init__(self, why_missing: str = "") -> None:
        """`why_missing`: why nothing is to be read, if so."""
        self._read = None if why_missing else _find_mallinfo2()
        self._baseline_bytes = 0
        self.held_bytes = 0
        """Always 0 here: the baseline is taken off."""
        no_function = "" if self._read else "this C library has no mallinfo2"
        self.why_missing = why_missing or no_function

    def settle(self, attributed_bytes: int) -> None:
        """What is in use now beyond the attributed is not the training's, from now on."""
        in_use = self._in_use()
        if in_use >= 0 and in_use < attributed_bytes:
            self._read = None
            self.why_missing = (
                f"malloc knows of {in_use} bytes, tensors hold {attributed_bytes}: another "
                "allocator is loaded"
            )
        self._baseline_bytes = max(in_use - attributed_bytes, 0)

    def allocated_bytes(self) -> int:
        """Now; -1 where it is not known."""
        in_use = self._in_use()
        return MISSING if in_use < 0 else max(in_use - self._baseline_bytes, 0)

    def requested_bytes(self) -> int:
        """malloc does not tell what it rounds up."""
        return self.allocated_bytes()

    def rounding_bytes(self) -> int:
        return 0

    def read(self) -> Counters:
        return _drop_missing(allocated_bytes=self.allocated_bytes())

    def _in_use(self) -> int:
        if self._read is None:
            return MISSING
        info = self._read()
        return int(info.uordblks + info.hblkhd)


def _find_mallinfo2() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _MallocInfo
    return function


def make_allocator(torch: Any, device: Any) -> CudaAllocator | HostAllocator:
    """The one a model's tensors come from."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        return CudaAllocator(torch, device)
    if device.type != "cpu":
        return HostAllocator(f"the allocator of {device.type} is not read")
    return HostAllocator()
