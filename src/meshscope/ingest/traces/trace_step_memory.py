"""What a device's allocator held at the end of each step, and at most in it (`[memory]` events).

A recorder reads an allocator at the ends of steps; the profiler writes an event at each change, so
that the last one of a step says what was held at its end. The highest is that of the step's own
events. A step without an event, and what was held outside of steps, is not in it:
`meshscope trace` shows all of it.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.ingest.kineto.trace_columns import TraceMemory
from meshscope.ingest.traces.trace_steps import TraceSteps
from meshscope.store.read.arrays import Int64s, find_true

HOST_TYPE = 0
"""The CPU, as torch numbers device types."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMemory:
    """One device's allocator, a row per step with an event; -1: not said."""

    place: Int64s
    """Of the step in `TraceSteps`."""
    allocated_bytes: Int64s
    """At the step's end."""
    reserved_bytes: Int64s
    peak_allocated_bytes: Int64s
    """In the step."""
    peak_reserved_bytes: Int64s


def sample_steps(memory: TraceMemory, steps: TraceSteps, device: int) -> StepMemory | None:
    """None where no allocator of the device says what it gave out."""
    is_own = (memory.device_type != HOST_TYPE) & (memory.device == device)
    rows = find_true(is_own & (memory.allocated_bytes >= 0))
    place_of = steps.locate(memory.time_ns[rows]).astype(np.int64)
    rows, place_of = rows[place_of >= 0], place_of[place_of >= 0]
    if not len(rows):
        return None
    place, first = np.unique(place_of, return_index=True)
    last = rows[np.append(first[1:], len(rows)) - 1]
    return StepMemory(
        place=place,
        allocated_bytes=memory.allocated_bytes[last],
        reserved_bytes=memory.reserved_bytes[last],
        peak_allocated_bytes=np.maximum.reduceat(memory.allocated_bytes[rows], first),
        peak_reserved_bytes=np.maximum.reduceat(memory.reserved_bytes[rows], first),
    )


def has_host_memory(memory: TraceMemory) -> bool:
    """Whether the host's allocator says what it gave out."""
    return bool(((memory.device_type == HOST_TYPE) & (memory.allocated_bytes >= 0)).any())
