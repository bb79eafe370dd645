"""The share of a rank's time in which its training thread was ready and had no core.

The kernel's scheduler counts it (`capture.hardware.core_queue`); the recorder reads it at the ends
of steps. It is about the thread that trains: other threads of the rank, and time in the kernel, are
not in it. It does not say who had the core: other programs, other ranks, or threads of the same.
"""

from dataclasses import dataclass

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.recording import Recording

_MAX_NS = 1 << 62
_MAX_COUNT = 1 << 20
_MAX_TEXT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreQueue:
    elapsed_ns: int
    """Between the first and the last reading."""
    run_ns: int
    queued_ns: int
    num_threads: int | Unavailable
    """That torch computes with."""
    num_cores: int | Unavailable
    """That they may run on, or that the container's share of time is worth."""
    cores: str
    """Which, as `0-3,8`; empty if that was not recorded."""

    @property
    def queued_ratio(self) -> float:
        return min(self.queued_ns / self.elapsed_ns, 1.0)


def read_core_queue(recording: Recording) -> CoreQueue | Unavailable:
    for line in reversed(recording.updates):
        found = line.get("core_queue")
        if not isinstance(found, dict):
            continue
        values = [
            value
            for name in ("elapsed_ns", "run_ns", "queued_ns")
            if type(value := found.get(name)) is int and 0 <= value < _MAX_NS
        ]
        if len(values) == 3 and values[0]:
            cores = found.get("cores")
            return CoreQueue(
                elapsed_ns=values[0],
                run_ns=values[1],
                queued_ns=values[2],
                num_threads=_read_count(found.get("num_threads")),
                num_cores=_read_count(found.get("num_cores")),
                cores=cores[:_MAX_TEXT] if isinstance(cores, str) else "",
            )
    return Unavailable("how long threads waited for a core was not recorded")


def _read_count(value: object) -> int | Unavailable:
    if type(value) is int and 0 < value < _MAX_COUNT:
        return value
    return Unavailable("how many threads and cores a rank has was not recorded")
