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
from meshscope.store.read.arrays import Int16s, Int32s, Int64s, Uint8s

NO_VALUE = -1
"""A stream, device, correlation or external id that an event does not have."""


class Category(IntEnum):
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceEvents:
    """Events with a begin and a length, in order of begin."""

    category: Uint8s
    name: Int32s
    """Index into `Trace.strings`."""
    track: Int32s
    """Index into `Trace.tracks`."""
    begin_ns: Int64s
    duration_ns: Int64s
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

    def key(self, name: str) -> int:
        """The index of an argument's name."""
        return self.keys.index(name)

    def argument_rows(self, name: str) -> Int64s:
        """Rows of `arguments` with that name."""
        return np.flatnonzero(self.arguments.key == self.key(name))

    def text_argument(self, name: str) -> Int32s:
        """Per event the index of its text in `strings`; -1 without one."""
        values = np.full(len(self.events), -1, dtype=np.int32)
        rows = self.argument_rows(name)
        rows = rows[self.arguments.kind[rows] >= ValueKind.STRING]
        values[self.arguments.event[rows]] = self.arguments.value[rows]
        return values
