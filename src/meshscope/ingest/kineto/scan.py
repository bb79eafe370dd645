"""What a scanner gives: the events of a trace as columns, a batch at a time.

Two scanners do the same: `native_scanner`, a shared library that is compiled when meshscope is
installed and a compiler is there, and `python_scanner`, which needs none and is several times
slower. Times are whole nanoseconds, taken from the digits of the text: microseconds of an epoch do
not fit a float to better than 0.2 µs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from meshscope.ingest.kineto.trace_columns import TraceArguments, TraceEvents
from meshscope.store.read.arrays import Int32s, Int64s, Uint8s

MISSING = -(1 << 63)
"""A time, process or thread that was not there, or no number."""
TEXT_IDENTITY = MISSING + 2
"""A process or thread that is named by text: this plus the index of the text in the symbols."""

KEPT_PHASES = "XMBEi"
"""Complete events, metadata, begins and ends, and moments, among which allocators' are. Flows and
counters are counted and left out."""

DENSE_KEYS = ("External id", "correlation", "stream", "device")
"""Arguments of nearly every event; complete events have them in columns of their own."""

KEYS = (
    *DENSE_KEYS,
    "name",
    "labels",
    "bytes",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "Process Group Name",
    "Process Group Ranks",
    "Process Group Description",
    "Rank",
    "Src Rank",
    "Dst Rank",
    "Seq",
    "Input Dims",
    "Input type",
    "Concrete Inputs",
    "Sequence number",
    "Fwd thread id",
    "Python id",
    "Python parent id",
    "Python module id",
    "graph id",
    "graph node id",
    "kernel_backend",
    "Device Id",
    "Device Type",
    "Bytes",
    "Total Allocated",
    "Total Reserved",
)
"""Arguments that are kept, in the order of their numbers."""
FIRST_KEPT_KEY = KEYS.index("labels") + 1
"""Those before it complete events do not have in their table of arguments."""


class ValueType(IntEnum):
    INT = 0
    FLOAT = 1
    """The bits of a float64."""
    STRING = 2
    """Index into the symbols."""
    WORD = 3
    """true, false, null or what is none of these: an index into the symbols."""
    RAW = 4
    """The text of a list or an object: an index into the symbols."""


class ScanState(IntEnum):
    START = 0
    IN_OBJECT = 1
    IN_EVENTS = 2
    END = 3
    BROKEN = 4


class ScanError(IntEnum):
    NONE = 0
    SYNTAX = 1
    NOT_A_TRACE = 2
    MEMORY = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanBatch:
    """Events in the order of the file, and their arguments."""

    phase: Uint8s
    """Chrome's phase letter."""
    category: Int32s
    """Index into the symbols; -1 without one. Names likewise."""
    name: Int32s
    pid: Int64s
    tid: Int64s
    ts_ns: Int64s
    dur_ns: Int64s
    argument_event: Int32s
    """Index into this batch."""
    argument_key: Uint8s
    """Index into KEYS."""
    argument_type: Uint8s
    argument_value: Int64s

    def __len__(self) -> int:
        return len(self.phase)


EMPTY_BATCH = ScanBatch(
    phase=np.empty(0, dtype=np.uint8),
    category=np.empty(0, dtype=np.int32),
    name=np.empty(0, dtype=np.int32),
    pid=np.empty(0, dtype=np.int64),
    tid=np.empty(0, dtype=np.int64),
    ts_ns=np.empty(0, dtype=np.int64),
    dur_ns=np.empty(0, dtype=np.int64),
    argument_event=np.empty(0, dtype=np.int32),
    argument_key=np.empty(0, dtype=np.uint8),
    argument_type=np.empty(0, dtype=np.uint8),
    argument_value=np.empty(0, dtype=np.int64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCounts:
    """What a scanner left out so far."""

    num_skipped: int
    num_event_lists: int
    num_complete: int = 0
    """Complete events that the scanner has columns of, kept or not."""
    num_incomplete: int = 0
    """Of these, without a begin or a length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanColumns:
    """Complete events in the order of the file, as they stay, and their arguments."""

    events: TraceEvents
    arguments: TraceArguments
    tracks: list[tuple[int, int]]
    """Process and thread of each track, in the order in which they appear."""


class Scanner(Protocol):
    """Takes bytes in, gives events out."""

    @property
    def state(self) -> ScanState: ...

    @property
    def error(self) -> ScanError: ...

    @property
    def counts(self) -> ScanCounts: ...

    def feed(self, data: bytes | memoryview) -> int:
        """Takes in what is whole; how many bytes that was."""

    def take(self) -> ScanBatch:
        """The events since the last call, less those that `columns` has."""

    def columns(self) -> ScanColumns | None:
        """All complete events so far, if the scanner takes them apart itself: the compiled one
        does. They are its own memory, which it changes when it is fed."""

    def put_in_order(self) -> ScanColumns | None:
        """What `columns` gives, in order of begin; the scanner, and what it gave before, is of no
        use then."""

    def symbols(self) -> list[bytes]:
        """All texts so far, as they stand between their quotes."""

    def fields(self) -> list[tuple[bytes, bytes]]:
        """The file's other entries: name and text of the value."""
