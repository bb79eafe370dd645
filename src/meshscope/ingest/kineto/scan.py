"""What a scanner gives: the events of a trace as columns, a batch at a time.

Two scanners do the same: `native_scanner`, a shared library that is compiled when meshscope is
installed and a compiler is there, and `python_scanner`, which needs none and is several times
slower. Times are whole nanoseconds, taken from the digits of the text: microseconds of an epoch do
not fit a float to better than 0.2 µs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from meshscope.store.read.arrays import Int32s, Int64s, Uint8s

MISSING = -(1 << 63)
"""A time, process or thread that was not there, or no number."""
TEXT_IDENTITY = MISSING + 2
"""A process or thread that is named by text: this plus the index of the text in the symbols."""

KEPT_PHASES = "XMBE"
"""Complete events, metadata, begins and ends. Flows and counters are counted and left out."""

KEYS = (
    "External id",
    "correlation",
    "stream",
    "device",
    "bytes",
    "name",
    "labels",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCounts:
    """What a scanner left out so far."""

    num_skipped: int
    num_event_lists: int


class Scanner(Protocol):
    """Takes bytes in, gives events out."""

    @property
    def state(self) -> ScanState: ...

    @property
    def error(self) -> ScanError: ...

    @property
    def counts(self) -> ScanCounts: ...

    def feed(self, data: bytes) -> int:
        """Takes in what is whole; how many bytes that was."""

    def take(self) -> ScanBatch:
        """The events since the last call."""

    def symbols(self) -> list[bytes]:
        """All texts so far, as they stand between their quotes."""

    def fields(self) -> list[tuple[bytes, bytes]]:
        """The file's other entries: name and text of the value."""

    def close(self) -> None:
        """Frees the scanner's memory."""
