"""How much memory a trace's allocators had given out, moment by moment (`[memory]` events).

The profiler writes one for each allocation and each release where it was asked to
(`profile_memory=True`), with what the allocator had given out in all by then: of the process, not
of the traced time alone. Memory that others took of a device is not in it.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import Trace, TraceMemory
from meshscope.ingest.traces.trace_steps import TraceSteps
from meshscope.store.read.arrays import Int64s, find_true

MAX_POINTS = 240
"""Of a timeline: each is the moment of a stretch with the most allocated."""
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 20: "privateuse1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """One moment of one allocator."""

    time_ns: int
    """On the clock of the trace."""
    allocated_bytes: int
    reserved_bytes: int | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """One allocator: a device's, or the host's."""

    device_type: str
    device: int
    num_events: int
    first_bytes: int
    """Allocated after the first event."""
    last_bytes: int
    peak_bytes: int
    peak_time_ns: int
    """On the clock of the trace."""
    peak_step: int | None
    """None outside of all steps."""
    peak_reserved_bytes: int | Unavailable
    requested_bytes: int
    """By all allocations together."""
    timeline: tuple[MemoryPoint, ...]


def measure_memory(trace: Trace, steps: TraceSteps) -> tuple[MemoryUse, ...]:
    """Every allocator that says how much it gave out."""
    memory = trace.memory
    known = find_true(memory.allocated_bytes >= 0)
    keys = memory.device_type[known] << 32 | (memory.device[known] & 0xFFFFFFFF)
    return tuple(_measure(memory, known[keys == key], steps) for key in np.unique(keys).tolist())


def _measure(memory: TraceMemory, rows: Int64s, steps: TraceSteps) -> MemoryUse:
    allocated, changed = memory.allocated_bytes[rows], memory.changed_bytes[rows]
    peak = int(rows[allocated.argmax()])
    kind, device = int(memory.device_type[peak]), int(memory.device[peak])
    reserved = int(memory.reserved_bytes[rows].max())
    return MemoryUse(
        device_type=_DEVICE_TYPES.get(kind, f"type {kind}"),
        device=max(device, 0),
        num_events=len(rows),
        first_bytes=int(allocated[0]),
        last_bytes=int(allocated[-1]),
        peak_bytes=int(allocated.max()),
        peak_time_ns=int(memory.time_ns[peak]),
        peak_step=steps.numbers_at(steps.locate(memory.time_ns[peak : peak + 1]))[0],
        peak_reserved_bytes=_known(reserved),
        requested_bytes=int(changed[changed > 0].sum()),
        timeline=tuple(_thin_out(memory, rows)),
    )


def _thin_out(memory: TraceMemory, rows: Int64s) -> list[MemoryPoint]:
    """The first, the last, and the highest of each stretch of time between."""
    since = memory.time_ns[rows].astype(np.float64)
    since -= since[0]
    stretch = (since * (MAX_POINTS / max(since[-1], 1.0))).astype(np.int64)
    order = np.lexsort((-memory.allocated_bytes[rows], stretch))
    is_first = np.append(True, np.diff(stretch[order]) != 0)
    picked = np.unique(np.concatenate([order[is_first], [0, len(rows) - 1]]))
    return [
        MemoryPoint(
            time_ns=int(memory.time_ns[row]),
            allocated_bytes=int(memory.allocated_bytes[row]),
            reserved_bytes=_known(int(memory.reserved_bytes[row])),
        )
        for row in rows[picked].tolist()
    ]


def _known(size: int) -> int | Unavailable:
    return size if size >= 0 else Unavailable("the trace does not say what is reserved")
