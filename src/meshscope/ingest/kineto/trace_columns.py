"""One process's trace as columns: what ran when, on which track, for which operator.

Times are integer nanoseconds of the trace's own clock; with `base_ns` added Kineto's are of the
wall clock.
Text is kept once; columns hold indices into `strings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int16s, Int32s, Int64s, Uint8s, find_true

NO_VALUE = -1
"""A stream, device, correlation or external id that an event does not have."""


class Category(IntEnum):
    """Columns are compared with `int(…)` of it: with an enum numpy takes six times as long."""

    OTHER = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    CPU_OP = 4
    RUNTIME = 5
    """Calls into the device's runtime or driver."""
    ANNOTATION = 6
    DEVICE_ANNOTATION = 7
    PYTHON = 8
    MODULE = 9
    """A Python call that is the forward of a module."""
    OVERHEAD = 10


CATEGORIES: dict[bytes, Category] = {
    b"kernel": Category.KERNEL,
    b"Kernel": Category.KERNEL,
    b"gpu_memcpy": Category.MEMCPY,
    b"Memcpy": Category.MEMCPY,
    b"gpu_memset": Category.MEMSET,
    b"Memset": Category.MEMSET,
    b"concurrent_kernel": Category.KERNEL,
    b"cpu_op": Category.CPU_OP,
    b"Operator": Category.CPU_OP,
    b"cuda_runtime": Category.RUNTIME,
    b"cuda_driver": Category.RUNTIME,
    b"hip_runtime": Category.RUNTIME,
    b"hip_driver": Category.RUNTIME,
    b"xpu_runtime": Category.RUNTIME,
    b"xpu_driver": Category.RUNTIME,
    b"mtia_runtime": Category.RUNTIME,
    b"privateuse1_runtime": Category.RUNTIME,
    b"privateuse1_driver": Category.RUNTIME,
    b"glow_runtime": Category.RUNTIME,
    b"hpu_op": Category.RUNTIME,
    b"Runtime": Category.RUNTIME,
    b"mtia_ccp_events": Category.KERNEL,
    b"mtia_insight": Category.KERNEL,
    b"user_annotation": Category.ANNOTATION,
    b"nvtx": Category.ANNOTATION,
    b"NVTX": Category.ANNOTATION,
    b"cuda_api": Category.RUNTIME,
    b"gpu_user_annotation": Category.DEVICE_ANNOTATION,
    b"python_function": Category.PYTHON,
    b"overhead": Category.OVERHEAD,
}
"""What Kineto and its forks call them; any other is OTHER."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceEvents:
    """Events with a begin and a length, in order of begin."""

    category: Uint8s
    name: Int32s
    """Index into `Trace.strings`."""
    track: Int32s
    """Index into `Trace.tracks`."""
    begin_ns: Int64s
    duration_ns: Int64s | Int32s
    """In four bytes where all of them fit, as ids are."""
    external_id: Int64s | Int32s
    """Ties device work and runtime calls to the operator they were launched for."""
    correlation: Int64s | Int32s
    """Ties device work to the runtime call that launched it."""
    stream: Int32s
    device: Int16s

    def __len__(self) -> int:
        return len(self.category)

    @property
    def end_ns(self) -> Int64s:
        return self.begin_ns + self.duration_ns

    def ends(self, rows: Int64s) -> Int64s:
        """When each of these ends: `end_ns` makes a column of the whole trace."""
        found: Int64s = self.begin_ns.take(rows) + self.duration_ns.take(rows)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceArguments:
    """What else events say, a row for each value, in order of event."""

    event: Int32s
    """Index into `TraceEvents`."""
    key: Uint8s
    """Index into `Trace.keys`."""
    kind: Uint8s
    """A `ValueKind`."""
    value: Int64s | Int32s
    """The number, the bits of a float, or an index into `Trace.strings`."""

    def __len__(self) -> int:
        return len(self.event)


class ValueKind(IntEnum):
    INT = 0
    FLOAT = 1
    STRING = 2
    WORD = 3
    JSON = 4
    """The text of a list or an object."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceMemory:
    """What allocators said at each change (`[memory]` events), in order of time; -1: not said."""

    time_ns: Int64s
    device_type: Int64s
    """As torch numbers them: 0 is the CPU, 1 CUDA."""
    device: Int64s
    changed_bytes: Int64s
    """Less than 0 where memory was given back."""
    allocated_bytes: Int64s
    """Afterwards, by all that this allocator gave out."""
    reserved_bytes: Int64s
    """Taken from the device, in use or not."""

    def __len__(self) -> int:
        return len(self.time_ns)


_NONE: Int64s = np.empty(0, dtype=np.int64)
NO_MEMORY = TraceMemory(
    time_ns=_NONE,
    device_type=_NONE,
    device=_NONE,
    changed_bytes=_NONE,
    allocated_bytes=_NONE,
    reserved_bytes=_NONE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """A line of events: a thread of a process, or a stream of a device."""

    process: int | str
    thread: int | str
    process_name: str = ""
    process_labels: str = ""
    thread_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGroup:
    """A process group as the trace's header lists it."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCounts:
    """What was read, and what was not."""

    num_bytes: int
    """Bytes of JSON."""
    num_events: int
    """Events kept."""
    num_skipped: int
    """Flows, counters and categories that were not asked for."""
    num_incomplete: int
    """Events without a begin or a length, or whose numbers do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    source: str
    rank: int | Unavailable
    world_size: int | Unavailable
    backend: str | Unavailable
    groups: tuple[TraceGroup, ...]
    device_names: Mapping[int, str]
    base_ns: int
    strings: tuple[str, ...]
    keys: tuple[str, ...]
    tracks: tuple[Track, ...]
    events: TraceEvents
    arguments: TraceArguments
    counts: TraceCounts
    warnings: tuple[str, ...]
    """What is wrong with the file; what came before it is here."""
    memory: TraceMemory = NO_MEMORY

    def key(self, name: str) -> int:
        """The index of an argument's name."""
        return self.keys.index(name)

    def argument_rows(self, name: str) -> Int64s:
        """Rows of `arguments` with that name."""
        return find_true(self.arguments.key == self.key(name))

    def text_argument(self, name: str) -> Int32s:
        """Per event the index of its text in `strings`; -1 without one."""
        values = np.full(len(self.events), -1, dtype=np.int32)
        rows = self.argument_rows(name)
        rows = rows[self.arguments.kind[rows] >= int(ValueKind.STRING)]
        values[self.arguments.event[rows]] = self.arguments.value[rows]
        return values
